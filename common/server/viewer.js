/*
 * Draws step traces: who waits, who holds a seat, what each step computed, and who has which block of memory.
 * The format is that of `common/step_trace.py`. Plain JavaScript and SVG; the page that uses it adds `viewer.css`.
 *
 *   new StepViewer(element).show([trace, …])                   recorded: one below or beside the other
 *   new StepViewer(element, { live: true }).begin(header)      running: frames come with `add(frame)`
 */
"use strict";

/**
 * @typedef {[request: number, seat: number, columns: number, kind: string, start?: number, end?: number,
 *   padding?: number]} Row
 * @typedef {{format: string, version: number, phase: [number, string], seats: number, max_seq_len: number}} Header
 * @typedef {{step: number, start: number, took: number, key?: boolean, memory: [number, number],
 *   requests?: [number, string, number, number][], waiting: [number, number[]], running: Row[],
 *   tables?: number[][], kept?: [number[], number[]], found?: [number, number][], preempted?: number[],
 *   ended?: [number, string][], done: number}} Frame
 * @typedef {{id: string, prompt: number, fresh: number, found: number, seen: number}} Named
 * @typedef {{index: number, tables: Map<number, number[]>, kept: Set<number>}} State
 */

/** A trace as it is read: frames by their index, and the tables as they were after any of them. */
class StepTrace {
  /** @param {Header} header @param {number} most frames that are remembered; older ones are forgotten */
  constructor(header, most = Infinity) {
    if (header.format !== "infer-steps" || header.version !== 1) throw new Error("not a step trace of version 1");
    this.header = header;
    this.most = most;
    /** @type {Frame[]} */
    this.frames = [];
    /** @type {Map<number, Named>} */
    this.names = new Map();
    this.forgotten = 0;
    /** @type {State} */
    this.state = { index: -1, tables: new Map(), kept: new Set() };
  }

  /** @param {any} frame as it came; what it tells only when it changes is filled in */
  add(frame) {
    const last = this.frames.at(-1);
    if (!last && !frame.key) return;
    frame.waiting ??= frame.key ? [0, []] : last?.waiting;
    frame.memory ??= last?.memory;
    frame.done = (last?.done ?? 0) + (frame.ended?.length ?? 0);
    const index = this.forgotten + this.frames.length;
    for (const [number, id, prompt, fresh] of frame.requests ?? [])
      if (!this.names.has(number)) this.names.set(number, { id, prompt, fresh, found: 0, seen: index });
    for (const [number, tokens] of frame.found ?? []) this.name(number).found = tokens;
    for (const number of [...frame.running.map(row => row[0]), ...frame.waiting[1]]) this.name(number).seen = index;
    this.frames.push(frame);
    if (this.frames.length > this.most) this.forget();
  }

  /** Forget the oldest frames, up to the next one that stands alone. */
  forget() {
    const key = this.frames.findIndex((frame, index) => index > 0 && frame.key);
    if (key < 0) return;
    this.frames.splice(0, key);
    this.forgotten += key;
    this.state.index = -1;
    for (const [number, name] of this.names) if (name.seen < this.forgotten) this.names.delete(number);
  }

  /** @param {number} number @returns {Named} */
  name(number) {
    return this.names.get(number) ?? { id: "?", prompt: 0, fresh: 0, found: 0, seen: 0 };
  }

  /** Tables and kept blocks after a frame. @param {number} index @returns {State} */
  stateAt(index) {
    const state = this.state;
    let first = index;
    if (state.index === index) return state;
    while (!this.frames[first].key && first !== state.index + 1) first -= 1;
    for (let at = first; at <= index; at++) this.apply(this.frames[at]);
    state.index = index;
    return state;
  }

  /** @param {Frame} frame */
  apply(frame) {
    const { tables, kept } = this.state;
    if (frame.key) {
      tables.clear();
      kept.clear();
    }
    for (const [number, stays, ...blocks] of frame.tables ?? [])
      tables.set(number, [...(tables.get(number) ?? []).slice(0, stays), ...blocks]);
    const running = new Set(frame.running.map(row => row[0]));
    for (const number of tables.keys()) if (!running.has(number)) tables.delete(number);
    const [came, went] = frame.kept ?? [[], []];
    for (const block of came) kept.add(block);
    for (const block of went) kept.delete(block);
  }
}

