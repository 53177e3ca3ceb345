"use strict";

/** One trace, drawn. */
class StepPanel {
  /** @param {HTMLElement} element @param {StepTrace} trace @param {StepViewer} viewer */
  constructor(element, trace, viewer) {
    this.element = element;
    this.trace = trace;
    this.viewer = viewer;
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
    this.seats = new SeatsPicture(part(".sv-time"), trace, viewer);
    this.memory = new MemoryPicture(part(".sv-memory"), part(".sv-memory-head"), trace, viewer);
    this.chipBox = part(".sv-chips");
    this.about = part(".sv-about");
    element.addEventListener("pointerover", event => this.light(this.requestOf(event.target)));
    element.addEventListener("pointerleave", () => this.light(null));
    element.addEventListener("focusin", event => this.light(this.requestOf(event.target)));
    element.addEventListener("focusout", () => this.light(null));
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

  /** In pixels, the same for all panels of a viewer; a guess while they are hidden. */
  get width() {
    return this.element.clientWidth || 320;
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
    const counts = `${frame.running.length} running, ${frame.waiting[0]} waiting`;
    this.head.textContent = `step ${frame.step}, ${timeOf(frame.took)} · ${counts} · ${frame.done}${all} done`;
    this.memory.draw(frame, state);
    this.seats.draw(index, this.words());
    this.drawChips(frame, state);
    this.about.innerHTML = this.describeHot(frame, state);
  }

  /** The sentence for a screen reader. */
  words() {
    if (this.index < 0) return "no step yet";
    const frame = this.trace.frames[this.index];
    const work = frame.running.map(row => `${this.trace.label(row[0])}: ${workOf(row, this.trace.name(row[0]))}`);
    const waiting = frame.waiting[1].map(number => this.trace.label(number)).join(", ") || "nobody";
    return `Phase ${this.trace.header.phase[0]}, step ${frame.step}. ${work.join("; ") || "nothing runs"}. `
      + `Waiting: ${waiting}. ${this.memory.heading.textContent}.`;
  }

  /* ---------------------------------------------------------------- requests */

  /** @param {Frame} frame @param {State} state */
  drawChips(frame, state) {
    const rows = [...frame.running].sort((a, b) => a[1] - b[1]);
    const shown = new Set([...rows.map(row => row[0]), ...frame.waiting[1]]);
    for (const [number, chip] of this.chips)
      if (!shown.has(number)) {
        if (document.activeElement === chip) this.viewer.element.focus(); /* otherwise its key presses would be lost */
        chip.remove();
        this.chips.delete(number);
      }
    for (const row of rows) {
      const name = this.trace.name(row[0]);
      const heard = this.viewer.heard.get(name.id);
      this.chip(row[0], heard ? `…${heard}` : workOf(row, name), Math.min(row[2] / (name.prompt + name.fresh), 1));
    }
    for (const number of frame.waiting[1]) this.chip(number, "waits", 0);
    [...shown].forEach((number, place) => {
      const chip = /** @type {HTMLButtonElement} */ (this.chips.get(number));
      if (this.chipBox.children[place] !== chip) this.chipBox.insertBefore(chip, this.chipBox.children[place] ?? null);
    });
    this.chipBox.toggleAttribute("data-more", frame.waiting[0] > frame.waiting[1].length);
  }

  /** @param {number} number @param {string} words @param {number} share of its longest possible length */
  chip(number, words, share) {
    let chip = this.chips.get(number);
    if (!chip) {
      chip = document.createElement("button");
      chip.type = "button";
      chip.dataset.r = String(number);
      for (const tag of ["b", "span", "i"]) chip.append(document.createElement(tag));
      this.chips.set(number, chip);
    }
    chip.className = `sv-chip ${this.trace.hue(number)}`; /* the page may mark a request after its chip was made */
    chip.children[0].textContent = this.trace.label(number);
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
    return `<b>${escaped(this.trace.label(this.hot))}</b> <code>${escaped(name.id)}</code>: ${now}${held}; a prompt of `
      + `${counted(name.prompt, "token")}, up to ${name.fresh} new${found}`;
  }
}
