"use strict";

/** @param {string} id @returns {any} */
const element = id => document.getElementById(id);

/**
 * Create an element. Text becomes text, never markup: it may be a model's.
 * @param {string} tag @param {string} look its class @param {(Node | string)[]} children
 */
function make(tag, look, ...children) {
  const made = document.createElement(tag);
  if (look) made.className = look;
  made.append(...children);
  return made;
}

/** Write a text only if it has changed, or a screen reader would say it again. @param {Element} place @param {string} text */
function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** @param {string} markdown @returns {{code: boolean, text: string}[]} its paragraphs and fenced code */
function blocksOf(markdown) {
  /** @type {{code: boolean, lines: string[]}[]} */
  const blocks = [{ code: false, lines: [] }];
  let code = false;
  for (const line of markdown.split("\n"))
    if (/^ {0,3}```/.test(line)) blocks.push({ code: code = !code, lines: [] });
    else if (code || line.trim()) /** @type {any} */ (blocks.at(-1)).lines.push(line);
    else blocks.push({ code, lines: [] });
  return blocks.filter(each => each.code || each.lines.length)
    .map(({ code, lines }) => ({ code, text: lines.join("\n") }));
}

/** @param {string} text @returns {(Node | string)[]} the text, `code` and **strong** words as elements */
const inlineOf = text => text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part, place) => {
  if (place % 2 === 0) return part;
  return part.startsWith("`") ? make("code", "", part.slice(1, -1)) : make("strong", "", part.slice(2, -2));
});

/** @type {WeakMap<Element, string>} the text that a block was made of */
const sources = new WeakMap();

/** Fill an element with a text in Markdown. Blocks that stay the same are left alone. @param {Element} box @param {string} markdown */
function drawMarkdown(box, markdown) {
  const blocks = blocksOf(markdown);
  blocks.forEach(({ code, text }, place) => {
    const old = box.children[place], source = (code ? "```" : "") + text;
    if (old && sources.get(old) === source) return;
    const made = code ? make("pre", "", make("code", "", text)) : make("p", "", ...inlineOf(text));
    if (code) made.tabIndex = 0; /* long lines scroll */
    sources.set(made, source);
    if (old) old.replaceWith(made);
    else box.append(made);
  });
  while (box.children.length > blocks.length) box.lastElementChild?.remove();
}
