// The charts: memory of each stage, parts of the time, schedule, and memory and time of layouts.

import {at, bytes, element, percent, seconds} from "./elements.js";

const COLORS = {
  light: ["#0550ae", "#1a7f37", "#9a6700", "#8250df", "#bc4c00", "#cf222e", "#57606a", "#0a7ea4", "#6f42c1", "#4d7c0f", "#9d174d"],
  dark: ["#79c0ff", "#56d364", "#e3b341", "#d2a8ff", "#ffa657", "#ff7b72", "#9ea7b3", "#39c5cf", "#b392f0", "#a3e635", "#f9a8d4"],
};
export const PARTS = [["parameters", "parameters"], ["gradients", "gradients"], ["optimizer", "optimizer states"],
  ["runtime", "workspaces and caches"], ["activations", "saved activations"], ["transient", "temporary tensors"]];
export const REST = "reserved, and outside of PyTorch";
export const TIME = {gemm: "GEMMs", attention: "attention", memory_bound: "memory-bound kernels", exposed_tp: "exposed TP communication",
  exposed_cp: "exposed CP communication", exposed_ep: "exposed EP communication", exposed_pp: "exposed messages between stages",
  exposed_dp: "exposed DP communication", bubble: "pipeline bubble", optimizer: "optimizer step", host: "host"};
const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";
const GIB = 2 ** 30;
const made = new Map();

export const theme = () => document.documentElement.dataset.theme;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => innerWidth < 600;

/** The highest-memory rank class of each stage. */
export function stages(report) {
  const found = new Map();
  for (const rank of report.ranks) {
    const before = found.get(rank.pipeline_rank);
    if (!before || before.memory.device_bytes < rank.memory.device_bytes) found.set(rank.pipeline_rank, rank);
  }
  return [...found.values()].sort((one, other) => one.pipeline_rank - other.pipeline_rank);
}

/** The parts of a bar; they add up to the memory on the device. */
export function partsOf(memory) {
  const found = PARTS.map(([field, name]) => [name, memory[`${field}_bytes`]]);
  return [...found, [REST, memory.device_bytes - memory.peak_allocated_bytes]];
}

/** Draws a chart in the box `id` below `parent`; `options` is called again when the theme or the width changes. */
function draw(parent, id, label, height, options, {canvas = false, click = null} = {}) {
  let box = at(id);
  if (!box) {
    box = element("div", {id, class: "chart", role: "img"});
    parent.append(box);
  }
  box.setAttribute("aria-label", label);
  box.style.height = `${height}px`;
  let found = made.get(id);
  if (found && found.chart.getDom() !== box) { found.chart.dispose(); found = null; }
  if (!found) {
    found = {chart: echarts.init(box, null, {renderer: canvas ? "canvas" : "svg"})};
    made.set(id, found);
    if (click) found.chart.on("click", (event) => found.click(event));
  }
  Object.assign(found, {options, click});
  redraw(found);
}

function redraw({chart, options}) {
  const {clientWidth, clientHeight} = chart.getDom();
  if (chart.getWidth() !== clientWidth || chart.getHeight() !== clientHeight) chart.resize(); // this draws the chart as it was
  chart.setOption({animation: false, color: COLORS[theme()], textStyle: {color: color("--text"), fontFamily: FONT}, aria: {enabled: false},
    ...options()}, {notMerge: true});
}

export function redrawAll() {
  for (const found of made.values()) redraw(found);
}

export function remove(id) {
  made.get(id)?.chart.dispose();
  made.delete(id);
  at(id)?.remove();
}

const axis = (more) => ({axisLine: {lineStyle: {color: color("--line")}}, axisLabel: {color: color("--text"), hideOverlap: true},
  nameTextStyle: {color: color("--text")}, splitLine: {lineStyle: {color: color("--line")}}, ...more});
const tooltip = (more) => ({confine: true, backgroundColor: color("--panel"), borderColor: color("--line"), textStyle: {color: color("--text"), fontSize: 13}, ...more});
const legend = (more) => ({textStyle: {color: color("--text")}, itemWidth: 14, itemHeight: 10, inactiveColor: color("--muted"), ...more});

