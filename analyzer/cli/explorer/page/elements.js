// Elements of the page, and texts of figures.

export function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) found.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (typeof child === "string" && tag !== "option") found.append(...unbroken(child));
    else if (child !== null && child !== undefined) found.append(child);
  }
  return found;
}

const OPTION = /((?<![\w-])--[A-Za-z][\w-]*)/;
/** The pieces of a text, with the names of options in elements that do not break at the end of a line. */
export function unbroken(text) {
  return text.split(OPTION).map((piece, place) => {
    if (place % 2 === 0) return piece;
    const found = document.createElement("span");
    found.className = "option";
    found.textContent = piece;
    return found;
  });
}

/** Replaces what is in an element; nothing stands for children that are null. */
export const fill = (box, ...children) => box.replaceChildren(...children.filter((child) => child !== null && child !== undefined));

export const at = (id) => document.getElementById(id);

const LONG = 30; // characters of a cell whose text may have several lines
/** A table in a box that scrolls. The first cell of a row is its header. */
export function table(caption, header, rows) {
  const cell = (value, place) => element(place ? "td" : "th", place ? {class: value.length > LONG ? "long" : null} : {scope: "row"}, value);
  const body = rows.map((row) => element("tr", {}, ...row.map(cell)));
  return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    element("table", {},
      element("thead", {}, element("tr", {}, ...header.map((each) => element("th", {scope: "col"}, each)))),
      element("tbody", {}, ...body)));
}

export function details(summary, ...children) {
  return element("details", {}, element("summary", {}, summary), ...children);
}

/** Bytes with two digits, rounded as the reports of the command line are: exactly, and a half to the even digit. */
export function bytes(value, {sign = false} = {}) {
  if (value === null || value === undefined) return "not known";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const size = BigInt(Math.abs(Math.round(value)));
  let unit = 0;
  while (size >= 1024n ** BigInt(unit + 1) && unit < units.length - 1) unit += 1;
  const before = value < 0 ? "−" : sign && value > 0 ? "+" : "";
  if (!unit) return `${before}${size} B`;
  const whole = 1024n ** BigInt(unit);
  const [hundredths, rest] = [size * 100n / whole, 2n * (size * 100n % whole)];
  const rounded = hundredths + (rest > whole || (rest === whole && hundredths % 2n) ? 1n : 0n);
  return `${before}${rounded / 100n}.${String(rounded % 100n).padStart(2, "0")} ${units[unit]}`;
}

export function seconds(value, {sign = false} = {}) {
  if (value === null || value === undefined) return "not known";
  const size = Math.abs(value);
  const [shown, unit] = size >= 1 || size === 0 ? [size, "s"] : size >= 1e-3 ? [1e3 * size, "ms"] : [1e6 * size, "µs"];
  const before = value < 0 ? "−" : sign && value > 0 ? "+" : "";
  return `${before}${shown.toFixed(shown < 10 ? 2 : shown < 100 ? 1 : 0)} ${unit}`;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");
export const percent = (value) => `${(100 * value).toFixed(1)}%`;
export const signedPercent = (value) => `${value < 0 ? "−" : value > 0 ? "+" : ""}${Math.abs(100 * value).toFixed(1)}%`;

export function days(hours) {
  return hours >= 48 ? `${(hours / 24).toFixed(1)} days` : `${hours.toFixed(1)} hours`;
}

/** Copies a text, and says so on the button for a moment. */
export async function copy(button, text) {
  const before = button.dataset.text || button.textContent;
  button.dataset.text = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy failed";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}
