// The `openai` library for JavaScript: the same as its sister's for Python, in short.

import OpenAI from "openai";
import { caught, check, given, joined, report } from "./harness.mjs";

const client = new OpenAI({ baseURL: given.base_url, apiKey: given.key, maxRetries: 0 });
const greedy = { model: given.model, temperature: 0, max_tokens: given.max_tokens };
const text = { ...greedy, prompt: given.prompt };
const chat = { ...greedy, messages: given.messages };
const streamed = { stream: true, stream_options: { include_usage: true } };
const usageOf = (usage) => [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];

async function gathered(stream) {
  const pieces = [];
  let usage = null;
  for await (const chunk of stream) {
    if (chunk.choices.length) pieces.push(textOf(chunk.choices[0]));
    usage = chunk.usage ?? usage;
  }
  return { ...joined(pieces), usage: usageOf(usage) };
}

const textOf = (choice) => choice.text ?? choice.message?.content ?? choice.delta?.content ?? "";
const whole = (answer) => ({ text: textOf(answer.choices[0]), usage: usageOf(answer.usage) });

await report({
  refusal: {
    refusals: async () => ({
      key: await caught(() => client.withOptions({ apiKey: "wrong" }).models.list()),
      value: await caught(() => client.completions.create({ ...text, top_p: 2 })),
      model: await caught(() => client.chat.completions.create({ ...chat, model: "another" })),
    }),
  },
  text: {
    completion: async () => whole(await client.completions.create(text)),
    completion_stream: async () => gathered(await client.completions.create({ ...text, ...streamed })),
  },
  chat: {
    chat: async () => whole(await client.chat.completions.create(chat)),
    chat_stream: async () => gathered(await client.chat.completions.create({ ...chat, ...streamed })),
    async stream_helper() {
      const pieces = [];
      const stream = client.chat.completions.stream(chat).on("content", (delta) => pieces.push(delta));
      const final = await stream.finalChatCompletion();
      check(final.choices[0].message.content === pieces.join(""), pieces.join("|"));
      return joined(pieces);
    },
  },
  said: {
    async models() {
      const names = (await client.models.list()).data.map((model) => model.id).join();
      check(names === given.model, names);
      return names;
    },
  },
});
