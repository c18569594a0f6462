// The report about an artifact: what it is, what each pass did, how far it moved the logits, and where memory goes.

import { getJson, getText } from "./api.js";
import { certificate } from "./certificate.js";
import { bar, bytes, card, el, headings, number, scaled, table } from "./dom.js";
import { diff, excerpt } from "./text_diff.js";

export class ArtifactReport {
  constructor(node) {
    this.node = node;
    this.model = null;
    this.texts = new Map(); // by graph
    this.showsAll = false;
  }

  async show(model) {
    if (!model || model === this.model) return;
    this.model = model;
    this.texts.clear();
    this.node.replaceChildren(el("p", { class: "empty" }, "Reading the artifact…"));
    let report;
    try {
      report = await getJson(`/artifact?model=${encodeURIComponent(model)}`);
    } catch (error) {
      this.model = null;
      this.node.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
      return;
    }
    if (model !== this.model) return;
    this.report = report;
    this.node.replaceChildren(this.#head(), this.#passes(), certificate(this.report), this.#memory(), this.#kernels(), this.#config());
  }

  // ----------------------------------------------------------------------------------------------- head

  #head() {
    const { report } = this;
    const { model, config } = report;
    const scheme = config.quantize || "not quantized";
    const rows = [
      ["Model", `${model.architecture}, ${scaled(model.num_parameters)} parameters in ${model.num_attention_layers} layers`],
      ["Numbers", `${config.dtype}, ${scheme}; K and V in ${config.kv_dtype}`],
      ["Longest sequence", `${number(config.max_model_len)} tokens`],
      ["Compiled for", `${report.targets.join(", ")}${report.host ? ` on ${report.host}` : ""}, by ${report.producer}`],
      ["Same bits", report.determinism ? `${report.determinism.contract} (${report.determinism.scope})` : "not promised"],
      ["Fingerprint", report.fingerprint],
      ["Files", `${report.files.number}, ${bytes(report.files.bytes)}, each with its digest`],
    ];
    return card("What it is", "", facts(rows));
  }

  // --------------------------------------------------------------------------------------------- passes

