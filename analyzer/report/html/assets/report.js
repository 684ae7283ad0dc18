"use strict";
const {names, documents} = JSON.parse(document.getElementById("reports").textContent);
const extra = JSON.parse(document.getElementById("extra").textContent);
const report = documents[0];
const charts = [];

// ---- text ----

const GIB = 2 ** 30;
const DIRECTIONS = ["forward", "backward"];
function bytes(value) {
  if (value === null || value === undefined) return "not known";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let size = Math.abs(value), unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${value < 0 ? "-" : ""}${unit ? size.toFixed(2) : size} ${units[unit]}`;
}
function seconds(value) {
  if (value === null || value === undefined) return "not known";
  const [shown, unit] = value >= 1 || value === 0 ? [value, "s"] : value >= 1e-3 ? [1e3 * value, "ms"] : [1e6 * value, "µs"];
  return `${shown.toFixed(shown < 10 ? 2 : shown < 100 ? 1 : 0)} ${unit}`;
}
const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (value) => `${(100 * value).toFixed(1)} %`;
function large(value) {
  for (const [limit, name] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= limit) return `${(value / limit).toFixed(2)} ${name}`;
  }
  return `${Math.round(value)} `;
}
function ranges(list) {
  return list.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

// ---- elements ----

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) found.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (typeof child === "string") found.append(...unbroken(child));
    else if (child !== null) found.append(child);
  }
  return found;
}
const OPTION = /((?<![\w-])--?[A-Za-z][\w-]*)/;
/** The pieces of a text, with the names of options in elements that do not break at the end of a line. */
function unbroken(text) {
  return text.split(OPTION).map((piece, place) => {
    if (place % 2 === 0) return piece;
    const found = document.createElement("span");
    found.className = "option";
    found.textContent = piece;
    return found;
  });
}
function section(id, title) {
  const found = element("section", {id, "aria-labelledby": `${id}-title`}, element("h2", {id: `${id}-title`}, title));
  document.getElementById("content").append(found);
  document.getElementById("contents").append(element("li", {}, element("a", {href: `#${id}`}, title)));
  return found;
}
const LONG = 30; // characters of a cell whose text may have several lines
function table(header, rows, caption) {
  const body = element("tbody");
  const kind = (cell) => (cell.length > LONG ? "long" : null);
  for (const row of rows) {
    body.append(element("tr", {}, ...row.map((cell, place) =>
      (place ? element("td", {class: kind(cell)}, cell) : element("th", {scope: "row", class: kind(cell)}, cell)))));
  }
  const head = element("thead", {}, element("tr", {}, ...header.map((cell) => element("th", {scope: "col"}, cell))));
  const found = element("table", {}, element("caption", {class: "visually-hidden", hidden: true}, caption), head, body);
  return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption}, found);
}
function details(summary, child) {
  return element("details", {}, element("summary", {}, summary), child);
}
function select(label, options, change) {
  const box = element("select", {"aria-label": label, onchange: () => change(box.value)}, ...options.map(([value, text]) => element("option", {value}, text)));
  return [element("label", {}, `${label} `, box), box];
}

// ---- charts ----

const ALL_AT_ONCE = 1e9; // marks of a chart that are drawn in one step

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
const COLORS = {
  light: ["#0550ae", "#1a7f37", "#9a6700", "#8250df", "#bc4c00", "#cf222e", "#57606a", "#0a7ea4"],
  dark: ["#79c0ff", "#56d364", "#e3b341", "#d2a8ff", "#ffa657", "#ff7b72", "#9ea7b3", "#39c5cf"],
};
const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
const shade = (place) => COLORS[theme()][place % COLORS.light.length];
const narrow = () => document.documentElement.clientWidth < 600;

/**
 * Adds a chart. `options` returns the options of ECharts, and is called again when the theme changes. A chart below the first screen is
 * drawn when it is scrolled to, when the browser has nothing else to do, or to be printed. `ready` gets the chart when it is there.
 * `keys` are the names of its series, for a legend above it that switches them on and off.
 */