const HUES = 8;
const LABEL = 58, COLUMN = 22, ROW = 22, AXIS = 20, BARS = 24, EDGE = 1.5;
const REMEMBERED = 3000; /* frames of a live view */
const MOST_BLOCKS = 4096;

/** @param {number} number a request's @returns {string} A to Z, then A1 to Z1 */
const letterOf = number => String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26) % 10);
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
const text = (kind, x, y, words, more = "") => `<text class="${kind}" x="${px(x)}" y="${px(y)}" ${more}>${words}</text>`;

/** @param {Row} row @param {Named} name what was computed for a request in a step, in words */
function workOf(row, name) {
  const [, , columns, kind, start, end] = row;
  if (kind === "p") return `prompt ${start} to ${end}`;
  if (kind === "d") return `token ${Math.max(columns + 1 - name.prompt, 1)}`;
  return kind === "i" ? "done, goes along" : "holds its seat";
}

/**
 * Shapes of one look and one request become one path, and letters of one look one text: a picture of a thousand boxes
 * has a hundred elements.
 */
class Layer {
  /** @param {number | null} hot the request that stands out */
  constructor(hot) {
    this.hot = hot;
    /** @type {Map<string, string[]>} */
    this.paths = new Map();
    /** @type {Map<string, [string, number][]>} */
    this.texts = new Map();
    /** @type {string[]} */
    this.others = [];
  }

  /** @param {number | null} request whose it is @param {string} kind @returns {string} the attributes of its look */
  look(request, kind) {
    if (request === null) return `class="${kind}"`;
    const cold = this.hot !== null && this.hot !== request ? " sv-cold" : "";
    return `class="${kind} ${hueOf(request)}${cold}" data-r="${request}"`;
  }

  /** @param {string} kind @param {number | null} request */
  box(kind, request, x, y, width, height, round = 0) {
    const look = this.look(request, kind), r = Math.min(round, width / 2, height / 2);
    const w = px(width - 2 * r), h = px(height - 2 * r), arc = (dx, dy) => r ? `a${r} ${r} 0 0 1 ${dx} ${dy}` : "";
    const path = `M${px(x + r)} ${px(y)}h${w}${arc(r, r)}v${h}${arc(-r, r)}h${-w}${arc(-r, -r)}v${-h}${arc(r, -r)}z`;
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
    const texts = [...this.texts].map(([key, letters]) =>
      `<text text-anchor="middle" ${key} x="${letters.map(each => px(each[1])).join(" ")}">${letters.map(each => each[0]).join("")}</text>`);
    return fills.join("") + texts.join("") + this.others.join("");
  }
}

let viewers = 0;

/** One trace, drawn. */
class StepPanel {
  /** @param {HTMLElement} element @param {StepTrace} trace @param {StepViewer} viewer */
  constructor(element, trace, viewer) {
    this.trace = trace;
    this.viewer = viewer;
    this.id = `sv${++viewers}`;
    this.index = -1;
    /** @type {Map<number, HTMLButtonElement>} */
    this.chips = new Map();
    const [number, title] = trace.header.phase;
    element.innerHTML = `
      <div class="sv-head"><strong>Phase ${number}: ${escaped(title.toLowerCase())}</strong> <span></span></div>
      <div class="sv-time"></div>
      <div class="sv-memory-head"></div>
      <div class="sv-memory"></div>
      <div class="sv-chips"></div>
      <p class="sv-about"></p>`;
    /** @param {string} selector */
    const part = selector => /** @type {HTMLElement} */ (element.querySelector(selector));
    this.head = part(".sv-head span");
    this.time = part(".sv-time");
    this.memoryHead = part(".sv-memory-head");
    this.memory = part(".sv-memory");
    this.chipBox = part(".sv-chips");
    this.about = part(".sv-about");
    this.scroll = 0; /* pixels that have gone out on the left */
    element.addEventListener("pointerover", event => this.light(this.requestOf(event.target)));
    element.addEventListener("pointerleave", () => this.light(null));
    element.addEventListener("focusin", event => this.light(this.requestOf(event.target)));
    element.addEventListener("focusout", () => this.light(null));
    this.time.addEventListener("click", event => this.jump(event));
  }