  #passes() {
    const { passes, workload } = this.report;
    const changed = passes.filter((row, index) => index === 0 || row.rewrites);
    const about = workload
      ? `Bytes and FLOPs are those of two steps: decode, one new token at a context of ${number(workload.context)}; prefill, a prompt of ${number(workload.input_len)}.`
      : this.report.unreadable.includes("graph/costs.json")
        ? "What each of them cost cannot be read: its file is damaged or gone."
        : "";
    const body = el("tbody");
    const fill = () => {
      const rows = this.showsAll ? passes : changed;
      const most = Math.max(...passes.map((row) => row.nodes_after));
      body.replaceChildren(...rows.flatMap((row) => this.#passRow(row, most)));
    };
    fill();
    const idle = passes.length - changed.length;
    const toggle = el("button", { type: "button", class: "quiet", "aria-pressed": "false", click: (event) => {
      this.showsAll = !this.showsAll;
      event.target.setAttribute("aria-pressed", String(this.showsAll));
      event.target.textContent = this.showsAll ? "Only those that changed something" : `Also the ${idle} that found nothing to do`;
      fill();
    } }, `Also the ${idle} that found nothing to do`);
    const head = headings(["Pass", "Rewrites", "Nodes", "", "Kernels", "Decode: bytes", "FLOPs", "Prefill: bytes", "FLOPs"], "lrrrrrrrr");
    return card("Passes", `${changed.length - 1} of ${passes.length - 1} passes changed the program. ${about} Choose one to see what it changed.`, table("Passes", "wide", head, body), idle ? toggle : "");
  }

  #passRow(row, most) {
    const { passes } = this.report;
    const before = passes[passes.indexOf(row) - 1];
    const panel = el("tr", { class: "panel", hidden: true }, el("td", { colspan: 9 }));
    const open = async (event) => {
      const isOpen = panel.hidden;
      panel.hidden = !isOpen;
      event.currentTarget.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) await this.#fillChange(panel.firstElementChild, before, row);
    };
    const name = row.graph ? el("button", { type: "button", class: "link", "aria-expanded": "false", click: open }, row.name) : row.name;
    const work = (step) => (row[step] ? [bytes(row[step].bytes), scaled(row[step].flops, "FLOP")] : ["", ""]);
    return [
      el(
        "tr",
        row.rewrites || !before ? {} : { class: "idle" },
        el("th", { scope: "row" }, name),
        num(before ? number(row.rewrites) : ""),
        num(before ? `${number(row.nodes_before)} → ${number(row.nodes_after)}` : number(row.nodes_after)),
        el("td", {}, bar(row.nodes_after / most)),
        num(row.decode ? number(row.decode.kernels) : ""),
        ...[...work("decode"), ...work("prefill")].map(num),
      ),
      panel,
    ];
  }

  async #text(graph) {
    if (!this.texts.has(graph)) this.texts.set(graph, await getText(`/artifact/graphs/${encodeURIComponent(graph)}?model=${encodeURIComponent(this.model)}`));
    return this.texts.get(graph);
  }

  async #fillChange(cell, before, row) {
    cell.replaceChildren(el("p", { class: "empty" }, "Reading…"));
    try {
      const after = await this.#text(row.graph);
      const lines = before && before.graph ? diff(await this.#text(before.graph), after) : null;
      const isSame = lines && lines.every((line) => line.sign === " ");
      if (lines && !isSame) cell.replaceChildren(program(excerpt(lines), `What ${row.name} changed`));
      else {
        const why = isSame ? "It changed nothing. The program:" : before ? "It changed nearly everything. The program behind it:" : "The program as it was captured:";
        cell.replaceChildren(el("p", {}, why), program(after.split("\n").map((text) => ({ sign: " ", text })), `The program after ${row.name}`));
      }
    } catch (error) {
      cell.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
  }

  // --------------------------------------------------------------------------------------------- memory

  #memory() {
    const { memory } = this.report;
    const parts = [["Weights", memory.weights_bytes], ["KV cache", memory.kv_bytes], ["Arena", memory.arena_bytes]];
    const total = parts.reduce((sum, part) => sum + (part[1] || 0), 0);
    const stack = el("div", { class: "stack", role: "img", "aria-label": parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") });
    parts.forEach(([, size], index) => {
      const piece = el("span", { class: `part${index}` });
      piece.style.flexGrow = String((size || 0) / total);
      stack.append(piece);
    });
    const legend = el("ul", { class: "legend" }, ...parts.map(([name, size], index) => el("li", {}, el("span", { class: `swatch part${index}` }), `${name} `, el("b", {}, size === null ? "no engine runs" : bytes(size)))));
    const { num_tokens: tokens, num_seqs: seqs } = memory.arena_for;
    const rows = [
      ["KV cache", memory.kv_tokens === null ? "no engine runs" : `room for ${number(memory.kv_tokens)} tokens in blocks of ${memory.block_size}: ${scaled(memory.kv_tokens / memory.max_model_len)} sequences of the greatest length`],
      ["A token", `${bytes(memory.kv_bytes_per_token)} of K and V`],
      ["Arena", `for steps of ${number(tokens)} tokens and ${number(seqs)} sequences`],
      ...memory.kv_groups.map((group) => [`Layers with ${group.kind} attention`, `${group.layers.length}, ${group.num_kv_heads} KV heads of ${group.head_dim}, ${group.dtype}${group.window ? `, window ${number(group.window)}` : ""}: ${bytes(group.bytes_per_token)} a token`]),
    ];
    return card("Memory", "As this server runs it.", stack, legend, facts(rows));
  }

  // ------------------------------------------------------------------------------------ kernels, config

  #kernels() {
    const rows = this.report.kernels;
    const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, el("th", { scope: "row", class: "mono" }, row.name), el("td", { class: "mono" }, row.op || ""), num(row.nodes === undefined ? "" : number(row.nodes)), el("td", {}, row.target))));
    return card("Kernels", "What runs, and for how many nodes.", table("Kernels", "", headings(["Kernel", "Op", "Nodes", "Target"], "llrl"), body));
  }

  #config() {
    const rows = Object.entries(this.report.config).map(([name, value]) => [name.replaceAll("_", " "), value === null ? "none" : Array.isArray(value) ? value.join(", ") || "none" : String(value)]);
    return card("Compiled with", "", facts(rows));
  }
}

// --------------------------------------------------------------------------------------------------- pieces

function facts(rows) {
  return el("dl", { class: "facts-list wide-facts" }, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

const num = (text) => el("td", { class: "num" }, text);

function program(lines, label) {
  const kinds = { "+": "added", "-": "removed", "…": "skipped" };
  return el("pre", { class: "program", tabindex: 0, "aria-label": label }, ...lines.map(({ sign, text }) => el("span", { class: kinds[sign] || "kept" }, `${sign} ${text}\n`)));
}
