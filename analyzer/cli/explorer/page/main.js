// The page: holds the state, asks for its figures, and shows them.

import {backend} from "./backend.js";
import {layoutsChart, memoryChart, partsOf, redrawAll, remove, scheduleChart, stages, theme, timeChart, TIME} from "./charts.js";
import {showControls, waiting} from "./controls.js";
import {at, bytes, copy, count, days, details, element, fill, percent, seconds, signedPercent, table, unbroken} from "./elements.js";
import {fromHash, toHash} from "./link.js";

const SHOWN = new Set(["--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank",
  "--num-layers-per-virtual-pipeline-stage", "--context-parallel-size", "--expert-model-parallel-size", "--micro-batch-size",
  "--global-batch-size", "--seq-length"]); // options whose values are among the settings of a version

let program = null;       // who answers
let versions = [];        // the states that were shown, with their figures
let current = null;       // the version that is shown
let base = null;          // the version that it is compared with; null for the one before
let asked = 0;            // the number of the latest question; answers to older ones are dropped
let found = null;         // the result of the latest search
let searching = null;     // the search that runs
let errorOfTimes = 0.03;

// ---- states ----

/** Shows a state. `history`: whether the address gets an entry for it. */
async function show(state, {history = true, fresh = false} = {}) {
  const number = asked += 1;
  busy(true);
  const answer = await program.ask({ask: "figures", state});
  if (number !== asked) return;
  busy(false);
  if (answer.error) { showError(answer.error); return; }
  showError("");
  if (fresh) { versions = []; base = null; current = null; found = null; clearSearch(); }
  const before = current;
  const key = JSON.stringify(answer.state);
  const known = versions.find((version) => version.key === key);
  current = known ?? {key, number: versions.length + 1, ...answer};
  if (!known) versions.push(current);
  current.before = before && before !== current ? before : current.before ?? null;
  if (history) window.history.pushState(null, "", toHash(answer.state));
  render();
  const controls = await program.ask({ask: "controls", state: answer.state});
  if (number !== asked) return;
  if (controls.error) showError(controls.error);
  else showControls(at("controls"), controls.controls, {take, choose});
  waiting(at("controls"), false);
  const schedule = await program.ask({ask: "schedule", state: answer.state});
  if (number !== asked) return;
  showSchedule(schedule);
  document.documentElement.dataset.shown = String(number);
}

/** Takes a choice of a control or a layout of a search: the state without its launch. */
const take = (change) => show({launch: current.state.launch, ...change});

/** Takes any number for a control. */
async function choose(name, value) {
  busy(true);
  const answer = await program.ask({ask: "choose", state: current.state, name, value});
  if (answer.error) { busy(false); showError(answer.error); return; }
  show(answer.state);
}

/** Analyzes the text in the box. */
async function analyze(state) {
  busy(true);
  const answer = await program.ask({ask: "open", state});
  if (answer.error) { busy(false); showError(answer.error); return; }
  await show(answer.state, {fresh: true});
}

function busy(is) {
  document.body.classList.toggle("busy", is);
  if (is) waiting(at("controls"), true);
}

function showError(text) {
  const still = text && current ? [element("span", {class: "muted"}, ` The figures are still those of version ${current.number}.`)] : [];
  at("error").replaceChildren(...unbroken(text), ...still);
  at("error").hidden = !text;
  if (text && !current) at("verdict").textContent = "No launch is shown.";
  waiting(at("controls"), false);
}

// ---- figures ----

function render() {
  const {report, state, gpu} = current;
  if (document.activeElement !== at("launch")) at("launch").value = state.launch;
  at("notes").replaceChildren(...current.notes.map((note) => element("li", {}, note)));
  at("notes").hidden = current.notes.length === 0;
  document.title = `${title()} – explorer`;
  showVerdict();
  at("setting").textContent = setting(report);
  memoryChart(at("memory"), report, gpu.capacity_bytes);
  memoryTable(report);
  showTime(report);
  showChanges();
  showVersions();
  showPaste(current.paste);
  showAbout(report);
  if (found) showLayouts();
}

