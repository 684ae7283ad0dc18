// ---- generation ----

const {inference} = report;

/** The parts of the memory of a rank. They add up to its device memory. */
function servingParts(memory) {
  const temporary = memory.graph_pool_bytes ? memory.prefill_bytes : Math.max(memory.prefill_bytes, memory.decode_bytes);
  return [["weights", memory.weights_bytes], ["KV cache", memory.kv_cache_bytes], ["workspaces", memory.runtime_bytes],
    ["temporary tensors", temporary], ["CUDA graphs of decode", memory.graph_pool_bytes],
    [OUTSIDE, memory.device_bytes - memory.peak_allocated_bytes]];
}
function memory() {
  if (!report.ranks) return;
  const found = section("memory", "Memory by stage");
  stacked(found, "memory-chart", "Memory of each pipeline stage by part, with the memory of the GPU",
    report.ranks.map((rank) => [`stage ${rank.pipeline_rank}`, rank.memory]), report.verdict.capacity_bytes, servingParts);
}
const STEP = {
  gemm: "GEMMs", attention: "attention", memory_bound: "memory-bound kernels", communication: "communication", host: "GPU waits for the host",
};
function steps() {
  const {prefill_parts_seconds: prefill, decode_parts_seconds: decode} = inference;
  if (!prefill) return;
  const found = section("time", "Time of a step");
  const present = Object.entries(STEP).filter(([part]) => prefill[part] || decode[part]);
  found.append(table(["", "prefill", "output token"], [
    ...present.map(([part, name]) => [name, seconds(prefill[part]), seconds(decode[part])]),
    ["sum", seconds(inference.prefill_seconds), seconds(inference.decode_seconds_per_token)]], "Parts of a prefill and of an output token"));
}
function batches() {
  const rows = inference.batches || [];
  if (!rows.length) return;
  const found = section("batches", "Batch size");
  const fits = rows.filter((each) => each.fits);
  found.append(element("p", {}, `Tokens per second of all replicas, by the number of requests of each. ${fits.length < rows.length ? "Batches that do not fit are grey." : ""}`));
  chart(found, "batches-chart", "Tokens per second by batch size", () => ({
    grid: {left: 70, right: 20, top: 20, bottom: 50},
    xAxis: axis({type: "category", name: "requests", nameLocation: "middle", nameGap: 30, data: rows.map((each) => `${each.batch_size}`)}),
    yAxis: axis({type: "value", min: 0, axisLabel: {formatter: count, color: color("--text")}}),
    tooltip: tooltip((point) => `${point.name} requests: ${count(point.value)} tokens/s`),
    series: [{name: "tokens/s", type: "bar", data: rows.map((each) => ({value: each.tokens_per_second, itemStyle: {color: each.fits ? shade(0) : color("--line")}}))}],
  }));
  const cost = rows.some((each) => each.cost_per_million_tokens !== null);
  found.append(table(["Requests", "Fits", "First token", "Output token", "Tokens/s", ...(cost ? ["Cost of a million tokens"] : [])], rows.map((each) => [
    count(each.batch_size), each.fits ? "yes" : "no", seconds(each.prefill_seconds), seconds(each.decode_seconds_per_token), count(each.tokens_per_second),
    ...(cost ? [each.cost_per_million_tokens === null ? "not known" : each.cost_per_million_tokens.toFixed(2)] : [])]), "Times by batch size"));
}

// ---- serving ----

