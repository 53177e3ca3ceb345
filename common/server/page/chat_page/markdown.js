"use strict";

/*
 * Markdown as models write it, drawn as elements. Every piece of an answer becomes a text node or the address of a
 * link, never HTML. Line ends within a paragraph stay, as on llama.cpp's page.
 *
 * An answer grows while it is drawn, and a model may write anything. So nesting is bounded, and the time is
 * proportional to the length of the text.
 */

const DEEPEST = 12; /* levels of lists and quotes; a deeper one is a paragraph */

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const INTERRUPTS = /^ *(?:[-*+]|1[.)]) +\S/; /* an item that may follow a paragraph's line */
const DASHES = /^:?-+:?$/;

/** @typedef {{from: number, end: number, draw: () => HTMLElement}} Block lines from `from` to before `end` */
/** @type {WeakMap<Element, string>} the text that a block was made of */
const sources = new WeakMap();

/** Fill an element with a text in Markdown. Blocks that stay the same are left alone. @param {Element} box @param {string} markdown */
function drawMarkdown(box, markdown) {
  const lines = markdown.replaceAll("\t", "    ").split("\n"), blocks = blocksOf(lines, 0);
  blocks.forEach(({ from, end, draw }, place) => {
    const old = box.children[place], source = lines.slice(from, end).join("\n");
    if (old && sources.get(old) === source) return;
    const made = draw();
    sources.set(made, source);
    if (old) old.replaceWith(made);
    else box.append(made);
  });
  while (box.children.length > blocks.length) box.lastElementChild?.remove();
}

/* ------------------------------------------------------------------ blocks */

/** @param {string[]} lines @param {number} depth of lists and quotes around them @returns {Block[]} */
function blocksOf(lines, depth) {
  const blocks = [];
  for (let from = 0; from < lines.length; from++)
    if (lines[from].trim()) {
      blocks.push(blockAt(lines, from, depth));
      from = blocks[blocks.length - 1].end - 1;
    }
  return blocks;
}

/** @param {string[]} lines @param {number} from the block's first line @param {number} depth @returns {Block} */
function blockAt(lines, from, depth) {
  const line = lines[from], heading = HEADING.exec(line);
  if (FENCE.test(line)) return codeAt(lines, from);
  if (heading) {
    const words = heading[2].trim().replace(/ #+$/, "");
    return { from, end: from + 1, draw: () => make(`h${Math.min(heading[1].length + 2, 6)}`, "", ...inlineOf(words)) };
  }
  if (RULE.test(line)) return { from, end: from + 1, draw: () => make("hr", "") };
  if (isTable(lines, from)) return tableAt(lines, from);
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, from, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, from, depth);
  const end = continuedTo(lines, from + 1);
  return { from, end, draw: () => make("p", "", ...inlineOf(lines.slice(from, end).join("\n"))) };
}

/** @param {string[]} lines @param {number} at @returns {boolean} whether this line ends a paragraph before it */
const interrupts = (lines, at) => !lines[at].trim() || FENCE.test(lines[at]) || HEADING.test(lines[at])
  || RULE.test(lines[at]) || QUOTE.test(lines[at]) || INTERRUPTS.test(lines[at]) || isTable(lines, at);

/** @param {string[]} lines @param {number} end @returns {number} the first line from `end` on that is not the paragraph's */
function continuedTo(lines, end) {
  while (end < lines.length && !interrupts(lines, end)) end++;
  return end;
}

/** Code between fences, or up to the end of the text. @param {string[]} lines @param {number} from @returns {Block} */
function codeAt(lines, from) {
  const [, fence, language] = /** @type {string[]} */ (/** @type {unknown} */ (FENCE.exec(lines[from])));
  let last = from + 1;
  const closes = line => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (last < lines.length && !closes(lines[last])) last++;
  return {
    from,
    end: Math.min(last + 1, lines.length),
    draw: () => {
      const code = make("pre", "", make("code", "", lines.slice(from + 1, last).join("\n")));
      code.tabIndex = 0; /* long lines scroll */
      return make("div", "fence", make("div", "fence-head", language.trim(), actButton("copy-code", WORDS.copy)), code);
    },
  };
}

