"use strict";

/* The marks within a paragraph of Markdown: emphasis, code, links. */

const MOST_OPEN = 32; /* marks of emphasis and links that wait for their end; the oldest is forgotten */

/* An escape, backticks, a run of emphasis, brackets with or without an address, an address. */
const MARKS = new RegExp([
  /\\([!-\/:-@[-`{-~])/, /(`+)/, /(\*+|_+|~~+)/, /(!?\[)/,
  /(\])(?:\( *<?((?:[^\s()<>]|\([^\s()]*\))*)>?(?: +"[^"]*")? *\))?/, /(https?:\/\/[^\s<>[\]|`]+)/,
].map(each => each.source).join("|"), "g");

/**
 * @typedef {{mark: string, length: number, at: number, whole: number, both: boolean}} Opener a mark, whose text is the
 *   node at `at`: how many characters are left of how many, and whether it might also end an emphasis
 */

/** @param {string} text @returns {(Node | string)[]} */
function inlineOf(text) {
  /** @type {(Node | string)[]} */
  const nodes = [];
  /** @type {Opener[]} */
  const open = [];
  const unclosed = new Set(); /* runs of backticks that have no end */
  const marks = new RegExp(MARKS);
  let done = 0;
  const opens = (mark, length, whole = length, both = false) => {
    if (open.length === MOST_OPEN) open.shift();
    open.push({ mark, length, at: nodes.length - 1, whole, both });
  };
  for (let found; (found = marks.exec(text));) {
    const [whole, escape, ticks, run, bracket, bracketEnd, target, address] = found;
    nodes.push(text.slice(done, found.index));
    done = marks.lastIndex;
    if (escape) nodes.push(escape);
    else if (ticks) {
      const end = unclosed.has(ticks) ? -1 : endOfTicks(text, ticks, done);
      if (end < 0) {
        unclosed.add(ticks);
        nodes.push(ticks);
      } else {
        const code = text.slice(done, end), padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        nodes.push(make("code", "", padded ? code.slice(1, -1) : code));
        marks.lastIndex = done = end + ticks.length;
      }
    } else if (run) {
      const [opensHere, closesHere] = sidesOf(text, found.index, done);
      const rest = closesHere ? closeRun(nodes, open, run, opensHere) : run.length;
      if (rest) nodes.push(run.slice(0, rest));
      if (rest && rest <= 3 && opensHere) opens(run[0], rest, run.length, closesHere);
    } else if (bracket) {
      nodes.push(bracket);
      opens("[", 1);
    } else if (bracketEnd) {
      const at = open.findLastIndex(each => each.mark === "["), opener = open[at];
      if (opener && target && isWebAddress(target)) {
        const words = nodes.splice(opener.at).slice(1);
        nodes.push(linkTo(target, words.map(each => each instanceof HTMLAnchorElement ? each.textContent ?? "" : each)));
        open.splice(at);
      } else {
        nodes.push(whole);
        if (opener) open.splice(at, 1);
      }
    } else {
      let end = address.length; /* without the sentence's punctuation */
      while (".,;:!?'\"*_~".includes(address[end - 1]) || (address[end - 1] === ")" && !address.includes("("))) end--;
      const bare = address.slice(0, end);
      nodes.push(isWebAddress(bare) ? linkTo(bare, [bare]) : bare);
      marks.lastIndex = done = found.index + end;
    }
  }
  return [...nodes, text.slice(done)].filter(each => each !== "");
}

/** @param {string} text @param {string} ticks @param {number} from @returns {number} the next run of as many backticks, or -1 */
function endOfTicks(text, ticks, from) {
  for (const run of text.slice(from).matchAll(/`+/g)) if (run[0] === ticks) return from + run.index;
  return -1;
}

/**
 * @param {string} text @param {number} from @param {number} end of a run of `*`, `_` or `~`
 * @returns {[boolean, boolean]} whether it may begin an emphasis, and whether it may end one, as CommonMark has it
 */
function sidesOf(text, from, end) {
  const before = text[from - 1] ?? " ", after = text[end] ?? " ";
  const isSpace = each => /\s/.test(each), isSign = each => /[\p{P}\p{S}]/u.test(each);
  const left = !isSpace(after) && (!isSign(after) || isSpace(before) || isSign(before));
  const right = !isSpace(before) && (!isSign(before) || isSpace(after) || isSign(after));
  if (text[from] !== "_") return [left, right];
  return [left && (!right || isSign(before)), right && (!left || isSign(after))];
}

/**
 * Let a run end emphases that are open.
 * @param {(Node | string)[]} nodes @param {Opener[]} open @param {string} run @param {boolean} both whether it might also
 *   begin one: then CommonMark's rule of three holds, as for `**a*b**` @returns {number} how many of its marks are left
 */
function closeRun(nodes, open, run, both) {
  let left = run.length;
  while (left) {
    const at = open.findLastIndex(each => each.mark === run[0]
      && !((both || each.both) && (each.whole + run.length) % 3 === 0 && run.length % 3));
    const opener = open[at];
    if (!opener) break;
    const used = Math.min(2, left, opener.length);
    const made = make(run[0] === "~" ? "del" : used === 2 ? "strong" : "em", "", ...nodes.splice(opener.at + 1));
    left -= used;
    opener.length -= used;
    nodes[opener.at] = run[0].repeat(opener.length);
    nodes.push(made);
    open.splice(opener.length ? at + 1 : at);
  }
  return left;
}

/** @param {string} target @returns {boolean} whether a link may lead there: no script, no file */
const isWebAddress = target => /^https?:\/\/./.test(target) && URL.canParse(target);

/** @param {string} target @param {(Node | string)[]} words */
function linkTo(target, words) {
  return Object.assign(make("a", "", ...words), { href: target, target: "_blank", rel: "noopener noreferrer" });
}
