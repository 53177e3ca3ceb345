"use strict";

const SAVED = "infer-conversations"; /* the key in the tab's storage, which outlives a reload */

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
}

/** Turns, each of which continues those before it, with the letter and colour of their requests in the picture. */
class Conversation {
  /** @param {number} number */
  constructor(number) {
    this.number = number;
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
}

/** All conversations, and the one that is shown. */
class Conversations {
  constructor() {
    /** @type {Conversation[]} */
    this.all = [];
    this.shown = this.add();
  }

  /** Add a conversation, with the lowest number that is free. */
  add() {
    const numbers = new Set(this.all.map(each => each.number));
    let number = 0;
    while (numbers.has(number)) number++;
    const chat = new Conversation(number);
    this.all.push(chat);
    this.all.sort((a, b) => a.number - b.number);
    return chat;
  }

  /** Stop conversations and remove them. One is always left. @param {Conversation[]} chats */
  remove(chats) {
    for (const chat of chats) chat.connection?.abort();
    const at = this.all.indexOf(this.shown);
    this.all = this.all.filter(each => !chats.includes(each));
    if (!this.all.includes(this.shown)) this.shown = this.all[Math.min(at, this.all.length - 1)] ?? this.add();
  }

  /** @param {Record<string, string>} settings are kept, too */
  save(settings) {
    const chats = this.all.map(({ number, turns, draft, started }) => ({ number, turns, draft, started }));
    try {
      sessionStorage.setItem(SAVED, JSON.stringify({ chats, shown: this.shown.number, settings }));
    } catch { /* no storage, or it is full: a reload starts without these conversations */ }
  }

  /** Load what `save` stored. Answers that were open then are marked as broken off. @returns {Record<string, string>} the settings */
  restore() {
    try {
      const { chats, shown, settings } = JSON.parse(sessionStorage.getItem(SAVED) ?? "");
      this.all = chats.map(({ number, turns, draft, started }) => {
        const chat = Object.assign(new Conversation(number), { draft, started });
        chat.turns = turns.map(turn => Object.assign(new Turn(""), turn));
        for (const turn of chat.turns) turn.end ||= WORDS.broken;
        return chat;
      });
      this.shown = this.all.find(each => each.number === shown) ?? this.all[0];
      return settings;
    } catch {
      return {};
    }
  }
}
