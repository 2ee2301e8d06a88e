// The little Markdown that answers use, as DOM nodes: no markup of an answer ever reaches the page as markup.

import { element } from "./format.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;

export function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const [block, next] = readBlock(lines, at);
    if (block) blocks.append(block);
    at = next;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = line.match(FENCE);
  if (fence) return readFence(lines, at, fence);
  const heading = line.match(HEADING);
  if (heading) return [element("p", { class: "heading" }, ...inline(heading[1])), at + 1];
  if (ITEM.test(line)) return readList(lines, at);
  if (QUOTE.test(line)) return readQuote(lines, at);
  return readParagraph(lines, at);
}

function readFence(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !isFenceEnd(lines[end], mark)) end++;
  const code = element("code", {}, lines.slice(at + 1, end).join("\n"));
  return [element("pre", { tabindex: "0", "data-language": language || null }, code), end + 1];
}

function isFenceEnd(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

function readList(lines, at) {
  const isOrdered = Boolean(lines[at].match(ITEM)[2]);
  const list = element(isOrdered ? "ol" : "ul", isOrdered ? { start: lines[at].match(ITEM)[2] } : {});
  let item = [];
  const finish = () => item.length && list.append(element("li", {}, ...inline(item.join("\n"))));
  for (; at < lines.length; at++) {
    const found = lines[at].match(ITEM);
    if (found && Boolean(found[2]) === isOrdered) {
      finish();
      item = [found[3]];
    } else if (!found && /^\s+\S/.test(lines[at])) item.push(lines[at].trim());
    else if (lines[at].trim() || !continues(lines, at, isOrdered)) break;
  }
  finish();
  return [list, at];
}

// An empty line between two items does not end their list.
function continues(lines, at, isOrdered) {
  const found = lines[at + 1]?.match(ITEM);
  return Boolean(found) && Boolean(found[2]) === isOrdered;
}

function readQuote(lines, at) {
  const said = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at++) said.push(lines[at].match(QUOTE)[1]);
  return [element("blockquote", {}, ...inline(said.join("\n"))), at];
}

function readParagraph(lines, at) {
  const said = [lines[at++]];
  while (at < lines.length && lines[at].trim() && ![FENCE, HEADING, ITEM, QUOTE].some((mark) => mark.test(lines[at])))
    said.push(lines[at++]);
  return [element("p", {}, ...inline(said.join("\n"))), at];
}

const INLINE = /(`+)(?!`)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > end) nodes.push(text.slice(end, found.index));
    const [, , code, bold, italic] = found;
    if (code !== undefined) nodes.push(element("code", {}, code));
    else if (bold !== undefined) nodes.push(element("strong", {}, ...inline(bold)));
    else nodes.push(element("em", {}, italic));
    end = found.index + found[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}
