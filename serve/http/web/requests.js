// The table of the requests that are open now, the oldest first.

import { getJson } from "./api.js";
import { duration, el, headings, number, table } from "./dom.js";

const STATES = { waiting: "waiting", prefill: "prefill", decode: "decode", unread: "not read to its end" };

export class RequestTable {
  constructor(node) {
    this.node = node;
    this.isAsking = false;
  }

  /** Ask for the requests and show them; a failure is left to who asks for the metrics. */
  async look() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      this.#show(await getJson("/requests"));
    } catch {
      this.node.replaceChildren();
    } finally {
      this.isAsking = false;
    }
  }

  #show({ num_open: count, requests: rows }) {
    const columns = [
      ["Request", "l", (row) => row.id],
      ["State", "l", (row) => STATES[row.state] || "waiting or prefill"],
      ["Age", "r", (row) => duration(row.age_seconds)],
      ["Prompt", "r", (row) => number(row.prompt_tokens)],
      ["Output", "r", (row) => number(row.output_tokens)],
      ["Kind", "l", (row) => row.kind],
      ["Model", "l", (row) => row.model],
    ];
    if (rows.some((row) => row.priority)) columns.push(["Priority", "r", (row) => number(row.priority)]);
    if (rows.some((row) => row.key)) columns.push(["Key", "l", (row) => row.key]);
    if (!rows.length) {
      this.node.replaceChildren(el("p", { class: "faint" }, "None."));
      return;
    }
    const cell = (row) => ([, side, text], index) => (index ? el("td", { class: side === "r" ? "num" : "nowrap" }, text(row)) : el("th", { scope: "row", class: "mono nowrap", title: row.id }, text(row)));
    const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...columns.map(cell(row)))));
    const head = headings(columns.map(([name]) => name), columns.map(([, side]) => side).join(""));
    const more = count > rows.length ? el("p", { class: "faint" }, `and ${number(count - rows.length)} more`) : "";
    this.#replace(table("Requests that are open", "wide", head, body), more);
  }

  /** Put new rows in place, without losing the place to which the table was scrolled, nor the focus. */
  #replace(found, more) {
    const before = this.node.querySelector(".scroll");
    if (!before) {
      this.node.replaceChildren(found, more);
      return;
    }
    before.replaceChildren(...found.childNodes);
    while (before.nextSibling) before.nextSibling.remove();
    this.node.append(more);
  }
}