  get hot() {
    return this.viewer.hot;
  }

  /** @param {number | null} request */
  light(request) {
    this.viewer.light(request);
  }

  /** @param {EventTarget | null} target @returns {number | null} */
  requestOf(target) {
    const found = target instanceof Element ? target.closest("[data-r]") : null;
    return found ? Number(found.getAttribute("data-r")) : null;
  }

  /** @param {MouseEvent} event */
  jump(event) {
    const x = event.clientX - this.time.getBoundingClientRect().left - LABEL + this.scroll;
    const index = this.trace.frames.findIndex((_, each) => this.right(each) >= x);
    if (x > 0 && index >= 0) this.viewer.goToTime(this.trace.frames[index].start);
  }

  /* Where a step is on the axis: by its time, or each as wide as the next. */

  /** @param {number} index */
  left(index) {
    const { scale, origin } = this.viewer;
    return scale ? (this.trace.frames[index].start - origin) * scale : index * COLUMN;
  }

  /** @param {number} index */
  right(index) {
    const { scale } = this.viewer;
    return this.left(index) + (scale ? this.trace.frames[index].took * scale : COLUMN);
  }

  /** @param {number} index */
  draw(index) {
    this.index = index;
    if (index < 0) {
      this.head.textContent = "no step yet";
      return;
    }
    const frame = this.trace.frames[index], state = this.trace.stateAt(index);
    const all = this.viewer.live ? "" : ` of ${this.trace.names.size}`;
    this.head.textContent = `step ${frame.step}, ${timeOf(frame.took)} · ${frame.done}${all} done`;
    this.drawTime(index);
    this.drawMemory(frame, state);
    this.drawChips(frame, state);
    this.about.innerHTML = this.describeHot(frame, state);
  }

  /** The sentence for those who hear the page. */
  words() {
    if (this.index < 0) return "no step yet";
    const frame = this.trace.frames[this.index];
    const work = frame.running.map(row => `${letterOf(row[0])}: ${workOf(row, this.trace.name(row[0]))}`);
    const waiting = frame.waiting[1].map(letterOf).join(", ") || "nobody";
    return `Phase ${this.trace.header.phase[0]}, step ${frame.step}. ${work.join("; ") || "nothing runs"}. `
      + `Waiting: ${waiting}. Memory: ${this.memoryHead.textContent}.`;
  }

  /* ---------------------------------------------------------------- seats over time */

  /** @param {number} now */
  drawTime(now) {
    const { frames, header } = this.trace;
    const bars = this.viewer.scale ? 0 : BARS, top = AXIS + bars;
    const width = this.time.clientWidth || 320, view = width - LABEL;
    const height = top + header.seats * ROW + 24;
    this.scroll = this.viewer.scrollOf(this, now, view);
    let first = now, last = now;
    while (first > 0 && this.right(first - 1) > this.scroll) first--;
    while (last + 1 < frames.length && this.left(last + 1) < this.scroll + view) last++;
    const longest = Math.max(...frames.slice(first, last + 1).map(frame => frame.took));
    const past = new Layer(this.hot), future = new Layer(this.hot);
    for (let index = first; index <= last; index++) this.drawStep(index <= now ? past : future, index, now, top, longest);
    const y = seat => top + seat * ROW;
    const seats = Array.from({ length: header.seats }, (_, seat) =>
      rect("sv-lane", LABEL, y(seat) + EDGE, view, ROW - 2 * EDGE) + text("sv-label", 0, y(seat) + 15, `seat ${seat}`));
    const nowBand = rect("sv-now", LABEL + this.left(now) - this.scroll, 0, this.right(now) - this.left(now), height);
    this.time.innerHTML = `<svg width="${width}" height="${height}" role="img" aria-label="${escaped(this.words())}">
      <defs><pattern id="${this.id}p" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="sv-stripe" width="2" height="5"/></pattern>
        <clipPath id="${this.id}c"><rect x="${LABEL}" y="0" width="${view}" height="${height}"/></clipPath></defs>
      ${seats.join("")}
      ${text("sv-label", 0, y(header.seats) + 16, "waiting")}${text("sv-label", 0, 13, bars ? "step" : "time")}
      ${bars ? text("sv-label", 0, AXIS + 15, timeOf(longest)) : ""}
      <g clip-path="url(#${this.id}c)">${nowBand}${bars ? "" : this.axis(view)}
      <g>${past.svg(`${this.id}p`)}</g><g class="sv-future">${future.svg(`${this.id}p`)}</g></g></svg>`;
  }

