/* The stepper's controls: two phases beside each other, the same arrivals, sliders for what they are given. */
"use strict";

/** @type {Record<string, {header: any, frames: any[]}>} filled by the files in `steps` */
globalThis.stepTraces ??= {};

(() => {
  const here = /** @type {HTMLScriptElement} */ (document.currentScript).src;
  /** @type {Map<string, Promise<void>>} */
  const loads = new Map();

  /** @param {string} name @returns {Promise<any>} the trace of a setting, loaded when it is first asked for */
  async function traceOf(name) {
    if (!loads.has(name))
      loads.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = new URL(`steps/${name}.js`, here).href;
        script.onload = () => resolve();
        script.onerror = reject;
        document.head.append(script);
      }));
    await loads.get(name);
    return globalThis.stepTraces[name];
  }

  /** @param {any[]} traces @returns {string} when each phase is done, the quicker one first */
  function score(traces) {
    const began = Math.min(...traces.map(({ frames }) => frames[0].start));
    const done = traces.map(({ header, frames }) => {
      const last = frames.at(-1);
      return { phase: header.phase[0], ms: Math.round((last.start + last.took - began) * 1000) };
    }).sort((a, b) => a.ms - b.ms);
    return `All requests are done ${done.map(({ phase, ms }) => `in phase ${phase} at ${ms} ms`).join(", ")}.`;
  }

  /** @param {HTMLElement} element */
  function start(element) {
    const { choices, opened } = JSON.parse(element.querySelector("script")?.textContent ?? "");
    const number = ++started;
    const option = (value, words, chosen) => `<option value="${value}"${chosen ? " selected" : ""}>${words}</option>`;
    const phases = side => {
      const options = Object.entries(choices.phases).map(([phase, title]) =>
        option(phase, `${phase}: ${title.toLowerCase()}`, phase === String(opened[side])));
      return `<select name="${side}" aria-label="phase, ${side}">${options.join("")}</select>`;
    };
    const stories = Object.entries(choices.stories).map(([name, title]) => option(name, title, name === opened.story));
    const slider = (name, label, values, unit) => `<div class="stepper-slider">
      <label for="stepper${number}${name}">${label} <output></output></label>
      <input id="stepper${number}${name}" name="${name}" class="sv-range" type="range" min="0" max="${values.length - 1}"
        data-unit="${unit}" value="${Math.max(values.indexOf(opened[name]), 0)}"></div>`;
    const blocks = ` blocks of ${choices.block_size} tokens`;
    element.innerHTML = `<form class="stepper-settings">
        <div class="stepper-choice">${phases("left")} <span>against</span> ${phases("right")}
          <label for="stepper${number}story">requests:</label>
          <select id="stepper${number}story" name="story">${stories.join("")}</select></div>
        ${slider("seats", "seats", choices.seats, "")}
        ${slider("blocks", "memory, from phase 6 on", choices.blocks, blocks)}
        ${slider("chunk", "chunks, from phase 7 on", choices.chunks, " tokens a step")}
      </form><div></div>
      <p class="stepper-score"><span role="status"></span> <a>Link to these settings</a></p>`;
    const form = /** @type {HTMLFormElement} */ (element.firstElementChild);
    /** @type {any} */
    const viewer = new StepViewer(/** @type {HTMLElement} */ (form.nextElementSibling));
    const [said, link] = /** @type {[Element, HTMLAnchorElement]} */ ([...element.querySelectorAll(".stepper-score > *")]);
    const values = { seats: choices.seats, blocks: choices.blocks, chunk: choices.chunks };

    /** Choose the settings that the address names, as the link below the viewer writes them. */
    function choose() {
      for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
        const field = /** @type {any} */ (form.elements.namedItem(name));
        const known = values[name]?.map(String) ?? [...field?.options ?? []].map(each => each.value);
        if (known.includes(value)) field.value = name in values ? known.indexOf(value) : value;
      }
    }

    async function show() {
      /** @type {Record<string, any>} */
      const chosen = Object.fromEntries(new FormData(form));
      for (const name of Object.keys(values)) {
        const input = /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
        const value = values[name][Number(input.value)];
        chosen[name] = value;
        const output = /** @type {Element} */ (input.parentElement?.querySelector("output"));
        output.textContent = `${value}${input.dataset.unit}`;
        input.setAttribute("aria-valuetext", output.textContent);
      }
      link.href = `#${new URLSearchParams(chosen)}`;
      const keys = [chosen.left, chosen.right], numbers = keys.map(key => parseInt(key)); /* "5-yours": a learner's */
      for (const [name, from] of [["blocks", choices.blocks_from], ["chunk", choices.chunks_from]])
        /** @type {HTMLInputElement} */ (form.elements.namedItem(name)).disabled = numbers.every(each => each < from);
      const names = keys.map((key, side) => {
        const phase = numbers[side];
        const blocks = phase >= choices.blocks_from ? [`b${chosen.blocks}`] : [];
        const chunk = phase >= choices.chunks_from ? [`c${chosen.chunk}`] : [];
        return [`p${key}`, `s${chosen.seats}`, ...blocks, ...chunk, chosen.story].join("-");
      });
      const wanted = names.join();
      element.dataset.wanted = wanted;
      const traces = await Promise.all([...new Set(names)].map(traceOf));
      if (element.dataset.wanted !== wanted) return; /* another choice was quicker */
      viewer.show(traces, { byTime: true });
      said.textContent = score(traces);
    }
    form.addEventListener("input", () => {
      show();
      history.replaceState(null, "", link.href);
    });
    addEventListener("hashchange", () => {
      choose();
      show();
    });
    form.addEventListener("submit", event => event.preventDefault());
    choose();
    if (location.hash.startsWith("#left=")) element.scrollIntoView();
    show();
  }

  let started = 0;
  document.querySelectorAll(".stepper").forEach(each => start(/** @type {HTMLElement} */ (each)));
})();
