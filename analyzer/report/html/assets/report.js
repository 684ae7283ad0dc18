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
  found.append(...children.filter((child) => child !== null));
  return found;
}
function section(id, title) {
  const found = element("section", {id, "aria-labelledby": `${id}-title`}, element("h2", {id: `${id}-title`}, title));
  document.getElementById("content").append(found);
  document.getElementById("contents").append(element("li", {}, element("a", {href: `#${id}`}, title)));
  return found;
}
function table(header, rows, caption) {
  const body = element("tbody");
  for (const row of rows) {
    body.append(element("tr", {}, ...row.map((cell, place) => place ? element("td", {}, cell) : element("th", {scope: "row"}, cell))));
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

/**
 * Adds a chart. `options` returns the options of ECharts, and is called again when the theme changes. A chart below the first screen is
 * drawn when it is scrolled to, when the browser has nothing else to do, or to be printed. `ready` gets the chart when it is there.
 */
function chart(parent, id, label, options, {tall = false, canvas = false, ready = () => {}} = {}) {
  const box = element("div", {id, class: tall ? "chart tall" : "chart", role: "img", "aria-label": label});
  parent.append(box);
  const found = {id, made: null, draw() {
    if (found.made === null) return;
    const text = {color: color("--text")};
    found.made.setOption({
      animation: false, color: COLORS[theme()], textStyle: text, aria: {enabled: false},
      ...options(),
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
/** An axis of bytes whose marks are round numbers of GiB. */
function memoryAxis(least, most) {
  const about = Math.max(most - least, 1) / 6;
  const unit = about > GIB / 20 ? GIB : about > 2 ** 20 / 20 ? 2 ** 20 : 1;
  const power = 10 ** Math.floor(Math.log10(about / unit));
  const step = unit * power * [1, 2, 5, 10].find((each) => each * power * unit >= about);
  const label = (value) => (unit === 1 ? bytes(value) : `${+(value / unit).toFixed(1)} ${unit === GIB ? "GiB" : "MiB"}`);
  return axis({type: "value", interval: step, min: step * Math.floor(least / step), max: step * Math.ceil(most / step),
    axisLabel: {formatter: label, color: color("--text")}});
}
const legend = () => ({textStyle: {color: color("--text")}, type: "scroll", top: 0});
const tooltip = (formatter) => ({
  trigger: "item", confine: true, formatter, backgroundColor: color("--panel"), borderColor: color("--line"),
  textStyle: {color: color("--text")},
});
const escape = (text) => String(text).replace(/[&<>"]/g, (found) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[found]));

// ---- summary ----

function highest(of) {
  return of.ranks.reduce((most, rank) => (rank.memory.device_bytes > most.memory.device_bytes ? rank : most));
}
function summary() {
  const {verdict, time} = report;
  const state = verdict.fits === null ? "" : verdict.state === "tight" ? "tight" : verdict.fits ? "fits" : "fails";
  const place = document.getElementById("verdict");
  const text = {fits: "It fits", "does not fit": "It does not fit", tight: "It fits, and is tight"}[verdict.state] || (verdict.withheld ? "No verdict" : "The GPU is not known");
  place.textContent = verdict.note ? `${text}. ${verdict.note}` : `${text}.`;
  place.className = state;
  const found = section("summary", "Key figures");
  const rows = [["GPUs", count(report.world.size)], ["Memory of the highest-memory rank", bytes(highest(report).memory.device_bytes)]];
  if (verdict.capacity_bytes !== null) {
    rows.push([`Memory of ${verdict.gpu || "the GPU"}`, bytes(verdict.capacity_bytes)], ["Headroom", bytes(verdict.headroom_bytes)]);
  }
  if (time) {
    rows.push(["Iteration", seconds(time.iteration_seconds)], ["Tokens/s/GPU", count(time.tokens_per_second_per_gpu)]);
    rows.push(["Model FLOPs utilization", percent(time.model_flops_utilization)]);
    if (time.training) {
      rows.push(["Training", `${time.training.days.toFixed(1)} days`]);
      if (time.training.cost !== null) rows.push(["Cost", count(time.training.cost)]);
    }
  }
  rows.push(["Parameters", `${large(report.model.parameters)}`]);
  found.append(element("dl", {class: "cards"}, ...rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
  if (report.advice.length) {
    found.append(element("h3", {}, "Changes that make it fit"), table(["Change", "Saves", "Then needs", "Iteration"],
      report.advice.map((each) => [each.change, bytes(each.saves_bytes), bytes(each.device_bytes), seconds(each.iteration_seconds)]),
      "Changes of options and the memory with each of them"));
  }
}

// ---- memory ----

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
function stacked(parent, id, label, rows, capacity) {
  const series = parts(rows[0][1]).map(([name], place) => ({
    name, type: "bar", stack: "memory", data: rows.map(([, memory]) => parts(memory)[place][1]),
    ...(place ? {} : capacity === null ? {} : {markLine: {
      symbol: "none", data: [{yAxis: capacity, name: "capacity"}], lineStyle: {color: color("--bad"), width: 2},
      label: {formatter: `capacity ${bytes(capacity)}`, color: color("--text"), position: "insideEndTop"},
    }}),
  }));
  chart(parent, id, label, () => ({
    legend: legend(), grid: {left: 70, right: 20, top: 50, bottom: 40}, series,
    xAxis: axis({type: "category", data: rows.map(([name]) => name)}),
    yAxis: memoryAxis(0, 1.05 * Math.max(capacity || 0, ...rows.map(([, memory]) => memory.device_bytes))),
    tooltip: tooltip((point) => `${escape(point.name)}<br>${escape(point.seriesName)}: ${bytes(point.value)}`),
  }));
  parent.append(details("Figures", table(["", ...parts(rows[0][1]).map(([name]) => name), "sum"],
    rows.map(([name, memory]) => [name, ...parts(memory).map(([, value]) => bytes(value)), bytes(memory.device_bytes)]), label)));
}
/** The name of a rank class: its stage, and its ranks if the stage has several classes. */
function classOf(rank) {
  const several = report.ranks.filter((each) => each.pipeline_rank === rank.pipeline_rank).length > 1;
  return `stage ${rank.pipeline_rank}${several ? `, ranks ${ranges(rank.ranks)}` : ""}`;
}
function memory() {
  const found = section("memory", "Memory by stage");
  const rows = report.ranks.map((rank) => [classOf(rank), rank.memory]);
  found.append(element("p", {}, "Memory at the peak, one rank of each pipeline stage. Stages whose ranks differ have several bars."));
  stacked(found, "memory-chart", "Memory of each pipeline stage by part, with the memory of the GPU", rows, report.verdict.capacity_bytes);
}

// ---- memory over an iteration ----

const LISTED = 10; // tensors in a tooltip
const SHOWN = 96; // passes of a stage that are visible at first

function overIteration() {
  if (!extra.memory.length) return;
  const found = section("over-iteration", "Memory over an iteration");
  const spans = extra.passes;
  const chosen = {stage: highest(report).pipeline_rank};
  const rank = () => report.ranks.find((each) => each.pipeline_rank === chosen.stage);
  const points = () => extra.memory[chosen.stage].map(([peak, after], place) => {
    const [start, end, direction, microbatch] = spans.length ? spans[chosen.stage][place] : [place, place + 1, null, place];
    return {start, end, name: direction === null ? `pass ${place}` : `${DIRECTIONS[direction]} of microbatch ${microbatch}`, peak, after};
  });
  /** The tensors that microbatches have saved for backward at the peak of a pass, or after it; the largest first. */
  function saved(place, after) {
    if (!spans.length) return [];
    const flight = extra.saved[chosen.stage].map(() => 0);
    spans[chosen.stage].slice(0, place + 1).forEach(([, , direction, , chunk], each) => {
      if (direction === 0) flight[chunk] += 1;
      else if (each < place || after) flight[chunk] -= 1;
    });
    const tensors = flight.flatMap((times, chunk) => extra.saved[chosen.stage][chunk].map(([name, size]) => [name, times * size]));
    const sums = new Map();
    for (const [name, size] of tensors) sums.set(name, (sums.get(name) || 0) + size);
    const found = [...sums].filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    const rest = found.slice(LISTED).reduce((sum, [, size]) => sum + size, 0);
    const inFlight = flight.map((times, chunk) => (flight.length > 1 ? `${times} of chunk ${chunk}` : `${times}`)).join(", ");
    return [`saved for backward by microbatches in flight (${inFlight}):`, ...found.slice(0, LISTED).map(([name, size]) => `${name} ${bytes(size)}`),
      ...(rest ? [`other tensors ${bytes(rest)}`] : [])];
  }
  const line = () => points().flatMap(({start, end, peak, after}) => [[start, peak], [end, after]]);
  const [label] = select("Stage", extra.memory.map((_, stage) => [stage, `${stage}`]), (value) => { chosen.stage = Number(value); made.draw(); });
  label.querySelector("select").value = chosen.stage;
  found.append(element("div", {class: "controls"}, label));
  found.append(element("p", {}, "Allocated memory at the peak of each forward and backward, and after it, as sums of tensors. " +
    "Of long iterations the first passes are shown; the mouse wheel zooms out. The peak is marked."));
  const made = chart(found, "over-chart", "Allocated memory over an iteration of one stage", () => {
    const all = points(), most = all.reduce((a, b) => (b.peak > a.peak ? b : a));
    const held = rank().memory;
    const live = [...held.runtime_parts, ...held.transient_parts].filter((part) => part.bytes > 0).slice(0, 12);
    return {
      grid: {left: 80, right: 30, top: 40, bottom: 60},
      xAxis: axis({type: "value", name: spans.length ? "seconds" : "pass", nameLocation: "middle", nameGap: 30, max: "dataMax", axisLabel: {showMaxLabel: false, color: color("--text")}}),
      yAxis: memoryAxis(all.reduce((least, each) => Math.min(least, each.after), most.peak), most.peak),
      dataZoom: [{type: "inside", startValue: 0, endValue: (all[Math.max(SHOWN, all.indexOf(most) + 8) - 1] || all[all.length - 1]).end}],
      tooltip: {...tooltip(([point]) => {
        const pass = all[Math.floor(point.dataIndex / 2)], at = point.dataIndex % 2 ? pass.after : pass.peak;
        const states = held.parameters_bytes + held.gradients_bytes + held.optimizer_bytes;
        const rows = [`${pass.name}${at === pass.peak ? "" : ", after it"}: ${bytes(at)}`,
          `model states ${bytes(states)}`, `workspaces and caches ${bytes(held.runtime_bytes)}`,
          `activations and temporary tensors ${bytes(at - states - held.runtime_bytes)}`];
        const tensors = pass.peak === most.peak && !(point.dataIndex % 2) ? live.map((part) => `${part.name} ${bytes(part.bytes)}`) : [];
        return [...rows, ...tensors, ...saved(Math.floor(point.dataIndex / 2), point.dataIndex % 2)].map(escape).join("<br>");
      }), trigger: "axis"},
      series: [{
        type: "line", name: "allocated", step: false, showSymbol: false, data: line(),
        markPoint: {data: [{name: "peak", coord: [most.start, most.peak], value: bytes(most.peak)}], symbolSize: 24,
          label: {fontSize: 11, color: color("--text"), position: "right", formatter: `peak ${bytes(most.peak)}`}},
      }],
    };
  });
  const rows = report.ranks.map((each) => [classOf(each), ...extremes(extra.memory[each.pipeline_rank]).map(bytes),
    bytes(each.memory.peak_allocated_bytes), bytes(each.memory.peak_allocated_first_iteration_bytes), each.memory.peak_at]);
  found.append(details("Figures", table(["", "least after a pass", "most, as a sum of tensors", "peak with the blocks of the allocator",
    "peak of the first iteration", "operation at the peak"], rows, "Allocated memory over an iteration of each stage")));
}
/** The least bytes after a pass, and the most bytes at the peak of a pass. */
function extremes(passes) {
  return [passes.reduce((least, [, after]) => Math.min(least, after), Infinity), passes.reduce((most, [peak]) => Math.max(most, peak), 0)];
}

// ---- schedule ----

function schedule() {
  if (!extra.passes.length) return;
  const found = section("schedule", "Pipeline schedule");
  const rows = extra.passes.flatMap((passes, stage) => passes.map((pass) => [stage, ...pass]));
  const stages = extra.passes.length;
  const shownEnd = Math.max(...extra.passes.map((passes) => (passes[SHOWN - 1] || [0, report.time.iteration_seconds])[1]));
  const others = extra.passes.flatMap((passes, stage) => around(passes, stage));
  const kinds = [...new Set(others.map(([, , , kind]) => kind))];
  found.append(element("p", {}, "The passes of each stage, and what delays them. The thin strip is communication that the GPU " +
    "waits for. Of long iterations the first passes are shown; the mouse wheel zooms out."));
  chart(found, "schedule-chart", "Gantt chart of the passes, the bubble and the exposed communication of each pipeline stage", () => ({
    legend: {...legend(), type: "plain"},
    grid: {left: 80, right: 20, top: 70, bottom: 60},
    dataZoom: [{type: "inside", xAxisIndex: 0, filterMode: "weakFilter", startValue: 0, endValue: shownEnd}],
    xAxis: axis({type: "value", name: "seconds", nameLocation: "middle", nameGap: 30, max: "dataMax", axisLabel: {showMaxLabel: false, color: color("--text")}}),
    yAxis: axis({type: "category", inverse: true, data: [...Array(stages).keys()].map((stage) => `stage ${stage}`)}),
    tooltip: tooltip((point) => {
      const [stage, start, end, direction, microbatch, chunk] = point.value;
      const what = DIRECTIONS[direction] ? `${DIRECTIONS[direction]} of microbatch ${microbatch}, chunk ${chunk}` : direction;
      return `stage ${stage}: ${what}<br>${seconds(end - start)} from ${seconds(start)}`;
    }),
    series: [
      ...DIRECTIONS.map((name, direction) => gantt(name, rows.filter((row) => row[3] === direction))),
      ...kinds.map((kind) => gantt(kind, others.filter((row) => row[3] === kind))),
    ],
  }), {tall: stages > 8, canvas: rows.length + others.length > 3000});
  found.append(details("Figures", table(["", "passes", `of these ${EXPOSED}`, BUBBLE, MESSAGE, DATA_PARALLEL],
    extra.schedule.stages.map((row, stage) => [`stage ${stage}`, ...row.map(seconds)]), "The schedule of each stage, for a complete iteration")));
}
/** The series of one kind of spans: stage, start, end and more. Communication within a pass is a strip below it. */
function gantt(name, data) {
  const strip = name === EXPOSED;
  return {
    name, type: "custom", progressive: 0, progressiveThreshold: ALL_AT_ONCE, encode: {x: [1, 2], y: 0}, data, z: strip ? 3 : 2,
    itemStyle: name === BUBBLE ? {color: color("--line")} : {},
    renderItem: (parameters, api) => {
      const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
      const height = 0.6 * api.size([0, 1])[1];
      const box = {x: from[0], y: from[1] - height / 2, width: Math.max(strip ? 0 : 1, to[0] - from[0]), height};
      return {type: "rect", shape: strip ? {...box, y: box.y + 0.75 * height, height: 0.25 * height} : box,
        style: {fill: api.visual("color"), stroke: strip ? null : color("--background"), lineWidth: 0.5}};
    },
  };
}
const EXPOSED = "exposed communication within a pass", MESSAGE = "exposed message between stages", BUBBLE = "bubble",
  DATA_PARALLEL = "exposed data-parallel communication";
/** What delays the passes of a stage, and what follows them: stage, start, end, kind. */
function around(passes, stage) {
  const {message, exposed, data_parallel: dataParallel, optimizer, host} = extra.schedule;
  const found = [];
  const add = (start, end, kind) => { if (end > start) found.push([stage, start, end, kind]); };
  let before = 0;
  for (const [start, end, direction, , chunk] of passes) {
    const waited = Math.min(message, start - before);
    if (start - before > 1e-6 * end) {
      add(before, start - waited, BUBBLE);
      add(start - waited, start, MESSAGE);
    }
    add(start, start + exposed[stage][chunk][direction], EXPOSED);
    before = end;
  }
  if (dataParallel) {
    const end = report.time.iteration_seconds, update = end - optimizer - host;
    add(before, before + dataParallel[stage], DATA_PARALLEL);
    add(update, update + optimizer, "optimizer step");
    add(end - host, end, "host");
  }
  return found;
}

// ---- time ----

const TIME = {
  gemm: "GEMMs", attention: "attention", memory_bound: "memory-bound kernels", exposed_tp: "exposed TP communication",
  exposed_cp: "exposed CP communication", exposed_ep: "exposed EP communication", exposed_pp: "exposed PP messages",
  exposed_dp: "exposed DP communication", bubble: "pipeline bubble", optimizer: "optimizer step", host: "GPU waits for the host",
};
function time() {
  if (!report.time) return;
  const found = section("time", "Time of an iteration");
  const shown = documents.map((each, place) => [names[place], each.time]).filter(([, each]) => each);
  found.append(element("p", {}, report.time.bottleneck));
  chart(found, "time-chart", "Parts of an iteration in seconds", () => ({
    legend: documents.length > 1 ? legend() : undefined, grid: {left: 190, right: 30, top: 40, bottom: 40},
    xAxis: axis({type: "value", axisLabel: {formatter: (value) => seconds(value), color: color("--text")}}),
    yAxis: axis({type: "category", inverse: true, data: Object.values(TIME)}),
    tooltip: tooltip((point) => `${escape(point.seriesName)}<br>${escape(point.name)}: ${seconds(point.value)}`),
    series: shown.map(([name, each]) => ({name, type: "bar", data: Object.keys(TIME).map((part) => each.parts_seconds[part])})),
  }));
  const rows = Object.entries(TIME).map(([part, name]) => [name, ...shown.map(([, each]) => seconds(each.parts_seconds[part]))]);
  found.append(details("Figures", table(["Part", ...shown.map(([name]) => name)],
    [...rows, ["iteration", ...shown.map(([, each]) => seconds(each.iteration_seconds))]], "Parts of an iteration")));
}

// ---- cluster ----

/** The coordinates of a rank, in Megatron's order of the kinds of parallelism. */
function sizes(expert) {
  const {parallel} = report;
  return expert
    ? {tp: parallel.expert_tensor, ep: parallel.expert, dp: parallel.expert_data, pp: parallel.pipeline, cp: 1}
    : {tp: parallel.tensor, cp: parallel.context, dp: parallel.data, pp: parallel.pipeline, ep: 1};
}
function strides(expert) {
  const found = {};
  let stride = 1;
  for (const kind of report.parallel.order.split("-")) {
    found[kind] = stride;
    stride *= sizes(expert)[kind];
  }
  return found;
}
const GROUPS = {
  tp: [["tp"], false, "tensor parallel"], cp: [["cp"], false, "context parallel"], dp: [["dp"], false, "data parallel"],
  dp_cp: [["dp", "cp"], false, "data and context parallel"], pp: [["pp"], false, "pipeline"],
  ep: [["ep"], true, "expert parallel"], etp: [["tp"], true, "expert-tensor parallel"],
  edp: [["dp"], true, "expert data parallel"], tp_ep: [["tp", "ep"], true, "expert-tensor and expert parallel"],
};
/** The ranks of the group of a kind that a rank belongs to. */
function members(kind, rank) {
  const [varied, expert] = GROUPS[kind];
  const size = sizes(expert), stride = strides(expert);
  const base = varied.reduce((value, each) => value - (Math.floor(rank / stride[each]) % size[each]) * stride[each], rank);
  let found = [base];
  for (const each of report.parallel.order.split("-").filter((name) => varied.includes(name))) {
    found = Array.from({length: size[each]}, (_, place) => found.map((value) => value + place * stride[each])).flat();
  }
  return found.sort((a, b) => a - b);
}
function stageOf(rank) {
  return Math.floor(rank / strides(false).pp) % report.parallel.pipeline;
}
const MOST_GPUS = 4096; // of a map that has room for a square for each
const BLOCK = 64; // nodes whose GPUs are shown together in a larger cluster
const MOST_LINES = 64, MOST_COLUMNS = 128; // of nodes

/** A map of the GPUs of some nodes: squares with column, line, first rank and number of ranks. */
function mapOfGpus(first, nodes) {
  const perNode = report.world.gpus_per_node, columns = Math.max(1, Math.ceil(Math.sqrt(nodes / 4)));
  const squares = Array.from({length: nodes * perNode}, (_, place) => {
    const node = Math.floor(place / perNode);
    return [(node % columns) * (perNode + 1) + (place % perNode), Math.floor(node / columns), first * perNode + place, 1];
  });
  return {columns: columns * (perNode + 1), lines: Array(Math.ceil(nodes / columns)).fill(""), squares};
}
/** A map with a square for each node. The nodes of a stage begin a line, if its ranks are consecutive nodes. */
function mapOfNodes() {
  const {gpus_per_node: perNode, nodes} = report.world, stages = report.parallel.pipeline;
  let ofStage = nodes / stages, perStage = Math.ceil(ofStage / MOST_COLUMNS);
  const whole = Number.isInteger(ofStage) && strides(false).pp === ofStage * perNode && stages * perStage <= MOST_LINES;
  if (!whole) [ofStage, perStage] = [nodes, Math.ceil(Math.sqrt(nodes / 4))];
  const columns = Math.ceil(ofStage / perStage);
  const squares = Array.from({length: nodes}, (_, node) => {
    const place = node % ofStage;
    return [place % columns, Math.floor(node / ofStage) * perStage + Math.floor(place / columns), node * perNode, perNode];
  });
  const lines = Array.from({length: Math.ceil(nodes / ofStage) * perStage}, (_, line) =>
    (whole && line % (perStage * Math.ceil(stages / 16)) === 0 ? `stage ${line / perStage}` : ""));
  return {columns, lines, squares};
}
function cluster() {
  const found = section("cluster", "Cluster");
  const perNode = report.world.gpus_per_node, nodes = report.world.nodes;
  const folded = report.world.size > MOST_GPUS, blockOf = (rank) => Math.floor(rank / perNode / BLOCK);
  const kinds = Object.keys(GROUPS).filter((kind) => members(kind, 0).length > 1);
  const state = {rank: 0, kind: kinds[0] || "tp", block: null};
  const number = element("input", {type: "number", min: 0, max: report.world.size - 1, value: 0, onchange: () => choose(Number(number.value))});
  const [kindLabel] = select("Group", Object.keys(GROUPS).map((kind) => [kind, `${kind}: ${GROUPS[kind][2]}`]), (value) => { state.kind = value; update(); });
  const [stageLabel] = select("Stage", Array.from({length: report.parallel.pipeline}, (_, stage) => [stage, `${stage}`]),
    (value) => choose(Number(value) * strides(false).pp));
  const [blockLabel, blockBox] = select("GPUs of nodes", [["", "all, a square for each node"], ...Array.from({length: Math.ceil(nodes / BLOCK)}, (_, block) =>
    [block, `${BLOCK * block}–${Math.min(nodes, BLOCK * (block + 1)) - 1}`])], (value) => { state.block = value === "" ? null : Number(value); update(); });
  kindLabel.querySelector("select").value = state.kind;
  found.append(element("p", {}, folded ? "Each square is a node. Those with members of the selected group are marked. Select a node to see the GPUs of the nodes around it." :
    "Each square is a GPU, and each row of squares a node. Select a GPU and a kind of group: its members are marked."));
  found.append(element("div", {class: "controls"}, element("label", {}, "Rank ", number), kindLabel, stageLabel, folded ? blockLabel : null));
  const shown = () => {
    if (!folded) return mapOfGpus(0, nodes);
    return state.block === null ? mapOfNodes() : mapOfGpus(BLOCK * state.block, Math.min(BLOCK, nodes - BLOCK * state.block));
  };
  const named = (first, ranks, of) => {
    const node = `node ${Math.floor(first / perNode)}, stage ${stageOf(first)}`;
    return ranks === 1 ? `rank ${first}, ${node}` : `${node}, ranks ${first}–${first + ranks - 1}: ${of} of the group`;
  };
  const made = chart(found, "cluster-chart", "Map of all GPUs, with the members of the selected group", () => {
    const group = members(state.kind, state.rank), {columns, lines, squares} = shown();
    const inside = (first, ranks) => group.filter((rank) => rank >= first && rank < first + ranks).length;
    const marked = new Set(group.map((rank) => (squares[0][3] === 1 ? rank : rank - rank % perNode)));
    const mark = (first, ranks) => (state.rank >= first && state.rank < first + ranks ? 2 : marked.has(first) ? 1 : 0);
    const labelled = lines.some((each) => each);
    return {
      grid: {left: labelled ? 80 : 10, right: 10, top: 10, bottom: 10},
      xAxis: {type: "category", show: false, data: [...Array(columns).keys()]},
      yAxis: {...axis({type: "category", data: lines, axisTick: {show: false}, axisLine: {show: false}, axisLabel: {interval: 0, color: color("--text")}}), show: labelled, inverse: true},
      visualMap: {show: false, type: "piecewise", dimension: 2, pieces: [
        {value: 0, color: color("--line")}, {value: 1, color: color("--accent")}, {value: 2, color: color("--bad")}]},
      tooltip: tooltip(({value: [, , , first, ranks]}) => named(first, ranks, ranks === 1 ? 1 : inside(first, ranks))),
      series: [{type: "heatmap", progressive: 0, progressiveThreshold: ALL_AT_ONCE, itemStyle: {borderColor: color("--background"), borderWidth: 1},
        data: squares.map(([column, line, first, ranks]) => [column, line, mark(first, ranks), first, ranks])}],
    };
  }, {canvas: report.world.size > 512, ready: (drawn) => drawn.on("click", ({value: [, , , first, ranks]}) => {
    if (ranks > 1) state.block = blockOf(first);
    choose(first);
  })});
  const text = element("div", {id: "cluster-text", "aria-live": "polite"});
  found.append(text);
  function choose(rank) {
    if (!Number.isInteger(rank) || rank < 0 || rank >= report.world.size) return;
    state.rank = rank;
    number.value = rank;
    if (state.block !== null) state.block = blockOf(rank);
    update();
  }
  function update() {
    made.draw();
    blockBox.value = state.block === null ? "" : state.block;
    const rows = Object.keys(GROUPS).map((kind) => {
      const group = members(kind, state.rank), spanned = new Set(group.map((rank) => Math.floor(rank / perNode))).size;
      const total = report.communication_totals[kind];
      const shown = group.length > 16 ? `${group.slice(0, 8).join(", ")} … ${group[group.length - 1]}` : group.join(", ");
      return [`${kind}: ${GROUPS[kind][2]}`, `${group.length}`, shown, group.length === 1 ? "none" : spanned === 1 ? "within a node" : `${spanned} nodes`,
        total && group.length > 1 ? bytes(total.bytes_per_iteration) : "0 B"];
    });
    text.replaceChildren(element("h3", {}, `Rank ${state.rank}: node ${Math.floor(state.rank / perNode)}, stage ${stageOf(state.rank)}`),
      table(["Group", "Size", "Ranks", "Links", "Bytes per iteration"], rows, `Groups of rank ${state.rank}`));
  }
  update();
}
const MOST_LABELLED = 10; // stages whose cells have room for a number

function matrix() {
  const stages = report.parallel.pipeline;
  const found = section("communication", "Communication");
  const totals = Object.entries(report.communication_totals);
  found.append(table(["Group", "Calls per iteration", "Bytes per iteration", "Bytes of the cluster"],
    totals.map(([kind, each]) => [kind, count(each.calls_per_iteration), bytes(each.bytes_per_iteration), bytes(each.cluster_bytes_per_iteration)]),
    "Communication of the rank with the largest volume, and of all ranks"));
  if (stages === 1) return;
  const sums = Array.from({length: stages}, () => Array(stages).fill(0));
  for (const row of report.communication) {
    const stage = row.pipeline_rank;
    const to = row.peer === "next" ? (stage + 1) % stages : row.peer === "previous" ? (stage - 1 + stages) % stages : stage;
    sums[stage][to] += row.bytes_per_iteration;
  }
  const sent = sums.flatMap((row, from) => row.map((value, to) => [to, from, value])).filter(([, , value]) => value);
  const most = Math.max(...sent.map(([, , value]) => value));
  const ink = (value) => ((value > most / 2) === (theme() === "dark") ? "#0d1117" : "#ffffff"); // the darkest color is the largest value in the light theme
  found.append(element("p", {}, "Bytes that a rank of one stage sends to the next and the previous stage in an iteration. On the diagonal: bytes within the groups of a stage."));
  chart(found, "matrix-chart", "Bytes that a rank of one stage sends to another stage in an iteration", () => ({
    grid: {left: 90, right: 90, top: 30, bottom: 50},
    xAxis: axis({type: "category", name: "to stage", nameLocation: "middle", nameGap: 30, data: [...Array(stages).keys()]}),
    yAxis: axis({type: "category", name: "from stage", inverse: true, data: [...Array(stages).keys()]}),
    visualMap: {min: 0, max: most, right: 0, top: "center", textStyle: {color: color("--text")}, formatter: bytes, text: [bytes(most), "0 B"],
      inRange: {color: theme() === "dark" ? ["#10233d", "#79c0ff"] : ["#ddeeff", "#0550ae"]}},
    tooltip: tooltip((point) => `stage ${point.value[1]} ${point.value[0] === point.value[1] ? "within its groups" : `to stage ${point.value[0]}`}: ${bytes(point.value[2])}`),
    series: [{type: "heatmap", label: {show: stages <= MOST_LABELLED, formatter: (point) => bytes(point.value[2])},
      data: sent.map((value) => ({value, label: {color: ink(value[2])}}))}],
  }));
}

// ---- tree ----

function tree() {
  const found = section("tree", "Modules");
  const state = {place: report.ranks.indexOf(highest(report)), chunk: 0, sort: null};
  const chosen = () => report.ranks[state.place];
  const [rankLabel] = select("Stage", report.ranks.map((rank, place) => [place, `${rank.pipeline_rank} (ranks ${ranges(rank.ranks)})`]),
    (value) => { state.place = Number(value); state.chunk = 0; draw(); });
  rankLabel.querySelector("select").value = state.place;
  const chunkBox = element("span");
  found.append(element("p", {}, "One rank, one microbatch. The time includes kernels and communication that the GPU waits for. Select a column to sort."));
  found.append(element("div", {class: "controls"}, rankLabel, chunkBox));
  const place = element("div");
  found.append(place);
  const closed = new Set();
  const COLUMNS = [["Module", null], ["Parameters", "parameters"], ["Activations", "saved_bytes"], ["FLOPs", "flops"], ["Time", "seconds"]];
  function nodes() {
    const times = (extra.modules[state.place] || [])[state.chunk] || [];
    let next = 0;
    const visit = (node, path, level, times_) => {
      const [forward, backward, flops] = times[next++] || [null, null, null];
      const repeated = times_ * (node.repeat || 1);
      const key = `${path}/${node.name}`;
      return {node, key, level, flops, seconds: forward === null ? null : forward + backward,
        parameters: node.parameters * repeated, saved_bytes: node.saved_bytes * repeated,
        children: (node.children || []).map((child) => visit(child, key, level + 1, repeated))};
    };
    return visit(chosen().chunks[state.chunk].tree, "", 1, 1);
  }
  function rows(entry, body) {
    const open = !closed.has(entry.key), inner = entry.children.length > 0;
    const toggle = inner ? element("button", {class: "toggle", type: "button", "aria-expanded": `${open}`,
      "aria-label": `${open ? "Collapse" : "Expand"} ${entry.node.name}`,
      onclick: () => { open ? closed.add(entry.key) : closed.delete(entry.key); draw(); place.querySelector(`[data-key="${CSS.escape(entry.key)}"] button`).focus(); }},
      open ? "▾" : "▸") : "";
    const name = element("td", {style: `padding-left:${1.2 * (entry.level - 1) + (inner ? 0 : 1.6)}rem`}, toggle, entry.node.name);
    const cells = [count(entry.parameters), bytes(entry.saved_bytes), entry.flops === null ? "" : large(entry.flops), entry.seconds === null ? "" : seconds(entry.seconds)];
    body.append(element("tr", {"data-key": entry.key}, name, ...cells.map((cell) => element("td", {}, cell))));
    if (!open) return;
    const ordered = state.sort ? [...entry.children].sort((a, b) => (b[state.sort] || 0) - (a[state.sort] || 0)) : entry.children;
    for (const child of ordered) rows(child, body);
  }
  function draw() {
    const chunks = chosen().chunks;
    if (chunks.length > 1) {
      const [label] = select("Chunk", chunks.map((chunk, each) => [each, `virtual stage ${chunk.virtual_stage}`]), (value) => { state.chunk = Number(value); draw(); });
      label.querySelector("select").value = state.chunk;
      chunkBox.replaceChildren(label);
    } else chunkBox.replaceChildren();
    const head = element("tr", {}, ...COLUMNS.map(([name, field]) => element("th",
      {scope: "col", "aria-sort": field && state.sort === field ? "descending" : null},
      element("button", {type: "button", onclick: () => { state.sort = field; draw(); }}, name))));
    const body = element("tbody");
    rows(nodes(), body);
    place.replaceChildren(element("div", {class: "scroll tree", tabindex: "0", role: "region", "aria-label": "Modules"},
      element("table", {}, element("thead", {}, head), body)));
  }
  const all = (entry) => entry.children.flatMap((child) => [child, ...all(child)]);
  for (const entry of all(nodes())) if (entry.level >= 3 && entry.children.length) closed.add(entry.key);
  draw();
}

// ---- search ----

function search() {
  if (!report.search) return;
  const found = section("search", "Layouts");
  const text = (layout) => Object.entries(layout.options).map(([flag, value]) =>
    value === null || value === false ? `without ${flag}` : value === true ? flag : `${flag} ${value}`).join(" ") || "the launch as it is";
  const groups = [["front of memory and time", report.search.front], ["fastest layouts", report.search.best],
    ["the launch", report.search.given ? [report.search.given] : []]];
  chart(found, "search-chart", "Time and memory of the layouts that the search found", () => ({
    legend: legend(), grid: {left: 80, right: 30, top: 50, bottom: 60},
    xAxis: axis({type: "value", scale: true, name: "seconds of an iteration", nameLocation: "middle", nameGap: 30}),
    yAxis: memoryAxis(Math.min(...groups.flatMap(([, layouts]) => layouts.map((each) => each.device_bytes))),
      Math.max(...groups.flatMap(([, layouts]) => layouts.map((each) => each.device_bytes)))),
    tooltip: tooltip((point) => `${escape(point.value[2])}<br>${seconds(point.value[0])}, ${bytes(point.value[1])}`),
    series: groups.map(([name, layouts], place) => ({name, type: "scatter", symbolSize: place === 2 ? 16 : 10, symbol: ["circle", "triangle", "diamond"][place],
      data: layouts.map((each) => [each.iteration_seconds, each.device_bytes, text(each)])})),
  }));
  found.append(table(["Changed options", "Iteration", "Tokens/s/GPU", "Memory"], report.search.best.map((each) =>
    [text(each), seconds(each.iteration_seconds), count(each.tokens_per_second_per_gpu), bytes(each.device_bytes)]), "Fastest layouts that fit"));
}

// ---- comparison ----

function comparison() {
  if (documents.length === 1) return;
  const found = section("comparison", "Comparison");
  const rows = [
    ["Verdict", ...documents.map((each) => each.verdict.state)],
    ["Memory of the highest-memory rank", ...documents.map((each) => bytes(highest(each).memory.device_bytes))],
    ["Iteration", ...documents.map((each) => seconds(each.time ? each.time.iteration_seconds : null))],
    ["GPUs", ...documents.map((each) => count(each.world.size))],
    ...["tensor", "pipeline", "context", "data", "expert"].map((name) => [`${name} parallel`, ...documents.map((each) => `${each.parallel[name]}`)]),
    ["Micro-batch size", ...documents.map((each) => `${each.batch.micro}`)],
    ["Global batch size", ...documents.map((each) => `${each.batch.global}`)],
  ];
  found.append(table(["", ...names], rows, "The reports side by side"));
  stacked(found, "comparison-chart", "Memory of the highest-memory rank of each report",
    documents.map((each, place) => [names[place], highest(each).memory]), report.verdict.capacity_bytes);
}

// ---- notes ----

function notes() {
  const found = section("notes", "Warnings and assumptions");
  for (const [title, lines] of [["Warnings", report.warnings], ["Assumptions", report.assumptions],
    ["Time: not counted", report.time ? report.time.not_counted : []]]) {
    if (lines.length) found.append(element("h3", {}, title), element("ul", {}, ...lines.map((line) => element("li", {}, line))));
  }
}

// ---- page ----

function showAll() {
  for (const each of charts) each.show();
}
function resizeAll() {
  for (const each of charts) if (each.made) each.made.resize();
}
function redraw() {
  for (const each of charts) each.draw();
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
nameTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
summary();
comparison();
memory();
overIteration();
schedule();
time();
cluster();
matrix();
tree();
search();
notes();
document.getElementById("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
document.getElementById("print").addEventListener("click", () => print());
let before = "light";
addEventListener("beforeprint", () => {
  before = theme();
  setTheme("light");
  showAll();
  for (const each of document.querySelectorAll("details")) each.open = true;
  resizeAll();
});
addEventListener("afterprint", () => {
  setTheme(before);
  resizeAll();
});
addEventListener("resize", resizeAll);
addEventListener("load", drawWhenIdle);