  /** @param {number} view how wide @returns {string} where which time is */
  axis(view) {
    const { scale } = this.viewer;
    const least = 70 / scale, power = 10 ** Math.floor(Math.log10(least));
    const every = power * [1, 2, 5, 10].filter(each => power * each >= least)[0];
    const marks = [];
    for (let n = Math.ceil(this.scroll / scale / every); n * every * scale < this.scroll + view - 20; n++)
      marks.push(text("sv-tick", LABEL + n * every * scale - this.scroll + (n ? 0 : 2), 13, timeOf(n * every),
        n ? 'text-anchor="middle"' : ""));
    return marks.join("");
  }

  /** @param {Layer} layer @param {number} index @param {number} now @param {number} top @param {number} longest of the steps in view */
  drawStep(layer, index, now, top, longest) {
    const frame = this.trace.frames[index];
    const x = LABEL + this.left(index) - this.scroll, width = this.right(index) - this.left(index);
    const middle = x + width / 2, below = top + this.trace.header.seats * ROW;
    for (const row of frame.running) this.drawCell(layer, row, frame, x, width, top + row[1] * ROW);
    if (!this.viewer.scale) {
      const missing = index > 0 ? frame.step - this.trace.frames[index - 1].step - 1 : 0;
      const height = BARS * frame.took / longest, known = index + this.trace.forgotten;
      layer.box("sv-took", null, x + 4, AXIS + BARS - height, width - 8, height);
      if (missing > 0) layer.others.push(`<path class="sv-gap" d="M${px(x)} ${AXIS}V${below}"/>`);
      if (index === now || (known % 5 === 0 && Math.abs(index - now) > 1))
        layer.others.push(text("sv-tick", middle, 13, frame.step, 'text-anchor="middle"'));
    }
    if (frame.waiting[0] && width > 9) layer.letters("sv-tick", null, middle, below + 16, String(frame.waiting[0]));
    for (const number of frame.preempted ?? []) this.drawLoss(layer, number, index, x, width, top);
  }

  /** A request's seat ends by force. @param {Layer} layer @param {number} number @param {number} index @param {number} x @param {number} width @param {number} top */
  drawLoss(layer, number, index, x, width, top) {
    const seat = this.trace.frames[index - 1]?.running.find(row => row[0] === number)?.[1];
    if (seat === undefined) return; /* the frame before is forgotten */
    const y = top + seat * ROW, taken = this.trace.frames[index].running.some(row => row[1] === seat);
    layer.box("sv-loss", null, x - EDGE - 2, y + EDGE, 3, ROW - 2 * EDGE);
    if (!taken && width > 14) layer.others.push(text("sv-lost", x + 3, y + 15.5, "↩"));
  }

  /** @param {Layer} layer @param {Row} row @param {Frame} frame @param {number} x @param {number} width @param {number} y */
  drawCell(layer, row, frame, x, width, y) {
    const [number, , , kind, start = 0, end = 0, padding = 0] = row;
    const inner = Math.max(width - EDGE, 1), height = ROW - 2 * EDGE;
    const own = kind === "p" ? (inner * (end - start)) / (end - start + padding) : inner;
    const look = { p: "sv-full sv-prompt", d: "sv-full", i: "sv-idle" }[kind] ?? "sv-held";
    layer.box(look, number, x, y + EDGE, own, height, 3);
    if (padding) layer.box("sv-idle", number, x + own, y + EDGE, inner - own, height, 3);
    const on = kind === "p" || kind === "d" ? "sv-on" : "sv-off", letter = letterOf(number), middle = x + own / 2;
    if (kind === "p" && own > 66)
      layer.others.push(text(`${on} ${hueOf(number)}`, middle, y + 15.5, `${letter} ${start}–${end}`, 'text-anchor="middle"'));
    else if (own > 7 * letter.length) layer.letters(on, number, middle, y + 15.5, letter);
    if ((frame.found ?? []).some(each => each[0] === number))
      layer.others.push(`<path class="sv-found" d="M${px(x)} ${y + EDGE}h9l-9 9z"/>`);
    if ((frame.ended ?? []).some(each => each[0] === number)) layer.box("sv-end", null, x + inner - 3, y + EDGE, 3, height);
  }

