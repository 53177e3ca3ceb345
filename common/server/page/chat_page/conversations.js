"use strict";

/* Keys of the browser's storage, which all tabs of this server share. Each conversation has its own entry: a tab
   writes only the conversations that it has changed. */
const SAVED_CHAT = "infer-chat:", SAVED_SETTINGS = "infer-settings";
/* The key in the tab's own storage: which conversation it shows. */
const SAVED_SHOWN = "infer-shown";

/** A message, its answer, and the answer's figures. */
class Turn {
  /** @param {string} asked */
  constructor(asked) {
    this.asked = asked;
    this.reasoning = "";
    this.text = "";
    /** @type {{name: string, arguments: string}[]} */
    this.calls = [];
    this.end = ""; /* how the answer ended; empty while it is open */
    this.error = "";
    this.prompt = this.cached = this.tokens = 0;
    this.first = 0; /* milliseconds from sending to the first token */
    this.rate = 0; /* tokens a second after the first */
  }

  get isOpen() {
    return !this.end;
  }

  /** Add a piece of the answer. @param {any} delta of a chat's chunk */
  hear(delta) {
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const { index, function: part } of delta.tool_calls ?? []) {
      const call = this.calls[index] ??= { name: "", arguments: "" };
      call.name += part?.name ?? "";
      call.arguments += part?.arguments ?? "";
    }
  }

  /** @param {string} end @param {string} error a message, or empty */
  close(end, error = "") {
    this.end = end;
    this.error = error;
  }

  /** @returns {any} the parts that are stored. An answer without an end is stored as it was while it was open */
  toJSON() {
    return { ...this, end: [WORDS.broken, WORDS.elsewhere].includes(this.end) ? "" : this.end };
  }
}

/** Turns, each of which continues those before it, with the letter and colour of their requests in the picture. */
class Conversation {
  /** @param {number} number of its letter and colour @param {string} id */
  constructor(number, id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`) {
    this.number = number;
    this.id = id;
    /** @type {Turn[]} */
    this.turns = [];
    this.draft = "";
    this.started = false; /* whether the button for several at once began it, and nothing was sent in it since */
    /** @type {AbortController | null} aborting it ends the answer that is open */
    this.connection = null;
    this.request = ""; /* id of the latest request in the engine */
  }

  get label() {
    return letterOf(this.number);
  }

  get hue() {
    return hueOf(this.number);
  }

  get isOpen() {
    return this.turns.at(-1)?.isOpen ?? false;
  }

  get title() {
    return this.turns[0]?.asked || WORDS.fresh;
  }

  /** @param {string} system the system prompt, or empty @returns the messages to send, up to the latest question */
  messages(system) {
    const answered = this.turns.slice(0, -1).filter(turn => turn.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...answered.flatMap(({ asked, text }) =>
        [{ role: "user", content: asked }, { role: "assistant", content: text }]),
      { role: "user", content: this.turns.at(-1)?.asked },
    ];
  }

  /** @param {string} model @returns {string} the conversation as a text in Markdown */
  exported(model) {
    const turns = this.turns.flatMap(({ asked, text }) => [`**${WORDS.you}:**`, asked, `**${model}:**`, text]);
    return `${turns.join("\n\n")}\n`;
  }

  /** @returns {any} the parts that are stored */
  toJSON() {
    const { number, turns, draft, started } = this;
    return { number, turns, draft, started };
  }

  /** Take over a stored copy. @param {any} copy @param {string} openEnd the end of an answer that was open when it was stored */
  load({ turns, draft, started }, openEnd) {
    Object.assign(this, { draft, started });
    this.turns = turns.map((turn, place) => {
      const old = this.turns[place];
      return Object.assign(old?.asked === turn.asked ? old : new Turn(""), turn, { end: turn.end || openEnd });
    });
  }
}

/** All conversations, and the one that is shown. */
class Conversations {
  constructor() {
    /** @type {Conversation[]} */
    this.all = [];
    /** @type {Map<string, string>} the stored form of conversations, by id, as this tab knows it */
    this.stored = new Map();
    this.shown = this.add();
  }

  /** Add an empty conversation, or one that was removed. It gets the lowest free number, unless its own is free. */
  add(chat = new Conversation(0)) {
    const numbers = new Set(this.all.map(each => each.number));
    if (numbers.has(chat.number)) chat.number = 0;
    while (numbers.has(chat.number)) chat.number++;
    this.all.push(chat);
    this.all.sort((a, b) => a.number - b.number);
    return chat;
  }

  /**
   * Remove conversations, and stop their answers, unless others come over the same connection. One is always left.
   * @param {Conversation[]} chats
   */
  remove(chats) {
    const at = this.all.indexOf(this.shown);
    this.all = this.all.filter(each => !chats.includes(each));
    for (const { connection } of chats)
      if (!this.all.some(each => each.connection === connection)) connection?.abort();
    if (!this.all.includes(this.shown)) this.shown = this.all[Math.min(at, this.all.length - 1)] ?? this.add();
  }

  /** Undo a removal. Conversations that are still empty make way. @param {Conversation[]} chats */
  putBack(chats) {
    this.all = this.all.filter(each => each.turns.length || each.draft);
    for (const chat of chats) this.add(chat);
  }

  /**
   * Store the conversations that this tab has changed, and the settings.
   * @param {Record<string, string>} settings @returns {boolean} false: the browser keeps nothing, or its storage is full
   */
  save(settings) {
    const stored = new Map(this.all.filter(each => each.turns.length || each.draft)
      .map(each => [each.id, JSON.stringify(each)]));
    try {
      for (const id of this.stored.keys()) if (!stored.has(id)) localStorage.removeItem(SAVED_CHAT + id);
      for (const [id, json] of stored) if (this.stored.get(id) !== json) localStorage.setItem(SAVED_CHAT + id, json);
      this.stored = stored;
      localStorage.setItem(SAVED_SETTINGS, JSON.stringify(settings));
      sessionStorage.setItem(SAVED_SHOWN, this.shown.id);
      return true;
    } catch {
      return false;
    }
  }

  /** Load all that is stored. Answers that were open then are marked as broken off. @returns {Record<string, string>} the settings */
  restore() {
    /** @type {Record<string, string>} */
    let settings = {};
    let shown = null;
    this.all = [];
    try {
      for (const key of Object.keys(localStorage)) this.follow(key, localStorage.getItem(key), WORDS.broken);
      shown = sessionStorage.getItem(SAVED_SHOWN);
      settings = JSON.parse(localStorage.getItem(SAVED_SETTINGS) ?? "{}");
    } catch { /* the browser keeps nothing for this page, or something else wrote there */ }
    this.shown = this.all.find(each => each.id === shown) ?? this.all[0] ?? this.add();
    return settings;
  }

  /**
   * Take over an entry of the storage. If another tab writes while this tab's own answer is open, this tab's copy wins.
   * @param {string | null} key @param {string | null} json null: it was removed @param {string} openEnd for `load`
   */
  follow(key, json, openEnd = WORDS.elsewhere) {
    if (!key?.startsWith(SAVED_CHAT)) return;
    const id = key.slice(SAVED_CHAT.length), known = this.all.find(each => each.id === id);
    if (known?.connection || this.stored.get(id) === json) return;
    if (json === null) {
      this.stored.delete(id);
      if (known) this.remove([known]);
      return;
    }
    const copy = JSON.parse(json), chat = known ?? new Conversation(copy.number, id);
    chat.load(copy, openEnd);
    if (!known) this.add(chat);
    this.stored.set(id, JSON.stringify(chat));
  }
}
