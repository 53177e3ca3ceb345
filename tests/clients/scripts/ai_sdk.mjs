// Vercel's AI SDK: chat and completions as an OpenAI-compatible provider, responses as OpenAI itself, messages as Anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const given = JSON.parse(process.argv[2]);
const compatible = createOpenAICompatible({
  name: "infer",
  baseURL: given.base_url,
  apiKey: given.key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: given.base_url, apiKey: given.key });
const anthropic = createAnthropic({ baseURL: `${given.url}/v1`, apiKey: given.key });
const greedy = { temperature: 0, maxOutputTokens: given.max_tokens, maxRetries: 0 };
const chat = {
  ...greedy,
  instructions: given.messages[0].content,
  messages: given.messages.slice(1),
};
const usageOf = (usage) => [usage.inputTokens, usage.outputTokens, usage.totalTokens];

async function whole(settings) {
  const answer = await generateText(settings);
  return { text: answer.text, usage: usageOf(answer.usage) };
}

async function streamed(settings) {
  const answer = streamText({ ...settings, onError: () => {} });
  const pieces = [];
  for await (const piece of answer.textStream) pieces.push(piece);
  return { text: pieces.join(""), pieces, usage: usageOf(await answer.usage) };
}

const finds = (called) => ({
  find_fox: tool({
    description: "Find a fox.",
    inputSchema: jsonSchema({
      type: "object",
      properties: { place: { type: "string", enum: ["forest", "river"] }, brave: { type: "boolean" } },
      required: ["place", "brave"],
      additionalProperties: false,
    }),
    execute: async ({ place, brave }) => {
      called.push([place, brave]);
      return "There is one fox.";
    },
  }),
});

// A forced call, its result, and an answer that has read it.
async function loop(model) {
  const called = [];
  const answer = await generateText({
    ...chat,
    maxOutputTokens: given.call_tokens,
    model,
    tools: finds(called),
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  return { called, steps: answer.steps.map((step) => step.finishReason), text: answer.text };
}

const parts = {
  completion: () => whole({ ...greedy, model: compatible.completionModel(given.model), prompt: given.prompt }),
  chat: () => whole({ ...chat, model: compatible(given.model) }),
  chat_stream: () => streamed({ ...chat, model: compatible(given.model) }),
  chat_loop: () => loop(compatible(given.model)),
  async chat_object() {
    const schema = { type: "object", properties: { brave: { type: "boolean" } }, required: ["brave"], additionalProperties: false };
    const output = Output.object({ schema: jsonSchema(schema) });
    return (await generateText({ ...chat, maxOutputTokens: given.call_tokens, model: compatible(given.model), output })).output;
  },
  responses: () => whole({ ...chat, model: openai.responses(given.model) }),
  responses_stream: () => streamed({ ...chat, model: openai.responses(given.model) }),
  responses_loop: () => loop(openai.responses(given.model)),
  // The second turn names the first turn's message by its id; then by the id of the first response.
  async second_turn() {
    const model = openai.responses(given.model);
    const first = await generateText({ ...chat, model });
    const more = { role: "user", content: "And then?" };
    const second = await generateText({
      ...chat,
      model,
      messages: [...chat.messages, ...first.responseMessages, more],
    });
    const third = await generateText({
      ...greedy,
      model,
      messages: [more],
      providerOptions: { openai: { previousResponseId: first.finalStep.response.id } },
    });
    return { first: first.text, second: second.text, third: third.text };
  },
  messages: () => whole({ ...chat, model: anthropic(given.model) }),
  messages_stream: () => streamed({ ...chat, model: anthropic(given.model) }),
  messages_loop: () => loop(anthropic(given.model)),
};

const said = {};
for (const [name, part] of Object.entries(parts)) {
  try {
    said[name] = { returned: await part() };
  } catch (error) {
    said[name] = { raised: `${error.stack}\n${error.responseBody ?? ""}\n${JSON.stringify(error.requestBodyValues ?? "")}` };
  }
}
console.log("\n" + JSON.stringify(said));
