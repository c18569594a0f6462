// Lines over time, in SVG. The page's style sheet has the colours; each line also has a dash of its own.

import { el, svg } from "./dom.js";

const HEIGHT = 150;
const EDGE = { left: 46, right: 10, top: 10, bottom: 20 };

/** A round step so that about `count` of them reach `top`. */
export function niceStep(top, count) {
  const raw = top / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw);
}

/**
 * title; names of its lines; format(value) for the axis and what is read; top: of the axis, if it is fixed;
 * limit: {value, text}, from which it is too much.
 */
export class Chart {
  constructor({ title, help, names, format, top, limit }) {
    Object.assign(this, { title, names, format, top, limit });
    this.rows = []; // {at, values}
    this.span = 300;
    this.cursor = null; // index of the row that is read
    this.legend = el("ul", { class: "legend" });
    this.drawing = svg("svg", { role: "img", tabindex: 0, class: "chart", height: HEIGHT });
    this.reading = el("p", { class: "reading" });
    this.node = el("figure", { class: "card" }, el("figcaption", {}, el("h2", {}, title), el("span", { class: "help" }, help)), this.legend, this.drawing, this.reading);
    this.drawing.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.#read(null));
    this.drawing.addEventListener("blur", () => this.#read(null));
    this.drawing.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** rows: {at: seconds, values: one for each line, NaN for none}, oldest first. */
  show(rows, span) {
    this.rows = rows;
    this.span = span;
    this.draw();
  }

  get #width() {
    return Math.max(200, this.drawing.clientWidth || 320);
  }

  #x(at) {
    const end = this.rows.length ? this.rows[this.rows.length - 1].at : 0;
    const width = this.#width - EDGE.left - EDGE.right;
    return EDGE.left + width * (1 - (end - at) / this.span);
  }

  draw() {
    const last = this.rows.length ? this.rows[this.rows.length - 1].values : this.names.map(() => NaN);
    this.legend.replaceChildren(
      ...this.names.map((name, index) => el("li", { class: `line${index}` }, svg("svg", { width: 22, height: 8, "aria-hidden": "true" }, svg("path", { d: "M1 4H21", class: `stroke line${index}` })), `${name} `, el("b", {}, this.format(last[index])))),
    );
    const spoken = this.names.map((name, index) => `${name} ${this.format(last[index])}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}: now ${spoken}. Arrow keys read earlier values.`);
    const seen = this.rows.flatMap((row) => row.values).filter((value) => Number.isFinite(value));
    const most = Math.max(...seen, 0);
    const step = niceStep(this.top || Math.max(most * 1.05, 1e-6), 3);
    const top = this.top || Math.max(step, Math.ceil(most / step) * step);
    const y = (value) => EDGE.top + (HEIGHT - EDGE.top - EDGE.bottom) * (1 - Math.min(value, top) / top);
    const parts = [];
    for (let value = 0; value <= top * 1.0001; value += step) {
      parts.push(svg("line", { x1: EDGE.left, x2: this.#width - EDGE.right, y1: y(value), y2: y(value), class: "grid" }));
      parts.push(svg("text", { x: EDGE.left - 6, y: y(value) + 4, class: "tick end" }, this.format(value)));
    }
    for (const [share, text] of [[0, `−${this.span / 60} min`], [0.5, `−${this.span / 120} min`], [1, "now"]]) {
      const x = EDGE.left + share * (this.#width - EDGE.left - EDGE.right);
      parts.push(svg("text", { x, y: HEIGHT - 4, class: share ? (share === 1 ? "tick end" : "tick middle") : "tick" }, text));
    }
    if (this.limit && this.limit.value <= top) {
      parts.push(svg("line", { x1: EDGE.left, x2: this.#width - EDGE.right, y1: y(this.limit.value), y2: y(this.limit.value), class: "limit" }));
      parts.push(svg("text", { x: this.#width - EDGE.right, y: y(this.limit.value) - 4, class: "tick end limit-text" }, this.limit.text));
    }
    this.names.forEach((_, index) => parts.push(svg("path", { d: this.#path(index, y), class: `stroke line${index}` })));
    this.mark = svg("line", { y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "cursor", visibility: "hidden" });
    this.drawing.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.drawing.replaceChildren(...parts, this.mark);
    this.#read(this.cursor);
  }

  /** Return the path of a line with gaps where there is no value; a single value is drawn as a dot. */
  #path(index, y) {
    const end = this.rows.length ? this.rows[this.rows.length - 1].at : 0;
    let path = "";
    let isDown = false;
    for (const row of this.rows) {
      const value = row.values[index];
      if (!Number.isFinite(value) || end - row.at > this.span) {
        isDown = false;
        continue;
      }
      const point = `${this.#x(row.at).toFixed(1)} ${y(value).toFixed(1)}`;
      path += isDown ? `L${point}` : `M${point}h0.1`;
      isDown = true;
    }
    return path;
  }

  #point(x) {
    let best = null;
    this.rows.forEach((row, index) => {
      if (best === null || Math.abs(this.#x(row.at) - x) < Math.abs(this.#x(this.rows[best].at) - x)) best = index;
    });
    this.#read(best);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.rows.length) return;
    event.preventDefault();
    const from = this.cursor === null ? this.rows.length : this.cursor;
    this.#read(Math.max(0, Math.min(this.rows.length - 1, from + step)));
    this.reading.setAttribute("aria-live", "polite");
  }

  #read(index) {
    const row = index === null ? null : this.rows[index];
    this.cursor = row ? index : null;
    this.mark.setAttribute("visibility", row ? "visible" : "hidden");
    if (!row) {
      this.reading.textContent = "";
      return;
    }
    const x = this.#x(row.at);
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
    const ago = Math.round(this.rows[this.rows.length - 1].at - row.at);
    this.reading.textContent = `${ago} s ago: ${this.names.map((name, at) => `${name} ${this.format(row.values[at])}`).join(", ")}`;
  }
}