function title() {
  const {report, gpu} = current;
  return `${(report.model.parameters / 1e9).toFixed(1)}B parameters on ${count(report.world.size)} × ${gpu.name ?? "GPU"}`;
}

function setting({world, parallel, batch, megatron}) {
  const names = [["TP", parallel.tensor], ["PP", parallel.pipeline], ["VPP", parallel.virtual_pipeline ?? 1], ["CP", parallel.context],
    ["EP", parallel.expert]].filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
  return `${title()}. ${[...names, `DP ${parallel.data}`].join(", ")}. Micro-batch ${batch.micro}, global batch ${count(batch.global)}, ` +
    `sequences of ${count(batch.sequence_length)} tokens. Megatron-LM ${megatron}.`;
}

const highest = (report) => report.ranks.reduce((one, other) => other.memory.device_bytes > one.memory.device_bytes ? other : one);

function showVerdict() {
  const {report, gpu} = current;
  const {verdict, time} = report;
  const rank = highest(report);
  const inPhase = verdict.phase && verdict.phase !== "update";
  const needed = inPhase ? gpu.capacity_bytes - verdict.headroom_bytes : rank.memory.device_bytes;
  const needs = `${inPhase ? `in the ${verdict.phase} phase a rank` : `stage ${rank.pipeline_rank}`} needs ${bytes(needed)}`;
  const of = gpu.capacity_bytes ? ` of ${bytes(gpu.capacity_bytes)}` : "";
  const left = verdict.headroom_bytes;
  const [text, style] = verdict.withheld ? [`No verdict: ${verdict.withheld}`, "fails"]
    : verdict.state === "fits" ? [`It fits: ${needs}${of}, ${bytes(left)} remain free`, "fits"]
    : verdict.state === "tight" ? [`It is tight: ${needs}${of}`, "tight"]
    : verdict.state === "does not fit" ? [`It does not fit: ${needs}${of}, ${bytes(-left)} too much`, "fails"]
    : [`No verdict: ${needs}`, "tight"];
  at("verdict").textContent = text;
  at("verdict").className = style;
  const keys = [["Memory", bytes(rank.memory.device_bytes), gpu.capacity_bytes ? `of ${bytes(gpu.capacity_bytes)}` : ""]];
  if (time) {
    keys.push(["Iteration", seconds(time.iteration_seconds), range(time)]);
    keys.push(["Throughput", `${count(time.tokens_per_second_per_gpu)}`, "tokens/s/GPU"]);
    keys.push(["MFU", percent(time.model_flops_utilization), `${time.model_tflops_per_gpu.toFixed(0)} TFLOP/s/GPU`]);
    if (time.training) keys.push(["Training", days(24 * time.training.days), ""]);
  }
  at("keys").replaceChildren(...keys.flatMap(([name, value, more]) => [element("div", {}, element("dt", {}, name),
    element("dd", {}, value, more ? element("small", {}, more) : null))]));
  const other = comparedWith();
  at("delta").hidden = !other;
  if (other) at("delta").replaceChildren(...summary(other));
}

/** The range of the time of an iteration; empty if it is not known. */
const range = ({range_seconds: both}) => (both ? `${seconds(both[0])} to ${seconds(both[1])}` : "");

function memoryTable(report) {
  const rows = stages(report).map((rank) => [`stage ${rank.pipeline_rank}`, ...partsOf(rank.memory).map(([, size]) => bytes(size)),
    bytes(rank.memory.device_bytes)]);
  const header = ["stage", ...partsOf(report.ranks[0].memory).map(([name]) => name), "on the device"];
  at("memory-table")?.remove();
  const open = at("memory").dataset.open === "true";
  const box = element("details", {id: "memory-table", open, ontoggle: (event) => { at("memory").dataset.open = String(event.target.open); }},
    element("summary", {}, "Figures"), table("Figures of the memory", header, rows),
    element("p", {class: "muted"}, `Peak of stage ${highest(report).pipeline_rank}: ${highest(report).memory.peak_at}.`));
  at("memory").append(box);
}