/** Bars of the memory of each stage, with the capacity of the GPU as a line. */
export function memoryChart(parent, report, capacity) {
  const all = stages(report);
  const names = all.map((rank) => `stage ${rank.pipeline_rank}`);
  const series = partsOf(all[0].memory).map(([name], place) => ({
    name, type: "bar", stack: "memory", barMaxWidth: 34, data: all.map((rank) => partsOf(rank.memory)[place][1]),
    ...(place === 0 && capacity ? {markLine: {symbol: "none", silent: true, lineStyle: {color: color("--bad"), type: "solid", width: 2},
      label: {formatter: bytes(capacity), color: color("--bad"), position: "start"}, data: [{xAxis: capacity}]}} : {}),
  }));
  const most = Math.max(capacity ?? 0, ...all.map((rank) => rank.memory.device_bytes));
  const label = `Memory of each pipeline stage: ${all.map((rank) => `stage ${rank.pipeline_rank} ${bytes(rank.memory.device_bytes)}`).join(", ")}` +
    (capacity ? `; the GPU has ${bytes(capacity)}` : "");
  const step = scale(most);
  draw(parent, "memory-chart", label, 96 + (narrow() ? 44 : 0) + Math.max(2, all.length) * (all.length > 12 ? 22 : 34), () => ({
    grid: {left: 64, right: 24, top: 26, bottom: narrow() ? 112 : 70},
    legend: legend({bottom: 0, left: "center", type: "plain"}),
    tooltip: tooltip({trigger: "axis", axisPointer: {type: "shadow"}, formatter: (items) => memoryTip(all[items[0].dataIndex], items)}),
    xAxis: axis({type: "value", min: 0, max: Math.ceil(most * 1.02 / step) * step, interval: step,
      axisLabel: {color: color("--text"), hideOverlap: true, formatter: (value) => `${Math.round(value / GIB)} GiB`}}),
    yAxis: axis({type: "category", data: names, inverse: true, splitLine: {show: false}}),
    series,
  }));
}

function memoryTip(rank, items) {
  const rows = items.filter((item) => item.value > 0).map((item) => `${item.marker}${item.seriesName}: <b>${bytes(item.value)}</b>`);
  return [`stage ${rank.pipeline_rank}, ${bytes(rank.memory.device_bytes)}`, ...rows].join("<br>");
}

/** A round interval of an axis in bytes. */
function scale(most) {
  const steps = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
  return (steps.find((step) => most / (step * GIB) <= (narrow() ? 4 : 9)) ?? 20000) * GIB;
}

/** A bar with the parts of the time. */
export function timeChart(parent, time) {
  const parts = Object.entries(time.parts_seconds).filter(([, value]) => value > 0);
  const label = `Parts of an iteration of ${seconds(time.iteration_seconds)}: ${parts.map(([name, value]) => `${TIME[name] ?? name} ${seconds(value)}`).join(", ")}`;
  const places = Object.keys(TIME);
  draw(parent, "time-chart", label, narrow() ? 190 : 130, () => ({
    grid: {left: 8, right: 24, top: 8, bottom: narrow() ? 130 : 74, containLabel: true},
    legend: legend({bottom: 0, left: "center"}),
    tooltip: tooltip({trigger: "item", formatter: (item) => `${item.marker}${item.seriesName}: <b>${seconds(item.value)}</b>, ${percent(item.value / time.iteration_seconds)}`}),
    xAxis: axis({type: "value", min: 0, max: time.iteration_seconds, axisLabel: {color: color("--text"), hideOverlap: true, showMaxLabel: true, alignMinLabel: "left", alignMaxLabel: "right",
      formatter: (value) => seconds(value)}}),
    yAxis: axis({type: "category", data: [""], axisTick: {show: false}}),
    series: parts.map(([name, value]) => ({name: TIME[name] ?? name, type: "bar", stack: "time", barWidth: 34, data: [value],
      itemStyle: {color: COLORS[theme()][places.indexOf(name) % COLORS.light.length]}})),
  }));
}