function chart(parent, id, label, options, {tall = false, canvas = false, keys = [], ready = () => {}} = {}) {
  const box = element("div", {id, class: tall ? "chart tall" : "chart", role: "img", "aria-label": label});
  box.addEventListener("wheel", (event) => { // ECharts would also keep the page from scrolling
    if (!event.ctrlKey) event.stopPropagation();
  }, {capture: true, passive: true});
  const hidden = new Set();
  const marks = legend(keys, hidden, () => found.draw());
  parent.append(...(keys.length ? [marks.list] : []), box);
  const found = {id, made: null, draw() {
    if (found.made === null) return;
    const drawn = options();
    if (keys.length) {
      drawn.series.forEach((each, place) => { each.itemStyle = {color: shade(place), ...each.itemStyle}; });
      drawn.legend = {show: false, selected: Object.fromEntries(keys.map((name) => [name, !hidden.has(name)]))};
      marks.paint(drawn.series.map((each) => each.itemStyle.color));
    }
    found.made.setOption({
      animation: false, color: COLORS[theme()], textStyle: {color: color("--text")}, aria: {enabled: false}, ...drawn,
    }, {notMerge: true});
  }, show() {
    if (found.made !== null) return;
    observer.unobserve(box);
    found.made = echarts.init(box, null, {renderer: canvas ? "canvas" : "svg"});
    ready(found.made);
    found.draw();
  }};
  charts.push(found);
  if (box.getBoundingClientRect().top < innerHeight) found.show();
  else observer.observe(box);
  return found;
}
/** A legend whose buttons switch the series of a chart on and off. `paint` sets the colors of the marks. */
function legend(keys, hidden, update) {
  const marks = keys.map((_, place) => element("span", {class: "mark", style: `background:${shade(place)}`, "aria-hidden": "true"}));
  const buttons = keys.map((name, place) => element("button", {type: "button", "aria-pressed": "true", onclick: () => {
    if (!hidden.delete(name)) hidden.add(name);
    buttons[place].setAttribute("aria-pressed", `${!hidden.has(name)}`);
    update();
  }}, marks[place], name));
  return {
    list: element("div", {class: "legend", role: "group", "aria-label": "Series of the chart"}, ...buttons),
    paint: (colors) => marks.forEach((mark, place) => { mark.style.background = colors[place]; }),
  };
}
const observer = new IntersectionObserver((entries) => {
  for (const {target} of entries.filter((each) => each.isIntersecting)) charts.find(({id}) => id === target.id).show();
}, {rootMargin: "50%"});
/** Draws the charts that are not drawn yet, one whenever the browser is idle. */
function drawWhenIdle() {
  const next = charts.find(({made}) => made === null);
  if (!next) return;
  const later = window.requestIdleCallback || ((call) => setTimeout(call, 100));
  later(() => { next.show(); drawWhenIdle(); });
}
function axis(extraOptions) {
  return {
    axisLine: {lineStyle: {color: color("--line")}}, axisLabel: {color: color("--text")}, nameTextStyle: {color: color("--text")},
    splitLine: {lineStyle: {color: color("--line")}}, ...extraOptions,
  };
}
/** An axis of bytes from zero whose marks are round numbers of GiB. */
function memoryAxis(most) {
  const about = Math.max(most, 1) / 6;
  const unit = about > GIB / 20 ? GIB : about > 2 ** 20 / 20 ? 2 ** 20 : 1;
  const power = 10 ** Math.floor(Math.log10(about / unit));
  const step = unit * power * [1, 2, 5, 10].find((each) => each * power * unit >= about);
  const label = (value) => (unit === 1 ? bytes(value) : `${+(value / unit).toFixed(1)} ${unit === GIB ? "GiB" : "MiB"}`);
  return axis({type: "value", interval: step, min: 0, max: step * Math.ceil(most / step),
    axisLabel: {formatter: label, color: color("--text")}});
}
/** The mouse wheel scrolls the page; with the control key it zooms. A mouse moves the chart, a finger scrolls the page. */
const zoom = (endValue) => [{type: "inside", xAxisIndex: 0, filterMode: "weakFilter", startValue: 0, endValue,
  zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false, moveOnMouseMove: matchMedia("(pointer: fine)").matches}];
