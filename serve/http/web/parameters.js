// The form of sampling parameters. What is left empty is not sent: the model's own default holds.

import { el } from "./dom.js";

const STORE = "inferc.parameters";
const FIELDS = [
  { name: "max_tokens", label: "Max tokens", step: 1, min: 1, initial: "256", help: "At most so many tokens are generated; empty: as many as fit." },
  { name: "temperature", label: "Temperature", step: 0.05, min: 0, max: 2, help: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top p", step: 0.01, min: 0, max: 1, help: "Only the likeliest tokens, which together have this probability." },
  { name: "top_k", label: "Top k", step: 1, min: 0, help: "Only so many of the likeliest tokens; 0: all." },
  { name: "min_p", label: "Min p", step: 0.01, min: 0, max: 1, help: "Only tokens with this share of the likeliest one's probability." },
  { name: "repetition_penalty", label: "Repetition penalty", step: 0.05, min: 0.05, max: 2, help: "Above 1: tokens that were there already are less likely." },
  { name: "presence_penalty", label: "Presence penalty", step: 0.1, min: -2, max: 2, help: "Taken from the logit of every token that was generated." },
  { name: "frequency_penalty", label: "Frequency penalty", step: 0.1, min: -2, max: 2, help: "The same, as often as it was." },
  { name: "seed", label: "Seed", step: 1, min: 0, help: "With the same seed the same tokens come again." },
  { name: "stop", label: "Stop strings", lines: true, help: "One a line; \\n is the end of a line." },
  { name: "top_logprobs", label: "Alternatives shown", step: 1, min: 0, max: 20, initial: "5", help: "Of each token, with their probabilities; empty: ask for none." },
];

export class Parameters {
  constructor(node) {
    this.inputs = new Map();
    const stored = JSON.parse(localStorage.getItem(STORE) || "{}");
    for (const field of FIELDS) {
      const id = `parameter-${field.name}`;
      const input = field.lines
        ? el("textarea", { id, rows: 2, "aria-describedby": `${id}-help`, spellcheck: "false" })
        : el("input", { id, type: "number", step: field.step, min: field.min, max: field.max, placeholder: "default", "aria-describedby": `${id}-help` });
      input.value = stored[field.name] ?? field.initial ?? "";
      input.addEventListener("input", () => this.#store());
      this.inputs.set(field.name, input);
      node.append(el("div", { class: "field", title: field.help }, el("label", { for: id }, field.label), input, el("span", { id: `${id}-help`, class: "hidden" }, field.help)));
    }
    this.colours = el("input", { id: "parameter-colours", type: "checkbox" });
    this.colours.checked = stored.colours ?? false;
    this.colours.addEventListener("change", () => this.#store());
    node.append(el("div", { class: "field check" }, this.colours, el("label", { for: "parameter-colours" }, "Colour tokens by probability")));
    this.#paint();
  }

  /** Show the values that hold where a field is empty. */
  setDefaults(defaults) {
    for (const [name, input] of this.inputs) {
      const value = (defaults || {})[name];
      if (input.type === "number") input.placeholder = value === undefined || value === null ? "default" : String(value);
    }
  }

  reset() {
    for (const field of FIELDS) this.inputs.get(field.name).value = field.initial ?? "";
    this.#store();
  }

  /** The first input that holds no allowed value, or null. */
  get invalid() {
    return [...this.inputs.values()].find((input) => !input.checkValidity()) || null;
  }

  /** The fields of a request that are set. */
  get values() {
    const found = {};
    for (const field of FIELDS) {
      const text = this.inputs.get(field.name).value;
      if (field.lines) {
        const lines = text.split("\n").filter((line) => line).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
        if (lines.length) found[field.name] = lines;
      } else if (text !== "") found[field.name] = Number(text);
    }
    return found;
  }

  #store() {
    const values = Object.fromEntries([...this.inputs].map(([name, input]) => [name, input.value]));
    localStorage.setItem(STORE, JSON.stringify({ ...values, colours: this.colours.checked }));
    this.#paint();
  }

  #paint() {
    document.body.classList.toggle("coloured", this.colours.checked);
  }
}

/** Parameters as the fields of one of the two kinds of requests. */
export function fieldsOf(values, kind) {
  const { top_logprobs: top, ...rest } = values;
  if (top === undefined) return rest;
  return kind === "chat" ? { ...rest, logprobs: true, top_logprobs: top } : { ...rest, logprobs: top };
}
