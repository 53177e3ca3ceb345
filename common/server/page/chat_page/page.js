"use strict";

(() => {
  const { mode, live, starters, atOnce, model } = /** @type {Record<string, string>} */ (document.body.dataset);
  const CHATS = mode === "chat";
  const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
  const MOST_SEATS = 16; /* that the strip of a narrow page shows */

  const conversations = new Conversations();
  const settings = conversations.restore();
  for (const [name, value] of Object.entries(settings)) element(name).value = value;
  const viewer = live === "on" ? new StepViewer(element("steps"), { live: true }) : null;
  const transcript = new Transcript(element("turns"), CHATS, act);
  const sender = new Sender({ chats: CHATS, model, viewer, changed: drawSoon });
  const [list, prompt] = [element("list"), element("prompt")];
  /** @type {Map<Conversation, HTMLElement>} */
  const entries = new Map();
  const leaving = new AbortController();
  let due = 0, saving = 0, isKept = true;
  /** @type {Conversation[]} the latest that were deleted, to undo it */
  let deleted = [];
  /** @type {{turn: Turn, draft: string} | null} the message that is being edited, and what stood in the form before */
  let edited = null;

  const isOpen = chat => chat.isOpen;
  /** Conversations that the button has started, as it leaves them. */
  const isStarted = chat => chat.started;

  /* ------------------------------------------------------------------ drawing */

  function drawSoon() {
    due ||= requestAnimationFrame(() => {
      due = 0;
      draw();
    });
    saving ||= window.setTimeout(() => {
      saving = 0;
      save();
    }, 400);
  }

  function save() {
    isKept = conversations.save(Object.fromEntries(["system", ...SAMPLING].map(name => [name, element(name).value])));
    drawNotice();
  }

  /** Say what was deleted, or that nothing more is stored. */
  function drawNotice() {
    const [words, undo] = element("notice").children;
    element("notice").hidden = isKept && !deleted.length;
    write(words, deleted.length ? WORDS.deleted(deleted.length) : WORDS.unkept);
    write(undo, WORDS.undo);
    undo.hidden = !deleted.length;
  }

  function draw() {
    const { shown, all } = conversations, open = all.filter(isOpen), turn = shown.turns.at(-1);
    drawList();
    transcript.draw(shown);
    write(element("badge"), shown.label);
    element("badge").className = `badge ${shown.hue}`;
    write(element("title"), shown.title);
    element("send").hidden = shown.isOpen;
    element("stop").hidden = !shown.isOpen;
    write(element("stop"), all.some(each => each !== shown && each.isOpen && each.connection === shown.connection) ? WORDS.stopAll : WORDS.stop);
    element("load").hidden = open.some(isStarted);
    element("stop-all").hidden = !open.some(isStarted) && open.length < 2;
    element("clear").hidden = all.length < 2 || open.length > 0;
    element("delete").hidden = all.length < 2 && !shown.turns.length;
    element("export").hidden = !shown.turns.length;
    element("editing").hidden = !edited;
    drawNotice();
    write(element("status"), !turn ? "" : !turn.isOpen ? turn.end : turn.tokens ? WORDS.writing : WORDS.waiting);
    write(element("pace"), turn?.isOpen && turn.tokens ? `: ${WORDS.pace(turn)}` : "");
    drawStrip();
  }

  function drawList() {
    for (const [chat, entry] of entries)
      if (!conversations.all.includes(chat)) {
        entry.remove();
        entries.delete(chat);
      }
    conversations.all.forEach((chat, place) => {
      const entry = entries.get(chat) ?? newEntry(chat), button = /** @type {any} */ (entry.firstElementChild);
      if (list.children[place] !== entry) list.insertBefore(entry, list.children[place] ?? null);
      button.setAttribute("aria-current", String(chat === conversations.shown));
      button.classList.toggle("open", chat.isOpen);
      write(button.children[1], chat.title);
      write(button.children[2], stateOf(chat));
    });
  }

  /** Create a conversation's entry in the list. @param {Conversation} chat */
  function newEntry(chat) {
    const button = make("button", "", make("b", `badge ${chat.hue}`, chat.label), make("span", "name"), make("span", "state"));
    button.setAttribute("type", "button");
    button.addEventListener("click", () => show(chat));
    button.addEventListener("pointerenter", () => viewer?.light(viewer.numberOf(chat.request)));
    button.addEventListener("pointerleave", () => viewer?.light(null));
    const entry = make("li", "", button);
    entries.set(chat, entry);
    return entry;
  }

  /** @param {Conversation} chat @returns {string} the end of the open answer, or the last answer's figures */
  function stateOf(chat) {
    const turn = chat.turns.at(-1);
    if (!turn) return WORDS.unsaid;
    if (turn.isOpen) return turn.tokens ? `…${(turn.text || turn.reasoning).slice(-32)}` : WORDS.waiting;
    return turn.tokens ? WORDS.pace(turn) : turn.end;
  }

  /** Draw the requests in their seats, for a narrow page, where picture and chat are not beside each other. */
  function drawStrip() {
    const strip = element("strip"), panel = viewer?.panels[0], frame = panel?.trace.frames.at(-1);
    strip.hidden = !frame;
    if (!panel || !frame) return;
    const { trace } = panel, seats = [];
    for (let seat = 0; seat < Math.min(trace.header.seats, MOST_SEATS); seat++) {
      const number = frame.running.find(row => row[1] === seat)?.[0];
      seats.push(number === undefined ? make("b", "badge free", "0") : make("b", `badge ${trace.hue(number)}`, trace.label(number)));
    }
    for (const each of seats) each.setAttribute("aria-hidden", "true");
    strip.replaceChildren(make("span", "unseen", WORDS.stripLabel), ...seats, WORDS.strip(frame.waiting[0], panel.memory.summary));
  }

  /* ------------------------------------------------------------------ conversations */

  /** @param {Conversation} chat */
  function show(chat) {
    stopEditing();
    conversations.shown.draft = prompt.value;
    conversations.shown = chat;
    prompt.value = chat.draft;
    chat.draft = "";
    drawSoon();
  }

  /** @param {string} what a button of a turn asks for @param {Turn} turn */
  function act(what, turn) {
    const chat = conversations.shown;
    if (what === "again") {
      cut(chat, turn);
      send([chat], [turn.asked]);
    } else {
      edited = { turn, draft: edited?.draft ?? prompt.value };
      prompt.value = turn.asked;
      prompt.focus();
      drawSoon();
    }
  }

  /** Remove a turn and what follows it. @param {Conversation} chat @param {Turn} turn */
  function cut(chat, turn) {
    const place = chat.turns.indexOf(turn);
    if (place >= 0) chat.turns.splice(place);
  }

  function stopEditing() {
    if (!edited) return;
    prompt.value = edited.draft;
    edited = null;
    drawSoon();
  }

  /** @param {Conversation[]} several @param {string[]} questions one for each */
  async function send(several, questions) {
    deleted = [];
    const sampling = Object.fromEntries(SAMPLING.filter(name => element(name).value !== "")
      .map(name => [name, Number(element(name).value)]));
    await sender.send(several, questions, sampling, element("system").value.trim());
    if (several.includes(conversations.shown) && !prompt.value) {
      prompt.value = conversations.shown.draft;
      conversations.shown.draft = "";
    }
  }

  /** Start several conversations at once, more than there are seats if the server has few. */
  function startSeveral() {
    if (!SAMPLING.every(name => element(name).reportValidity())) return;
    conversations.remove(conversations.all.filter(isStarted));
    const questions = STARTERS[starters].slice(0, Number(atOnce));
    const several = questions.map(() => {
      const chat = conversations.all.find(each => !each.started && !each.turns.length) ?? conversations.add();
      return Object.assign(chat, { started: true });
    });
    send(several, questions);
    show(several[0]);
  }

  function stop() {
    conversations.shown.connection?.abort();
    prompt.focus();
  }

  element("compose").addEventListener("submit", event => {
    event.preventDefault();
    const chat = conversations.shown;
    if (chat.isOpen) {
      write(element("status"), WORDS.unread);
      return;
    }
    const asked = prompt.value;
    prompt.value = "";
    if (edited) {
      cut(chat, edited.turn);
      stopEditing();
    }
    chat.started = false;
    send([chat], [asked]);
    prompt.focus();
  });
  document.addEventListener("invalid", () => { /* otherwise the browser's message has no place */
    element("talk-head").querySelector("details").open = true;
  }, true);
  /* Whether a key belongs to an input method. Safari ends the composition before this event (WebKit bug 165004). */
  const composes = (/** @type {KeyboardEvent} */ event) => event.isComposing || event.keyCode === 229;
  prompt.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
    event.preventDefault();
    element("compose").requestSubmit();
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || composes(event)) return;
    if (conversations.shown.isOpen) stop();
    else stopEditing();
  });
  element("editing").querySelector("button").addEventListener("click", stopEditing);
  element("notice").querySelector("button").addEventListener("click", () => {
    conversations.shown.draft = prompt.value;
    conversations.putBack(deleted);
    show(deleted[0]);
    deleted = [];
  });
  element("export").addEventListener("click", () => download(`${WORDS.file}.md`, conversations.shown.exported(model)));
  addEventListener("storage", event => { /* another tab has changed a conversation */
    const { shown } = conversations;
    conversations.follow(event.key, event.newValue);
    if (shown !== conversations.shown) prompt.value = conversations.shown.draft;
    drawSoon();
  });
  element("stop").addEventListener("click", stop);
  element("stop-all").addEventListener("click", () => {
    for (const chat of conversations.all) chat.connection?.abort();
  });
  element("load").addEventListener("click", startSeveral);
  addEventListener("pagehide", () => { /* browsers keep a page that was left for a while, with its connections */
    save();
    leaving.abort();
    for (const chat of conversations.all) chat.connection?.abort();
  });
  addEventListener("pageshow", event => {
    if (event.persisted) location.reload();
  });
  element("new").addEventListener("click", () => {
    show(conversations.all.find(chat => !chat.turns.length) ?? conversations.add());
    prompt.focus();
  });
  element("delete").addEventListener("click", () => removeAll([conversations.shown]));
  element("clear").addEventListener("click", () => removeAll(conversations.all));
  element("talk-head").addEventListener("input", drawSoon);

  /** @param {Conversation[]} chats */
  function removeAll(chats) {
    stopEditing();
    conversations.shown.draft = prompt.value;
    deleted = chats.filter(each => each.turns.length);
    conversations.remove(chats);
    prompt.value = conversations.shown.draft;
    conversations.shown.draft = "";
    prompt.focus();
    drawSoon();
  }

  /* ------------------------------------------------------------------ the engine */

  /** @param {string} view of a narrow page */
  function look(view) {
    document.body.dataset.view = view;
    for (const button of element("views").children)
      button.setAttribute("aria-pressed", String(button.dataset.view === view));
    viewer?.drawSoon();
  }
  element("views").addEventListener("click", event => {
    const view = event.target.closest("[data-view]")?.dataset.view;
    if (view) look(view);
  });
  element("strip").addEventListener("click", () => look("engine"));
  element("steps").addEventListener("click", event => { /* a request's chip leads to its conversation */
    const number = event.target.closest(".sv-chip")?.dataset.r;
    const id = number && viewer?.panels[0].trace.name(Number(number)).id;
    const chat = conversations.all.find(each => each.request === id);
    if (!chat) return;
    show(chat);
    look("talk");
  });

  /** @param {StepViewer} viewer @param {(message: string) => void} tell */
  async function watch(viewer, tell) {
    const response = await ask("steps", { signal: leaving.signal });
    tell("");
    for await (const [name, data] of eventsOf(response.body)) {
      if (name === "begin") viewer.begin(data);
      if (name === "step") viewer.add(data);
      if (name === "step") drawSoon();
      if (name === "missed") tell(WORDS.missed(data.frames));
      if (name === "end") return;
    }
  }

  /** @param {StepViewer} viewer */
  async function keepWatching(viewer) {
    const tell = message => write(element("live-status"), message);
    for (;;) {
      let wantsKey = false;
      try {
        await watch(viewer, tell);
        tell(WORDS.viewEnded);
      } catch (/** @type {any} */ error) {
        wantsKey = error.status === 401;
        tell(wantsKey ? "" : messageOf(error)); /* the field for the key is shown instead */
      }
      if (wantsKey) await new Promise(resolve => element("key").addEventListener("change", resolve, { once: true }));
      else await new Promise(resolve => setTimeout(resolve, 2000));
    }
  }

  prompt.value = conversations.shown.draft || (conversations.shown.turns.length ? "" : STARTERS[starters][0]);
  write(element("editing").children[0], WORDS.editing);
  write(element("editing").children[1], WORDS.cancel);
  draw();
  if (viewer) keepWatching(viewer);
  else write(element("live-status"), WORDS.viewOff);
})();
