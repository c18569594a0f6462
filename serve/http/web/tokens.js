// An answer token by token: how likely each was, and what else there was, where the pointer or the keyboard is.

import { $, bar, el } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // probabilities from which a token has level 4, 3, 2, 1

/** Tokens of a chunk with their log probabilities, from either form that OpenAI has. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      token: each.token,
      logprob: each.logprob,
      top: (each.top_logprobs || []).map((other) => ({ token: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens || []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries((logprobs.top_logprobs || [])[index] || {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

/** What is shown of a token: blanks must be seen. */
export function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

function level(logprob) {
  const at = LEVELS.findIndex((bound) => Math.exp(logprob) >= bound);
  return at < 0 ? 0 : LEVELS.length - at;
}

/** Text that grows by tokens. A part of a character waits for the rest, and is shown with it. */
export class TokenText {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.waiting = [];
    node.addEventListener("pointerover", (event) => this.#show(event.target));
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("focusin", (event) => this.#show(event.target));
    node.addEventListener("focusout", hideTip);
    node.addEventListener("keydown", (event) => this.#move(event));
  }

  add(text, tokens) {
    this.text += text;
    this.waiting.push(...tokens);
    if (!text) return;
    if (!this.waiting.length) {
      this.node.append(text);
      return;
    }
    // A chunk may bring several tokens. Those that stand for no text of their own (a part of a character, the end) are shown
    // with what comes before the next that does; behind the last they wait.
    let group = [];
    let rest = text;
    for (const each of this.waiting) {
      const at = each.token ? rest.indexOf(each.token) : -1;
      if (at < 0 || (at > 0 && !group.length)) {
        group.push(each);
        continue;
      }
      if (at > 0) this.#append(rest.slice(0, at), group);
      this.#append(each.token, at > 0 ? [each] : [...group, each]);
      group = [];
      rest = rest.slice(at + each.token.length);
    }
    if (rest && group.length) this.#append(rest, group);
    else this.node.append(rest);
    this.waiting = rest ? [] : group;
  }

  #append(text, tokens) {
    const span = el("span", { class: `token p${level(Math.min(...tokens.map((each) => each.logprob)))}` }, text);
    span.tokens = tokens;
    span.tabIndex = this.node.querySelector(".token") ? -1 : 0; // one stop for the tab key, arrows go on from there
    this.node.append(span);
  }

  #show(target) {
    const span = target.closest ? target.closest(".token") : null;
    if (span && this.node.contains(span)) showTip(span, span.tokens.map(tokenTip));
    else hideTip();
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!step || !event.target.classList.contains("token")) return;
    const all = [...this.node.querySelectorAll(".token")];
    const next = all[all.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function tokenTip({ token, logprob, top }) {
  const rows = [...top].sort((one, two) => two.logprob - one.logprob);
  if (!rows.some((each) => each.token === token)) rows.push({ token, logprob });
  const body = rows.map((each) => {
    const share = Math.exp(each.logprob);
    return el(
      "tr",
      each.token === token ? { class: "chosen" } : {},
      el("td", {}, each.token === token ? "▸" : ""),
      el("td", { class: "mono" }, visible(each.token)),
      el("td", { class: "num" }, `${(100 * share).toFixed(1)} %`),
      el("td", {}, bar(share)),
      el("td", { class: "num faint" }, each.logprob.toFixed(3)),
    );
  });
  return el("table", {}, el("tbody", {}, ...body));
}

/** Show nodes beside another, within the window. */
export function showTip(beside, nodes) {
  const tip = $("tip");
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const at = beside.getBoundingClientRect();
  const room = { width: document.documentElement.clientWidth, height: window.innerHeight };
  const left = Math.max(8, Math.min(at.left, room.width - tip.offsetWidth - 8));
  const below = at.bottom + 6;
  const top = below + tip.offsetHeight > room.height ? Math.max(8, at.top - tip.offsetHeight - 6) : below;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}