function showTime(report) {
  const {time} = report;
  if (!time) {
    at("time-text").textContent = "The time is not predicted, because the speeds of this GPU are not known.";
    remove("time-chart");
    at("time-table")?.remove();
    return;
  }
  at("time-text").replaceChildren(...unbroken(`${seconds(time.iteration_seconds)}${time.range_seconds ? `, likely ${range(time)}` : ""}. ${time.bottleneck}`));
  timeChart(at("time"), time);
  at("time-table")?.remove();
  const rows = Object.entries(time.parts_seconds).filter(([, value]) => value > 0)
    .map(([name, value]) => [TIME[name] ?? name, seconds(value), percent(value / time.iteration_seconds)]);
  const box = details("Figures", table("Figures of the time", ["part", "time", "share"], rows));
  box.id = "time-table";
  at("time").append(box);
}

function showSchedule(schedule) {
  const some = !schedule.error && schedule.stages.length > 0;
  at("schedule-title").hidden = !some;
  at("schedule-text").hidden = !some;
  if (!some) { remove("schedule-chart"); return; }
  at("schedule-text").textContent = schedule.complete ? "Forward and backward passes. Gaps are waiting, and what follows the passes is communication and the optimizer step."
    : "The first passes of each stage; the iteration has more.";
  scheduleChart(at("schedule"), schedule);
}

// ---- comparison ----

const comparedWith = () => (base && base !== current ? base : current.before);

function summary(other) {
  const memory = highest(current.report).memory.device_bytes - highest(other.report).memory.device_bytes;
  const parts = [element("span", {class: memory > 0 ? "worse" : memory < 0 ? "better" : ""}, `${memory ? bytes(memory, {sign: true}) : "same memory"}`)];
  const [now, then] = [current.report.time, other.report.time];
  if (now && then) {
    const share = now.tokens_per_second_per_gpu / then.tokens_per_second_per_gpu - 1;
    const difference = now.iteration_seconds - then.iteration_seconds;
    parts.push(", ", element("span", {class: difference > 0 ? "worse" : difference < 0 ? "better" : ""},
      difference ? `${seconds(difference, {sign: true})} (${signedPercent(difference / then.iteration_seconds)})` : "same time"));
    parts.push(`, ${signedPercent(share)} tokens/s/GPU`);
  }
  return [`Against version ${other.number}: `, ...parts];
}

function showChanges() {
  const other = comparedWith();
  if (!other) {
    at("changes").replaceChildren(element("p", {class: "muted"}, "Change something to see the difference."));
    return;
  }
  const rows = [];
  const row = (name, then, now, text) => {
    if (then !== now) rows.push([name, text(then), text(now), then === null || now === null ? "" : text(now - then, {sign: true})]);
  };
  const [one, two] = [highest(other.report).memory, highest(current.report).memory];
  row("memory of the highest-memory rank", one.device_bytes, two.device_bytes, bytes);
  const parts = new Map(partsOf(two));
  for (const [name, size] of partsOf(one)) row(`– ${name}`, size, parts.get(name), bytes);
  const [then, now] = [other.report.time, current.report.time];
  if (then && now) {
    row("time of an iteration", then.iteration_seconds, now.iteration_seconds, seconds);
    for (const name of Object.keys(TIME)) row(`– ${TIME[name]}`, then.parts_seconds[name] ?? 0, now.parts_seconds[name] ?? 0, seconds);
    const plain = (value, {sign = false} = {}) => `${sign && value > 0 ? "+" : ""}${count(value)}`.replace("-", "−");
    row("tokens/s/GPU", then.tokens_per_second_per_gpu, now.tokens_per_second_per_gpu, plain);
  }
  const close = then && now && Math.abs(now.iteration_seconds / then.iteration_seconds - 1) <= errorOfTimes;
  const choice = element("select", {"aria-label": "Compare with", onchange: (event) => {
    base = versions.find((version) => String(version.number) === event.target.value) ?? null;
    render();
  }}, element("option", {value: ""}, "the version before"),
  ...versions.filter((version) => version !== current).map((version) => element("option", {value: version.number, selected: version === base}, `version ${version.number}`)));
  fill(at("changes"), element("label", {class: "inline"}, "Compare with ", choice),
    element("p", {id: "change-text"}, differences(other, current)),
    rows.length ? table("Differences", ["figure", `version ${other.number}`, `version ${current.number}`, "difference"], rows)
      : element("p", {class: "muted"}, "No figure differs."),
    close ? element("p", {class: "muted"}, `The times differ by less than the error of the model (${percent(errorOfTimes)}): it cannot tell which is faster.`) : null);
}

