// The planner: reads the form, asks the server while it changes, and shows the answers.

import { capital, copy, element, find, follow, numbers, post, table } from "./page.js";
import { draw } from "./figures.js";

const presets = JSON.parse(find("#preset-data").textContent);
const forms = { fleet: find("#fleet"), dataset: find("#dataset") };
const defaults = {};
let mode = "fleet";
let job = null; // the computation in the background, if there is one
let shown = ""; // the state that the page shows an answer for
let detail = ""; // how detailed that answer is: live, figures or job

const fields = (of = mode) => [...forms[of].elements].filter((control) => control.name);

function values(of = mode) {
  const found = {};
  for (const control of fields(of)) if (control.value.trim()) found[control.name] = control.value.trim();
  return found;
}

const state = () => JSON.stringify([mode, values()]);

// ---- the address holds the whole state ----

function query() {
  const parts = new URLSearchParams({ mode });
  for (const [name, value] of Object.entries(values())) parts.set(name, value);
  const preset = find("#preset").value;
  if (mode === "fleet" && preset) parts.set("preset", preset);
  return parts;
}

function keepInAddress() {
  history.replaceState(null, "", `${location.pathname}?${query()}`);
}

function fill(of, given) {
  for (const control of fields(of)) {
    control.value = given[control.name] ?? "";
    if (control.tagName === "SELECT" && control.selectedIndex < 0) control.selectedIndex = 0;
    toSlider(control.name, of);
  }
  const more = forms[of].querySelector("details.more");
  const isUsed = [...more.querySelectorAll("[name]")].some((one) => one.value && one.value !== (defaults[of][one.name] ?? ""));
  if (isUsed) more.open = true;
}

function fromAddress() {
  const parts = new URLSearchParams(location.search);
  for (const of of Object.keys(forms)) {
    defaults[of] = values(of);
    fill(of, defaults[of]);
  }
  const given = Object.fromEntries(parts);
  if (given.mode in forms) {
    fill(given.mode, given);
    if (given.mode === "fleet" && presets.some((one) => String(one.number) === given.preset)) {
      find("#preset").value = given.preset;
      comparePreset();
    }
  }
  setMode(given.mode in forms ? given.mode : "fleet");
}

function setMode(next) {
  mode = next;
  for (const [name, form] of Object.entries(forms)) form.hidden = name !== mode;
  for (const one of document.querySelectorAll("[data-mode]")) {
    one.setAttribute("aria-pressed", String(one.dataset.mode === mode));
  }
  find("#preset-card").hidden = mode !== "fleet" || !find("#preset").value;
  changed(0);
}

// ---- sliders: the text field is the value, the slider is a way to set it ----

const SUFFIXES = { k: 1e3, K: 1e3, M: 1e6, B: 1e9, G: 1e9 };

function numberOf(text) {
  const plain = text.trim().replace(/[_,]/g, "");
  if (plain.endsWith("%")) return Number(plain.slice(0, -1)) / 100;
  const last = plain.slice(-1);
  return last in SUFFIXES ? Number(plain.slice(0, -1)) * SUFFIXES[last] : Number(plain);
}

function toSlider(name, of = mode) {
  const slider = forms[of].querySelector(`[data-for="${name}"]`);
  if (!slider) return;
  const text = forms[of].elements[name].value;
  const [low, high] = [Number(slider.dataset.low), Number(slider.dataset.high)];
  const share = text.trim() ? Math.log(numberOf(text) / low) / Math.log(high / low) : NaN;
  slider.value = Number.isFinite(share) ? Math.round(1000 * Math.min(1, Math.max(0, share))) : 0;
  slider.setAttribute("aria-valuetext", text || "chosen");
}

function fromSlider(slider) {
  const [low, high] = [Number(slider.dataset.low), Number(slider.dataset.high)];
  const exact = low * (high / low) ** (slider.value / 1000);
  return written(exact, slider.dataset.kind);
}

function written(exact, kind) {
  if (kind === "share") return `${Number((100 * exact).toPrecision(2))}%`;
  const rounded = Number(exact.toPrecision(exact < 1e-3 ? 1 : 3));
  if (kind !== "count") return rounded < 1e-3 ? rounded.toExponential().replace("e-", "e-") : String(rounded);
  for (const [suffix, size] of [["B", 1e9], ["M", 1e6]]) {
    if (rounded >= size) return `${Number((rounded / size).toPrecision(3))}${suffix}`;
  }
  return String(Math.max(1, Math.round(rounded)));
}

// ---- asking: one request at a time; only the newest answer is shown ----

let timer = null;
let isAsking = false;
let isStale = false;

