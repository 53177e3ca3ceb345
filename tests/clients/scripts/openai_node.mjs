// The `openai` library for JavaScript: the same as its sister's for Python, in short.

import OpenAI from "openai";

const given = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: given.base_url, apiKey: given.key, maxRetries: 0 });
const greedy = { model: given.model, temperature: 0, max_tokens: given.max_tokens };
const text = { ...greedy, prompt: given.prompt };
const chat = { ...greedy, messages: given.messages };
const streamed = { stream: true, stream_options: { include_usage: true } };
const usageOf = (usage) => [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];

async function gathered(stream, pieceOf) {
  const pieces = [];
  let usage = null;
  for await (const chunk of stream) {
    const piece = chunk.choices.length ? pieceOf(chunk.choices[0]) : "";
    if (piece) pieces.push(piece);
    usage = chunk.usage ?? usage;
  }
  return { text: pieces.join(""), pieces, usage: usageOf(usage) };
}

async function caught(ask) {
  try {
    await ask();
  } catch (error) {
    return { types: [error.constructor.name], status: error.status, message: error.message };
  }
  throw new Error("it was answered");
}

const parts = {
  async completion() {
    const answer = await client.completions.create(text);
    return { text: answer.choices[0].text, usage: usageOf(answer.usage) };
  },
  async completion_stream() {
    return gathered(await client.completions.create({ ...text, ...streamed }), (choice) => choice.text);
  },
  async chat() {
    const answer = await client.chat.completions.create(chat);
    return { text: answer.choices[0].message.content, usage: usageOf(answer.usage) };
  },
  async chat_stream() {
    const stream = await client.chat.completions.create({ ...chat, ...streamed });
    return gathered(stream, (choice) => choice.delta.content);
  },
  async stream_helper() {
    const pieces = [];
    const stream = client.chat.completions.stream(chat).on("content", (delta) => pieces.push(delta));
    const final = await stream.finalChatCompletion();
    return { text: final.choices[0].message.content, pieces: pieces.filter((piece) => piece) };
  },
  async models() {
    return (await client.models.list()).data.map((model) => model.id);
  },
  async refusals() {
    return {
      key: await caught(() => client.withOptions({ apiKey: "wrong" }).models.list()),
      value: await caught(() => client.completions.create({ ...text, top_p: 2 })),
      model: await caught(() => client.chat.completions.create({ ...chat, model: "another" })),
      next: await parts.completion(),
    };
  },
};

const said = {};
for (const [name, part] of Object.entries(parts)) {
  try {
    said[name] = { returned: await part() };
  } catch (error) {
    said[name] = { raised: error.stack };
  }
}
console.log("\n" + JSON.stringify(said));
