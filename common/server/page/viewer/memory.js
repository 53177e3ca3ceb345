"use strict";

/** @typedef {[x: number, y: number, width: number, height: number, round: number]} Place */

const MOST_IN_PLACE = 200; /* blocks: up to this number, all are drawn in their places; of more, only those in use */
const MOST_DRAWN = 512; /* blocks; more would be too small to see */
const BAR = 14; /* height of the bar, in pixels */
let memoryPictures = 0;

/** Draws the blocks of memory, each with the requests that hold it. */
class MemoryPicture {
  /** @param {HTMLElement} element @param {HTMLElement} heading @param {StepTrace} trace @param {StepViewer} viewer */
  constructor(element, heading, trace, viewer) {
    this.element = element;
    this.heading = heading;
    this.trace = trace;
    this.viewer = viewer;
    this.id = `sv-memory${++memoryPictures}`;
    this.summary = ""; /* blocks in use, in a few words */
  }

  /** @param {Frame} frame @param {State} state */
  draw(frame, state) {
    const [blocks, size] = frame.memory;
    /** @type {Map<number, [number, number][]>} by block: its requests, and the share of it that each has filled */
    const owners = new Map();
    for (const [number, , columns] of frame.running)
      (state.tables.get(number) ?? []).forEach((block, place) => {
        const used = Math.min(Math.max(columns - place * size, 0), size) / size;
        owners.set(block, [...(owners.get(block) ?? []), [number, used]]);
      });
    const slots = blocks <= this.trace.header.seats, word = slots ? "slots" : "blocks";
    const shared = [...owners.values()].filter(each => each.length > 1).length, kept = state.kept.size;
    this.summary = `${owners.size} of ${blocks} ${word}`;
    const words = [`memory: ${this.summary} of ${size} tokens in use`];
    if (shared) words.push(`${shared} shared`);
    if (kept) words.push(`${kept} kept for later prompts`);
    const [stored, places] = frame.disk;
    if (places) words.push(`${stored} of ${places} on disk`);
    this.heading.textContent = blocks ? words.join(", ") : "memory: none is taken";
    const all = blocks <= MOST_IN_PLACE, held = [...owners.keys()].sort((a, b) => a - b);
    const drawn = all ? Array.from({ length: blocks }, (_, block) => block) : held.slice(0, MOST_DRAWN);
    if (drawn.length < held.length) this.heading.textContent += `; the first ${drawn.length} drawn here`;
    const { width } = this.viewer, area = width * 130;
    const side = Math.max(8, Math.min(24, Math.floor(Math.sqrt(area / Math.max(drawn.length, 1)))));
    const most = Math.max(1, Math.floor(width / side)); /* blocks in a row */
    const rows = slots ? drawn.length : Math.ceil(drawn.length / most);
    const per = all ? Math.max(1, Math.ceil(drawn.length / rows)) : most; /* no row that is nearly empty */
    const w = all ? width / per : side, h = slots ? 16 : Math.min(side, 22);
    const gap = side > 10 ? 1 : 0.5, round = side > 10 ? 2.5 : 0;
    const layer = new Layer(this.trace, this.viewer.hot);
    drawn.forEach((block, place) => {
      const x = (place % per) * w + gap, y = Math.floor(place / per) * h + gap;
      const owned = owners.get(block);
      if (owned) this.drawBlock(layer, owned, [x, y, w - 2 * gap, h - 2 * gap, round]);
      else layer.box(state.kept.has(block) ? "sv-kept" : "sv-free", null, x, y, w - 2 * gap, h - 2 * gap, round);
    });
    let below = rows * h;
    /** @param {[look: string, count: number][]} parts */
    const bar = parts => {
      this.drawBar(layer, below + 4, parts);
      below += 4 + BAR;
    };
    if (!all) bar([["sv-in-use", held.length], ["sv-kept", kept], ["sv-free", blocks - held.length - kept]]);
    if (places) bar([["sv-disk", stored], ["sv-free", places - stored]]);
    this.element.innerHTML = `<svg width="${width}" height="${Math.max(below, 1)}" role="img"
      aria-label="${escaped(this.heading.textContent)}" style="--sv-dots: url(#${this.id})">
      <defs><pattern id="${this.id}" width="6" height="6" patternUnits="userSpaceOnUse">
        <circle class="sv-dot" cx="3" cy="3" r="1.3"/></pattern></defs>${layer.svg("")}</svg>`;
  }

  /**
   * Blocks as one bar: those of memory in use, kept, free; or those on disk, and free places.
   * @param {Layer} layer @param {number} y @param {[look: string, count: number][]} parts
   */
  drawBar(layer, y, parts) {
    const all = parts.reduce((sum, [, count]) => sum + count, 0), { width } = this.viewer;
    let x = 0;
    for (const [look, count] of parts) {
      const length = count / all * width;
      if (count) layer.box(look, null, x + 0.5, y + 0.5, Math.max(length - 1, 1), BAR - 1);
      x += length;
    }
  }

  /**
   * A block, with a band for each request that holds it.
   * @param {Layer} layer @param {[number, number][]} held @param {Place} place
   */
  drawBlock(layer, held, [x, y, width, height, round]) {
    const bands = held.slice(0, 4), band = height / bands.length;
    bands.forEach(([number, used], place) => {
      layer.box("sv-held", number, x, y + place * band, width, band, round);
      layer.box("sv-full", number, x, y + place * band, width * used, band, round);
    });
    const [number, used] = held[0], shared = held.length > 1;
    const words = shared ? `×${held.length}` : this.trace.label(number);
    if (height < 10 || width < 7 * words.length) return;
    const wide = width > 60, on = used * width > (wide ? 20 : width * 0.75) ? "sv-on" : "sv-off";
    const middle = wide ? x + 10 : x + width / 2;
    layer.letters(shared ? "sv-share" : on, shared ? null : number, middle, y + height / 2 + 4, words);
  }
}
