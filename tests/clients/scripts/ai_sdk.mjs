// Vercel's AI SDK: chat and completions as an OpenAI-compatible provider, responses as OpenAI itself, messages as Anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { check, given, joined, report } from "./harness.mjs";

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
  return { ...joined(pieces), usage: usageOf(await answer.usage) };
}

const fox = jsonSchema({
  type: "object",
  properties: { place: { type: "string", enum: ["forest", "river"] }, brave: { type: "boolean" } },
  required: ["place", "brave"],
  additionalProperties: false,
});
const finds = (calls) => ({
  find_fox: tool({
    description: "Find a fox.",
    inputSchema: fox,
    execute: async ({ place, brave }) => {
      calls.push([place, brave]);
      return "There is one fox.";
    },
  }),
});

// A forced call, its result, and an answer that has read it.
async function loop(model) {
  const calls = [];
  const answer = await generateText({
    ...chat,
    maxOutputTokens: given.call_tokens,
    model,
    tools: finds(calls),
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  check(answer.steps[0].finishReason === "tool-calls", answer.steps[0].finishReason);
  return { calls, text: answer.text };
}

// The second turn names the first turn's message by its id; then by the id of the first response.
async function turns() {
  const model = openai.responses(given.model);
  const first = await generateText({ ...chat, model });
  const more = { role: "user", content: "And then?" };
  const second = await generateText({ ...chat, model, messages: [...chat.messages, ...first.responseMessages, more] });
  const third = await generateText({
    ...greedy,
    model,
    messages: [more],
    providerOptions: { openai: { previousResponseId: first.finalStep.response.id } },
  });
  check(second.text && third.text === second.text, `${second.text} | ${third.text}`);
  return { text: first.text };
}

const models = { chat: compatible(given.model), responses: openai.responses(given.model), messages: anthropic(given.model) };
const ofEachModel = (part) => Object.fromEntries(Object.entries(models).map(([name, model]) => [name, () => part(model)]));

await report({
  chat: { ...ofEachModel(async (model) => [await whole({ ...chat, model }), await streamed({ ...chat, model })]), turns },
  loop: ofEachModel(loop),
  fox: {
    async object() {
      const output = Output.object({ schema: fox });
      return (await generateText({ ...chat, maxOutputTokens: given.call_tokens, model: models.chat, output })).output;
    },
  },
  // The library writes roles around the prompt.
  said: { completion: () => whole({ ...greedy, model: compatible.completionModel(given.model), prompt: given.prompt }) },
});