/** What differs between two versions, as text: settings of the report, and then other options. */
function differences(then, now) {
  const [before, after] = [settings(then), settings(now)];
  const found = Object.keys(after).filter((name) => before[name] !== after[name]).map((name) => `${name} ${before[name]} → ${after[name]}`);
  const word = (version, flag) => (version.state.unset.includes(flag) ? "left out" : version.state.set[flag] === true ? "on"
    : flag in version.state.set ? [version.state.set[flag]].flat().join(" ") : "as in the launch");
  const flags = new Set([then, now].flatMap(({state}) => [...Object.keys(state.set), ...state.unset]));
  for (const flag of flags) {
    if (!SHOWN.has(flag) && word(then, flag) !== word(now, flag)) found.push(`${flag} ${word(then, flag)} → ${word(now, flag)}`);
  }
  return found.join("; ") || "No option differs.";
}

function settings({report, gpu}) {
  const {parallel, batch, world} = report;
  return {GPU: gpu.name, GPUs: world.size, TP: parallel.tensor, PP: parallel.pipeline, VPP: parallel.virtual_pipeline ?? 1, CP: parallel.context,
    EP: parallel.expert, "micro-batch": batch.micro, "global batch": batch.global, "sequence length": batch.sequence_length};
}

function showVersions() {
  const rows = versions.map((version) => {
    const {time} = version.report;
    const name = element("button", {type: "button", class: "plain", "aria-current": version === current ? "true" : null,
      onclick: () => show(version.state)}, `version ${version.number}`);
    return [name, bytes(highest(version.report).memory.device_bytes), version.report.verdict.state ?? "", time ? seconds(time.iteration_seconds) : "",
      time ? count(time.tokens_per_second_per_gpu) : "", version.number === 1 ? "as pasted" : differences(versions[0], version)];
  });
  at("versions").replaceChildren(table("Versions", ["version", "memory", "verdict", "iteration", "tokens/s/GPU", "changed"], rows));
}

// ---- search ----

async function search(event) {
  event.preventDefault();
  const limit = Number(at("seconds").value);
  const started = performance.now();
  const of = current;
  const tick = () => {
    const now = Math.round((performance.now() - started) / 1000);
    at("search-text").textContent = `Searching, ${now} s of at most ${limit} s …`;
  };
  const mine = searching = {timer: setInterval(tick, 1000)};
  tick();
  at("search-start").disabled = true;
  at("search-stop").hidden = false;
  const answer = await program.search({ask: "search", state: of.state, over: at("over").value, seconds: limit});
  if (searching !== mine) return;
  endSearch();
  if (answer.stopped) { at("search-text").textContent = "The search was stopped."; return; }
  if (answer.error) { at("search-text").textContent = answer.error; return; }
  found = answer;
  showLayouts();
}

function endSearch() {
  if (searching) clearInterval(searching.timer);
  searching = null;
  at("search-start").disabled = false;
  at("search-stop").hidden = true;
}

function clearSearch() {
  if (searching) { program.stop(); endSearch(); }
  at("search").replaceChildren();
  at("search-text").textContent = "";
}

