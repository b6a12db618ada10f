// Draws figures with plotly.js, and offers each as PNG, SVG and CSV.

import { element, save } from "./page.js";

// The palette of Okabe and Ito, which is distinct under all common forms of colour blindness.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#882255"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star"];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const drawn = new Map();

function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return { text: value("--text"), quiet: value("--quiet"), line: value("--line"), paper: value("--card") };
}

function traces(figure) {
  const made = figure.series.map((series, place) => ({
    type: "scatter",
    name: series.name,
    x: series.x,
    y: series.y,
    cliponaxis: true,
    text: series.text,
    mode: figure.markers ? "markers" : series.x.length > 60 ? "lines" : "lines+markers",
    connectgaps: false,
    line: { color: COLOURS[place % 8], dash: DASHES[place % 4], width: 2 },
    marker: {
      color: series.chosen ? COLOURS[place % 8] : "rgba(0,0,0,0)",
      line: { color: COLOURS[place % 8], width: 2 },
      symbol: SYMBOLS[place % 8],
      size: figure.markers ? (series.chosen ? 15 : 11) : 6,
    },
    hovertemplate: `${series.name}: %{y:.4g} at ${series.text ? "%{text}" : "%{x:,.4g}"}<extra></extra>`,
  }));
  if (figure.planned) {
    made.push({
      type: "scatter", mode: "markers", name: figure.planned.label, x: [figure.planned.x], y: [figure.planned.y],
      marker: { symbol: "star", size: 16, color: "gold", line: { color: "#333", width: 1 } },
      hovertemplate: `${figure.planned.label}: %{y:.4g} at %{x:,.4g}<extra></extra>`,
    });
  }
  return made;
}

// The positive numbers along one axis, to choose its scale and ticks.
function extent(figure, key) {
  const found = figure.series.flatMap((series) => series[key]).filter((value) => value > 0);
  for (const extra of [figure.planned?.[key], figure.target?.[key]]) if (extra > 0) found.push(extra);
  return found.length ? [Math.min(...found), Math.max(...found)] : [1, 10];
}

function axis(figure, key, theme) {
  const settings = figure[key];
  let [low, high] = extent(figure, key);
  const made = {
    title: { text: settings.label, font: { size: 12 }, standoff: 8 },
    rangemode: settings.zero ? "tozero" : "normal",
    gridcolor: theme.line, linecolor: theme.line, zerolinecolor: theme.line, automargin: true,
    tickfont: { size: 11 }, nticks: 7, range: settings.range, exponentformat: "power",
    tickformat: high >= 1000 ? "~s" : undefined,
  };
  // A logarithmic axis over less than a factor of four would have hardly any ticks.
  if (!settings.log || high < 4 * low) return made;
  low = Math.max(low, 1e-9 * high); // tails below that are of no use to anybody
  const [bottom, top] = [Math.log10(low), Math.log10(high)];
  const room = 0.05 * (top - bottom);
  made.type = "log";
  made.range = [bottom - room, top + room];
  made.dtick = top - bottom > 3 ? Math.ceil((top - bottom) / 6) : "D2";
  made.tickformat = low >= 1 ? "~s" : undefined;
  return made;
}

function layout(figure) {
  const theme = colours();
  const made = {
    paper_bgcolor: theme.paper, plot_bgcolor: theme.paper,
    font: { family: "system-ui, sans-serif", size: 12, color: theme.text },
    margin: { l: 56, r: 16, t: 12, b: 48 },
    xaxis: axis(figure, "x", theme), yaxis: axis(figure, "y", theme),
    legend: { orientation: "h", y: -0.22, font: { size: 11 } },
    hovermode: "closest", shapes: [], annotations: [],
  };
  made.xaxis.tickangle = 0;
  if (figure.planned) {
    made.shapes.push({ type: "line", x0: figure.planned.x, x1: figure.planned.x, y0: 0, y1: 1, yref: "paper", line: { color: theme.quiet, width: 1, dash: "dot" } });
  }
  if (figure.target) {
    made.shapes.push({ type: "line", x0: 0, x1: 1, xref: "paper", y0: figure.target.y, y1: figure.target.y, line: { color: theme.quiet, width: 1.5, dash: "dash" } });
    made.annotations.push({ x: 0.01, xref: "paper", xanchor: "left", y: made.yaxis.type === "log" ? Math.log10(figure.target.y) : figure.target.y, yanchor: "bottom", text: figure.target.label, showarrow: false, font: { size: 11, color: theme.quiet } });
  }
  return made;
}

