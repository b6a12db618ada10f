// What all pages share: elements, requests, tables and downloads.

const csrf = document.querySelector('meta[name="csrf-token"]').content;

export const find = (selector) => document.querySelector(selector);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export class RequestFailed extends Error {
  constructor(message, field = "") {
    super(message);
    this.field = field;
  }
}

async function read(response) {
  const text = await response.text();
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    throw new RequestFailed(text.replace(/^dpftrl: /, "") || `error ${response.status}`);
  }
  if (content.error && content.state === undefined) {
    throw new RequestFailed(content.error.message, content.error.field);
  }
  return content;
}

async function request(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailed("The server does not answer. Is `dpftrl web` still running?");
  }
}

export async function get(address) {
  return read(await request(address, { cache: "no-store" }));
}

export async function post(address, content = {}) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json", "x-csrf-token": csrf },
    body: JSON.stringify(content),
  };
  return read(await request(address, options));
}

export const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

// Poll a computation in the background until it has ended.
export async function follow(job, onChange) {
  let state = job;
  onChange(state);
  while (state.state === "waiting" || state.state === "running") {
    await wait(0.5);
    state = await get(`/api/jobs/${state.job}`);
    onChange(state);
  }
  return state;
}

export function table(content, heading = "h2") {
  const head = element("tr");
  const isNumber = (place) => place >= content.name_columns;
  content.columns.forEach((text, place) => {
    head.append(element("th", { scope: "col", class: isNumber(place) ? "number" : "" }, text));
  });
  const body = element("tbody");
  content.rows.forEach((cells, row) => {
    const line = element("tr", { class: row === content.marked ? "marked" : "" });
    cells.forEach((text, place) => {
      if (isNumber(place)) line.append(element("td", { class: "number" }, text));
      else if (place === 0) line.append(element("th", { scope: "row" }, text));
      else line.append(element("td", {}, text));
    });
    body.append(line);
  });
  const card = element("section", { class: "card" }, element(heading, {}, capital(content.title)));
  const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": content.title };
  card.append(element("div", scroll, element("table", {}, element("thead", {}, head), body)));
  if (content.caption.length) {
    const notes = element("ul", { class: "notes" });
    for (const line of content.caption) notes.append(element("li", {}, line));
    card.append(notes);
  }
  return card;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = element("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    area.remove();
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

export function numbers(figures) {
  return figures.map((figure) => element(
    "div", { class: "number-box" },
    element("span", { class: "number-label" }, figure.label),
    element("span", { class: "number-value" }, figure.value),
    element("span", { class: "number-note" }, figure.note),
  ));
}
