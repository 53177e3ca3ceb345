/*
 * The page at `/`: conversations beside the engine's steps. Plain JavaScript, in parts that make one script after the
 * viewer's parts (`viewer/trace.js`):
 *
 *   words           every sentence that the script writes       sending      requests, and the streams that answer
 *   elements        elements made of text, code in answers      transcript   one conversation, drawn
 *   conversations   turns, history, and a copy for reloads      page         list, buttons, keys, live view
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
  stopped: "Stopped.",
  failed: "Failed.",
  broken: "Broken off.",
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

/** Messages of the conversations that the page starts at once, of several lengths, by the model's mode. */
const STARTERS = {
  chat: [
    "Tell me a story about an owl named Nora.",
    "What does a fox like to eat?",
    "Tell me a story about a shy otter named Finn, who lives at the river and has lost a lantern.",
    "Write a short story about a brave fox named Zoë.",
  ],
  completion: [
    "Once there was a young owl named Nora.",
    "Once upon a time there was a shy otter named Finn, who lived at the river and had lost a lantern.",
    "Long ago there was a kind duck named Lily.",
    "Once upon a time there was a brave fox named Zoë.",
  ],
};
