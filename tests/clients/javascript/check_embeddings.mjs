// Print the vectors that OpenAI's JavaScript client and Vercel's AI SDK get: node - URL MODEL < check_embeddings.mjs.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany } from "ai";
import { OpenAI } from "openai";

const [url, model] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const client = new OpenAI(settings);
const provider = createOpenAI(settings).embedding(model);
const compatible = createOpenAICompatible({ ...settings, name: "inferc" }).embeddingModel(model);
const VALUES = ["a text", "other"];

const answer = await client.embeddings.create({ model, input: VALUES });
const many = await embedMany({ model: provider, values: VALUES });
const one = await embed({ model: compatible, value: VALUES[0] });
const cut = await embed({ model: provider, value: VALUES[0], providerOptions: { openai: { dimensions: 8 } } });
const seen = {
  client: answer.data.map((each) => each.embedding),
  many: many.embeddings,
  one: one.embedding,
  cut: cut.embedding,
  usage: [answer.usage.prompt_tokens, many.usage.tokens, one.usage.tokens],
};
console.log(JSON.stringify(seen));
