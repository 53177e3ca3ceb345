/*
 * The viewer draws step traces: which requests wait and which have seats, what each step computed, and which request
 * holds which block of memory. The format is that of `common/observing/frames.py`. Plain JavaScript and SVG, in parts
 * that make one script:
 *
 *   trace      frames as they come, tables as they were    panel     one trace: both pictures, and its requests
 *   shapes     boxes and letters, few elements for many    viewer    panels, and the controls that move them
 *   seats      requests in their seats, step by step       .css      colours and layout, light and dark
 *   memory     requests and their blocks
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
 *   tables?: number[][], kept?: [number[], number[]], disk: [number, number], found?: [number, number][], verified?: [number, number][], preempted?: number[],
 *   ended?: [number, string][], done: number}} Frame
 * @typedef {{id: string, prompt: number, fresh: number, found: number, seen: number}} Named
 * @typedef {{index: number, tables: Map<number, number[]>, kept: Set<number>}} State
 * @typedef {{label: string, hue: string}} Mark a label and a colour's class that a page gives to a request
 */

/** A trace as it is read: frames by their index, and the tables as they were after any of them. */
class StepTrace {
  /**
   * @param {Header} header @param {number} most frames that are remembered; older ones are forgotten
   * @param {Map<string, Mark> | null} marks of requests, by id; null: the page gives none
   */
  constructor(header, most = Infinity, marks = null) {
    if (header.format !== "infer-steps" || header.version !== 1) throw new Error("not a step trace of version 1");
    this.header = header;
    this.most = most;
    this.marks = marks;
    /** @type {Frame[]} */
    this.frames = [];
    /** @type {Map<number, Named>} */
    this.names = new Map();
    this.forgotten = 0;
    /** @type {Set<string>} looks that pictures of these frames have, by their names in the legend */
    this.looks = new Set();
    /** @type {State} */
    this.state = { index: -1, tables: new Map(), kept: new Set() };
  }

  /** Add a frame. Fills in fields that frames have only when they change. @param {any} frame */
  add(frame) {
    const last = this.frames.at(-1);
    if (!last && !frame.key) return;
    frame.waiting ??= frame.key ? [0, []] : last?.waiting;
    frame.memory ??= last?.memory;
    frame.disk ??= frame.key ? [0, 0] : last?.disk;
    frame.done = (last?.done ?? 0) + (frame.ended?.length ?? 0);
    const index = this.forgotten + this.frames.length;
    for (const [number, id, prompt, fresh] of frame.requests ?? [])
      if (!this.names.has(number)) this.names.set(number, { id, prompt, fresh, found: 0, seen: index });
    for (const [number, tokens] of frame.found ?? []) this.name(number).found = tokens;
    for (const number of [...frame.running.map(row => row[0]), ...frame.waiting[1]]) this.name(number).seen = index;
    for (const [number, right] of frame.verified ?? []) {
      const row = last?.running.find(each => each[0] === number);
      if (row) row[5] = right;
    }
    this.look(frame, last);
    this.frames.push(frame);
    if (this.frames.length > this.most) this.forget();
  }

  /** Note the looks that a frame brings. @param {Frame} frame @param {Frame | undefined} last the frame before */
  look(frame, last) {
    for (const [, , , kind, guesses, , padding] of frame.running) {
      if (kind === "d" && guesses) this.looks.add("guess").add("idle");
      this.looks.add({ p: "prompt", d: "token", i: "idle" }[kind] ?? "held");
      if (padding) this.looks.add("idle");
    }
    if (frame.ended?.length) this.looks.add("end");
    if (frame.found?.length) this.looks.add("found");
    if (frame.kept?.[0].length) this.looks.add("kept");
    if (frame.disk[0]) this.looks.add("disk");
    if (frame.preempted?.length) this.looks.add("lost");
    if (last && frame.step > last.step + 1) this.looks.add("gap");
  }

  /** Forget the oldest frames, up to the next key frame. */
  forget() {
    const key = this.frames.findIndex((frame, index) => index > 0 && frame.key);
    if (key < 0) return;
    this.frames.splice(0, key);
    this.forgotten += key;
    this.state.index = -1;
    for (const [number, { id, seen }] of this.names)
      if (seen < this.forgotten) {
        this.names.delete(number);
        this.marks?.delete(id);
      }
  }

  /** @param {number} number @returns {Named} */
  name(number) {
    return this.names.get(number) ?? { id: "?", prompt: 0, fresh: 0, found: 0, seen: 0 };
  }

  /** @param {number} number @returns {string} a request's letter: a small one if others have marks, and it has none */
  label(number) {
    if (!this.marks) return letterOf(number);
    return this.marks.get(this.name(number).id)?.label ?? letterOf(number).toLowerCase();
  }

  /** @param {number} number @returns {string} the class of a request's colour */
  hue(number) {
    return this.marks?.get(this.name(number).id)?.hue ?? hueOf(number);
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