export function csv(figure) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : String(text));
  const lines = [["series", figure.x.label, figure.y.label].map(quote).join(",")];
  for (const series of figure.series) {
    series.x.forEach((x, place) => {
      const y = series.y[place];
      lines.push([series.name, x, y === null ? "" : y].map(quote).join(","));
    });
  }
  if (figure.planned) lines.push([figure.planned.label, figure.planned.x, figure.planned.y].map(quote).join(","));
  if (figure.target) lines.push([figure.target.label, "", figure.target.y].map(quote).join(","));
  return `${lines.join("\n")}\n`;
}

async function picture(name, format) {
  const { figure, plot } = drawn.get(name);
  // Pictures are light, whatever the page is: they go into documents.
  const light = { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
  const made = layout(figure);
  const content = {
    data: plot.data,
    layout: { ...made, ...light, width: 900, height: 560, font: { ...made.font, color: "#1b1f24" }, title: { text: figure.title, font: { size: 15 } }, margin: { l: 70, r: 20, t: 44, b: 60 } },
  };
  for (const key of ["xaxis", "yaxis"]) {
    content.layout[key] = { ...content.layout[key], gridcolor: "#e3e6ea", linecolor: "#e3e6ea", zerolinecolor: "#e3e6ea" };
  }
  const address = await window.Plotly.toImage(content, { format, width: 900, height: 560, scale: format === "png" ? 2 : 1 });
  if (format === "svg") {
    save(`${name}.svg`, "image/svg+xml", decodeURIComponent(address.slice(address.indexOf(",") + 1)));
  } else {
    const bytes = Uint8Array.from(atob(address.slice(address.indexOf(",") + 1)), (c) => c.charCodeAt(0));
    save(`${name}.png`, "image/png", bytes);
  }
}

function button(text, title, action) {
  const made = element("button", { type: "button", class: "small", "aria-label": title }, text);
  made.addEventListener("click", action);
  return made;
}

function card(figure) {
  const plot = element("div", { class: "plot", role: "img", "aria-label": `${figure.title}: ${figure.y.label} against ${figure.x.label}` });
  const actions = element(
    "div", { class: "figure-actions" },
    button("PNG", `Save the figure ${figure.title} as PNG`, () => picture(figure.name, "png")),
    button("SVG", `Save the figure ${figure.title} as SVG`, () => picture(figure.name, "svg")),
    button("CSV", `Save the points of ${figure.title} as CSV`, () => save(`${figure.name}.csv`, "text/csv", csv(drawn.get(figure.name).figure))),
  );
  const made = element("figure", { class: "card figure", "data-figure": figure.name }, element("div", { class: "figure-top" }, element("figcaption", {}, figure.title), actions), plot);
  drawn.set(figure.name, { figure, plot, card: made });
  new ResizeObserver(() => { if (plot.data && plot.isConnected) window.Plotly.Plots.resize(plot); }).observe(plot);
  return made;
}

export function draw(figures, holder) {
  const names = figures.map((figure) => figure.name);
  for (const [name, old] of drawn) {
    if (!names.includes(name)) {
      old.card.remove();
      drawn.delete(name);
    }
  }
  // All cards come first: a figure is as wide as its card is then.
  for (const figure of figures) if (!drawn.has(figure.name)) holder.append(card(figure));
  for (const figure of figures) {
    const { plot } = drawn.get(figure.name);
    drawn.get(figure.name).figure = figure;
    window.Plotly.react(plot, traces(figure), layout(figure), { displayModeBar: false, responsive: true });
  }
}

dark.addEventListener("change", () => {
  for (const { figure, plot } of drawn.values()) {
    window.Plotly.react(plot, traces(figure), layout(figure), { displayModeBar: false, responsive: true });
  }
});
