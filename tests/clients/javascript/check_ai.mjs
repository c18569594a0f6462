// Print what Vercel's AI SDK sees of a server whose model calls tools, by each of its providers that speak OpenAI's API.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const PROMPT = { prompt: "hi", temperature: 1, maxOutputTokens: 120, maxRetries: 0 };
// Nothing is stored here, so the provider of responses is to send all of a conversation again.
const OPTIONS = { openai: { parallelToolCalls: false, store: false }, inferc: { parallel_tool_calls: false } };

const Weather = z.object({ city: z.enum(["Rome", "Paris"]), days: z.number().int().min(1).max(9) });
const Verdict = z.object({ verdict: z.enum(["yes", "no"]), count: z.number().int().min(0).max(9) });

globalThis.AI_SDK_LOG_WARNINGS = false;

// Responses have no seed in the SDK, and no provider of OpenAI's keeps an answer going, so both are put in on the way.
function providers(more) {
  const bodies = [];
  const asked = async (to, init) => {
    bodies.push(JSON.parse(init.body));
    return fetch(to, { ...init, body: JSON.stringify({ seed: 5, ...bodies.at(-1), ...more }) });
  };
  const settings = { baseURL: `${url}/v1`, apiKey: "none", fetch: asked };
  const openai = createOpenAI(settings);
  const compatible = createOpenAICompatible({
    ...settings,
    name: "inferc",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  return { bodies, chat: (name) => openai.chat(name), responses: (name) => openai.responses(name), compatible };
}

async function fault(call) {
  try {
    await call();
  } catch (error) {
    return [error.name, error.statusCode, error.message, error.isRetryable];
  }
  return ["no error"];
}

async function parts(stream) {
  const kinds = [];
  let text = "";
  for await (const part of stream) {
    if (kinds.at(-1) !== part.type) kinds.push(part.type); // how many there are depends on how fast both ends are
    if (part.type === "text-delta") text += part.text;
  }
  return { kinds, text };
}

// One step that calls a tool, and one that answers; the SDK calls the tool itself.
function steps(called) {
  const execute = async (input) => {
    called.push(input);
    return "sunny";
  };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  return {
    tools: { get_weather: tool({ description: "The weather.", inputSchema: Weather, execute }) },
    stopWhen: isStepCount(2),
    prepareStep,
  };
}

async function sees(kind) {
  const provider = providers({});
  const asked = { ...PROMPT, model: provider[kind](model), providerOptions: OPTIONS };
  const called = [];
  const whole = await generateText({ ...asked, ...steps(called) });
  const stream = streamText({ ...asked, ...steps(called) });
  const streamed = await parts(stream.fullStream);
  const formed = { ...asked, output: Output.object({ schema: Verdict }) };
  const object = streamText(formed);
  const partial = [];
  for await (const each of object.partialOutputStream) partial.push(each);
  const older = streamObject({ ...asked, schema: Verdict });
  const olderPartial = [];
  for await (const each of older.partialObjectStream) olderPartial.push(each);
  return {
    steps: whole.steps.map((step) => [step.finishReason, step.toolCalls.map((call) => call.input), step.text]),
    called,
    text: whole.text,
    usage: whole.usage,
    stream: { ...streamed, steps: (await stream.steps).length, usage: await stream.usage },
    fields: [...new Set(provider.bodies.flatMap((body) => Object.keys(body)))],
    objects: [
      (await generateText(formed)).output,
      partial.at(-1),
      await object.output,
      (await generateObject({ ...asked, schema: Verdict })).object,
      olderPartial.at(-1),
      await older.object,
    ],
    choice: (await generateText({ ...asked, output: Output.choice({ options: ["left", "right"] }) })).output,
    array: (await generateText({ ...asked, output: Output.array({ element: z.enum(["a", "b"]) }) })).output,
    any: typeof (await generateObject({ ...asked, output: "no-schema" })).object,
    errors: {
      model: await fault(() => generateText({ ...asked, model: provider[kind]("none") })),
      image: await fault(() => {
        const content = [{ type: "file", mediaType: "image/png", data: "iVBORw0KGgo=" }];
        return generateText({ ...asked, prompt: undefined, messages: [{ role: "user", content }] });
      }),
    },
  };
}

// A client that leaves in the middle of a stream.
async function left(kind) {
  const provider = providers({ ignore_eos: true });
  const controller = new AbortController();
  const asked = { ...PROMPT, model: provider[kind](model), maxOutputTokens: 200, abortSignal: controller.signal };
  let isAborted = false;
  const stream = streamText({ ...asked, onAbort: () => (isAborted = true) });
  for await (const part of stream.fullStream) if (part.type === "text-delta") controller.abort();
  return isAborted;
}

// Its prompt for a model of completions has the conversation as a text, with the turns that it is to stop at.
async function completed() {
  const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const { text, usage } = await generateText({ ...PROMPT, model: openai.completion(model), maxOutputTokens: 6 });
  return { text, usage };
}

const seen = { completed: await completed() };
for (const kind of ["chat", "responses", "compatible"]) seen[kind] = { ...(await sees(kind)), left: await left(kind) };
console.log(JSON.stringify(seen));