/** @param {string[]} lines @param {number} from @param {number} depth @returns {Block} */
function quoteAt(lines, from, depth) {
  let end = from + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || !interrupts(lines, end))) end++;
  const quoted = () => lines.slice(from, end).map(line => line.replace(QUOTE, ""));
  return { from, end, draw: () => make("blockquote", "", ...blocksOf(quoted(), depth + 1).map(each => each.draw())) };
}

/**
 * A list: items with the same kind of mark. Lines that are indented more belong to the item before them. Two columns
 * are enough, since models indent so below numbers, too.
 * @param {string[]} lines @param {number} from @param {number} depth @returns {Block}
 */
function listAt(lines, from, depth) {
  const mark = ITEM.exec(lines[from])?.[2] ?? "", kind = mark.slice(-1);
  /** @type {string[][]} */
  const items = [];
  let end = from, outer = 0, inner = 0, blank = false, loose = false;
  for (; end < lines.length; end++) {
    const line = lines[end], item = ITEM.exec(line), indent = line.search(/\S/);
    if (indent < 0) {
      blank = true;
      items.at(-1)?.push("");
      continue;
    }
    if (items.length && indent >= outer + 2) {
      inner = Math.min(indent, inner);
      items.at(-1)?.push(line.slice(inner));
    } else if (item?.[2].endsWith(kind) && !RULE.test(line)) {
      loose ||= blank;
      [outer, inner] = [indent, item[0].length];
      items.push([line.slice(inner)]);
    } else if (blank || interrupts(lines, end)) break;
    else items.at(-1)?.push(line);
    blank = false;
  }
  return {
    from,
    end,
    draw: () => {
      const parts = items.map(each => blocksOf(each, depth + 1));
      const spaced = loose || parts.some((blocks, at) => blocks.some(({ from }) => from && !items[at][from - 1].trim()));
      const list = make(kind === "." || kind === ")" ? "ol" : "ul", "", ...parts.map(each => itemOf(each, spaced)));
      if (list instanceof HTMLOListElement) list.start = parseInt(mark);
      return list;
    },
  };
}

/** @param {Block[]} blocks @param {boolean} spaced whether its paragraphs have space around */
const itemOf = (blocks, spaced) => make("li", "", ...blocks.map(each => each.draw())
  .flatMap(each => each.tagName === "P" && !spaced ? [...each.childNodes] : [each]));

/** @param {string} line @returns {string[]} the cells of a table's row */
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (!cells.at(-1)?.trim()) cells.pop();
  return cells.map(each => each.trim().replaceAll("\\|", "|"));
}

/** @param {string[]} lines @param {number} at @returns {boolean} whether a table's head and its line of dashes are here */
function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const dashes = cellsOf(lines[at + 1]);
  return dashes.every(each => DASHES.test(each)) && dashes.length === cellsOf(lines[at]).length;
}

/** @param {string[]} lines @param {number} from @returns {Block} */
function tableAt(lines, from) {
  let end = from + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const sides = cellsOf(lines[from + 1]).map(each =>
    each.endsWith(":") ? (each.startsWith(":") ? "center" : "right") : "left");
  const row = (tag, line) => {
    const cells = cellsOf(line);
    return make("tr", "", ...sides.map((side, place) => {
      const cell = make(tag, "", ...inlineOf(cells[place] ?? ""));
      cell.style.textAlign = side;
      return cell;
    }));
  };
  return {
    from,
    end,
    draw: () => {
      const body = lines.slice(from + 2, end).map(line => row("td", line));
      const box = make("div", "wide", make("table", "", make("thead", "", row("th", lines[from])), make("tbody", "", ...body)));
      box.tabIndex = 0; /* wide tables scroll */
      return box;
    },
  };
}
