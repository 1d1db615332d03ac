// The study page: filters, sorting, and three drawings of numbers that Python computed.
const form = $("filters");
const AXES = Object.keys(data.axes);
const chosen = () => Object.fromEntries(new FormData(form));
const points = () => chosen().show === "seeds";

// --- what the filters leave ---

function fits(axes, filters) { // `axes` has one value of each axis, or a list; an axis that is not known fits nothing
  return AXES.every((axis) => !filters[axis] || [axes[axis] ?? []].flat().includes(filters[axis]));
}
const effectFits = (effect, filters) =>
  fits(effect.axes, filters) && (!filters.verdict || effect.verdict === filters.verdict);
const compared = data.effects.filter((effect) => effect.pairs); // those that have their runs
const visible = () => data.effects.filter((effect) => effectFits(effect, chosen()));
const runsLeft = () => data.runs.filter((run) => fits(run.axes, chosen()));

function apply() {
  const filters = chosen();
  const left = new Set([...data.effects.keys()].filter((place) => effectFits(data.effects[place], filters)));
  for (const cell of document.querySelectorAll("[data-effect]")) cell.hidden = !left.has(Number(cell.dataset.effect));
  const some = new Set([...left].map((place) => `${data.effects[place].claim}-${data.effects[place].scope}`));
  for (const block of document.querySelectorAll("tr[data-claim], section[data-claim]"))
    block.hidden = !some.has(`${block.dataset.claim}-${block.dataset.scope}`);
  for (const row of document.querySelectorAll("tr[data-run]"))
    row.hidden = !fits(data.runs[row.dataset.run].axes, filters);
  for (const part of document.querySelectorAll("[data-axes]"))
    part.toggleAttribute("hidden", !fits(JSON.parse(part.dataset.axes), filters));
  const paired = [...left].filter((place) => data.effects[place].pairs);
  $("counts").textContent = (compared.length ? `${paired.length} of ${compared.length} comparisons, ` : "") +
    `${runsLeft().length} of ${data.runs.length} runs`;
  drawOverview();
  drawClaims();
  drawDoses();
  listComparisons();
  const kept = new URLSearchParams(Object.entries(filters).filter(([key, value]) => value && value !== "intervals"));
  if (location.hash.startsWith("#?") || String(kept)) history.replaceState(null, "", `#?${kept}`);
}

function restore() { // a page that loads itself again keeps its filters
  for (const [key, value] of new URLSearchParams(location.hash.startsWith("#?") ? location.hash.slice(2) : ""))
    if (form.elements[key]) form.elements[key].value = value;
}

// --- tables ---

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [row.cells[column].textContent.trim(), row]);
      rows.sort(([first], [second]) => inOrder(first, second, down ? -1 : 1));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function inOrder(first, second, sign) { // missing values last, whatever the direction
  const [one, two] = [first, second].map((text) => (text === "-" || text === "" ? null : text));
  if (one === null || two === null) return (one === null) - (two === null);
  const [a, b] = [one, two].map((text) => parseFloat(text.replaceAll(",", "").replace("×", "")));
  const numeric = /^[-+×\d.]/.test(one) && /^[-+×\d.]/.test(two) && !Number.isNaN(a) && !Number.isNaN(b);
  return sign * (numeric && a !== b ? a - b : one.localeCompare(two, undefined, { numeric: true }));
}

function claimText(effect) {
  const claim = data.claims[effect.claim];
  const scope = data.scopes.length > 1 ? ` (${data.scopes[effect.scope]})` : "";
  return `${claim.number}. ${claim.title}${scope}`;
}

const EFFECT_HEAD = ["claim", "scope", "verdict", "contrast", "setting", "role", "means", "text", "from", "status", "reason",
  "value", "low", "high", "unit"];
const effectRow = (effect) => [data.claims[effect.claim].title, data.scopes[effect.scope], effect.verdict, effect.cells[0],
  effect.cells[1], effect.role, effect.cells[3], effect.cells[4], effect.cells[5], effect.status, effect.reason,
  ...(effect.on_axis ?? [null, null, null]), data.claims[effect.claim].unit];
