"use strict";
// What both pages use: data, elements, one tooltip for mouse and keyboard, and files to save.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const tip = document.body.appendChild(element("div", { id: "tip", role: "tooltip", hidden: "" }));

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

function told(mark, text) { // `text` appears while the pointer is on `mark`
  mark.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
  mark.addEventListener("pointerleave", hideTip);
}

// One tab stop for a drawing; arrow keys go from mark to mark. `marks` are [node, text].
function walkable(svg, marks) {
  let at = -1;
  const leave = () => { if (at >= 0 && marks[at]) marks[at][0].classList.remove("at"); };
  svg.setAttribute("tabindex", marks.length ? "0" : "-1");
  svg.onkeydown = (event) => {
    const moves = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !marks.length) return;
    event.preventDefault();
    leave();
    at = Math.max(0, Math.min(marks.length - 1, at + moves[event.key]));
    const [node, text] = marks[at];
    node.classList.add("at");
    const box = node.getBoundingClientRect();
    showTip(text, box.right, box.bottom);
    $("said").textContent = text;
  };
  svg.onblur = () => { leave(); at = -1; hideTip(); };
}

function csvCell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const asked = /^[=+\-@]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text; // no formula for a spreadsheet
  return /[",\n]/.test(asked) ? `"${asked.replaceAll('"', '""')}"` : asked;
}

function saveCsv(name, rows) {
  const text = rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const number = (value, digits = 3) => (value === null ? "-" : String(Number(value.toPrecision(digits))));
const signed = (value) => (value > 0 ? "+" : "") + number(value);
