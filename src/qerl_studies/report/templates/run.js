// The page of a run's samples: one group of one step, its completions side by side, tokens colored by a number.
const steps = data.steps;

// The numbers of a completion's tokens in nats, or null where the run did not measure them.
function numbers(completion, scale) {
  const first = completion[scale.first], second = scale.second && completion[scale.second];
  if (!first || (scale.second && !second)) return null;
  return first.map((value, place) => (value === null || (second && second[place] === null) ? null
    : (value - (second ? second[place] : 0)) / data.per_nat));
}

// White to purple for a size; blue below zero and orange above it for a difference. Strength by the square root, so that
// small ones show.
function shade(value, most, signed) {
  if (value === null || most === 0) return "transparent";
  const strength = Math.round(75 * Math.sqrt(Math.min(1, Math.abs(value) / most)));
  const hue = !signed ? "#9b51c9" : value < 0 ? "#2f7fd0" : "#e0701c";
  return `color-mix(in srgb, ${hue} ${strength}%, transparent)`;
}

function completionBox(completion, place, scale, most) {
  const box = element("article", { class: "completion", "aria-label": `completion ${place + 1}` });
  const verdict = completion.correct === null ? "" : completion.correct ? ", correct" : ", wrong";
  box.append(element("h4", {}, `completion ${place + 1}${verdict}${completion.finished === false ? ", cut at the limit" : ""}`));
  const parts = Object.entries(completion.parts).map(([name, part]) => `${name} ${part}`).join(", ");
  const advantage = completion.advantage === null ? "" : `; advantage ${completion.advantage}`;
  box.append(element("p", {}, `reward ${completion.reward}${parts && ` (${parts})`}${advantage}`));
  const text = box.appendChild(element("div", { class: "tokens" }));
  const values = completion.tokens && numbers(completion, scale);
  if (!completion.tokens) text.append(completion.text);
  completion.tokens?.forEach((token, at) => {
    const span = text.appendChild(element("span", {}, token));
    if (values) span.style.background = shade(values[at], most, Boolean(scale.second));
    told(span, data.scales.flatMap((one) => {
      const number = numbers(completion, one)?.[at];
      return number === undefined || number === null ? [] : [`${one.name}: ${number.toFixed(3)} nats`];
    }).concat(`token ${at + 1}: ${JSON.stringify(token)}`).join("\n"));
  });
  return box;
}

function draw() {
  const chosen = steps[$("step").value];
  $("step-name").textContent = `${chosen.step} of ${steps.at(-1).step}`;
  $("step").setAttribute("aria-valuetext", `step ${chosen.step}`);
  $("group-label").hidden = chosen.groups.length < 2;
  if ($("group").options.length !== chosen.groups.length)
    $("group").replaceChildren(...chosen.groups.map((_, place) => element("option", { value: place }, String(place + 1))));
  const group = chosen.groups[$("group").value || 0];
  const scale = data.scales[$("scale").value];
  // One scale for all steps, so that a color means the same before training and after it.
  const everything = steps.flatMap((one) => one.groups.flatMap((some) => some.completions.flatMap((completion) =>
    numbers(completion, scale) ?? [])));
  const most = everything.reduce((largest, value) => Math.max(largest, Math.abs(value ?? 0)), 0);
  const here = group.completions.some((completion) => numbers(completion, scale));
  $("key").textContent = !here ? "not measured in this step" : scale.second
    ? `up to ±${most.toFixed(3)} nats: blue below zero, orange above` : `from 0 to ${most.toFixed(3)} nats`;
  $("shown").replaceChildren(element("h2", {}, `Step ${chosen.step}`), element("p", { class: "question" }, group.question),
    element("p", {}, `Reference answer: ${group.gold}`), element("div", { class: "completions" },
      ...group.completions.map((completion, place) => completionBox(completion, place, scale, most))));
}

if (steps.length) {
  $("choice").hidden = false;
  data.scales.forEach((scale, place) => $("scale").append(element("option", { value: place }, scale.name)));
  for (const name of ["step", "group", "scale"]) $(name).addEventListener("input", draw);
  $("choice").addEventListener("submit", (event) => event.preventDefault());
  draw();
}
