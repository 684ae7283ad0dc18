// ---- memory ----

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

const LISTED = 4; // tensors in a tooltip
const SHOWN = 96; // passes of a stage that are visible at first

function overIteration() {
  if (!extra.memory.length) return;
  const found = section("over-iteration", "Memory over an iteration");
  const spans = extra.passes;
  const chosen = {stage: highest(report).pipeline_rank, whole: false};
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
  found.append(element("p", {}, "Allocated memory at the peak of each forward and backward, and after it, as sums of tensors. " +
    "Of long iterations the first passes are shown. The mouse wheel with the control key zooms. The peak is marked."));
  found.append(element("div", {class: "controls"}, label, wholeButton(chosen, () => made.draw())));
  const made = chart(found, "over-chart", "Allocated memory over an iteration of one stage", () => {
    const all = points(), most = all.reduce((a, b) => (b.peak > a.peak ? b : a));
    const held = rank().memory;
    return {
      grid: {left: 70, right: 30, top: 40, bottom: 60},
      xAxis: axis({type: "value", name: spans.length ? "seconds" : "pass", nameLocation: "middle", nameGap: 30, max: "dataMax", axisLabel: {showMaxLabel: false, color: color("--text")}}),
      yAxis: memoryAxis(most.peak),
      dataZoom: zoom((!chosen.whole && all[Math.max(SHOWN, all.indexOf(most) + 8) - 1] || all[all.length - 1]).end),
      tooltip: {...tooltip(([point]) => {
        const pass = all[Math.floor(point.dataIndex / 2)], at = point.dataIndex % 2 ? pass.after : pass.peak;
        const states = held.parameters_bytes + held.gradients_bytes + held.optimizer_bytes;
        const rows = [`${pass.name}${at === pass.peak ? "" : ", after it"}: ${bytes(at)}`,
          `model states ${bytes(states)}`, `workspaces and caches ${bytes(held.runtime_bytes)}`,
          `activations and temporary tensors ${bytes(at - states - held.runtime_bytes)}`];
        return [...rows, ...saved(Math.floor(point.dataIndex / 2), point.dataIndex % 2)].map(escape).join("<br>");
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
  const state = {whole: false};
  const shownEnd = () => (state.whole ? report.time.iteration_seconds : firstPasses);
  const firstPasses = Math.max(...extra.passes.map((passes) => (passes[SHOWN - 1] || [0, report.time.iteration_seconds])[1]));
  const others = extra.passes.flatMap((passes, stage) => around(passes, stage));
  const kinds = [...new Set(others.map(([, , , kind]) => kind))];
  found.append(element("p", {}, "The passes of each stage, and what delays them. The thin strip is communication that the GPU " +
    "waits for. Of long iterations the first passes are shown. The mouse wheel with the control key zooms."));
  found.append(element("div", {class: "controls"}, wholeButton(state, () => made.draw())));
  const made = chart(found, "schedule-chart", "Gantt chart of the passes, the bubble and the exposed communication of each pipeline stage", () => ({
    grid: {left: 65, right: 20, top: 10, bottom: 60},
    dataZoom: zoom(shownEnd()),
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
  }), {tall: stages > 8, canvas: rows.length + others.length > 3000, keys: [...DIRECTIONS, ...kinds]});
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
        style: {fill: api.visual("color"), stroke: strip || box.width < 4 ? null : color("--background"), lineWidth: 0.5}};
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
  const present = Object.entries(TIME).filter(([part]) => shown.some(([, each]) => each.parts_seconds[part]));
  chart(found, "time-chart", "Parts of an iteration in seconds", () => ({
    grid: {left: narrow() ? 150 : 190, right: 60, top: 10, bottom: 40},
    xAxis: axis({type: "value", splitNumber: narrow() ? 2 : 5,
      axisLabel: {formatter: (value) => seconds(value), color: color("--text")}}),
    yAxis: axis({type: "category", inverse: true, data: present.map(([, name]) => name),
      axisLabel: {color: color("--text"), fontSize: narrow() ? 11 : 12}}),
    tooltip: tooltip((point) => `${escape(point.seriesName)}<br>${escape(point.name)}: ${seconds(point.value)}`),
    series: shown.map(([name, each]) => ({name, type: "bar", data: present.map(([part]) => each.parts_seconds[part]),
      label: {show: shown.length === 1, position: "right", color: color("--text"), formatter: ({value}) => seconds(value)}})),
  }), {keys: documents.length > 1 ? shown.map(([name]) => name) : []});
  const rows = present.map(([part, name]) => [name, ...shown.map(([, each]) => seconds(each.parts_seconds[part]))]);
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
    const rows = Object.keys(GROUPS).filter((kind) => members(kind, state.rank).length > 1).map((kind) => {
      const group = members(kind, state.rank), spanned = new Set(group.map((rank) => Math.floor(rank / perNode))).size;
      const total = report.communication_totals[kind];
      const shown = group.length > 16 ? `${group.slice(0, 8).join(", ")} … ${group[group.length - 1]}` : group.join(", ");
      return [`${kind}: ${GROUPS[kind][2]}`, `${group.length}`, shown, spanned === 1 ? "within a node" : `${spanned} nodes`,
        total ? bytes(total.bytes_per_iteration) : "0 B"];
    });
    text.replaceChildren(element("h3", {}, `Rank ${state.rank}: node ${Math.floor(state.rank / perNode)}, stage ${stageOf(state.rank)}`),
      rows.length ? table(["Group", "Size", "Ranks", "Links", "Bytes per iteration"], rows, `Groups of rank ${state.rank}`) : "The rank is in no group with others.");
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
    series: [{type: "heatmap", label: {show: stages <= (narrow() ? 3 : MOST_LABELLED), formatter: (point) => bytes(point.value[2])},
      data: sent.map((value) => ({value, label: {color: ink(value[2])}}))}],
  }));
  found.append(details("Figures", table(["From", "To", "Bytes per iteration"], sent.map(([to, from, value]) =>
    [`stage ${from}`, to === from ? "its groups" : `stage ${to}`, bytes(value)]), "Bytes that a rank of one stage sends to another stage")));
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
    ["the launch", report.search.given ? [report.search.given] : []]].filter(([, layouts]) => layouts.length);
  chart(found, "search-chart", "Time and memory of the layouts that the search found", () => ({
    grid: {left: 70, right: 30, top: 20, bottom: 60},
    xAxis: axis({type: "value", min: 0, name: "seconds of an iteration", nameLocation: "middle", nameGap: 30}),
    yAxis: memoryAxis(Math.max(...groups.flatMap(([, layouts]) => layouts.map((each) => each.device_bytes)))),
    tooltip: tooltip((point) => `${shownOptions(point.value[2])}<br>${seconds(point.value[0])}, ${bytes(point.value[1])}`),
    series: groups.map(([name, layouts], place) => ({name, type: "scatter", symbolSize: place === 2 ? 16 : 10, symbol: ["circle", "triangle", "diamond"][place],
      data: layouts.map((each) => [each.iteration_seconds, each.device_bytes, text(each)])})),
  }), {keys: groups.map(([name]) => name)});
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


start([comparison, memory, overIteration, schedule, time, cluster, matrix, tree, search, notes]);