const runRow = (run) => [run.name, run.state, ...AXES.map((axis) => run.axes[axis]), run.lr, run.seed, run.base,
  ...Object.keys(data.columns).map((name) => run.numbers[name])];
const names = (runs) => runs.map((place) => data.runs[place].name).join(" + ");

function listComparisons() {
  const select = $("comparison");
  const before = select.value;
  select.replaceChildren(...data.effects.flatMap((effect, place) => (!effect.pairs || !effectFits(effect, chosen()) ? [] : [
    element("option", { value: place }, `${claimText(effect)}: ${effect.label}, ${effect.cells[1]} (${effect.role})`)])));
  if ([...select.options].some((option) => option.value === before)) select.value = before;
  fillPairs();
}

function fillPairs() {
  const effect = data.effects[$("comparison").value];
  const table = $("pair-table");
  table.caption.textContent = effect ? `${effect.text}, the mean over ${effect.origin}` : "No comparison to show.";
  table.tBodies[0].replaceChildren(...(effect?.pairs ?? []).map((pair) => element("tr", {}, ...[pair.base, pair.seed,
    `${signed(pair.on_axis)} ${data.claims[effect.claim].unit}`, names(pair.runs[0]), names(pair.runs[1])].map(
    (text) => element("td", {}, String(text))))));
}

// --- drawings ---

const color = (format) => data.colors[format] ?? "var(--soft)";

function ticks(low, high, count = 6) { // pairs of value and text, with as many decimals as tell them apart
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const first = Math.ceil(low / step);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) => (first + place) * step)
    .map((value) => [value, value.toFixed(decimals)]);
}

