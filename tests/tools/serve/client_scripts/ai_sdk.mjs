// Vercel's AI SDK: text, streams, tools in a loop, objects, and a second turn.
// Arguments: the server, and a file in the folder of its packages.

import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , server, packages] = process.argv;
const { resolve } = createRequire(packages);
const load = (name) => import(pathToFileURL(resolve(name)));
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const compatible = createOpenAICompatible({
  name: "edgellm", baseURL: `${server}/v1`, supportsStructuredOutputs: true, includeUsage: true,
});
const openai = createOpenAI({ baseURL: `${server}/v1`, apiKey: "none" });
const schema = z.object({ city: z.enum(["Bonn", "Rome"]) }).strict();
const weather = tool({
  description: "The weather of a city.", inputSchema: schema,
  execute: async ({ city }) => `${city}: sunny`,
});
const ask = { role: "user", content: "Where is it sunny?" };

for (const model of [compatible("tiny"), openai.chat("tiny"), openai.responses("tiny")]) {
  // The server keeps no items of Responses. The SDK runs no tool of a step that its limit cut, so
  // the model calls once.
  const providerOptions = {
    openai: { store: false, parallelToolCalls: false }, edgellm: { parallel_tool_calls: false },
  };
  const own = { model, maxOutputTokens: 300, maxRetries: 0, providerOptions };
  const first = await generateText({ ...own, messages: [ask] });
  const second = streamText({ ...own, messages: [ask, ...first.response.messages, ask] });
  for await (const part of second.textStream) assert.equal(typeof part, "string");
  assert.ok((await second.usage).outputTokens > 0);
  const called = await generateText({
    ...own, messages: [ask], tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1),
  });
  assert.equal(called.toolCalls.length, 1);
  schema.parse(called.toolCalls[0].input);
  assert.match(called.toolResults[0].output, /sunny/);
  await generateText({
    ...own, messages: [ask, ...called.response.messages], tools: { weather },
    stopWhen: stepCountIs(1),
  });
  schema.parse((await generateObject({ ...own, messages: [ask], schema })).object);
}
