"use strict";

/** A turn's elements. */
class TurnView {
  /** @param {Turn} turn @param {string} hue */
  constructor(turn, hue) {
    this.turn = turn;
    this.thought = make("div", "thought");
    this.reasoning = /** @type {HTMLDetailsElement} */ (
      make("details", "", make("summary", "", WORDS.reasoning), this.thought));
    this.text = make("div", "answer");
    this.calls = make("div", "calls");
    this.error = make("p", "error");
    this.about = make("p", "about");
    this.element = make("article", `turn ${hue}`, make("div", "asked", turn.asked),
      this.reasoning, this.text, this.calls, this.error, this.about);
  }

  draw() {
    const { turn } = this;
    this.element.classList.toggle("open", turn.isOpen && turn.text !== "");
    this.reasoning.hidden = !turn.reasoning;
    drawMarkdown(this.thought, turn.reasoning);
    this.text.hidden = !turn.text;
    drawMarkdown(this.text, turn.text);
    turn.calls.forEach((call, place) => {
      const box = this.calls.children[place] ?? this.calls.appendChild(make("div", "", make("p", ""), make("pre", "", make("code", ""))));
      write(box.children[0], WORDS.call(call.name));
      write(box.children[1].children[0], call.arguments);
    });
    this.error.hidden = !turn.error;
    write(this.error, turn.error);
    write(this.about, turn.isOpen ? (turn.tokens ? "" : `${WORDS.waiting} …`) : WORDS.figures(turn));
  }
}

/** Draws the conversation that is shown. */
class Transcript {
  /** @param {HTMLElement} box @param {boolean} chats */
  constructor(box, chats) {
    this.box = box;
    this.chats = chats;
    /** @type {Conversation | null} */
    this.chat = null;
    /** @type {TurnView[]} */
    this.views = [];
  }

  /** @param {Conversation} chat */
  draw(chat) {
    const { box } = this, other = chat !== this.chat;
    const follows = other || box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (other) {
      this.chat = chat;
      this.views = [];
      box.replaceChildren();
    }
    if (!chat.turns.length && !box.children.length) box.append(make("p", "empty", WORDS.empty(this.chats)));
    if (chat.turns.length > this.views.length && !this.views.length) box.replaceChildren();
    const from = Math.max(this.views.length - 1, 0); /* turns before it do not change any more */
    for (const turn of chat.turns.slice(this.views.length)) {
      const view = new TurnView(turn, chat.hue);
      this.views.push(view);
      box.append(view.element);
    }
    for (const view of this.views.slice(from)) view.draw();
    box.setAttribute("aria-busy", String(chat.isOpen)); /* an answer is read out when it is complete */
    if (follows) box.scrollTop = box.scrollHeight;
  }
}
