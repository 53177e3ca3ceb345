"use strict";

const LABEL = 58, COLUMN = 22, ROW = 22, AXIS = 20, BARS = 24, EDGE = 1.5;
let seatsPictures = 0;

/** Draws the request in each seat, step after step, and the work that was computed for it. */
class SeatsPicture {
  /** @param {HTMLElement} element @param {StepTrace} trace @param {StepViewer} viewer */
  constructor(element, trace, viewer) {
    this.element = element;
    this.trace = trace;
    this.viewer = viewer;
    this.id = `sv-seats${++seatsPictures}`;
    this.scroll = 0; /* pixels that are scrolled out on the left */
    element.addEventListener("click", event => this.jump(event));
  }

  /** @param {MouseEvent} event */
  jump(event) {
    const x = event.clientX - this.element.getBoundingClientRect().left - LABEL + this.scroll;
    const index = this.trace.frames.findIndex((_, each) => this.right(each) >= x);
    if (x > 0 && index >= 0) this.viewer.goToTime(this.trace.frames[index].start);
  }

  /* A step's place on the axis: by its time, or all steps equally wide. */

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

  /** @param {number} now the step that is shown @param {string} words the picture's text for screen readers */
  draw(now, words) {
    const { frames, header } = this.trace, { width } = this.viewer, view = width - LABEL;
    const bars = this.viewer.scale ? 0 : BARS, top = AXIS + bars;
    const height = top + header.seats * ROW + 24;
    this.scroll = this.viewer.scrollOf(this, now, view);
    let first = now, last = now;
    while (first > 0 && this.right(first - 1) > this.scroll) first--;
    while (last + 1 < frames.length && this.left(last + 1) < this.scroll + view) last++;
    const longest = Math.max(...frames.slice(first, last + 1).map(frame => frame.took));
    const past = new Layer(this.trace, this.viewer.hot), future = new Layer(this.trace, this.viewer.hot);
    for (let index = first; index <= last; index++)
      this.drawStep(index <= now ? past : future, index, now, top, longest);
    const y = seat => top + seat * ROW;
    const lanes = Array.from({ length: header.seats }, (_, seat) =>
      rect("sv-lane", LABEL, y(seat) + EDGE, view, ROW - 2 * EDGE)
      + text("sv-label", 0, y(seat) + 15, `seat ${seat}`));
    const left = this.left(now), band = rect("sv-now", LABEL + left - this.scroll, 0, this.right(now) - left, height);
    this.element.innerHTML = `<svg width="${width}" height="${height}" role="img" aria-label="${escaped(words)}">
      <defs><pattern id="${this.id}p" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="sv-stripe" width="2" height="5"/></pattern>
        <clipPath id="${this.id}c"><rect x="${LABEL}" y="0" width="${view}" height="${height}"/></clipPath></defs>
      ${lanes.join("")}
      ${text("sv-label", 0, y(header.seats) + 16, "waiting")}${text("sv-label", 0, 13, bars ? "step" : "time")}
      ${bars ? text("sv-label", 0, AXIS + 15, timeOf(longest)) : ""}
      <g clip-path="url(#${this.id}c)">${band}${bars ? "" : this.axis(view)}
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

  /**
   * @param {Layer} layer @param {number} index @param {number} now @param {number} top
   * @param {number} longest of the steps in view, in seconds
   */
  drawStep(layer, index, now, top, longest) {
    const frame = this.trace.frames[index];
    const x = LABEL + this.left(index) - this.scroll, width = this.right(index) - this.left(index);
    const middle = x + width / 2, below = top + this.trace.header.seats * ROW;
    const fifth = (index + this.trace.forgotten) % 5 === 0; /* labels longer than a letter are drawn only there */
    const waiting = String(frame.waiting[0]);
    for (const row of frame.running)
      this.drawCell(layer, row, frame, x, width, top + row[1] * ROW, fifth || index === now);
    if (!this.viewer.scale) {
      const missing = index > 0 ? frame.step - this.trace.frames[index - 1].step - 1 : 0;
      const height = BARS * frame.took / longest;
      layer.box("sv-took", null, x + 4, AXIS + BARS - height, width - 8, height);
      if (missing > 0) layer.others.push(`<path class="sv-gap" d="M${px(x)} ${AXIS}V${below}"/>`);
      if (index === now || (fifth && Math.abs(index - now) > 1))
        layer.others.push(text("sv-tick", middle, 13, frame.step, 'text-anchor="middle"'));
    }
    if (frame.waiting[0] && (width > 7 * waiting.length + 2 || (fifth && !this.viewer.scale)))
      layer.letters("sv-tick", null, middle, below + 16, waiting);
    for (const number of frame.preempted ?? []) this.drawLoss(layer, number, index, x, width, top);
    for (const [number] of frame.ended ?? []) this.drawEnd(layer, number, index, x, width, top);
  }

  /** @param {number} number @param {number} index of a frame @returns {number | undefined} the request's seat */
  seatOf(number, index) {
    return this.trace.frames[index]?.running.find(row => row[0] === number)?.[1];
  }

  /**
   * A request has ended. With steps in flight, that is known only when the next step has been launched, without it.
   * @param {Layer} layer @param {number} number @param {number} index @param {number} x @param {number} width
   * @param {number} top
   */
  drawEnd(layer, number, index, x, width, top) {
    const here = this.seatOf(number, index), seat = here ?? this.seatOf(number, index - 1);
    if (seat === undefined) return; /* it had no seat, or the frame before is forgotten */
    const right = here === undefined ? x - EDGE : x + Math.max(width - EDGE, 1);
    layer.box("sv-end", null, right - 3, top + seat * ROW + EDGE, 3, ROW - 2 * EDGE);
  }

  /**
   * A request has lost its seat.
   * @param {Layer} layer @param {number} number @param {number} index @param {number} x @param {number} width
   * @param {number} top
   */
  drawLoss(layer, number, index, x, width, top) {
    const seat = this.seatOf(number, index - 1);
    if (seat === undefined) return; /* the frame before is forgotten */
    const y = top + seat * ROW, taken = this.trace.frames[index].running.some(row => row[1] === seat);
    layer.box("sv-loss", null, x - EDGE - 2, y + EDGE, 3, ROW - 2 * EDGE);
    if (!taken && width > 14) layer.others.push(text("sv-lost", x + 3, y + 15.5, "↩"));
  }

  /**
   * @param {Layer} layer @param {Row} row @param {Frame} frame @param {number} x @param {number} width
   * @param {number} y @param {boolean} marked whether a long name is drawn even if its request decodes
   */
  drawCell(layer, row, frame, x, width, y, marked) {
    const [number, , , kind, start = 0, end = 0, padding = 0] = row;
    const inner = Math.max(width - EDGE, 1), height = ROW - 2 * EDGE;
    const token = kind === "d" ? inner / (1 + start) : inner; /* then come its guesses: first those that came true */
    const own = kind === "p" ? (inner * (end - start)) / (end - start + padding) : kind === "d" ? token * (1 + end) : inner;
    const look = { p: "sv-full sv-prompt", d: "sv-full", i: "sv-idle" }[kind] ?? "sv-held";
    layer.box(look, number, x, y + EDGE, own, height, 3);
    if (own > token) layer.box("sv-guess", number, x + token, y + EDGE, own - token, height, 3);
    if (own < inner - .5) layer.box("sv-idle", number, x + own, y + EDGE, inner - own, height, 3);
    const on = kind === "p" || kind === "d" ? "sv-on" : "sv-off", letter = this.trace.label(number), middle = x + own / 2;
    if (kind === "p" && own > 66) {
      const words = `${letter} ${start}–${end}`;
      layer.others.push(text(`${on} ${this.trace.hue(number)}`, middle, y + 15.5, words, 'text-anchor="middle"'));
    } else if (own > 7 * letter.length && (letter.length === 1 || kind === "p" || marked))
      layer.letters(on, number, middle, y + 15.5, letter);
    if ((frame.found ?? []).some(each => each[0] === number))
      layer.others.push(`<path class="sv-found" d="M${px(x)} ${y + EDGE}h9l-9 9z"/>`);
  }
}
