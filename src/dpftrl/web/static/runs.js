// The list of runs, read again every three seconds.

import { element, find, get, wait } from "./page.js";

function row(run) {
  if (run.error) {
    return element("tr", {}, element("th", { scope: "row" }, run.name), element("td", { colspan: "6", class: "error" }, run.error));
  }
  const bar = element("progress", { "aria-label": `${run.rounds} ${run.unit}` });
  bar.value = run.fraction;
  const cell = (text) => element("td", { class: "number" }, text);
  return element("tr", {},
    element("th", { scope: "row" }, element("a", { href: `/runs/${run.run}` }, run.name)),
    element("td", {}, element("span", { class: `state ${run.state.replace(" ", "-")}` }, run.state)),
    element("td", {}, bar),
    cell(`${run.rounds} ${run.unit}`), cell(run.epsilon), cell(run.planned), cell(String(run.warnings)));
}

for (;;) {
  if (!document.hidden) {
    try {
      const { runs } = await get("/api/runs");
      const focused = document.activeElement?.getAttribute("href");
      find("#runs tbody").replaceChildren(...runs.map(row));
      if (focused?.startsWith("/runs/")) find(`#runs a[href="${focused}"]`)?.focus();
      find("#runs-note").textContent = runs.length ? "" : "There is no run in this folder yet.";
      find("#form-error").textContent = "";
    } catch (error) {
      find("#form-error").textContent = error.message;
    }
  }
  await wait(3);
}
