"use strict";

const ICONS = {
  first: "M4 4h2v12H4zM16 4v12L7 10z",
  back: "M13 4v12L5 10z",
  play: "M6 3.5v13l11-6.5z",
  pause: "M5 4h3.5v12H5zM11.5 4H15v12h-3.5z",
  on: "M7 4v12l8-6z",
  last: "M14 4h2v12h-2zM4 4v12l9-6z",
};

/* The words for each look that a picture may have. Only looks that have been drawn are explained. */
const LEGEND = {
  prompt: "prompt tokens",
  token: "one new token",
  guess: "a token that was guessed",
  held: "has memory, but no work in this step",
  idle: "computed for nobody: padding, a wrong guess, or a request that has ended",
  end: "the request ends",
  found: "prompt found in memory, so not computed again",
  kept: "kept: no request has this block, a later prompt may begin with its tokens",
  disk: "on disk: this block is in the file below the memory, a later prompt may read it",
  lost: "preempted: memory ran out, or its client held more seats than its share. It starts again later",
  gap: "steps left out",
};

const REMEMBERED = 3000; /* frames of a live view */

/** Panels with one row of controls. */
class StepViewer {
  /** @param {HTMLElement} element @param {{live?: boolean}} options */
  constructor(element, { live = false } = {}) {
    this.live = live;
    this.element = element;
    /** @type {StepPanel[]} */
    this.panels = [];
    /** @type {number[]} times at which a step of any panel begins */
    this.moments = [];
    this.moment = 0;
    this.scale = 0; /* pixels a second; 0: all steps are equally wide */
    this.origin = 0;
    this.usual = 1; /* between two moments, in seconds */
    this.width = 0; /* of each panel's pictures, in pixels */
    this.playing = live;
    this.timer = 0;
    /** @type {number | undefined} */
    this.due = undefined;
    /** @type {number | null} */
    this.hot = null;
    /** @type {Map<string, string>} last words of requests, by id */
    this.heard = new Map();
    /** @type {Map<string, Mark>} labels and colours that the page has given to requests, by id */
    this.marks = new Map();
    element.classList.add("steps-viewer");
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "steps");
    element.tabIndex = -1;
    const button = (name, label) => `<button type="button" data-do="${name}" aria-label="${label}" title="${label}">
      <svg viewBox="0 0 20 20" aria-hidden="true"><path d="${ICONS[name]}"/></svg></button>`;
    element.innerHTML = `
      <div class="sv-controls">
        ${button("first", "to the first step")}${button("back", "a step back")}
        ${button("play", "play")}${button("on", "a step on")}
        ${button("last", live ? "to the latest step" : "to the last step")}
        <input class="sv-range" type="range" min="0" max="0" value="0" aria-label="step">
        <label class="sv-speed"${live ? " hidden" : ""}>speed <select>${[0.5, 1, 2, 4].map(each =>
          `<option value="${each}"${each === 1 ? " selected" : ""}>${each}×</option>`).join("")}</select></label>
      </div>
      <div class="sv-panels"></div>
      <div class="sv-legend" role="list" aria-label="legend">${Object.entries(LEGEND).map(([name, words]) =>
        `<span role="listitem" data-look="${name}" hidden><i class="sv-k-${name}"></i>${words}</span>`).join("")}</div>
      <p class="sv-said" role="status"></p>`;
    this.controls = /** @type {HTMLElement} */ (element.querySelector(".sv-controls"));
    this.slider = /** @type {HTMLInputElement} */ (element.querySelector("input"));
    this.speed = /** @type {HTMLSelectElement} */ (element.querySelector("select"));
    this.box = /** @type {HTMLElement} */ (element.querySelector(".sv-panels"));
    this.legend = /** @type {HTMLElement} */ (element.querySelector(".sv-legend"));
    this.said = /** @type {HTMLElement} */ (element.querySelector(".sv-said"));
    this.controls.addEventListener("click", event => {
      const found = /** @type {Element} */ (event.target).closest("[data-do]");
      if (found) this.act(/** @type {HTMLElement} */ (found).dataset.do ?? "");
    });
    this.slider.addEventListener("input", () => this.goTo(Number(this.slider.value)));
    element.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => { /* the pictures take their width from it, and it takes its height from them */
      if (this.panels.length && this.panels[0].width !== this.width) this.drawSoon();
    }).observe(this.box);
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
    const gaps = this.moments.slice(1).map((time, index) => time - this.moments[index]).sort((a, b) => a - b);
    this.usual = gaps[Math.floor(gaps.length / 2)] || 1;
    this.pause();
    this.fill(read);
    this.goTo(Math.min(this.moment, this.moments.length - 1), { tell: false });
  }

  /** Show an engine that runs. @param {Header} header */
  begin(header) {
    this.moments = [];
    this.fill([new StepTrace(header, REMEMBERED, this.marks)]);
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

  /** Give a request a label and a colour, from its next drawing on. @param {string} id @param {Mark} mark */
  mark(id, mark) {
    this.marks.set(id, mark);
    this.drawSoon();
  }

  /** Show the end of a request's text in its chip. @param {string} id @param {string} text empty: it has ended */
  hear(id, text) {
    if (text) this.heard.set(id, text.slice(-26));
    else this.heard.delete(id);
  }

  drawSoon() {
    this.due ??= requestAnimationFrame(() => {
      this.due = undefined;
      this.draw();
    });
  }

  /** @param {string} id a request's @returns {number | null} its number in the frames, if they have named it */
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

  /**
   * How far seats are scrolled: all show the same time.
   * @param {SeatsPicture} picture @param {number} now @param {number} view
   */
  scrollOf(picture, now, view) {
    const end = Math.max(...this.panels.map(({ seats, trace }) => seats.right(trace.frames.length - 1)));
    const here = this.scale ? (this.moments[this.moment] - this.origin) * this.scale : picture.right(now);
    return Math.max(0, Math.min(here - view * 0.6, end - view));
  }

  /* ---------------------------------------------------------------- the step that is shown */

  draw() {
    if (!this.panels.length) return;
    const time = this.moments[this.moment] ?? -Infinity;
    this.width = this.panels[0].width; /* read before anything is written, or the browser lays out the page twice */
    for (const each of this.legend.children)
      /** @type {HTMLElement} */ (each).hidden = !this.panels.some(({ trace }) => trace.looks.has(each.getAttribute("data-look") ?? ""));
    for (const panel of this.panels) {
      const { frames } = panel.trace;
      let low = 0, high = frames.length; /* binary search for the first step that begins later */
      while (low < high) {
        const middle = (low + high) >> 1;
        if (frames[middle].start <= time) low = middle + 1;
        else high = middle;
      }
      panel.draw(this.panels.length > 1 ? Math.max(low - 1, 0) : Math.min(this.moment, frames.length - 1));
    }
    this.slider.max = String(Math.max(this.moments.length - 1, 0));
    this.slider.value = String(this.moment);
    const steps = this.panels.map(panel => `step ${panel.trace.frames[panel.index]?.step ?? 0}`);
    this.slider.setAttribute("aria-valuetext", steps.join(", "));
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
    const gap = (this.moments[this.moment + 1] - this.moments[this.moment]) / this.usual;
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