  /* ---------------------------------------------------------------- memory */

  /** @param {Frame} frame @param {State} state */
  drawMemory(frame, state) {
    const [blocks, size] = frame.memory, shown = Math.min(blocks, MOST_BLOCKS);
    /** @type {Map<number, [number, number][]>} who has a block, and how many columns of it */
    const owners = new Map();
    for (const [number, , columns] of frame.running)
      (state.tables.get(number) ?? []).forEach((block, place) => {
        const used = Math.min(Math.max(columns - place * size, 0), size) / size;
        owners.set(block, [...(owners.get(block) ?? []), [number, used]]);
      });
    const slots = blocks <= this.trace.header.seats, word = slots ? "slots" : "blocks";
    const shared = [...owners.values()].filter(each => each.length > 1).length;
    const kept = state.kept.size;
    this.memoryHead.textContent = blocks === 0 ? "memory: none is taken" : `memory: ${owners.size} of ${blocks} ${word} of ${size} tokens in use`
      + (shared ? `, ${shared} shared` : "") + (kept ? `, ${kept} kept for requests to come` : "")
      + (shown < blocks ? ` (the first ${shown} are drawn)` : "");
    const width = this.memory.clientWidth || 320;
    const side = Math.max(5, Math.min(24, Math.floor(Math.sqrt((width * (shown > 500 ? 230 : 130)) / Math.max(shown, 1)))));
    const rows = slots ? shown : Math.ceil(shown / Math.max(1, Math.floor(width / side)));
    const per = Math.max(1, Math.ceil(shown / rows)); /* no row that is nearly empty */
    const w = width / per, h = slots ? 16 : Math.min(side, 22), gap = side > 10 ? 1 : 0.5, round = side > 10 ? 2.5 : 0;
    const layer = new Layer(this.hot);
    let before = -1;
    for (let block = 0; block < shown; block++) {
      const x = (block % per) * w + gap, y = Math.floor(block / per) * h + gap;
      const held = owners.get(block);
      if (held) this.drawBlock(layer, held, x, y, w - 2 * gap, h - 2 * gap, round, shown > 200 && block % per > 0 && held[0][0] === before);
      else layer.box(state.kept.has(block) ? "sv-kept" : "sv-free", null, x, y, w - 2 * gap, h - 2 * gap, round);
      before = held?.length === 1 ? held[0][0] : -1;
    }
    const dots = `<pattern id="${this.id}k" width="6" height="6" patternUnits="userSpaceOnUse"><circle class="sv-dot" cx="3" cy="3" r="1.3"/></pattern>`;
    this.memory.innerHTML = `<svg width="${width}" height="${Math.max(rows * h, 1)}" role="img" aria-label="${
      escaped(this.memoryHead.textContent)}" style="--sv-dots: url(#${this.id}k)"><defs>${dots}</defs>${layer.svg("")}</svg>`;
  }

  /** A block, with a band for each who has it. @param {Layer} layer @param {[number, number][]} held @param {boolean} again the letter stands before it */
  drawBlock(layer, held, x, y, width, height, round, again) {
    const bands = held.slice(0, 4), band = height / bands.length;
    bands.forEach(([number, used], place) => {
      layer.box("sv-held", number, x, y + place * band, width, band, round);
      layer.box("sv-full", number, x, y + place * band, width * used, band, round);
    });
    const [number, used] = held[0], shared = held.length > 1;
    const words = shared ? `×${held.length}` : letterOf(number);
    if (again || height < 10 || width < 7 * words.length) return;
    const wide = width > 60, on = used * width > (wide ? 20 : width * 0.75) ? "sv-on" : "sv-off";
    layer.letters(shared ? "sv-share" : on, shared ? null : number, wide ? x + 10 : x + width / 2, y + height / 2 + 4, words);
  }

  /* ---------------------------------------------------------------- requests */

