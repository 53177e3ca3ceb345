"use strict";

/** A turn's elements. */
class TurnView {
  /** @param {Turn} turn @param {string} hue */
  constructor(turn, hue) {
    this.turn = turn;
    this.thought = make("div", "thought marked");
    this.reasoning = /** @type {HTMLDetailsElement} */ (
      make("details", "", make("summary", "", WORDS.reasoning), this.thought));
    this.text = make("div", "answer marked");
    this.calls = make("div", "calls");
    this.error = make("p", "error");
    this.about = make("p", "about");
    this.element = make("article", `turn ${hue}`, make("div", "asked", turn.asked), actButton("edit", WORDS.edit, WORDS.editTitle),
      this.reasoning, this.text, this.calls, this.error,
      make("div", "row", this.about, actButton("copy", WORDS.copy, WORDS.copyTitle), actButton("again", WORDS.again, WORDS.againTitle)));
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
  /** @param {HTMLElement} box @param {boolean} chats @param {(act: string, turn: Turn) => void} act called for the buttons of turns, except those that copy */
  constructor(box, chats, act) {
    this.box = box;
    this.chats = chats;
    /** @type {Conversation | null} */
    this.chat = null;
    /** @type {TurnView[]} */
    this.views = [];
    box.addEventListener("click", event => {
      const button = /** @type {Element} */ (event.target).closest("button");
      const turn = this.views.find(each => each.element.contains(button))?.turn;
      if (!button || !turn) return;
      const { act: name } = button.dataset;
      if (name === "copy") this.copy(button, turn.text);
      else if (name === "copy-code") this.copy(button, button.closest(".fence")?.querySelector("code")?.textContent ?? "");
      else act(name ?? "", turn);
    });
  }

  /** @param {HTMLElement} button says that it has copied @param {string} text */
  async copy(button, text) {
    await copyText(text);
    button.textContent = WORDS.copied;
    setTimeout(() => write(button, WORDS.copy), 1500);
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
    const changed = this.views.findIndex((view, place) => view.turn !== chat.turns[place]);
    if (changed >= 0) for (const view of this.views.splice(changed)) view.element.remove();
    if (!this.views.length && (chat.turns.length || !box.children.length))
      box.replaceChildren(...(chat.turns.length ? [] : [make("p", "empty", WORDS.empty(this.chats))]));
    const from = Math.max(this.views.length - 1, 0); /* turns before it do not change any more */
    for (const turn of chat.turns.slice(this.views.length)) {
      const view = new TurnView(turn, chat.hue);
      this.views.push(view);
      box.append(view.element);
    }
    for (const view of this.views.slice(from)) view.draw();
    box.setAttribute("aria-busy", String(chat.isOpen)); /* an answer is read out when it is complete */
    box.classList.toggle("busy", chat.isOpen);
    if (follows) box.scrollTop = box.scrollHeight;
  }
}
