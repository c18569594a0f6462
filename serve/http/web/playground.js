// Chat and completion: the request, its answer as it comes, and what it cost.

import { ApiError, apiKey, postStream } from "./api.js";
import { Conversations, asJson, asMarkdown, download, newId, paintList } from "./conversations.js";
import { $, duration, el, number } from "./dom.js";
import { copyText, rendered } from "./markdown.js";
import { Parameters, fieldsOf } from "./parameters.js";
import { asCurl, asPython } from "./snippets.js";
import { TokenText, hideTip, tokensOf } from "./tokens.js";

const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };
const ENDS = { stop: "ended by itself", length: "at its limit", content_filter: "filtered", error: "failed" };

export class Playground {
  constructor() {
    this.model = null;
    this.early = null; // the form that was sent before the model was known
    this.mode = "chat";
    this.conversation = []; // {role, content, failed}, one for each article of the log
    this.id = newId(); // under which the conversation is kept
    this.conversations = new Conversations();
    this.sent = {}; // the body of the last request of each kind
    this.running = null; // AbortController of the request under way
    this.parameters = new Parameters($("parameters"));
    for (const mode of ["chat", "completion"]) $(`mode-${mode}`).addEventListener("click", () => this.setMode(mode));
    $("clear").addEventListener("click", () => this.clear());
    for (const view of ["text", "tokens"]) $(`view-${view}`).addEventListener("click", () => this.setView(view));
    this.setView(localStorage.getItem("inferc.view") === "tokens" ? "tokens" : "text");
    $("export-markdown").addEventListener("click", () => this.#export("md", asMarkdown, "text/markdown"));
    $("export-json").addEventListener("click", () => this.#export("json", asJson, "application/json"));
    $("forget-all").addEventListener("click", () => this.#forget(null));
    if (window.matchMedia("(max-width: 820px)").matches) for (const each of ["conversations", "settings"]) $(each).open = false;
    this.#list();
    $("reset").addEventListener("click", () => this.parameters.reset());
    $("chat-form").addEventListener("submit", (event) => this.#send(event));
    $("completion-form").addEventListener("submit", (event) => this.#complete(event));
    $("take").addEventListener("click", () => this.#take());
    for (const stop of document.querySelectorAll(".stop")) stop.addEventListener("click", () => this.running && this.running.abort());
    $("chat-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("chat-form").requestSubmit();
    });
    $("completion-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("completion-form").requestSubmit();
    });
    for (const [id, make] of [["copy-curl", asCurl], ["copy-python", asPython]]) {
      $(id).addEventListener("click", (event) => this.#copy(event.target, make));
    }
  }

  /** model: its name; hasTemplate: whether it can chat; defaults: its own sampling parameters. */
  setModel(model, hasTemplate, defaults) {
    this.parameters.setDefaults(defaults);
    if (this.running) this.running.abort();
    if (this.model !== model) this.clear();
    this.model = model;
    $("mode-chat").disabled = !hasTemplate;
    $("mode-note").textContent = hasTemplate ? "" : "This model has no chat template: it completes texts.";
    this.setMode(hasTemplate ? this.mode : "completion");
    const early = this.early;
    this.early = null;
    if (early && !early.closest("[hidden]")) early.requestSubmit();
  }

  setMode(mode) {
    this.mode = mode;
    for (const each of ["chat", "completion"]) {
      $(`mode-${each}`).setAttribute("aria-pressed", String(each === mode));
      $(each).hidden = each !== mode;
    }
  }

  /** Show answers as text, with Markdown in chats, or as the tokens that they were made of. */
  setView(view) {
    document.body.classList.toggle("tokens", view === "tokens");
    for (const each of ["text", "tokens"]) $(`view-${each}`).setAttribute("aria-pressed", String(each === view));
    localStorage.setItem("inferc.view", view);
  }

  /** Begin another conversation; the one so far is kept. */
  clear() {
    if (this.running) this.running.abort();
    hideTip();
    this.conversation = [];
    this.id = newId();
    this.#list();
    $("messages").replaceChildren(el("p", { class: "empty" }, "Say something to the model."));
    $("completion-output").replaceChildren();
    $("take").hidden = true;
  }

  // ------------------------------------------------------------------------------------------- requests

  /** The body of the request that the form stands for. */
  body(kind, messages) {
    const more = kind === "chat" ? { messages } : { prompt: $("completion-input").value };
    return {
      model: this.model,
      ...more,
      ...fieldsOf(this.parameters.values, kind),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  get #messages() {
    const system = $("system").value.trim();
    const isLost = (index) => [index, index + 1].some((at) => this.conversation[at] && this.conversation[at].failed);
    const kept = this.conversation.filter((_, index) => !isLost(index)).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...kept] : kept;
  }

  /** Have a request answered into a node; resolves to its text and whether it failed, or to null if nothing was asked. */
  async #answer(kind, body, node) {
    const invalid = this.parameters.invalid;
    if (invalid) {
      invalid.reportValidity();
      return null;
    }
    const words = el("div", { class: "words" });
    const facts = el("p", { class: "facts" }, "…");
    const shown = kind === "chat" ? el("div", { class: "markdown" }) : null;
    const thought = el("div", { class: "thought" });
    const thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Reasoning"), thought);
    node.append(...(shown ? [thoughts, shown] : []), words, facts);
    this.sent[kind] = body;
    const text = new TokenText(words);
    const reasoning = new TokenText(thought);
    const draw = shown ? onceAFrame(() => shown.replaceChildren(...rendered(text.text))) : () => {};
    const timing = { start: performance.now(), first: NaN, last: NaN };
    const ended = { reason: null, usage: null };
    this.#setRunning(new AbortController());
    node.classList.add("streaming");
    try {
      for await (const chunk of postStream(PATHS[kind], body, this.running.signal)) {
        if (chunk.usage) ended.usage = chunk.usage;
        for (const choice of chunk.choices) {
          const piece = kind === "chat" ? choice.delta.content || "" : choice.text;
          const idea = kind === "chat" ? choice.delta.reasoning || "" : "";
          const tokens = tokensOf(choice.logprobs);
          if (piece || idea || tokens.length) {
            timing.last = performance.now();
            if (Number.isNaN(timing.first)) timing.first = timing.last;
          }
          const isAtEnd = this.#isAtEnd();
          if (idea) {
            thoughts.hidden = false;
            reasoning.add(idea, tokens);
          }
          text.add(piece, idea ? [] : tokens);
          draw(isAtEnd ? () => this.#scroll() : null);
          if (isAtEnd) this.#scroll();
          if (choice.finish_reason) ended.reason = choice.finish_reason;
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!(error instanceof ApiError)) throw error;
        const wait = error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
        node.append(el("p", { class: "error", role: "alert" }, error.message + wait));
      }
      ended.reason = error.name === "AbortError" ? "stopped" : "error";
    } finally {
      node.classList.remove("streaming");
      this.#setRunning(null);
    }
    if (shown) shown.replaceChildren(...rendered(text.text));
    facts.textContent = this.#facts(timing, ended);
    $("spoken").textContent = ended.reason === "error" ? "" : `Answer: ${text.text}`;
    return { content: text.text, failed: ended.reason === "error" && !text.text };
  }

  #facts(timing, { reason, usage }) {
    const parts = [];
    if (!Number.isNaN(timing.first)) parts.push(`first token after ${duration((timing.first - timing.start) / 1000)}`);
    if (usage) {
      const seconds = (timing.last - timing.first) / 1000;
      if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${number((usage.completion_tokens - 1) / seconds)} tokens/s`);
      const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
      parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} from the cache)` : ""}, ${usage.completion_tokens} out`);
    }
    parts.push(ENDS[reason] || reason || "");
    return parts.filter((part) => part).join(" · ");
  }

  #setRunning(controller) {
    this.running = controller;
    for (const stop of document.querySelectorAll(".stop")) stop.hidden = !controller;
    for (const submit of document.querySelectorAll("#playground button[type=submit]")) submit.hidden = Boolean(controller);
    for (const redo of document.querySelectorAll("#messages .redo")) redo.disabled = Boolean(controller);
  }

  /** Whether a form can be sent now; if the model is not known yet, it is sent as soon as it is. */
  #hasModel(form) {
    if (!this.model) this.early = form;
    return Boolean(this.model);
  }

  #isAtEnd() {
    const node = $("messages");
    return node.scrollHeight - node.scrollTop - node.clientHeight < 40;
  }

  #scroll() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }

  // ----------------------------------------------------------------------------------------------- chat

  async #send(event) {
    event.preventDefault();
    const content = $("chat-input").value;
    if (!content.trim() || this.running || !this.#hasModel(event.target)) return;
    $("chat-input").value = "";
    this.conversation.push({ role: "user", content });
    this.#paint();
    await this.#reply();
  }

  /** Bring the log in line with the conversation; messages that are shown already stay, with their tokens. */
  #paint() {
    const log = $("messages");
    log.querySelectorAll(".empty").forEach((node) => node.remove());
    while (log.children.length > this.conversation.length) log.lastElementChild.remove();
    for (let index = log.children.length; index < this.conversation.length; index += 1) {
      const { role, content } = this.conversation[index];
      const edit = el("button", { type: "button", class: "quiet redo", click: () => this.#edit(index) }, "Edit");
      const isUser = role === "user";
      const said = isUser ? el("div", { class: "words" }, content) : el("div", { class: "markdown" }, ...rendered(content));
      log.append(el("article", { class: `message ${role}` }, el("h2", {}, isUser ? "You" : "Model"), said, ...(isUser ? [edit] : [])));
    }
    this.#scroll();
  }

  // ------------------------------------------------------------------------------------- conversations

  /** The conversation as it is kept: without what was not answered. */
  get #kept() {
    const said = this.#messages.filter((each) => each.role !== "system");
    return { id: this.id, at: Date.now(), model: this.model, system: $("system").value.trim(), messages: said };
  }

  #list() {
    paintList(this.conversations, this.id, { open: (id) => this.#open(id), forget: (id) => this.#forget(id) });
  }

  #open(id) {
    const found = this.conversations.find(id);
    if (!found || this.running) return;
    this.clear();
    this.id = found.id;
    this.conversation = found.messages.map((each) => ({ ...each }));
    $("system").value = found.system || "";
    this.setMode("chat");
    this.#paint();
    this.#list();
    $("chat-input").focus();
  }

  #forget(id) {
    if (id === null) this.conversations.forgetAll();
    else this.conversations.forget(id);
    this.#list();
  }

  #export(ending, make, type) {
    const kept = this.#kept;
    if (kept.messages.length) download(`conversation.${ending}`, make(kept), type);
  }

  async #reply() {
    const model = this.model;
    const redo = el("button", { type: "button", class: "quiet redo", click: () => this.#again(node) }, "Answer again");
    const node = el("article", { class: "message assistant" }, el("h2", {}, "Model"));
    $("messages").append(node);
    this.#scroll();
    const answer = await this.#answer("chat", this.body("chat", this.#messages), node);
    if (model !== this.model || !node.isConnected) return;
    if (!answer) {
      node.remove();
      return;
    }
    this.conversation.push({ role: "assistant", ...answer });
    this.conversations.keep(this.#kept);
    this.#list();
    node.append(redo);
    this.#scroll();
    $("chat-input").focus();
  }

  /** Discard an answer and everything after it, and ask for a new answer. */
  async #again(node) {
    if (this.running) return;
    const index = [...$("messages").children].indexOf(node);
    this.conversation.length = index;
    this.#paint();
    await this.#reply();
  }

  #edit(index) {
    if (this.running) return;
    $("chat-input").value = this.conversation[index].content;
    this.conversation.length = index;
    this.#paint();
    $("chat-input").focus();
  }

  // ----------------------------------------------------------------------------------------- completion

  async #complete(event) {
    event.preventDefault();
    if (!$("completion-input").value || this.running || !this.#hasModel(event.target)) return;
    const output = $("completion-output");
    output.replaceChildren();
    $("take").hidden = true;
    const answer = await this.#answer("completion", this.body("completion"), output);
    $("take").hidden = !answer || !answer.content;
  }

  #take() {
    $("completion-input").value += $("completion-output").querySelector(".words").textContent;
    $("completion-output").replaceChildren();
    $("take").hidden = true;
    $("completion-input").focus();
  }

  // ----------------------------------------------------------------------------------------- elsewhere

  /** Copy the last request as it was sent, or what would be sent now if there was none. */
  #copy(button, make) {
    const asked = [...this.#messages, { role: "user", content: $("chat-input").value || "Hello" }];
    const body = this.sent[this.mode] || this.body(this.mode, asked);
    return copyText(make(location.origin, PATHS[this.mode], body, Boolean(apiKey())), button);
  }
}

/** A function that draws at most once a frame, and then calls what it was given last. */
function onceAFrame(draw) {
  let isDue = false;
  let after = null;
  return (then) => {
    after = then;
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
      if (after) after();
    });
  };
}