  /** @param {Frame} frame @param {State} state */
  drawChips(frame, state) {
    const rows = [...frame.running].sort((a, b) => a[1] - b[1]);
    const shown = new Set([...rows.map(row => row[0]), ...frame.waiting[1]]);
    for (const [number, chip] of this.chips)
      if (!shown.has(number)) {
        if (document.activeElement === chip) this.viewer.element.focus(); /* or its keys would be lost */
        chip.remove();
        this.chips.delete(number);
      }
    for (const row of rows) {
      const name = this.trace.name(row[0]);
      this.chip(row[0], workOf(row, name), Math.min(row[2] / (name.prompt + name.fresh), 1));
    }
    for (const number of frame.waiting[1]) this.chip(number, "waits", 0);
    [...shown].forEach((number, place) => {
      const chip = /** @type {HTMLButtonElement} */ (this.chips.get(number));
      if (this.chipBox.children[place] !== chip) this.chipBox.insertBefore(chip, this.chipBox.children[place] ?? null);
    });
    this.chipBox.toggleAttribute("data-more", frame.waiting[0] > frame.waiting[1].length);
  }

  /** @param {number} number @param {string} words @param {number} share of what it may become */
  chip(number, words, share) {
    let chip = this.chips.get(number);
    if (!chip) {
      chip = document.createElement("button");
      chip.type = "button";
      chip.className = `sv-chip ${hueOf(number)}`;
      chip.dataset.r = String(number);
      chip.innerHTML = `<b>${letterOf(number)}</b><span></span><i></i>`;
      this.chips.set(number, chip);
    }
    chip.children[1].textContent = words;
    chip.classList.toggle("sv-waits", words === "waits");
    /** @type {HTMLElement} */ (chip.children[2]).style.width = `${Math.round(share * 100)}%`;
  }

  /** @param {Frame} frame @param {State} state @returns {string} about the request that is pointed at */
  describeHot(frame, state) {
    if (this.hot === null) return "";
    const name = this.trace.name(this.hot), table = state.tables.get(this.hot);
    const row = frame.running.find(each => each[0] === this.hot);
    const now = row ? workOf(row, name) : frame.waiting[1].includes(this.hot) ? "waits" : "has left";
    const held = table ? `, ${counted(table.length, "block")} for ${counted(row?.[2] ?? 0, "token")}` : "";
    const found = name.found ? `, ${name.found} of its prompt found in memory` : "";
    return `<b>${letterOf(this.hot)}</b> <code>${escaped(name.id)}</code>: ${now}${held}; a prompt of `
      + `${counted(name.prompt, "token")}, up to ${name.fresh} new${found}`;
  }
}

const ICONS = {
  first: "M4 4h2v12H4zM16 4v12L7 10z",
  back: "M13 4v12L5 10z",
  play: "M6 3.5v13l11-6.5z",
  pause: "M5 4h3.5v12H5zM11.5 4H15v12h-3.5z",
  on: "M7 4v12l8-6z",
  last: "M14 4h2v12h-2zM4 4v12l9-6z",
};

/** Panels with one row of controls. */
class StepViewer {
  static letterOf = letterOf;
  static hueOf = hueOf;

