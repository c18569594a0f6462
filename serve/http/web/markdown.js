// A model's answer as Markdown: paragraphs, headings, lists, quotes, tables, code, emphasis and links. The text becomes
// elements and never markup, so nothing that a model writes runs.

import { el } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,}) *([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*?))?(?: +#+)? *$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|$)/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ {0,3}\|?(?: *:?-+:? *\|)+ *:?-*:? *$/;
const DEEPEST = 8; // lists and quotes within one another; what is deeper stays text
const LINK = /^https?:\/\/[^\s<>"']+$/;

/** The elements of a text, which may end anywhere while it grows. */
export function rendered(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"));
}

function blocks(lines, depth = 0) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const kinds = depth < DEEPEST ? [fence, heading, rule, quote, list, table] : [];
    const read = kinds.find((each) => each.starts(lines, at)) || paragraph;
    const { node, end } = read.read(lines, at, depth);
    nodes.push(node);
    at = end;
  }
  return nodes;
}

const fence = {
  starts: (lines, at) => FENCE.test(lines[at]),
  read(lines, at) {
    const [, indent, mark, language] = FENCE.exec(lines[at]);
    const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},} *$`);
    let end = at + 1;
    while (end < lines.length && !close.test(lines[end])) end += 1;
    const body = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line.trimStart()));
    return { node: codeBlock(body.join("\n"), language), end: end + 1 };
  },
};

function codeBlock(text, language) {
  const copy = el("button", { type: "button", class: "quiet copy", click: () => copyText(text, copy) }, "Copy");
  const head = el("div", { class: "code-head" }, el("span", { class: "faint" }, language), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: 0 }, el("code", {}, text)));
}

/** Put a text on the clipboard, and say on the button whether it worked. */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

const heading = {
  starts: (lines, at) => HEADING.test(lines[at]),
  read(lines, at) {
    const [, marks, text] = HEADING.exec(lines[at]);
    // The page's own headings end at h2, so an answer's begin at h3.
    return { node: el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text || "")), end: at + 1 };
  },
};

const rule = {
  starts: (lines, at) => RULE.test(lines[at]),
  read: (lines, at) => ({ node: el("hr"), end: at + 1 }),
};

const quote = {
  starts: (lines, at) => QUOTE.test(lines[at]),
  read(lines, at, depth) {
    let end = at;
    const inner = [];
    for (; end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines, end)); end += 1) {
      const found = QUOTE.exec(lines[end]);
      inner.push(found ? found[1] : lines[end]);
    }
    return { node: el("blockquote", {}, ...blocks(inner, depth + 1)), end };
  },
};

const list = {
  starts: (lines, at) => ITEM.test(lines[at]) && ITEM.exec(lines[at])[1].length < 4,
  read(lines, at, depth) {
    const [, indent, mark] = ITEM.exec(lines[at]);
    const isOrdered = /\d/.test(mark);
    const sameKind = (line) => {
      const found = ITEM.exec(line);
      return found && found[1].length <= indent.length + 1 && /\d/.test(found[2]) === isOrdered ? found : null;
    };
    const items = [];
    let end = at;
    while (end < lines.length && sameKind(lines[end])) {
      const found = sameKind(lines[end]);
      const width = found[1].length + found[2].length + 1;
      const body = [found[3] || ""];
      for (end += 1; end < lines.length; end += 1) {
        const line = lines[end];
        const isBlank = !line.trim();
        const isInner = line.startsWith(" ".repeat(Math.min(width, indent.length + 2)));
        if (isBlank && !(lines[end + 1] || "").startsWith(" ".repeat(indent.length + 2))) break;
        if (!isBlank && !isInner && startsBlock(lines, end)) break;
        if (!isBlank && !isInner && !(body[body.length - 1] || "").trim()) break;
        body.push(isInner ? line.slice(Math.min(width, line.length - line.trimStart().length)) : line);
      }
      items.push(body);
      // A blank line between two items belongs to the list.
      if (end + 1 < lines.length && !lines[end].trim() && sameKind(lines[end + 1])) end += 1;
    }
    const nodes = items.map((body) => el("li", {}, ...loosened(blocks(body, depth + 1))));
    const start = isOrdered ? Number.parseInt(mark, 10) : 1;
    return { node: el(isOrdered ? "ol" : "ul", start === 1 ? {} : { start }, ...nodes), end };
  },
};

/** An item that is one paragraph is shown without one. */
function loosened(nodes) {
  const [first, ...rest] = nodes;
  return first && first.tagName === "P" ? [...first.childNodes, ...rest] : nodes;
}

const table = {
  starts: (lines, at) => lines[at].includes("|") && DIVIDER.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("|"),
  read(lines, at) {
    const aligned = cells(lines[at + 1]).map((cell) => (/^:-*:$/.test(cell) ? "middle" : cell.endsWith(":") ? "num" : ""));
    const row = (line, name) => el("tr", {}, ...cells(line).slice(0, aligned.length).map((cell, index) => el(name, { class: aligned[index] }, ...inline(cell))));
    let end = at + 2;
    const body = [];
    for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end += 1) body.push(row(lines[end], "td"));
    const node = el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, ...body));
    return { node: el("div", { class: "scroll", tabindex: 0 }, node), end };
  },
};

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const paragraph = {
  read(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
    return { node: el("p", {}, ...inline(lines.slice(at, end).join("\n"))), end };
  },
};

function startsBlock(lines, at) {
  return [fence, heading, rule, quote, list, table].some((each) => each.starts(lines, at));
}

// ------------------------------------------------------------------------------------------------- in a line

const REACH = 4000; // characters within which an emphasis or a link must end

const INLINE = [
  { pattern: /^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, make: ([, , text]) => el("code", {}, text.replaceAll("\n", " ")) },
  { pattern: /^!?\[([^\]\n]*)\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"\n]*")?\s*\)/, make: ([whole, text, url]) => link(text, url, whole) },
  { pattern: /^<(https?:\/\/[^\s>]+)>/, make: ([whole, url]) => link(url, url, whole) },
  { pattern: /^https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"*_`]/, make: ([url]) => link(url, url, url) },
  { pattern: /^\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, make: ([, text]) => el("strong", {}, ...inline(text)) },
  { pattern: /^__(?=\S)([\s\S]*?\S)__(?!\w)/, isWord: true, make: ([, text]) => el("strong", {}, ...inline(text)) },
  { pattern: /^~~(?=\S)([\s\S]*?\S)~~/, make: ([, text]) => el("s", {}, ...inline(text)) },
  { pattern: /^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, make: ([, text]) => el("em", {}, ...inline(text)) },
  { pattern: /^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, isWord: true, make: ([, text]) => el("em", {}, ...inline(text)) },
  { pattern: /^\\([\\`*_{}[\]()#+\-.!|~<>])/, make: ([, mark]) => mark },
  { pattern: /^(?: {2,}|\\)\n/, make: () => el("br") },
];

/** The nodes of a text without blocks. */
function inline(text) {
  const nodes = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const rest = text.slice(at, at + REACH);
    let found = null;
    if (/[`![<h*_~\\ ]/.test(rest[0])) {
      for (const { pattern, make, isWord } of INLINE) {
        const match = isWord && /\w/.test(text[at - 1] || "") ? null : pattern.exec(rest);
        if (!match) continue;
        found = { node: make(match), length: match[0].length };
        break;
      }
    }
    if (!found) {
      plain += rest[0];
      at += 1;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(found.node);
    at += found.length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** A link to a web address; anything else stays the text that it was. */
function link(text, url, whole) {
  if (!LINK.test(url)) return whole;
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, text || url);
}
