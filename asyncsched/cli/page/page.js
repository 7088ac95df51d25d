// Draws the charts in the page's colours, in light and in dark; moves and zooms them from the keyboard.
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), line: of("--line"), back: of("--back") };
}

function layoutOf(layout) {
  const { text, line, back } = colours();
  const themed = {
    ...layout,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 13 },
    margin: { l: 80, r: 20, t: 20, b: 50 },
    hoverlabel: { bgcolor: back, bordercolor: line, font: { color: text } },
    legend: { bgcolor: "rgba(0,0,0,0)", orientation: "h", y: 1.12 },
    dragmode: "pan",
  };
  const axes = new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis/.test(key))]);
  for (const key of axes) {
    themed[key] = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...(layout[key] || {}) };
  }
  return themed;
}

function draw(id) {
  const box = document.getElementById(id);
  const config = { responsive: true, displaylogo: false, scrollZoom: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  return Plotly.react(box, charts[id].data, layoutOf(charts[id].layout), config);
}

function isShown(box) {
  return box.closest("[hidden]") === null;
}

function drawAll() {
  for (const box of document.querySelectorAll(".chart")) {
    if (isShown(box)) draw(box.id);
  }
}

// Factor < 1 zooms in; shift is in parts of what is seen. Logarithmic axes have logarithmic ranges, so both work alike.
function move(id, factor, shift) {
  const [low, high] = document.getElementById(id).layout.xaxis.range.map(Number);
  const middle = (low + high) / 2 + shift * (high - low);
  const half = ((high - low) / 2) * factor;
  Plotly.relayout(id, { "xaxis.range": [middle - half, middle + half], "xaxis.autorange": false });
}

const MOVES = { in: [0.5, 0], out: [2, 0], left: [1, -0.4], right: [1, 0.4] };
const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right" };

for (const button of document.querySelectorAll("button[data-chart]")) {
  button.addEventListener("click", () => {
    const id = button.dataset.chart;
    if (button.dataset.move === "reset") draw(id);
    else move(id, ...MOVES[button.dataset.move]);
  });
}
for (const box of document.querySelectorAll(".chart[tabindex]")) {
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== box) return;
    if (event.key === "0") draw(box.id);
    else if (event.key in KEYS) move(box.id, ...MOVES[KEYS[event.key]]);
    else return;
    event.preventDefault();
  });
}
for (const select of document.querySelectorAll("select[data-group]")) {
  select.addEventListener("change", () => {
    for (const part of document.querySelectorAll(`[data-of="${select.dataset.group}"]`)) {
      part.hidden = part.dataset.value !== select.value;
    }
    drawAll();
  });
}
dark.addEventListener("change", drawAll);
drawAll();
document.documentElement.dataset.drawn = "yes";