function showLayouts() {
  const state = `${count(found.candidates)} layouts in ${seconds(found.seconds)}, ${count(found.evaluated)} of them calculated. `;
  const ending = found.complete ? "No other layout of these is faster." : `The time is over; another layout could be ${percent(found.gap)} faster.`;
  at("search-text").textContent = found.points.length ? state + ending : `${state}No other layout is better.`;
  const time = current.report.time;
  const now = time ? [time.iteration_seconds, highest(current.report).memory.device_bytes] : null;
  remove("layouts-chart");
  at("search").replaceChildren();
  if (!found.points.length) return;
  layoutsChart(at("search"), found, now, (each) => take(each.change));
  const rows = found.points.map((each) => [each.text, seconds(each.iteration_seconds), bytes(each.device_bytes), each.tight ? "tight" : "fits",
    element("button", {type: "button", "aria-label": `Take ${each.text}`, onclick: () => take(each.change)}, "Take")]);
  at("search").append(table("Layouts that were found", ["changed options", "iteration", "memory", "verdict", "choice"], rows));
}

// ---- texts ----

function showPaste({options, left_out, launch, command}) {
  const blocks = [
    ["Changed options", options, left_out.length ? `Leave out ${left_out.join(" ")}.` : ""],
    ["Complete launch", launch, ""],
    ["Command line of this program", command, ""],
  ].filter(([, text, more]) => text || more);
  if (!options && !left_out.length) at("paste").replaceChildren(element("p", {class: "muted"}, "No option differs from the launch."));
  else at("paste").replaceChildren();
  at("paste").append(...blocks.map(([name, text, more], place) => element("div", {class: "block"},
    element("div", {class: "row"}, element("h3", {id: `paste-${place}`}, name),
      text ? element("button", {type: "button", "aria-label": `Copy: ${name}`, onclick: (event) => copy(event.currentTarget, text)}, "Copy") : null),
    text ? element("pre", {tabindex: "0", role: "region", "aria-labelledby": `paste-${place}`}, element("code", {}, text)) : null,
    more ? element("p", {}, more) : null)));
}

function showAbout({warnings, assumptions, time}) {
  const list = (items) => element("ul", {}, ...items.map((item) => element("li", {}, item)));
  at("about").replaceChildren(
    ...(warnings.length ? [element("h3", {}, "Warnings"), list(warnings)] : []),
    details(`Assumptions (${assumptions.length})`, list(assumptions)),
    ...(time?.not_counted?.length ? [details("Not counted in the time", list(time.not_counted))] : []));
}

// ---- start ----

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  at("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
  redrawAll();
}

/** Print has the light theme. */
function printInLight() {
  let before = "light";
  addEventListener("beforeprint", () => { before = theme(); setTheme("light"); });
  addEventListener("afterprint", () => setTheme(before));
}

async function start() {
  at("theme").textContent = theme() === "dark" ? "Light theme" : "Dark theme";
  at("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
  at("print").addEventListener("click", () => print());
  at("link").addEventListener("click", (event) => copy(event.currentTarget, location.href));
  busy(true);
  try {
    program = await backend((step) => { at("verdict").textContent = step; });
  } catch (error) {
    showError(String(error.message ?? error));
    at("verdict").textContent = "The explorer could not be started.";
    return;
  }
  at("backend").textContent = program.text;
  const first = await program.ask({ask: "start"});
  if (first.error) { showError(first.error); return; }
  errorOfTimes = first.error_of_times;
  at("examples").append(...first.examples.map(({name}, place) => element("option", {value: place}, name)));
  at("examples").addEventListener("change", (event) => {
    const example = first.examples[event.target.value];
    if (example) { at("launch").value = example.state.launch; analyze(example.state); }
  });
  at("launch-form").addEventListener("submit", (event) => { event.preventDefault(); analyze({launch: at("launch").value}); });
  at("search-form").addEventListener("submit", search);
  at("search-stop").addEventListener("click", () => { program.stop(); endSearch(); at("search-text").textContent = "The search was stopped."; });
  addEventListener("popstate", () => { const state = fromHash(location.hash); if (state) show(state, {history: false}); });
  const linked = fromHash(location.hash);
  if (linked) at("launch").value = linked.launch;
  if (linked) await show(linked, {history: false, fresh: true});
  else if (first.opened) await analyze({launch: first.opened});
  else await analyze(first.examples[0].state);
  busy(false);
}

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; if (current) render(); redrawAll(); } });
printInLight();
start();
