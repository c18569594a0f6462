// The certificate of an artifact: how much of its budget each row uses.

import { card, el, headings, number, table } from "./dom.js";

const DECADES_WITHIN = 6; // of a bar's scale, up to the budget
const DECADES_OVER = 2; // of it, beyond
const MEASURES = { relative_error: " (relative error)", kl: " nats (KL)", other_top1: " with another top token", kl_of_one: " nats (KL of one position)" };
const ABOUT = {
  program: "as lowered, with the model's weights",
  program_random: "as lowered, with random weights",
  program_small: "as lowered, with small random weights",
  captured_far: "as captured, at the end of the context",
};

/** The section about a report's certificate. */
export function certificate(report) {
  const found = report.certificate;
  if (report.unreadable.includes("certificate.json")) return card("Certificate", "It cannot be read: its file is damaged or gone.");
  if (!found) return card("Certificate", "It has none: it was compiled with --certify none.");
  const positions = found.kind === "auto" ? "" : `, at ${number(found.num_positions)} positions of ${number(found.num_prompts)} prompts`;
  const badge = el("span", { class: `badge ${found.ok ? "good" : "bad"}` }, found.ok ? "within all budgets" : "over a budget");
  const scope = found.scope ? ` Measured on ${found.scope}${positions}.` : "";
  const head = headings(["Program", "Of its budget", "Verdict", "Run by", "Same top token", "KL, nats", "1 in 100 over", "Perplexity"], "llllrrrr");
  const body = el("tbody", {}, ...found.rows.map((row) => rowOf(row)));
  const reference = found.perplexity ? ` Perplexity of the reference: ${number(found.perplexity)}.` : "";
  return card("Certificate", about(found), el("p", {}, badge, scope), table("Certificate", "wide", head, body), el("p", { class: "about" }, `The mark in a bar is its budget, and an eighth of a bar is a factor of ten.${reference}`));
}

/** What is compared with what, and what the budgets are; of a certificate of either kind. */
function about(found) {
  const { float32_relative_error: error, kl_factor: factor, ...schemes } = found.budgets;
  const has = (name) => found.rows.some((row) => row.name === name);
  const by = new Set(found.rows.map((row) => row.use && row.use.by));
  const said = [];
  if (found.kind === "auto") {
    said.push("The program is compared with transformers' model of the same layers, both in exact float32.");
    said.push(has("kernels") ? "The kernels, in the artifact's own numbers, are compared with transformers' whole model in float32." : "The kernels were not run; inferc verify does, on the machine that serves them.");
  } else said.push(`Each row is a program's distance from transformers' model in float32, ${has("kernels") ? "after one pass; the last row's is that of the kernels" : "after one pass"}.`);
  if (by.has("float32")) said.push(`Logits in float32 may be off by ${small(error)} of their size.`);
  const compared = [...by].filter((name) => found.rows.some((row) => row.name === name));
  if (compared.includes("hugging_face")) said.push(`In 16 bits the KL to float32 may be ${factor} times that of Hugging Face's own run in the same dtype, as far as so few positions can tell.`);
  for (const [name, { max_kl: kl, min_top1: top }] of Object.entries(schemes)) said.push(`${name.replaceAll("_", " ")}: KL up to ${small(kl)}, the same top token at ${(100 * top).toFixed(0)} %.`);
  if (compared.some((name) => name !== "hugging_face")) said.push(`Rows behind a pass that rounds to integers may have ${factor} times its KL.`);
  return said.join(" ");
}

function rowOf(row) {
  const num = (text) => el("td", { class: "num" }, text);
  const name = el("th", { scope: "row" }, row.name.replaceAll("_", " "));
  if (ABOUT[row.name]) name.append(el("span", { class: "sub" }, ABOUT[row.name]));
  const share = row.use ? shareOf(row.use) : null;
  return el(
    "tr",
    row.ok ? {} : { class: "failed" },
    name,
    el("td", {}, row.use ? el("div", { class: "use" }, budgetBar(share, row.ok), used(row.use)) : row.name === "hugging_face" ? "It has none: later rows are compared with it" : "not known"),
    el("td", {}, verdict(row)),
    el("td", {}, `${row.ran_by}${row.dtype ? `, ${row.dtype}` : ""}`),
    num(row.top1_agreement === null || row.top1_agreement === undefined ? "" : `${(100 * row.top1_agreement).toFixed(1)} %`),
    num(small(row.kl)),
    num(small(row.kl_p99)),
    num(row.perplexity ? number(row.perplexity) : ""),
  );
}

function verdict(row) {
  if (!row.ok) return row.reason || "over its budget";
  return row.use ? "kept" : "";
}

const shareOf = ({ found, limit }) => (found === null ? Infinity : found / limit);

function used({ measure, found, limit }) {
  const shown = measure === "other_top1" ? (value) => `${number(100 * value)} %` : small;
  return `${found === null ? "no number" : shown(found)} of ${shown(limit)}${MEASURES[measure]}`;
}

/** A bar on a logarithmic scale, with the budget as a mark at the same place in each; what is over it goes beyond. */
function budgetBar(share, isOk) {
  const all = DECADES_WITHIN + DECADES_OVER;
  const at = share > 0 ? (DECADES_WITHIN + Math.log10(share)) / all : 0;
  const fill = el("span", { class: isOk ? "fill" : "fill over" });
  fill.style.width = `${100 * Math.max(0, Math.min(1, at))}%`;
  const mark = el("span", { class: "mark" });
  mark.style.left = `${(100 * DECADES_WITHIN) / all}%`;
  return el("span", { class: "budget", "aria-hidden": "true" }, fill, mark);
}

const small = (value) => {
  if (value === null || value === undefined) return "";
  const rounded = Number(value.toPrecision(value < 0.001 ? 2 : 3));
  return rounded && rounded < 0.001 ? rounded.toExponential() : String(rounded);
};
