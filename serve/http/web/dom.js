// Elements and numbers.

/** Create an element; functions among the attributes are event listeners, and strings among the children plain text. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Create an SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export const $ = (id) => document.getElementById(id);

/** Three digits: 0.0123, 4.56, 78.9, 1,234. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 999.5) return Math.round(value).toLocaleString("en");
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

const UNITS = ["", "k", "M", "G", "T", "P"];

/** With a unit of thousands: 11.5 MB, 2.1 G. */
export function scaled(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < UNITS.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${number(value)} ${UNITS[power]}${unit}`.trim();
}

export const bytes = (value) => scaled(value, "B");

/** Create a bar that is filled to a share; screen readers skip it, since the number is written beside it. */
export function bar(share) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return el("span", { class: "track", "aria-hidden": "true" }, fill);
}

/** Create a section with a title and a sentence about it. */
export function card(title, text, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), text ? el("p", { class: "about" }, text) : "", ...children);
}

/** Create a table that scrolls sideways where it is wider than the window. */
export function table(name, kind, head, body) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, el("table", { class: kind }, el("caption", { class: "hidden" }, name), head, body));
}

/** Create a row of headings; alignment: a letter for each of them, r for numbers, l for the rest. */
export function headings(names, alignment) {
  return el("thead", {}, el("tr", {}, ...names.map((name, index) => (name ? el("th", { scope: "col", class: alignment[index] === "r" ? "num" : "" }, name) : el("td", {})))));
}

export const percent = (share) => (Number.isNaN(share) || share === null ? "–" : `${Math.round(100 * share)} %`);

/** Seconds as the unit that fits. */
export function duration(seconds) {
  if (Number.isNaN(seconds) || seconds === null) return "–";
  return seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`;
}
