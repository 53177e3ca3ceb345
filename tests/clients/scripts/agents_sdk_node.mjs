// OpenAI's Agents SDK for JavaScript: an agent with one tool, over responses and over chat, and a second turn.

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const given = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: given.base_url, apiKey: given.key, maxRetries: 0 });
setTracingDisabled(true);
const called = [];

const findFox = tool({
  name: "find_fox",
  description: "Find a fox.",
  parameters: z.object({ place: z.enum(["forest", "river"]), brave: z.boolean() }),
  async execute({ place, brave }) {
    called.push([place, brave]);
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
  called.length = 0;
  const first = await run(agent(model), given.question, { maxTurns: 3 });
  const items = first.newItems.map((item) => item.type);
  const second = await run(agent(model), [...first.history, { role: "user", content: "And then?" }], { maxTurns: 3 });
  return { called: [...called], items, first: first.finalOutput, second: second.finalOutput };
}

async function streamed(model) {
  called.length = 0;
  const answer = await run(agent(model), given.question, { maxTurns: 3, stream: true });
  const pieces = [];
  for await (const piece of answer.toTextStream()) pieces.push(piece);
  await answer.completed;
  return { called: [...called], text: answer.finalOutput, pieces };
}

const parts = {
  responses: () => twoTurns(new OpenAIResponsesModel(client, given.model)),
  responses_stream: () => streamed(new OpenAIResponsesModel(client, given.model)),
  chat: () => twoTurns(new OpenAIChatCompletionsModel(client, given.model)),
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
