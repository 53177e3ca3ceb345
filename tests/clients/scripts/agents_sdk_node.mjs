// OpenAI's Agents SDK for JavaScript: an agent with one tool, over responses and over chat, and a second turn.

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { check, given, report } from "./harness.mjs";

const client = new OpenAI({ baseURL: given.base_url, apiKey: given.key, maxRetries: 0 });
setTracingDisabled(true);
const calls = [];

const findFox = tool({
  name: "find_fox",
  description: "Find a fox.",
  parameters: z.object({ place: z.enum(["forest", "river"]), brave: z.boolean() }),
  async execute({ place, brave }) {
    calls.push([place, brave]);
    return "There is one fox.";
  },
});

const agent = (model) =>
  new Agent({
    name: "storyteller",
    instructions: "You tell short stories.",
    model,
    tools: [findFox],
    modelSettings: { temperature: 0, toolChoice: "required" },
  });

async function twoTurns(model) {
  calls.length = 0;
  const first = await run(agent(model), given.question, { maxTurns: 3 });
  const items = first.newItems.map((item) => item.type).join();
  check(items === "tool_call_item,tool_call_output_item,message_output_item", items);
  const second = await run(agent(model), [...first.history, { role: "user", content: "And then?" }], { maxTurns: 3 });
  check(calls.length === 2 && second.finalOutput, "the second turn");
  return { calls: [...calls], text: first.finalOutput };
}

async function streamed(model) {
  calls.length = 0;
  const answer = await run(agent(model), given.question, { maxTurns: 3, stream: true });
  const pieces = [];
  for await (const piece of answer.toTextStream()) pieces.push(piece);
  await answer.completed;
  check(pieces.length > 3 && pieces.join("") === answer.finalOutput, pieces.join("|"));
  return { calls: [...calls], text: answer.finalOutput };
}

await report({
  loop: {
    responses: () => twoTurns(new OpenAIResponsesModel(client, given.model)),
    responses_stream: () => streamed(new OpenAIResponsesModel(client, given.model)),
    chat: () => twoTurns(new OpenAIChatCompletionsModel(client, given.model)),
  },
});