  /** @param {HTMLElement} element @param {{live?: boolean}} options */
  constructor(element, { live = false } = {}) {
    this.live = live;
    this.element = element;
    /** @type {StepPanel[]} */
    this.panels = [];
    /** @type {number[]} times at which a step of any panel begins */
    this.moments = [];
    this.moment = 0;
    this.scale = 0; /* pixels a second; 0: every step is as wide as the next */
    this.origin = 0;
    this.playing = live;
    this.timer = 0;
    /** @type {number | undefined} */
    this.due = undefined;
    /** @type {number | null} */
    this.hot = null;
    element.classList.add("steps-viewer");
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "steps");
    element.tabIndex = -1;
    const button = (name, label) => `<button type="button" data-do="${name}" aria-label="${label}" title="${label}">
      <svg viewBox="0 0 20 20" aria-hidden="true"><path d="${ICONS[name]}"/></svg></button>`;
    element.innerHTML = `
      <div class="sv-controls">
        ${button("first", "to the first step")}${button("back", "a step back")}
        ${button("play", "play")}${button("on", "a step on")}${button("last", live ? "to the latest step" : "to the last step")}
        <input type="range" min="0" max="0" value="0" aria-label="step">
        <label class="sv-speed"${live ? " hidden" : ""}>speed <select>${[0.5, 1, 2, 4].map(each =>
          `<option value="${each}"${each === 1 ? " selected" : ""}>${each}×</option>`).join("")}</select></label>
      </div>
      <div class="sv-panels"></div>
      <div class="sv-legend" aria-hidden="true">
        <span><i class="sv-k-prompt"></i>prompt</span><span><i class="sv-k-token"></i>one more token</span>
        <span><i class="sv-k-held"></i>held, not computed</span><span><i class="sv-k-idle"></i>padding, done</span>
        <span><i class="sv-k-end"></i>ends</span><span><i class="sv-k-found"></i>found in memory</span>
        <span><i class="sv-k-kept"></i>kept</span><span><i class="sv-k-lost"></i>↩ loses its memory</span>${live ? "<span>┊ steps left out</span>" : ""}
      </div>
      <p class="sv-said" role="status"></p>`;
    this.controls = /** @type {HTMLElement} */ (element.querySelector(".sv-controls"));
    this.slider = /** @type {HTMLInputElement} */ (element.querySelector("input"));
    this.speed = /** @type {HTMLSelectElement} */ (element.querySelector("select"));
    this.box = /** @type {HTMLElement} */ (element.querySelector(".sv-panels"));
    this.said = /** @type {HTMLElement} */ (element.querySelector(".sv-said"));
    this.controls.addEventListener("click", event => {
      const found = /** @type {Element} */ (event.target).closest("[data-do]");
      if (found) this.act(/** @type {HTMLElement} */ (found).dataset.do ?? "");
    });
    this.slider.addEventListener("input", () => this.goTo(Number(this.slider.value)));
    element.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.drawSoon()).observe(this.box);
  }

  /* ---------------------------------------------------------------- what is shown */

  /** Show recorded traces. @param {{header: Header, frames: any[]}[]} traces @param {{byTime?: boolean}} options */
  show(traces, { byTime = traces.length > 1 } = {}) {
    const read = traces.map(({ header, frames }) => {
      const trace = new StepTrace(header);
      for (const frame of frames) trace.add({ ...frame });
      return trace;
    });
    const all = read.flatMap(trace => trace.frames);
    const times = all.map(frame => frame.took).sort((a, b) => a - b);
    this.origin = Math.min(...all.map(frame => frame.start));
    this.scale = byTime ? 17 / Math.max(times[Math.floor(times.length / 8)], 1e-6) : 0;
    this.moments = [...new Set(all.map(frame => frame.start))].sort((a, b) => a - b);
    this.pause();
    this.fill(read);
    this.goTo(Math.min(this.moment, this.moments.length - 1), { tell: false });
  }

  /** Show an engine that runs. @param {Header} header */
  begin(header) {
    this.moments = [];
    this.fill([new StepTrace(header, REMEMBERED)]);
    this.element.setAttribute("data-playing", "");
    this.icon();
  }

  /** A step of the engine that is shown. @param {any} frame */
  add(frame) {
    const { trace } = this.panels[0];
    const before = trace.forgotten;
    trace.add(frame);
    this.moments = trace.frames.map(each => each.start);
    this.moment = this.playing ? this.moments.length - 1 : Math.max(this.moment - (trace.forgotten - before), 0);
    this.drawSoon();
  }

  drawSoon() {
    this.due ??= requestAnimationFrame(() => {
      this.due = undefined;
      this.draw();
    });
  }

  /** @param {string} id a request's @returns {number | null} what its letter and colour are made of */
  numberOf(id) {
    for (const { trace } of this.panels) for (const [number, name] of trace.names) if (name.id === id) return number;
    return null;
  }

  /** @param {StepTrace[]} traces */
  fill(traces) {
    this.box.replaceChildren();
    this.panels = traces.map(trace => {
      const element = document.createElement("div");
      element.className = "sv-panel";
      this.box.append(element);
      return new StepPanel(element, trace, this);
    });
    this.box.dataset.panels = String(traces.length);
  }

  /** @param {number | null} request the one that stands out, in all panels */
  light(request) {
    if (request === this.hot) return;
    this.hot = request;
    this.draw();
  }

  /** How far a panel is scrolled: all show the same time. @param {StepPanel} panel @param {number} now @param {number} view */
  scrollOf(panel, now, view) {
    const end = Math.max(...this.panels.map(each => each.right(each.trace.frames.length - 1)));
    const here = this.scale ? (this.moments[this.moment] - this.origin) * this.scale : panel.right(now);
    return Math.max(0, Math.min(here - view * 0.6, end - view));
  }

  /* ---------------------------------------------------------------- where it stands */

  draw() {
    if (!this.panels.length) return;
    const time = this.moments[this.moment] ?? -Infinity;
    for (const panel of this.panels) {
      const { frames } = panel.trace;
      let low = 0, high = frames.length; /* the first step that begins later lies between */
      while (low < high) {
        const middle = (low + high) >> 1;
        if (frames[middle].start <= time) low = middle + 1;
        else high = middle;
      }
      panel.draw(this.panels.length > 1 ? Math.max(low - 1, 0) : Math.min(this.moment, frames.length - 1));
    }
    this.slider.max = String(Math.max(this.moments.length - 1, 0));
    this.slider.value = String(this.moment);
    this.slider.setAttribute("aria-valuetext", this.panels.map(panel => `step ${panel.trace.frames[panel.index]?.step ?? 0}`).join(", "));
  }

  /** @param {number} moment @param {{tell?: boolean}} options */
  goTo(moment, { tell = true } = {}) {
    if (this.live) this.follow(moment >= this.moments.length - 1);
    this.moment = Math.max(0, Math.min(moment, this.moments.length - 1));
    this.draw();
    if (tell && !this.playing) this.said.textContent = this.panels.map(panel => panel.words()).join(" ");
  }

  /** @param {number} time */
  goToTime(time) {
    this.pause();
    this.goTo(this.moments.findLastIndex(each => each <= time));
  }

  /** @param {string} what a button or a key asks for */
  act(what) {
    if (what === "play") {
      if (this.playing) this.pause();
      else this.play();
      return;
    }
    const last = this.moments.length - 1;
    const moment = { first: 0, back: this.moment - 1, on: this.moment + 1, last }[what] ?? this.moment;
    this.pause();
    this.goTo(moment);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const own = target.matches("input, select, textarea"); /* they have arrow keys of their own */
    const what = { ArrowLeft: "back", ArrowRight: "on", Home: "first", End: "last" }[event.key];
    if (event.altKey || event.ctrlKey || event.metaKey || own) return;
    if (what) this.act(what);
    else if (event.key === " " && !target.matches("button")) this.act("play");
    else return;
    event.preventDefault();
  }

  play() {
    if (this.live) {
      this.goTo(this.moments.length - 1);
      return;
    }
    if (this.moment >= this.moments.length - 1) this.moment = 0;
    this.playing = true;
    this.icon();
    this.next();
  }

  pause() {
    clearTimeout(this.timer);
    this.playing = false;
    this.icon();
  }

  /** @param {boolean} on whether a live view shows each step as it comes */
  follow(on) {
    this.playing = on;
    this.icon();
  }

  /** Show what comes next when its time has come: a step of usual length takes a third of a second. */
  next() {
    const gaps = this.moments.slice(1).map((time, index) => time - this.moments[index]).sort((a, b) => a - b);
    const usual = gaps[Math.floor(gaps.length / 2)] || 1;
    const gap = (this.moments[this.moment + 1] - this.moments[this.moment]) / usual;
    this.timer = window.setTimeout(() => {
      this.goTo(this.moment + 1);
      if (this.moment < this.moments.length - 1) this.next();
      else this.pause();
    }, Math.max(60, Math.min(330 * gap, 1600)) / Number(this.speed.value));
  }

  icon() {
    const button = /** @type {HTMLElement} */ (this.controls.querySelector("[data-do=play]"));
    const label = this.playing ? "pause" : this.live ? "follow the latest step" : "play";
    button.setAttribute("aria-label", label);
    button.title = label;
    /** @type {Element} */ (button.querySelector("path")).setAttribute("d", this.playing ? ICONS.pause : ICONS.play);
  }
}
