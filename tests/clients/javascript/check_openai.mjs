// Print what OpenAI's JavaScript client sees of a server: node - URL MODEL < check_openai.mjs, where it is installed.

import { OpenAI } from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const MESSAGES = [{ role: "user", content: "Write a function that adds two numbers." }];
const OPTIONS = { model, messages: MESSAGES, temperature: 0, max_tokens: 12, ignore_eos: true };
const TOOL = { type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } };

const FREE = { ignore_eos: false, max_tokens: 200 };
const format = (schema) => ({ type: "json_schema", json_schema: { name: "verdict", schema } });
const VERDICT = { type: "object", properties: { verdict: { enum: ["yes", "no"] } }, required: ["verdict"] };

async function streamed(stream) {
  const seen = { pieces: [], reasons: [], usage: null };
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      seen.pieces.push((choice.delta ? choice.delta.content : choice.text) || "");
      if (choice.finish_reason) seen.reasons.push(choice.finish_reason);
    }
    seen.usage = chunk.usage || seen.usage;
  }
  return seen;
}

// What a busy machine has not sent yet, the server merges: the first of some equal answers that came in several pieces.
async function inPieces(ask) {
  let seen;
  for (let tries = 0; tries < 20; tries++) {
    seen = await streamed(await ask());
    if (seen.pieces.length > 2) break;
  }
  return seen;
}

async function helped() {
  const runner = client.chat.completions.stream(OPTIONS);
  let text = "";
  runner.on("content", (delta) => (text += delta));
  const last = await runner.finalChatCompletion();
  return [text, last.choices[0].message.content];
}

async function responded() {
  const kinds = [];
  let text = "";
  const stream = await client.responses.create({ model, input: "Hi", max_output_tokens: 6, stream: true });
  for await (const event of stream) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { kinds, text };
}

// A client that leaves in the middle of a stream.
async function left() {
  for await (const _ of await client.chat.completions.create({ ...OPTIONS, max_tokens: 200, stream: true })) break;
  return true;
}

async function fault(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.message, error.param, error.code];
  }
  return ["no error"];
}

async function main() {
  const create = (more) => client.chat.completions.create({ ...OPTIONS, ...more });
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  const raw = await create({}).withResponse();
  return {
    models,
    left: await left(),
    chat: raw.data,
    request_id: raw.request_id,
    stream: await inPieces(() => create({ stream: true, stream_options: { include_usage: true } })),
    helped: await helped(),
    together: await Promise.all(
      [...Array(8)].map(async () => (await streamed(await create({ stream: true }))).pieces.join("")),
    ),
    completion: await client.completions.create({ ...OPTIONS, messages: undefined, prompt: "def add(" }),
    responses: await responded(),
    structured: (await create({ ...FREE, response_format: format(VERDICT) })).choices[0].message.content,
    structured_stream: (await inPieces(() => create({ ...FREE, response_format: format(VERDICT), stream: true }))).pieces,
    errors: {
      tools: await fault(() => create({ tools: [TOOL] })),
      run_tools: await fault(() => {
        const tool = { type: "function", function: { ...TOOL.function, function: () => 1, parse: JSON.parse } };
        return client.chat.completions.runTools({ ...OPTIONS, tools: [tool] }).finalContent();
      }),
      schema: await fault(() => create({ ...FREE, response_format: format({ contains: { const: 1 } }) })),
      model: await fault(() => create({ model: "none" })),
      embeddings: await fault(() => client.embeddings.create({ model, input: "a" })),
    },
  };
}

main().then((seen) => console.log(JSON.stringify(seen)));
