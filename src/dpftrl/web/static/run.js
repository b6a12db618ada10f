// One run: its status, read again every two seconds, its curves, and verification.

import { capital, element, find, follow, get, numbers, post, table, wait } from "./page.js";
import { draw } from "./figures.js";

const run = find("main").dataset.run;

function list(holder, rows) {
  holder.replaceChildren(...rows.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

function boxes(view) {
  const rows = { ...Object.fromEntries(view.private), ...Object.fromEntries(view.public) };
  const unit = "rounds" in rows ? "rounds" : "steps";
  const [epsilon, ...rest] = rows.epsilon.split("; ");
  const [now, ...after] = rows[unit].split("; ");
  const made = [
    { label: unit, value: now, note: after.join("; ") },
    { label: "epsilon", value: epsilon, note: rest.join("; ") },
  ];
  const accuracy = view.curve.filter((point) => point.accuracy !== undefined).at(-1);
  if (accuracy) made.push({ label: "held-out accuracy", value: `${(100 * accuracy.accuracy).toFixed(2)}%`, note: `after ${accuracy.round.toLocaleString("en")} rounds` });
  if (rows["eligible now"]) made.push({ label: "eligible clients (private)", value: rows["eligible now"].split(" ")[0], note: "may be contacted next, if the fleet is as planned" });
  if (rows["expected end"]) {
    const [when, left = ""] = rows["expected end"].split(", ");
    made.push({ label: "expected end (private)", value: left || when, note: left ? when : "" });
  }
  return made;
}

function figures(view) {
  const { public: facts } = view.status;
  const unit = facts.kind === "federated" ? "rounds" : "steps";
  const points = view.curve;
  if (!points.length) return [];
  const x = points.map((point) => point.round);
  const budget = facts.epsilon_budget;
  const target = budget ? { y: budget, label: `budget ${budget}` } : { y: facts.epsilon_planned, label: `planned epsilon ${facts.epsilon_planned.toPrecision(4)}` };
  const made = [{
    name: "epsilon-by-round", title: "Epsilon against the budget", x: { label: `${unit} released`, log: false, range: [0, facts.rounds_planned] },
    y: { label: `epsilon at delta ${facts.delta}`, log: false, zero: true }, target,
    series: [{ name: "epsilon", x, y: points.map((point) => point.epsilon) }],
  }];
  const measured = points.filter((point) => point.accuracy !== undefined);
  if (measured.length) {
    made.push({
      name: "accuracy-by-round", title: "Held-out accuracy", x: { label: `${unit} released`, log: false, range: [0, facts.rounds_planned] },
      y: { label: "accuracy on held-out people", log: false, zero: true },
      series: [{ name: "accuracy", x: measured.map((point) => point.round), y: measured.map((point) => point.accuracy) }],
    });
  }
  return made;
}

function show(view) {
  list(find("#public"), view.public);
  list(find("#private"), view.private);
  find("#warnings").replaceChildren(...view.warnings.map((one) => element("p", { class: "warning card" }, `${capital(one.kind)}: ${one.text}`)));
  find("#numbers").replaceChildren(...numbers(boxes(view)));
  draw(figures(view), find("#figures"));
  const time = new Date(1000 * view.time).toLocaleTimeString();
  find("#live").textContent = view.status.public.ended ? `Ended: ${view.status.public.ended}.` : `Live, last read at ${time}.`;
  const isRunning = view.status.private.process.running === true;
  if (!find("#verify").dataset.busy) find("#verify").disabled = isRunning;
  find("#verify").title = isRunning ? "A process works on this run: verify it afterwards" : "";
}

find("#verify").addEventListener("click", async () => {
  const button = find("#verify");
  const bar = find("#verify-progress");
  button.disabled = true;
  button.dataset.busy = "yes";
  bar.hidden = false;
  find("#verdict").replaceChildren(element("p", { class: "waiting" }, "Verifying …"));
  try {
    const ended = await follow(await post(`/runs/${run}/verify`), () => {});
    if (ended.state === "done") {
      const verdict = ended.result;
      const checks = table({
        title: "Checks", columns: ["check", "outcome", "details"], name_columns: 3, marked: null, caption: [],
        rows: verdict.checks.map((check) => [check.name, check.outcome, check.text]),
      }, "h3");
      checks.className = "checks";
      find("#verdict").replaceChildren(element("p", { class: verdict.passed ? "passed" : "warning" }, capital(verdict.summary)), checks);
    } else {
      find("#verdict").replaceChildren(element("p", { class: "warning" }, ended.error ? ended.error.message : "Cancelled."));
    }
  } catch (error) {
    find("#verdict").replaceChildren(element("p", { class: "warning" }, capital(error.message)));
  }
  bar.hidden = true;
  button.disabled = false;
  delete button.dataset.busy;
});

for (;;) {
  if (!document.hidden) {
    try {
      show(await get(`/api/runs/${run}`));
      find("#form-error").textContent = "";
    } catch (error) {
      find("#form-error").textContent = capital(error.message);
    }
  }
  await wait(2);
}
