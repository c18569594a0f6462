// Print what OpenAI's JavaScript client sees of a server whose model calls tools: its helpers with zod, and its runners.

import { OpenAI } from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const SAMPLED = { model, temperature: 1, seed: 5 };
const CHAT = { ...SAMPLED, messages, max_tokens: 120 };
const RESPONSE = { ...SAMPLED, input: "hi", max_output_tokens: 120 };
const ONE = { tool_choice: "required", parallel_tool_calls: false };

const Weather = z.object({ city: z.enum(["Rome", "Paris"]), days: z.number().int().min(1).max(9) });
const Verdict = z.object({ verdict: z.enum(["yes", "no"]), count: z.number().int().min(0).max(9) });
const WEATHER = { name: "get_weather", description: "The weather.", parameters: Weather };

async function chats() {
  const asked = { ...CHAT, ...ONE, tools: [zodFunction(WEATHER)] };
  const whole = (await client.chat.completions.parse(asked)).choices[0];
  const runner = client.chat.completions.stream(asked);
  const events = [];
  runner.on("tool_calls.function.arguments.delta", (event) => events.push(event.arguments_delta));
  runner.on("tool_calls.function.arguments.done", (event) => events.push(event.arguments));
  const last = (await runner.finalChatCompletion()).choices[0];
  const formed = await client.chat.completions.parse({
    ...CHAT,
    response_format: zodResponseFormat(Verdict, "verdict"),
  });
  const shapes = [];
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    shapes.push(chunk.choices[0].delta.content);
  }
  return {
    reason: whole.finish_reason,
    call: whole.message.tool_calls[0].function,
    streamed: last.message.tool_calls[0].function,
    contents: [whole.message.content, last.message.content, ...new Set(shapes)],
    deltas: events.slice(0, -1).join(""),
    done: events.at(-1),
    formed: formed.choices[0].message.parsed,
  };
}

// The client calls the functions itself and asks again, until it has asked so often.
async function run(stream) {
  const called = [];
  const weather = ({ city, days }) => {
    called.push([city, days]);
    return "sunny";
  };
  const tool = zodFunction({ ...WEATHER, function: weather });
  const asked = { ...CHAT, ...ONE, max_tokens: 80, tools: [tool], stream };
  const runner = client.chat.completions.runTools(asked, { maxChatCompletions: 2 });
  await runner.done();
  return { called, roles: runner.messages.map((message) => message.role), usage: await runner.totalUsage() };
}

async function responses() {
  const asked = { ...RESPONSE, ...ONE, tools: [zodResponsesFunction(WEATHER)] };
  const whole = await client.responses.parse(asked);
  const stream = client.responses.stream(asked);
  const deltas = [];
  stream.on("response.function_call_arguments.delta", (event) => deltas.push(event.delta));
  const last = await stream.finalResponse();
  const output = { type: "function_call_output", call_id: whole.output[0].call_id, output: "sunny" };
  const input = [{ role: "user", content: "hi" }, ...whole.output, output];
  const then = await client.responses.create({ ...asked, input, tool_choice: "none", max_output_tokens: 12 });
  const formed = await client.responses.parse({ ...RESPONSE, text: { format: zodTextFormat(Verdict, "verdict") } });
  const counted = await client.responses.inputTokens.count({ model, input, tools: asked.tools });
  return {
    call: whole.output[0],
    streamed: last.output[0].parsed_arguments,
    deltas: deltas.join(""),
    then: then.output_text,
    usage: then.usage,
    counted,
    formed: formed.output_parsed,
  };
}

const seen = { chats: await chats(), run: await run(false), run_stream: await run(true), responses: await responses() };
console.log(JSON.stringify(seen));
