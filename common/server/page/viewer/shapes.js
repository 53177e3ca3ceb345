"use strict";

const HUES = 8;

/** @param {number} number a request's @returns {string} A to Z, then A1 to Z1 */
const letterOf = number =>
  String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26) % 10);
/** @param {number} number */
const hueOf = number => `sv-h${number % HUES}`;
/** @param {unknown} text whatever a client has sent as its request's id */
const escaped = text => String(text).replace(/[&<>"']/g, each => `&#${each.charCodeAt(0)};`);
/** @param {number} seconds */
const timeOf = seconds => seconds >= 1 ? `${+seconds.toFixed(2)} s` : `${+(seconds * 1000).toPrecision(3)} ms`;
/** @param {number} value */
const px = value => Math.round(value * 10) / 10;
/** @param {number} count @param {string} word */
const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const rect = (kind, x, y, width, height, more = "") =>
  `<rect class="${kind}" x="${px(x)}" y="${px(y)}" width="${px(Math.max(width, 0))}" height="${px(height)}" ${more}/>`;
const text = (kind, x, y, words, more = "") =>
  `<text class="${kind}" x="${px(x)}" y="${px(y)}" ${more}>${words}</text>`;

/** @param {Row} row @param {Named} name what was computed for a request in a step, in words */
function workOf(row, name) {
  const [, , columns, kind, start, end] = row;
  if (kind === "p") return `prompt ${start} to ${end}`;
  if (kind === "d") {
    const token = `token ${Math.max(columns + 1 - name.prompt, 1)}`;
    return start ? `${token}, guesses: ${end ?? 0} of ${start} right` : token;
  }
  return kind === "i" ? "done, goes along" : "holds its seat";
}

/**
 * Joins boxes of one look and request into one path, and letters of one look into one text: a picture of a thousand
 * boxes has a hundred elements.
 */
class Layer {
  /** @param {StepTrace} trace @param {number | null} hot the request that stands out */
  constructor(trace, hot) {
    this.trace = trace;
    this.hot = hot;
    /** @type {Map<string, string[]>} */
    this.paths = new Map();
    /** @type {Map<string, [string, number][]>} */
    this.texts = new Map();
    /** @type {string[]} */
    this.others = [];
  }

  /** @param {number | null} request that the shape belongs to @param {string} kind @returns {string} the attributes of its look */
  look(request, kind) {
    if (request === null) return `class="${kind}"`;
    const cold = this.hot !== null && this.hot !== request ? " sv-cold" : "";
    return `class="${kind} ${this.trace.hue(request)}${cold}" data-r="${request}"`;
  }

  /** @param {string} kind @param {number | null} request */
  box(kind, request, x, y, width, height, round = 0) {
    const look = this.look(request, kind), r = Math.min(round, width / 2, height / 2);
    const w = px(width - 2 * r), h = px(height - 2 * r), start = `M${px(x + r)} ${px(y)}h${w}`;
    const path = start + (r
      ? `q${r} 0 ${r} ${r}v${h}q0 ${r} ${-r} ${r}h${-w}q${-r} 0 ${-r} ${-r}v${-h}q0 ${-r} ${r} ${-r}z`
      : `v${h}h${-w}z`);
    const paths = this.paths.get(look);
    if (paths) paths.push(path);
    else this.paths.set(look, [path]);
  }

  /** A few letters or digits around x. @param {string} kind @param {number | null} request @param {string} words */
  letters(kind, request, x, y, words) {
    const key = `${this.look(request, kind)} y="${px(y)}"`, texts = this.texts.get(key) ?? [];
    this.texts.set(key, texts);
    [...words].forEach((each, place) => texts.push([each, x + (place - (words.length - 1) / 2) * 7]));
  }

  /** @param {string} stripes address of the pattern that lies over prompts */
  svg(stripes) {
    const fills = [...this.paths].map(([look, paths]) => {
      const path = paths.join("");
      const lined = look.includes("sv-prompt") ? `<path class="sv-over" fill="url(#${stripes})" d="${path}"/>` : "";
      return `<path ${look} d="${path}"/>${lined}`;
    });
    const texts = [...this.texts].map(([key, letters]) => {
      const places = letters.map(each => px(each[1])).join(" "), words = letters.map(each => each[0]).join("");
      return `<text text-anchor="middle" ${key} x="${places}">${words}</text>`;
    });
    return fills.join("") + texts.join("") + this.others.join("");
  }
}
