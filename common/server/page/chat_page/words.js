/*
 * The page at `/`: conversations beside the engine's steps. Plain JavaScript, in parts that make one script after the
 * viewer's parts (`viewer/trace.js`):
 *
 *   words           every sentence that the script writes       sending      requests, and the streams that answer
 *   elements        elements made of text, clipboard, files     transcript   one conversation, drawn
 *   inline          emphasis, code, links                       page         list, buttons, keys, live view
 *   markdown        the elements of an answer
 *   conversations   turns, history, and a stored copy
 */
"use strict";

/** @param {number} ms */
const seconds = ms => ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;

/** Every sentence that the script writes. Sentences that never change are in `page.html`. */
const WORDS = {
  fresh: "New conversation",
  unsaid: "nothing said yet",
  /** @param {boolean} chats */
  empty: chats => chats
    ? "Say something, or start several conversations at once: the picture shows which seats and blocks they use."
    : "This model has no chat template. It continues the text that you give it, each text by itself.",
  waiting: "waiting for the first token",
  writing: "writing",
  reasoning: "Reasoning",
  /** @param {string} name */
  call: name => `Calls the tool ${name}`,
  unread: "The answer is still being written: stop it, or wait.",
  ended: { stop: "Done.", length: "Cut at the limit.", tool_calls: "Waits for a tool's result." },
  stop: "Stop",
  stopAll: "Stop all",
  stopped: "Stopped.",
  failed: "Failed.",
  broken: "Broken off.",
  elsewhere: "Being written in another tab.",
  you: "You",
  file: "conversation",
  copy: "Copy",
  copyTitle: "Copy the answer, as the model wrote it",
  copied: "Copied",
  again: "Again",
  againTitle: "Ask the same again: another answer replaces this one",
  edit: "Edit",
  editTitle: "Change this message: it and what follows it are replaced",
  editing: "You are editing a message. It and what follows it will be replaced.",
  cancel: "Cancel",
  undo: "Undo",
  /** @param {number} count */
  deleted: count => `${counted(count, "conversation")} deleted.`,
  unkept: "This browser keeps no more conversations: its storage is off or full.",
  unreachable: "the server cannot be reached",
  cut: "the stream ended before the answer did",
  viewOff: "The live view is off: this server runs with --no-live-view.",
  viewEnded: "the server has ended the view",
  /** @param {number} frames */
  missed: frames => `${frames} steps were not drawn: this page does not keep up`,
  /** @param {number} waiting @param {string} memory */
  strip: (waiting, memory) => `${waiting ? `${waiting} waiting, ` : ""}${memory}`,
  stripLabel: "Show what the engine does",
  /** @param {Turn} turn the figures so far */
  pace: turn => counted(turn.tokens, "token") + (turn.rate ? `, ${Math.round(turn.rate)} tokens/s` : ""),
  /** @param {Turn} turn the figures of an answer that has ended */
  figures: turn => !turn.tokens ? turn.end
    : `${turn.end} ${WORDS.pace(turn)}, the first after ${seconds(turn.first)}. `
      + `Prompt: ${counted(turn.prompt, "token")}, ${turn.cached} cached.`,
};

/** Messages of the conversations that the page starts at once, of several lengths, by what the model is made for. */
const STARTERS = {
  stories: [
    "Tell me a story about an owl named Nora.",
    "What does a fox like to eat?",
    "Tell me a story about a shy otter named Finn, who lives at the river and has lost a lantern.",
    "Write a short story about a brave fox named Zoë.",
    "Where does a hedgehog live?",
    "Tell me a story about a kind duck named Lily.",
    "What does an owl like to eat?",
    "Tell me a story about a clever mouse named Pip.",
    "Write a short story about a rabbit named Ivy, who runs a race to the bridge.",
    "Where does an otter live?",
    "Tell me a story about a bear named Bruno.",
    "Write a short story about a squirrel named Hazel.",
  ],
  chat: [
    "Write three tips for staying healthy.",
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Describe a rainbow.",
    "List five fruits.",
    "What does the heart do?",
    "What is photosynthesis?",
    "Why is exercise good for you?",
    "Name three large rivers and the countries they flow through.",
    "Tell me a short story about a lighthouse keeper.",
    "Why do people sleep?",
    "What is a computer?",
  ],
  completion: [
    "Once there was a young owl named Nora.",
    "Once upon a time there was a shy otter named Finn, who lived at the river and had lost a lantern.",
    "Long ago there was a kind duck named Lily.",
    "Once upon a time there was a brave fox named Zoë.",
    "One morning a rabbit named Ivy",
    "Once there was a clever mouse named Pip, who wanted to see the sea.",
    "In a small house by the forest lived",
    "Once upon a time there was a bear named Bruno. He loved honey.",
    "It was raining when",
    "Once there was a squirrel named Hazel.",
    "At the end of the long bridge stood",
    "Once upon a time there was an old hedgehog who told stories.",
  ],
};
