"use strict";

/** @typedef {[x: number, y: number, width: number, height: number, round: number]} Place */

const MOST_BLOCKS = 4096;
let memoryPictures = 0;

/** Who has which block. */
class MemoryPicture {
  /** @param {HTMLElement} element @param {HTMLElement} heading @param {StepTrace} trace @param {StepViewer} viewer */
  constructor(element, heading, trace, viewer) {
    this.element = element;
    this.heading = heading;
    this.trace = trace;
    this.viewer = viewer;
    this.id = `sv-memory${++memoryPictures}`;
  }

  /** @param {Frame} frame @param {State} state */
  draw(frame, state) {
    const [blocks, size] = frame.memory, shown = Math.min(blocks, MOST_BLOCKS);
    /** @type {Map<number, [number, number][]>} who has a block, and how many columns of it */
    const owners = new Map();
    for (const [number, , columns] of frame.running)
      (state.tables.get(number) ?? []).forEach((block, place) => {
        const used = Math.min(Math.max(columns - place * size, 0), size) / size;
        owners.set(block, [...(owners.get(block) ?? []), [number, used]]);
      });
    const slots = blocks <= this.trace.header.seats, word = slots ? "slots" : "blocks";
    const shared = [...owners.values()].filter(each => each.length > 1).length, kept = state.kept.size;
    const words = [`memory: ${owners.size} of ${blocks} ${word} of ${size} tokens in use`];
    if (shared) words.push(`${shared} shared`);
    if (kept) words.push(`${kept} kept for requests to come`);
    if (shown < blocks) words.push(`the first ${shown} drawn here`);
    this.heading.textContent = blocks ? words.join(", ") : "memory: none is taken";
    const { width } = this.viewer, area = width * (shown > 500 ? 230 : 130);
    const side = Math.max(5, Math.min(24, Math.floor(Math.sqrt(area / Math.max(shown, 1)))));
    const rows = slots ? shown : Math.ceil(shown / Math.max(1, Math.floor(width / side)));
    const per = Math.max(1, Math.ceil(shown / rows)); /* no row that is nearly empty */
    const w = width / per, h = slots ? 16 : Math.min(side, 22);
    const gap = side > 10 ? 1 : 0.5, round = side > 10 ? 2.5 : 0;
    const layer = new Layer(this.viewer.hot);
    let before = -1;
    for (let block = 0; block < shown; block++) {
      const x = (block % per) * w + gap, y = Math.floor(block / per) * h + gap;
      /** @type {Place} */
      const place = [x, y, w - 2 * gap, h - 2 * gap, round];
      const held = owners.get(block);
      const again = shown > 200 && block % per > 0 && held?.[0][0] === before; /* the letter stands before it */
      if (held) this.drawBlock(layer, held, place, again);
      else layer.box(state.kept.has(block) ? "sv-kept" : "sv-free", null, ...place);
      before = held?.length === 1 ? held[0][0] : -1;
    }
    this.element.innerHTML = `<svg width="${width}" height="${Math.max(rows * h, 1)}" role="img"
      aria-label="${escaped(this.heading.textContent)}" style="--sv-dots: url(#${this.id})">
      <defs><pattern id="${this.id}" width="6" height="6" patternUnits="userSpaceOnUse">
        <circle class="sv-dot" cx="3" cy="3" r="1.3"/></pattern></defs>${layer.svg("")}</svg>`;
  }

  /**
   * A block, with a band for each who has it.
   * @param {Layer} layer @param {[number, number][]} held @param {Place} place @param {boolean} again
   */
  drawBlock(layer, held, [x, y, width, height, round], again) {
    const bands = held.slice(0, 4), band = height / bands.length;
    bands.forEach(([number, used], place) => {
      layer.box("sv-held", number, x, y + place * band, width, band, round);
      layer.box("sv-full", number, x, y + place * band, width * used, band, round);
    });
    const [number, used] = held[0], shared = held.length > 1;
    const words = shared ? `×${held.length}` : letterOf(number);
    if (again || height < 10 || width < 7 * words.length) return;
    const wide = width > 60, on = used * width > (wide ? 20 : width * 0.75) ? "sv-on" : "sv-off";
    const middle = wide ? x + 10 : x + width / 2;
    layer.letters(shared ? "sv-share" : on, shared ? null : number, middle, y + height / 2 + 4, words);
  }
}