/** A button that shows the whole iteration, or its beginning again. */
function wholeButton(state, update) {
  const button = element("button", {type: "button", "aria-pressed": "false", onclick: () => {
    state.whole = !state.whole;
    button.setAttribute("aria-pressed", `${state.whole}`);
    update();
  }}, "Whole iteration");
  return button;
}
const tooltip = (formatter) => ({
  trigger: "item", confine: true, formatter, backgroundColor: color("--panel"), borderColor: color("--line"),
  textStyle: {color: color("--text")}, extraCssText: "max-width: min(30rem, 80vw); white-space: normal",
});
const shownOptions = (text) => escape(text).replace(new RegExp(OPTION, "g"), '<span class="option">$1</span>');
const escape = (text) => String(text).replace(/[&<>"]/g, (found) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[found]));

// ---- memory ----

function highest(of) {
  return of.ranks.reduce((most, rank) => (rank.memory.device_bytes > most.memory.device_bytes ? rank : most));
}
const PARTS = [
  ["parameters_bytes", "parameters"], ["gradients_bytes", "gradients"], ["optimizer_bytes", "optimizer"],
  ["runtime_bytes", "workspaces and caches"], ["activations_bytes", "activations"], ["transient_bytes", "temporary tensors"],
];
const OUTSIDE = "reserved but unused, CUDA and NCCL";
/** The parts of the memory of a rank. They add up to its device memory. */
function parts(memory) {
  const found = PARTS.map(([field, name]) => [name, memory[field]]);
  return [...found, [OUTSIDE, memory.device_bytes - memory.peak_allocated_bytes]];
}
/** A chart of stacked bars and the table of its figures. `of` returns the parts of the memory of a row; parts of no row are left out. */
function stacked(parent, id, label, rows, capacity, of = parts) {
  const shown = of(rows[0][1]).map(([name], place) => [name, rows.map(([, memory]) => of(memory)[place][1])])
    .filter(([, sizes]) => sizes.some((size) => size));
  const series = () => shown.map(([name, data], place) => ({
    name, type: "bar", stack: "memory", data,
    ...(place ? {} : capacity === null ? {} : {markLine: {
      symbol: "none", data: [{yAxis: capacity, name: "capacity"}], lineStyle: {color: color("--bad"), width: 2},
      label: {formatter: `capacity ${bytes(capacity)}`, color: color("--text"), position: "insideEndTop"},
    }}),
  }));
  chart(parent, id, label, () => ({
    grid: {left: 70, right: 20, top: 30, bottom: 40}, series: series(),
    xAxis: axis({type: "category", data: rows.map(([name]) => name)}),
    yAxis: memoryAxis(1.05 * Math.max(capacity || 0, ...rows.map(([, memory]) => memory.device_bytes))),
    tooltip: tooltip((point) => `${escape(point.name)}<br>${escape(point.seriesName)}: ${bytes(point.value)}`),
  }), {keys: shown.map(([name]) => name)});
  parent.append(details("Figures", table(["", ...shown.map(([name]) => name), "sum"],
    rows.map(([name, memory], place) => [name, ...shown.map(([, sizes]) => bytes(sizes[place])), bytes(memory.device_bytes)]), label)));
}

// ---- notes ----

function notes() {
  const found = section("notes", "Warnings and assumptions");
  for (const [title, lines] of [["Warnings", report.warnings], ["Assumptions", report.assumptions],
    ["Time: not counted", report.time && report.time.not_counted || []],
    ["Serving: not counted", report.inference && report.inference.serving ? report.inference.serving.not_counted : []]]) {
    if (lines.length) found.append(element("h3", {}, title), element("ul", {}, ...lines.map((line) => element("li", {}, line))));
  }
}

// ---- page ----

function showAll() {
  for (const each of charts) each.show();
}
/** Draws the charts for the present width and theme. */
function redraw() {
  for (const each of charts) {
    if (each.made) each.made.resize();
    each.draw();
  }
}
/** Sets the theme, without drawing. */
function nameTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
}
function setTheme(name) {
  nameTheme(name);
  redraw();
}
function copyButtons() {
  for (const button of document.querySelectorAll("[data-copies]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const place = document.getElementById(button.dataset.copies), status = button.parentElement.querySelector("[role=status]");
      try {
        await navigator.clipboard.writeText(place.textContent);
        status.textContent = "Copied.";
      } catch {
        getSelection().selectAllChildren(place);
        status.textContent = "Selected; copy it with the keyboard.";
      }
    });
  }
}
function saveReport() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(report, null, 2)], {type: "application/json"}));
  element("a", {href: url, download: "report.json"}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
function pageButtons() {
  const actions = {theme: () => setTheme(theme() === "dark" ? "light" : "dark"), print: () => print(), save: saveReport};
  for (const [id, action] of Object.entries(actions)) {
    const button = document.getElementById(id);
    button.hidden = false;
    button.addEventListener("click", action);
  }
  copyButtons();
}
/** Print has the light theme and the width of a sheet of paper. */
function printing() {
  const {classList} = document.documentElement;
  let before = "light", opened = [];
  addEventListener("beforeprint", () => {
    before = theme();
    nameTheme("light");
    classList.add("printing");
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
    showAll();
    redraw();
  });
  addEventListener("afterprint", () => {
    classList.remove("printing");
    for (const each of opened) each.open = false;
    setTheme(before);
  });
}
/** Adds the sections to the page. */
function start(sections) {
  nameTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  for (const {id, firstElementChild: title} of document.querySelectorAll("section[id]")) {
    document.getElementById("contents").append(element("li", {}, element("a", {href: `#${id}`}, title.textContent)));
  }
  for (const each of sections) each();
  pageButtons();
  printing();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) requestAnimationFrame(redraw);
    width = innerWidth;
  });
  drawWhenIdle();
}
