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

/** Create a small button whose clicks are found by its name. @param {string} act @param {string} words @param {string} [title] */
function actButton(act, words, title) {
  const button = make("button", "act", words);
  button.setAttribute("type", "button");
  button.dataset.act = act;
  if (title) button.title = title;
  return button;
}

/** Copy a text, also where the page came over plain HTTP: there, browsers have no `navigator.clipboard`. @param {string} text */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = /** @type {HTMLTextAreaElement} */ (make("textarea", "unseen"));
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Let the browser save a text as a file. @param {string} name @param {string} text */
function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
