// The conversations that this browser keeps, newest first. They stay in its local storage and go nowhere else.

import { $, el } from "./dom.js";

const STORE = "inferc.conversations";
const MOST = 50; // conversations
const MOST_CHARACTERS = 2_000_000; // of all of them together: browsers give a site 5 MB
const TITLE = 60; // characters

/** Kept conversations: {id, at, model, system, messages: [{role, content}]}. */
export class Conversations {
  constructor() {
    this.all = read();
  }

  /** Keep a conversation, or what became of it; one without messages is dropped. */
  keep(conversation) {
    const others = this.all.filter((each) => each.id !== conversation.id);
    this.all = conversation.messages.length ? [conversation, ...others] : others;
    this.#write();
  }

  find(id) {
    return this.all.find((each) => each.id === id) || null;
  }

  forget(id) {
    this.all = this.all.filter((each) => each.id !== id);
    this.#write();
  }

  forgetAll() {
    this.all = [];
    this.#write();
  }

  /** Write what fits: the oldest conversations are dropped first. */
  #write() {
    let left = MOST_CHARACTERS;
    this.all = this.all.slice(0, MOST).filter((each) => (left -= JSON.stringify(each).length) > 0);
    try {
      localStorage.setItem(STORE, JSON.stringify(this.all));
    } catch {
      // Without storage (a private window, or one that is full) they last as long as the page.
    }
  }
}

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) || "[]");
    return found.filter((each) => each.id && Array.isArray(each.messages) && each.messages.length);
  } catch {
    return [];
  }
}

export function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

/** The beginning of what was asked first. */
export function titleOf(conversation) {
  const first = (conversation.messages.find((each) => each.role === "user") || { content: "" }).content.trim().replace(/\s+/g, " ");
  return first.length > TITLE ? `${first.slice(0, TITLE - 1)}…` : first || "(nothing)";
}

/** A conversation as a file that people read. */
export function asMarkdown(conversation) {
  const head = [`# ${titleOf(conversation)}`, "", `${conversation.model}, ${new Date(conversation.at).toISOString()}`, ""];
  const system = conversation.system ? ["## System", "", conversation.system, ""] : [];
  const said = conversation.messages.flatMap(({ role, content }) => [`## ${role === "user" ? "You" : "Model"}`, "", content, ""]);
  return [...head, ...system, ...said].join("\n");
}

/** A conversation as the messages of a request. */
export function asJson(conversation) {
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  return `${JSON.stringify({ model: conversation.model, messages: [...system, ...conversation.messages] }, null, 2)}\n`;
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const anchor = el("a", { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  URL.revokeObjectURL(url);
}

/** The list of kept conversations; open(id) and forget(id) are called for the one whose button was pressed. */
export function paintList(conversations, current, { open, forget }) {
  const items = conversations.all.map((each) => {
    const title = titleOf(each);
    const when = new Date(each.at).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
    return el(
      "li",
      each.id === current ? { "aria-current": "true" } : {},
      el("button", { type: "button", class: "link", title: `${each.model}, ${when}`, click: () => open(each.id) }, title),
      el("button", { type: "button", class: "quiet", "aria-label": `Forget: ${title}`, click: () => forget(each.id) }, "×"),
    );
  });
  $("kept").replaceChildren(...items);
  $("kept-note").hidden = items.length > 0;
  $("forget-all").hidden = items.length < 2;
}