// Rows of effects on one axis. `at` picks the numbers: on_axis, or in_margins.
function forest(place, rows, at, reach, band, paper, label, unit) {
  const width = 1000, left = 400, right = 40, row = 24, height = rows.length * row + 46;
  const x = (value) => left + ((Math.max(-reach, Math.min(reach, value)) + reach) / (2 * reach)) * (width - left - right);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${rows.length} effects: ` +
    rows.map((effect) => `${label(effect)} ${effect.text}`).join("; ") });
  const marks = [];
  svg.append(shape("rect", { class: "band", x: x(-band), y: 0, width: x(band) - x(-band), height: height - 42 }),
    shape("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: height - 42 }));
  for (const [tick, text] of ticks(-reach, reach)) svg.append(shape("text", { x: x(tick), y: height - 24,
    "text-anchor": "middle" }, document.createTextNode(text)));
  svg.append(shape("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" },
    document.createTextNode(unit)));
  rows.forEach((effect, line) => {
    const y = line * row + row / 2;
    const shade = color(effect.axes.format[0]);
    const noisy = effect.axes.noise[0] !== "none";
    const [value, low, high] = effect[at];
    const group = shape("g", { class: "mark" });
    const text = label(effect);
    const name = shape("text", { x: left - 12, y: y + 4, "text-anchor": "end" }, document.createTextNode(
      text.length > 57 ? `${text.slice(0, 56)}…` : text));
    if (effect.role !== "primary") name.style.fill = "var(--soft)";
    group.append(name);
    if (points()) for (const pair of effect.pairs) {
      const dot = shape("circle", { class: "mark", cx: x(pair[at]), cy: y, r: 3.5, stroke: shade, fill: noisy ? shade : "none",
        opacity: 0.75 });
      told(dot, `${signed(pair.on_axis)} ${data.claims[effect.claim].unit}\nbase ${pair.base}, seed ${pair.seed}\n` +
        `${names(pair.runs[0])}\nminus ${names(pair.runs[1])}`);
      group.append(dot);
    } else if (low !== null) {
      group.append(shape("line", { x1: x(low), x2: x(high), y1: y, y2: y, stroke: shade, "stroke-width": 2 }));
    }
    const size = effect.role === "primary" ? 6 : 4;
    const cx = x(value);
    const tall = Math.abs(value) > reach ? `M${cx},${y} l${value > 0 ? -9 : 9},-6 v12 z`
      : `M${cx - size},${y} L${cx},${y - size} L${cx + size},${y} L${cx},${y + size} Z`;
    group.append(shape("path", { d: tall, stroke: shade, fill: noisy ? shade : "var(--back)", "stroke-width": 1.5 }));
    svg.append(group);
    const spoken = `${text}\n${effect.cells[1]}\n${effect.text}\n${effect.origin}; ${effect.role}; ` +
      `means ${effect.cells[3]}${effect.status ? `\n${effect.status}: ${effect.reason}` : ""}`;
    told(name, spoken);
    told(group.lastChild, spoken);
    marks.push([group, spoken]);
    if (effect.role === "primary") for (const at_paper of paper(effect)) {
      const beyond = at_paper > reach ? "l5,4 l-5,4" : "m5,0 l-5,4 l5,4"; // a point of an arrow instead of a cross
      const cross = shape("path", { class: "axis", d: `M${x(at_paper) - 4},${y - 4} ` +
        (Math.abs(at_paper) > reach ? beyond : "l8,8 m0,-8 l-8,8") });
      told(cross, "the paper's number");
      svg.append(cross);
    }
  });
  walkable(svg, marks);
  place.replaceChildren(rows.length ? svg : element("p", { class: "soft" },
    data.effects.some((effect) => effect.pairs) ? "No effect is left by these filters." : "No comparison has its runs yet."));
}

function drawOverview() {
  const rows = visible().filter((effect) => effect.pairs && effect.role === "primary");
  forest($("overview"), rows, "in_margins", 5, 1, (effect) => data.claims[effect.claim].paper,
    (effect) => `${claimText(effect)}: ${effect.label}`, "effect in margins");
}

function drawClaims() {
  for (const place of document.querySelectorAll("section[data-claim] .chart")) {
    const { claim, scope } = place.closest("section").dataset;
    const rows = visible().filter((effect) => effect.pairs && effect.claim === Number(claim) && effect.scope === Number(scope));
    const about = data.claims[claim];
    const ends = rows.filter((effect) => effect.role === "primary" || rows.length === 1)
      .flatMap((effect) => effect.on_axis).filter((end) => end !== null).map(Math.abs);
    const reach = 1.4 * Math.max(Math.abs(about.margin), ...ends, ...(ends.length ? [] : rows.map((e) => Math.abs(e.on_axis[0]))));
    forest(place, rows, "on_axis", reach || 1, Math.abs(about.margin), () => about.paper_on_axis,
      (effect) => `${effect.label}: ${effect.cells[1]}`, `difference in ${about.unit}; band: margin`);
  }
}

function drawDoses() {
  const measure = Number($("dose").value);
  const rows = data.doses.filter((dose) => fits(dose.axes, chosen()) && dose.measures[measure]);
  const width = 1000, height = 380, left = 70, right = 20, bottom = 50;
  const place = $("dose-chart");
  if (!rows.length) {
    place.replaceChildren(element("p", { class: "soft" }, "No two settings are left that differ in their noise alone."));
    return;
  }
  const levels = rows.map((dose) => dose.sigma).filter((sigma) => sigma > 0);
  const low = Math.log10(Math.min(...levels)), high = Math.log10(Math.max(...levels));
  const span = high - low || 1, zero = left + 40, start = levels.length ? zero + 100 : zero;
  const x = (sigma) => (sigma > 0 ? start + ((Math.log10(sigma) - low) / span) * (width - right - 30 - start) : zero);
  const all = rows.flatMap((dose) => [...dose.measures[measure].mean, ...(points() ? dose.measures[measure].values : [])])
    .filter((value) => value !== null);
  const pad = (Math.max(...all) - Math.min(...all)) * 0.06 || 0.01;
  const [least, most] = [Math.min(...all) - pad, Math.max(...all) + pad];
  const y = (value) => 10 + (1 - (value - least) / (most - least)) * (height - bottom - 10);
  const what = data.dose_measures[measure];
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${what} against noise, ` +
    `${rows.length} settings` });
  for (const [tick, text] of ticks(least, most)) svg.append(
    shape("line", { class: "band", x1: left, x2: width - right, y1: y(tick), y2: y(tick), stroke: "var(--band)" }),
    shape("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, document.createTextNode(text)));
  const labelled = [];
  for (const sigma of [...new Set(rows.map((dose) => dose.sigma))].sort((a, b) => a - b)) {
    if (labelled.some((other) => Math.abs(other - x(sigma)) < 55)) continue;
    labelled.push(x(sigma));
    svg.append(shape("text", { x: x(sigma), y: height - bottom + 18, "text-anchor": "middle" },
      document.createTextNode(sigma ? number(sigma, 2) : "none")));
  }
  svg.append(shape("text", { x: width / 2, y: height - 8, "text-anchor": "middle" }, document.createTextNode("mean sigma")));
  const marks = [];
  for (const series of new Set(rows.map((dose) => dose.series))) {
    const group = rows.filter((dose) => dose.series === series);
    const shade = color(group[0].axes.format);
    svg.append(shape("polyline", { points: group.map((dose) => `${x(dose.sigma)},${y(dose.measures[measure].mean[0])}`).join(" "),
      stroke: shade, fill: "none", opacity: 0.35 }));
    for (const dose of group) {
      const { mean: [value, below, above], n, values } = dose.measures[measure];
      if (points()) values.forEach((one, number_) => {
        const dot = shape("circle", { class: "mark", cx: x(dose.sigma), cy: y(one), r: 2.5, stroke: shade, fill: "none" });
        told(dot, `${number(one, 4)}\n${data.runs[dose.runs[number_]].name}`);
        svg.append(dot);
      });
      else if (below !== null) svg.append(shape("line", { x1: x(dose.sigma), x2: x(dose.sigma), y1: y(below), y2: y(above),
        stroke: shade, "stroke-width": 1.5 }));
      const mark = shape("circle", { class: "mark", cx: x(dose.sigma), cy: y(value), r: 5, stroke: shade,
        fill: dose.sigma > 0 ? shade : "var(--back)" });
      const interval = below === null ? "" : ` [${number(below, 4)}, ${number(above, 4)}]`;
      const text = `${dose.label}\nmean sigma ${number(dose.sigma)}\n${what}: ${number(value, 4)}${interval}, n = ${n}`;
      told(mark, text);
      marks.push([mark, text]);
      svg.append(mark);
    }
  }
  walkable(svg, marks);
  place.replaceChildren(svg);
}

// --- start ---

$("of-all").hidden = !compared.some((effect) => effect.role === "primary");
$("of-pairs").hidden = !compared.length;
$("of-doses").hidden = !data.doses.length;
form.hidden = $("drawn").hidden = $("save-runs").hidden = $("save-effects").hidden = false;
$("legend").append(...Object.entries(data.colors).map(([format, shade]) => {
  const dot = element("i");
  dot.style.background = shade;
  return element("span", {}, dot, format);
}));
data.dose_measures.forEach((name, place) => $("dose").append(element("option", { value: place }, name)));
for (const table of document.querySelectorAll("table:not(#pair-table)")) sortable(table);
sortable($("pair-table"));
restore();
form.addEventListener("change", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
$("dose").addEventListener("change", drawDoses);
$("comparison").addEventListener("change", fillPairs);
$("save-runs").addEventListener("click", () => saveCsv("runs.csv", [["run", "state", ...AXES, "lr", "seed", "base",
  ...Object.values(data.columns)], ...runsLeft().map(runRow)]));
$("save-effects").addEventListener("click", () => saveCsv("effects.csv", [EFFECT_HEAD, ...visible().map(effectRow)]));
$("save-pairs").addEventListener("click", () => {
  const effect = data.effects[$("comparison").value];
  saveCsv("pairs.csv", [["base", "seed", "difference", "unit", "runs", "minus runs"], ...(effect?.pairs ?? []).map((pair) =>
    [pair.base, pair.seed, pair.on_axis, data.claims[effect.claim].unit, names(pair.runs[0]), names(pair.runs[1])])]);
});
apply();
