// The controls: a list of GPUs, and for every other dimension a row of choices. A choice that Megatron refuses is disabled and keeps its
// reason, which is shown when it is selected or gets the focus; a pointer sees it as a tooltip.

import {element} from "./elements.js";

const GROUPS = [["Hardware", ["gpu", "gpus"]], ["Layout", ["tensor", "pipeline", "virtual", "context", "expert"]],
  ["Batch", ["micro_batch", "global_batch", "sequence"]], ["Arithmetic", ["recompute", "precision"]]];

/** Shows the controls in `box`. `take` gets the change of a choice, `choose` the name of a control and a number. */
export function showControls(box, controls, {take, choose}) {
  const focused = document.activeElement?.closest("[data-control]")?.dataset.control;
  const value = document.activeElement?.dataset.value;
  const by = new Map(controls.map((each) => [each.name, each]));
  box.replaceChildren(...GROUPS.map(([title, names]) => element("div", {class: "group"}, element("h3", {}, title),
    ...names.filter((name) => by.has(name)).map((name) => control(by.get(name), take, choose)))));
  if (!focused) return;
  const again = box.querySelector(`[data-control="${focused}"]`);
  (again?.querySelector(`[data-value="${CSS.escape(value ?? "")}"]`) ?? again?.querySelector("[tabindex='0'], select"))?.focus();
}

/** Whether the controls wait for an answer. */
export function waiting(box, busy) {
  box.setAttribute("aria-busy", busy ? "true" : "false");
}

function control(each, take, choose) {
  const id = `control-${each.name}`;
  const reason = element("p", {class: "reason", id: `${id}-reason`, hidden: true});
  const head = element("div", {class: "head"}, element("span", {id, class: "name"}, each.label),
    each.help ? element("span", {class: "help"}, each.help) : null);
  const body = each.name === "gpu" ? list(each, id, take) : chips(each, id, reason, take);
  return element("div", {class: "control", "data-control": each.name}, head, body,
    each.free ? free(each, id, choose) : null, reason);
}

function list(each, id, take) {
  const box = element("select", {"aria-labelledby": id, "data-value": "list"}, ...each.choices.map((choice) => element("option", {
    value: choice.value, selected: choice.selected, disabled: Boolean(choice.reason),
  }, choice.reason ? `${choice.text}: ${choice.reason}` : choice.text)));
  box.addEventListener("change", () => take(each.choices[box.selectedIndex].change));
  return box;
}

function chips(each, id, reason, take) {
  const group = element("div", {class: "chips", role: "radiogroup", "aria-labelledby": id});
  const show = (choice) => {
    reason.hidden = !choice?.reason;
    reason.textContent = choice?.reason ? `${choice.text}: ${choice.reason}` : "";
  };
  const current = Math.max(0, each.choices.findIndex((choice) => choice.selected));
  const buttons = each.choices.map((choice, place) => element("button", {
    type: "button", role: "radio", class: "chip", "aria-checked": String(choice.selected), "aria-disabled": choice.reason ? "true" : null,
    "aria-describedby": choice.reason ? `${id}-reason` : null, title: choice.reason ?? null, tabindex: place === current ? "0" : "-1",
    "data-value": choice.value,
    onclick: () => { if (choice.reason) show(choice); else if (!choice.selected) take(choice.change); },
    onfocus: () => show(choice), // it stays when the focus leaves: what is below must not move while it is clicked
  }, choice.text));
  group.append(...buttons);
  group.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const place = buttons.indexOf(document.activeElement);
    const next = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : step ? (place + step + buttons.length) % buttons.length : -1;
    if (next < 0 || place < 0) return;
    event.preventDefault();
    buttons.forEach((button, index) => button.setAttribute("tabindex", index === next ? "0" : "-1"));
    buttons[next].focus();
  });
  return group;
}

function free(each, id, choose) {
  const box = element("input", {type: "number", min: "1", step: "1", value: each.value, inputmode: "numeric", "data-value": "number",
    "aria-label": `${each.label}, any number`});
  box.addEventListener("change", () => { if (box.value && Number(box.value) !== each.value) choose(each.name, Number(box.value)); });
  return element("label", {class: "free"}, "other ", box);
}
