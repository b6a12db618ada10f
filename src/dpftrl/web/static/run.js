// One run: its status, read again every two seconds, its curves, and verification.

import { capital, element, find, follow, get, numbers, post, table, wait } from "./page.js";
import { draw } from "./figures.js";

const run = find("main").dataset.run;

function list(holder, rows) {
  holder.replaceChildren(...rows.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

function show(view) {
  list(find("#public"), view.public);
  list(find("#private"), view.private);
  find("#warnings").replaceChildren(...view.warnings.map((one) => element("p", { class: "warning card" }, `${capital(one.kind)}: ${one.text}`)));
  find("#numbers").replaceChildren(...numbers(view.headline));
  draw(view.figures, find("#figures"));
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
