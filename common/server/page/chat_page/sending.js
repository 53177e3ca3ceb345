"use strict";

/** The events of a stream: [name, data]. OpenAI's have no name, and their last is no JSON. @param {any} body */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map(line => line.split(/: (.*)/s, 2)));
      if (fields.data && fields.data !== "[DONE]") yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** Ask this server, with the key if there is one. @param {string} path @param {any} options of `fetch` */
async function ask(path, options = {}) {
  const key = element("key").value;
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) element("keyed").hidden = false;
  if (response.ok) return response;
  const said = await response.json().catch(() => null); /* a proxy's error may be anything */
  const message = said?.error?.message ?? `${response.status} ${response.statusText}`;
  throw Object.assign(new Error(message), { status: response.status });
}

/** @param {string} path @param {any} body @param {AbortSignal} signal */
const post = (path, body, signal) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

/** @param {any} error @returns {string} its message for a reader */
const messageOf = error => error instanceof TypeError ? WORDS.unreachable : error.message;

/** Sends messages, and fills turns from the streams that answer them. */
class Sender {
  /**
   * @param {{chats: boolean, model: string, viewer: StepViewer | null, changed: () => void}} options
   *   `changed` is called whenever a turn has changed
   */
  constructor({ chats, model, viewer, changed }) {
    this.chats = chats;
    this.model = model;
    this.viewer = viewer;
    this.changed = changed;
  }

  /**
   * Ask a question in a conversation, or one in each of several. Several questions are the prompts of one completion,
   * since a browser opens only six connections to a server. Each prompt is a request of the engine. They end together
   * if any of them is stopped.
   * @param {Conversation[]} several @param {string[]} questions @param {any} sampling @param {string} system
   */
  async send(several, questions, sampling, system) {
    const turns = questions.map(asked => new Turn(asked)), connection = new AbortController();
    const { signal } = connection, chats = this.chats && several.length === 1;
    several.forEach((chat, index) => {
      chat.turns.push(turns[index]);
      chat.connection = connection;
      chat.request = "";
    });
    this.changed();
    let error = "";
    try {
      const asked = chats ? { messages: several[0].messages(system) } : { prompt: await this.prompts(several, system, signal) };
      await this.exchange(several, turns, chats ? "chat/completions" : "completions", signal, {
        ...asked,
        ...sampling,
        model: this.model,
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
      });
      error = WORDS.cut;
    } catch (failure) {
      if (!signal.aborted) error = messageOf(failure);
    }
    for (const turn of turns.filter(each => each.isOpen))
      if (signal.aborted) turn.close(WORDS.stopped);
      else turn.close(turn.tokens ? WORDS.broken : WORDS.failed, error);
    several.forEach((chat, index) => {
      if (!turns[index].text && turns[index].error) chat.draft ||= questions[index]; /* to try again */
      this.viewer?.hear(chat.request, "");
      chat.connection = null;
    });
    this.changed();
  }

  /** @param {Conversation[]} several @param {string} system @param {AbortSignal} signal @returns {Promise<any>} a text to continue, or several, or their token ids */
  async prompts(several, system, signal) {
    const texts = several.map(chat => chat.turns.at(-1)?.asked);
    if (!this.chats) return texts.length === 1 ? texts[0] : texts;
    return Promise.all(several.map(async chat => {
      const response = await post("tokenize", { model: this.model, messages: chat.messages(system) }, signal);
      return (await response.json()).tokens;
    }));
  }

  /**
   * Post a body, and read its answer.
   * @param {Conversation[]} several @param {Turn[]} turns @param {string} route @param {AbortSignal} signal @param {any} body
   */
  async exchange(several, turns, route, signal, body) {
    const began = performance.now();
    const response = await post(`v1/${route}`, body, signal);
    /* The engine's request ids begin with the answer's id, and that ends with the header's: known before any token. */
    const id = `${route === "completions" ? "cmpl" : "chatcmpl"}-${response.headers.get("x-request-id")}`;
    several.forEach((chat, index) => {
      chat.request = `${id}-${index}`;
      this.viewer?.mark(chat.request, { label: chat.label, hue: chat.hue });
    });
    /** @type {{at: number, tokens: number}[]} when each answer began, and with how many tokens */
    const firsts = [];
    for await (const [, data] of eventsOf(response.body)) {
      const choice = data.choices?.[0], index = choice?.index ?? 0, turn = turns[index];
      if (data.error) turn.close(WORDS.failed, data.error.message);
      else if (choice) {
        turn.hear(choice.delta ?? { content: choice.text });
        if (data.usage?.completion_tokens) this.count(turn, data.usage, firsts[index] ??= { at: performance.now(), tokens: data.usage.completion_tokens }, began);
        if (choice.finish_reason) turn.close(WORDS.ended[choice.finish_reason] ?? choice.finish_reason);
        this.viewer?.hear(several[index].request, turn.isOpen ? turn.text || turn.reasoning : "");
      }
      this.changed();
    }
  }

  /** @param {Turn} turn @param {any} usage so far @param {{at: number, tokens: number}} first @param {number} began */
  count(turn, usage, first, began) {
    if (usage.completion_tokens === turn.tokens) return;
    turn.prompt = usage.prompt_tokens;
    turn.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    turn.tokens = usage.completion_tokens;
    turn.first = first.at - began;
    turn.rate = turn.tokens > first.tokens ? (turn.tokens - first.tokens) / (performance.now() - first.at) * 1000 : 0;
  }
}