/** The passes of each stage over an iteration. */
export function scheduleChart(parent, schedule) {
  const kinds = ["forward", "backward"];
  const rows = schedule.stages.flatMap((line, stage) => line.map(([start, end, direction, microbatch, chunk]) => [stage, start, end, direction, microbatch, chunk]));
  const most = schedule.complete ? schedule.seconds : Math.min(...schedule.stages.map((line) => line.at(-1)[1]));
  const label = `Passes of ${schedule.stages.length} pipeline stages in ${seconds(most)}`;
  const shade = (base, chunk) => Math.max(0.45, 1 - 0.12 * chunk);
  draw(parent, "schedule-chart", label, 96 + schedule.stages.length * (schedule.stages.length > 12 ? 16 : 26), () => ({
    grid: {left: 64, right: 24, top: 8, bottom: 62},
    legend: legend({bottom: 0, left: "center", data: kinds}),
    tooltip: tooltip({trigger: "item", formatter: ({value}) => `stage ${value[0]}, ${kinds[value[3]]} of microbatch ${value[4]}` +
      `${value[5] ? `, virtual stage ${value[5]}` : ""}<br>${seconds(value[1])} to ${seconds(value[2])}`}),
    xAxis: axis({type: "value", min: 0, max: most, splitLine: {show: false},
      axisLabel: {color: color("--text"), hideOverlap: true, formatter: (value) => seconds(value)}}),
    yAxis: axis({type: "category", data: schedule.stages.map((_, stage) => `stage ${stage}`), inverse: true, splitLine: {show: false}}),
    series: kinds.map((name, direction) => ({
      name, type: "custom", clip: true, encode: {x: [1, 2], y: 0}, progressive: 0, data: rows.filter((row) => row[3] === direction),
      itemStyle: {color: COLORS[theme()][direction ? 4 : 0]},
      renderItem: (params, api) => {
        const [left, top] = api.coord([api.value(1), api.value(0)]);
        const [right] = api.coord([api.value(2), api.value(0)]);
        const height = api.size([0, 1])[1] * 0.7;
        const shape = echarts.graphic.clipRectByRect({x: left, y: top - height / 2, width: Math.max(right - left, 0.5), height}, params.coordSys);
        return shape && {type: "rect", shape, style: {...api.style(), opacity: shade(1, api.value(5)), stroke: color("--background"), lineWidth: right - left > 3 ? 0.5 : 0}};
      },
    })),
  }), {canvas: true});
}

/** Memory and time of the layouts that a search found, of the launch, and of the versions before. */
export function layoutsChart(parent, result, now, take) {
  const points = result.points;
  const label = `Time and memory of ${points.length} layouts; the table below has them`;
  const data = (best) => points.filter((each) => each.best === best).map((each) => ({
    value: [each.iteration_seconds, each.device_bytes], name: each.text, layout: each}));
  draw(parent, "layouts-chart", label, 320, () => ({
    grid: {left: 70, right: 24, top: 30, bottom: 84},
    legend: legend({bottom: 0, left: "center"}),
    tooltip: tooltip({trigger: "item", formatter: (item) => item.data.layout
      ? `${item.name}<br>${seconds(item.value[0])}, ${bytes(item.value[1])}` : `${item.seriesName}<br>${seconds(item.value[0])}, ${bytes(item.value[1])}`}),
    xAxis: axis({type: "value", scale: true, name: "time of an iteration", nameLocation: "middle", nameGap: 30,
      axisLabel: {color: color("--text"), hideOverlap: true, formatter: (value) => seconds(value)}}),
    yAxis: axis({type: "value", min: 0, max: result.capacity_bytes ? Math.ceil(result.capacity_bytes * 1.05 / scale(result.capacity_bytes)) * scale(result.capacity_bytes) : null,
      interval: result.capacity_bytes ? scale(result.capacity_bytes) : null,
      axisLabel: {color: color("--text"), hideOverlap: true, formatter: (value) => `${Math.round(value / GIB)} GiB`}}),
    series: [
      // emphasis would replace the element under the pointer between a press and its release, and the browser then sends no click
      {name: "fastest layouts", type: "scatter", symbolSize: 14, cursor: "pointer", emphasis: {disabled: true}, data: data(true)},
      {name: "with less memory", type: "scatter", symbol: "diamond", symbolSize: 14, cursor: "pointer", emphasis: {disabled: true}, data: data(false)},
      {name: "the launch now", type: "scatter", symbol: "triangle", symbolSize: 16, z: 1, silent: true, itemStyle: {color: color("--tight")},
        data: now ? [{value: now}] : [],
        markLine: result.capacity_bytes ? {symbol: "none", silent: true, lineStyle: {color: color("--bad"), type: "solid"},
          label: {formatter: bytes(result.capacity_bytes), color: color("--bad"), position: "insideEndTop"}, data: [{yAxis: result.capacity_bytes}]} : undefined},
    ],
  }), {click: (event) => { if (event.data?.layout) take(event.data.layout); }});
}