function changed(seconds = 0.06) {
  keepInAddress();
  find("#headline").setAttribute("aria-busy", "true");
  find("#figures").setAttribute("aria-busy", "true");
  clearTimeout(timer);
  timer = setTimeout(ask, 1000 * seconds);
}

async function ask() {
  if (isAsking) {
    isStale = true; // ask again when the answer is here
    return;
  }
  isAsking = true;
  isStale = false;
  const asked = state();
  try {
    const answer = await post("/api/plan", { mode, values: values() });
    if (asked === state()) show(answer, asked, answer.figures ? "figures" : "live");
  } catch (error) {
    if (asked === state()) fail(error);
  }
  isAsking = false;
  if (isStale || asked !== state()) ask();
  else if (detail === "live" && shown === asked) setTimeout(() => askForFigures(asked), 250);
}

async function askForFigures(asked) {
  if (asked !== state() || detail !== "live") return;
  try {
    const answer = await post("/api/plan", { mode, values: values(), figures: true });
    if (asked === state() && detail === "live") show(answer, asked, "figures");
  } catch (error) {
    if (asked === state()) fail(error);
  }
}

function clearErrors() {
  find("#form-error").textContent = "";
  for (const one of document.querySelectorAll(".field .error")) one.textContent = "";
  for (const control of document.querySelectorAll('[aria-invalid="true"]')) control.removeAttribute("aria-invalid");
}

function fail(error) {
  clearErrors();
  const place = document.getElementById(`${mode}-${error.field}-error`);
  find("#headline").setAttribute("aria-busy", "false");
  document.body.classList.add("outdated");
  shown = "";
  if (!error.field || !place) {
    find("#form-error").textContent = capital(error.message);
    return;
  }
  place.textContent = capital(error.message);
  const control = document.getElementById(`${mode}-${error.field}`);
  control.setAttribute("aria-invalid", "true");
  const more = control.closest("details");
  if (more) more.open = true;
}

// ---- showing ----

function show(answer, asked, level) {
  clearErrors();
  document.body.classList.remove("outdated");
  const isSame = shown === asked;
  shown = asked;
  detail = level;
  headline(answer.headline);
  const [mechanisms, ...others] = answer.tables.map((one) => table(one));
  find("#tables").replaceChildren(mechanisms);
  find("#more-tables").replaceChildren(...others);
  find("#command").textContent = answer.command;
  downloads(level === "job");
  if (!isSame || level === "job") jobButtons(level);
  if (answer.figures) {
    draw(answer.figures, find("#figures"));
    find("#figures").setAttribute("aria-busy", "false");
    find("#figures-help").textContent = mode === "fleet"
      ? "Star: the plan. Dashed: the target. All mechanisms have the utility of the recommended one, so the lowest line is the best."
      : "All ways have the same epsilon and delta, so the one with the least noise is the best.";
  }
}

function headline(content) {
  const box = find("#headline");
  const notes = [element("p", { class: "binding" }, content.binding)];
  for (const line of content.choices) notes.push(element("p", {}, line));
  for (const line of content.warnings) notes.push(element("p", { class: "warning" }, capital(line)));
  box.replaceChildren(
    element("p", { class: "kicker" }, "Recommended"),
    element("h2", { class: "chosen" }, content.recommended),
    element("p", { class: "reason" }, content.reason),
    element("div", { class: "numbers" }, ...numbers(content.figures)),
    element("div", { class: "words" },
      element("div", {}, element("h3", {}, "What it means for one person"), element("p", {}, content.risk)),
      element("div", {}, element("h3", {}, "What limits it"), ...notes)),
  );
  box.setAttribute("aria-busy", "false");
}

function downloads(isJob) {
  const names = { "plan.json": "Plan (plan.json)", "mechanism.json": "Mechanism (JSON)", "statement.md": "Draft statement (Markdown)", "statement.html": "Draft statement (HTML)" };
  const parts = query();
  parts.delete("preset");
  find("#downloads").replaceChildren(...Object.entries(names).map(([name, label]) => element(
    "a", { class: "button", href: isJob ? `/api/jobs/${job.job}/${name}` : `/download/${name}?${parts}`, download: name }, label,
  )));
}

// ---- long computations ----

const EFFORTS = {
  fleet: [["normal", "Compare all mechanisms (seconds)"], ["slow", "Also optimise BandMF (minutes)"]],
  dataset: [["normal", "Compare all samplings, with certificates (minutes)"], ["slow", "Also optimise BandMF (minutes)"]],
};