const {serving} = inference;
const milliseconds = (value) => `${+(1e3 * value).toPrecision(3)} ms`;
/** A chart of throughput by the time of an output token. `groups`: name, marks, and whether a line joins them. */
function tradeOff(parent, id, label, axisName, groups) {
  chart(parent, id, label, () => ({
    grid: {left: 70, right: 40, top: 40, bottom: 60},
    xAxis: axis({type: "value", min: 0, name: "time of an output token", nameLocation: "middle", nameGap: 30,
      axisLabel: {formatter: milliseconds, color: color("--text"), hideOverlap: true}}),
    yAxis: axis({type: "value", min: 0, name: axisName, nameTextStyle: {align: "left", color: color("--text")},
      axisLabel: {formatter: count, color: color("--text")}}),
    tooltip: tooltip(({value: [time, tokens, name]}) => `${shownOptions(name)}<br>${seconds(time)}, ${count(tokens)} ${axisName}`),
    series: groups.map(([name, data, line], place) => ({name, type: line ? "line" : "scatter", symbol: ["circle", "diamond"][place], symbolSize: place ? 14 : 9,
      z: 2 + place, data})),
  }), {keys: groups.map(([name]) => name)});
}
function servedSteps() {
  if (!serving) return;
  const {decode_parts_seconds: decode, prompt_parts_seconds: prompt} = serving;
  const found = section("time", "Time of a step");
  found.append(element("p", {}, "A step that generates a token of each running request, and a step with one prompt alone."));
  const present = Object.entries(STEP).filter(([part]) => decode[part] || prompt[part]);
  const sum = (parts) => Object.keys(STEP).reduce((total, part) => total + parts[part], 0);
  found.append(table(["", "tokens of all requests", "one prompt"], [
    ...present.map(([part, name]) => [name, seconds(decode[part]), seconds(prompt[part])]), ["sum", seconds(sum(decode)), seconds(sum(prompt))]],
    "Parts of a step of generation and of a step of a prompt"));
}
function clients() {
  if (!serving) return;
  const found = section("clients", "Clients");
  const given = serving.clients.filter((each) => each.clients === serving.given.clients);
  found.append(element("p", {}, "Each client of a replica sends a request when the last one is complete. Tokens per second are those of all replicas, and times are means."));
  const marks = (times) => times.map((each) => [each.token_seconds, each.tokens_per_second,
    `${count(each.clients)} clients${each.waits ? ", which wait for the cache" : ""}`]);
  tradeOff(found, "clients-chart", "Tokens per second and time of an output token by number of clients", "tokens/s",
    [["numbers of clients", marks(serving.clients), true], ["the launch", marks(given), false]]);
  const cost = serving.clients.some((each) => each.cost_per_million_tokens !== null);
  found.append(table(["Clients", "First token", "after the first requests", "Output token", "Tokens/s", ...(cost ? ["Cost of a million tokens"] : []), "Cache"],
    serving.clients.map((each) => [count(each.clients), seconds(each.first_seconds), seconds(each.first_later_seconds), seconds(each.token_seconds),
      count(each.tokens_per_second), ...(cost ? [each.cost_per_million_tokens === null ? "not known" : each.cost_per_million_tokens.toFixed(2)] : []),
      each.waits ? "requests wait" : "has room"]), "Times by number of clients"));
}
function servedLayouts() {
  if (!serving || !serving.front.length) return;
  const {choices, front} = serving;
  const found = section("layouts", "Layouts");
  const text = (each) => `${count(each.time.clients)} clients of each of ${count(each.replicas)} replicas, ${each.options.join(" ")}`;
  const marks = (layouts) => layouts.map((each) => [each.time.token_seconds, each.time.tokens_per_second / each.gpus, text(each)]);
  found.append(element("p", {}, choices.length ? "Layouts that meet the times, the cheapest first, and those that no other one exceeds in both throughput and time of an output token."
    : "No layout meets both times. These are not exceeded by another one in both throughput and time of an output token."));
  tradeOff(found, "layouts-chart", "Tokens per second of a GPU and time of an output token of the layouts that the search found", "tokens/s/GPU",
    [["not exceeded by another layout", marks(front), false], ...(choices.length ? [["meets the times", marks(choices), false]] : [])]);
  for (const [title, layouts] of [["Layouts that meet the times", choices], ["Layouts that no other one exceeds", front]]) {
    if (!layouts.length) continue;
    found.append(element("h3", {}, title), table(["Options", "GPUs", "Replicas", "Clients", "First token", "Output token", "Tokens/s/GPU"], layouts.map((each) => [
      each.options.join(" "), count(each.gpus), count(each.replicas), count(each.time.clients), seconds(each.time.first_seconds),
      seconds(each.time.token_seconds), count(each.time.tokens_per_second / each.gpus)]), title));
  }
}

// ---- offloading ----

const TIER_PARTS = [["weights_bytes", "weights"], ["kv_cache_bytes", "KV cache"], ["activation_bytes", "activations"], ["buffer_bytes", "buffers"]];
const PLACED = {weights: "weights", cache: "KV cache", activations: "activations"};
const percentages = (list) => list.map((each) => +each.toFixed(2)).join(" / ");
function placement() {
  const {policy} = inference;
  if (!policy) return;
  const found = section("placement", "Placement");
  found.append(table(["Percent on GPU / host / disk", "asked for", "actual"], Object.entries(PLACED).map(([part, name]) =>
    [name, percentages(policy.percent[part]), percentages(policy.actual_percent[part])]), "Placement of the tensors"));
  const tiers = policy.tiers.filter((each) => each.total_bytes);
  found.append(element("h3", {}, "Memory of each tier"), table(["", ...tiers.map((each) => each.name)], [
    ...TIER_PARTS.map(([field, name]) => [name, ...tiers.map((each) => bytes(each[field]))]),
    ["sum", ...tiers.map((each) => bytes(each.total_bytes))], ["capacity", ...tiers.map((each) => bytes(each.capacity_bytes))]], "Memory of each tier"));
  const named = {overlapped: "transfers overlap with computation", serial: "transfers do not overlap"};
  found.append(element("h3", {}, "Time of a block"), table(["", "prefill", "decode", "sum"], Object.entries(policy.seconds).map(([name, each]) =>
    [named[name], seconds(each.prefill), seconds(each.decode), seconds(each.total)]), "Time of a block"));
}
function policies() {
  const {front} = inference;
  if (!front || !front.length) return;
  const found = section("policies", "Latency and throughput");
  const text = (policy) => Object.entries(PLACED).map(([part]) => `${part}=${policy.percent[part].join("/")}`).join(", ");
  found.append(element("p", {}, "No other policy is better in both."));
  chart(found, "policies-chart", "Latency and throughput of the policies that the search found", () => ({
    grid: {left: 70, right: 30, top: 20, bottom: 60},
    xAxis: axis({type: "value", min: 0, name: "seconds of a block", nameLocation: "middle", nameGap: 30}),
    yAxis: axis({type: "value", min: 0, name: "tokens/s"}),
    tooltip: tooltip((point) => `${escape(point.value[2])}<br>${seconds(point.value[0])}, ${point.value[1].toFixed(2)} tokens/s`),
    series: [{name: "policies", type: "scatter", symbolSize: 10, itemStyle: {color: shade(0)},
      data: front.map((each) => [each.latency_seconds, each.tokens_per_second, text(each.policy)])}],
  }));
  found.append(table(["Policy", "Requests", "Latency", "Tokens/s"], front.map((each) => [text(each.policy),
    count(each.policy.batch_size * each.policy.batches), seconds(each.latency_seconds), each.tokens_per_second.toFixed(2)]), "Policies"));
}

start([memory, steps, batches, servedSteps, clients, servedLayouts, placement, policies, notes]);