function jobButtons(level) {
  const text = level === "job" ? "This is the full comparison." : "This is a quick answer. What takes longer is computed in the background.";
  find("#job-text").textContent = text;
  find("#job-progress").hidden = true;
  find("#job-buttons").replaceChildren(...EFFORTS[mode].map(([effort, label]) => {
    const made = element("button", { type: "button", "data-effort": effort }, label);
    made.addEventListener("click", () => startJob(effort));
    return made;
  }));
}

function progress(one, label) {
  const bar = find("#job-progress");
  bar.hidden = false;
  if (one.fraction === null) bar.removeAttribute("value");
  else bar.value = one.fraction;
  const doing = one.message ? `: ${one.message}` : "";
  find("#job-text").textContent = one.state === "waiting" ? `${label}: waiting for another computation` : `${label}${doing} (${one.seconds.toFixed(0)} s)`;
}

async function startJob(effort) {
  const asked = state();
  const label = EFFORTS[mode].find(([name]) => name === effort)[1].replace(/ \(.*/, "");
  try {
    job = await post("/api/jobs", { mode, values: values(), effort });
  } catch (error) {
    fail(error);
    return;
  }
  const cancel = element("button", { type: "button" }, "Cancel");
  const mine = job;
  cancel.addEventListener("click", () => post(`/api/jobs/${mine.job}/cancel`));
  find("#job-buttons").replaceChildren(cancel);
  let ended = null;
  try {
    ended = await follow(job, (one) => { if (job === mine && asked === state()) progress(one, label); });
  } catch (error) {
    if (asked === state()) fail(error);
    return;
  }
  if (job !== mine || asked !== state()) return;
  if (ended.state === "done") show(ended.result, asked, "job");
  else if (ended.state === "failed") { jobButtons("figures"); fail(Object.assign(new Error(ended.error.message), { field: ended.error.field })); }
  else jobButtons("figures");
}

// ---- the paper's table ----

async function comparePreset() {
  const box = find("#preset-card");
  const chosen = presets.find((one) => String(one.number) === find("#preset").value);
  box.hidden = !chosen;
  if (!chosen) return;
  const printed = `The paper prints rho ${chosen.printed.rho} and epsilon ${chosen.printed.epsilon}.`;
  const status = element("p", { class: "waiting" }, "Computing ours …");
  box.replaceChildren(element("h2", {}, chosen.title), element("p", {}, printed), status, element("p", { class: "help" }, chosen.note));
  try {
    const started = await post(`/api/presets/${chosen.number}`);
    const ended = started.job ? await follow(started, (one) => {
      status.textContent = `Computing ours in the background (BandMF takes minutes): ${one.state}, ${one.seconds.toFixed(0)} s`;
    }) : started;
    if (find("#preset").value !== String(chosen.number)) return;
    if (ended.state !== "done") {
      status.textContent = ended.error ? ended.error.message : "The computation was ended.";
      return;
    }
    const { rows, reason } = ended.result;
    const agrees = rows.every((row) => row.verdict === "reproduces");
    const lines = table({
      title: "Printed and ours", columns: ["", "printed", "ours", "verdict"], name_columns: 1, marked: null, caption: [],
      rows: rows.map((row) => [row.name, row.printed, row.ours, row.verdict === "reproduces" ? "reproduces" : "does not reproduce"]),
    }, "h3");
    lines.className = "";
    status.replaceWith(lines);
    if (!agrees) lines.after(element("p", { class: "warning" }, `Why they differ: ${reason}.`));
  } catch (error) {
    status.textContent = error.message;
  }
}

// ---- events ----

for (const [of, form] of Object.entries(forms)) {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    const control = event.target;
    if (control.id === "preset") return;
    if (control.dataset.for) {
      form.elements[control.dataset.for].value = fromSlider(control);
      control.setAttribute("aria-valuetext", form.elements[control.dataset.for].value);
      changed(0.03);
    } else {
      toSlider(control.name, of);
      changed(0.25);
    }
  });
}

find("#preset").addEventListener("change", () => {
  const chosen = presets.find((one) => String(one.number) === find("#preset").value);
  if (chosen) fill("fleet", { ...chosen.values, objective: "rms", devices: "1", parameters: "1M" });
  comparePreset();
  changed(0);
});

for (const one of document.querySelectorAll("[data-mode]")) {
  one.addEventListener("click", () => setMode(one.dataset.mode));
}
find("#copy-link").addEventListener("click", (event) => copy(location.href, event.target));
find("#copy-command").addEventListener("click", (event) => copy(find("#command").textContent, event.target));
find("#reset").addEventListener("click", () => {
  find("#preset").value = "";
  find("#preset-card").hidden = true;
  fill(mode, defaults[mode]);
  changed(0);
});
window.addEventListener("popstate", fromAddress);

fromAddress();
