// Print the reasoning that Vercel's AI SDK sees: node - URL MODEL THINK < check_reasoning.mjs; THINK begins it.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, model, think] = process.argv.slice(2);
const provider = createOpenAICompatible({ baseURL: `${url}/v1`, name: "inferc", includeUsage: true });
const inferc = { logit_bias: { [think]: 100 }, max_reasoning_tokens: 6 };
const SAMPLED = { model: provider(model), temperature: 1, seed: 5, maxOutputTokens: 24, maxRetries: 0 };
const asked = { ...SAMPLED, prompt: "hi", providerOptions: { inferc } };

const whole = await generateText(asked);
const stream = streamText(asked);
const kinds = [];
let [thought, text] = ["", ""];
for await (const part of stream.fullStream) {
  if (kinds.at(-1) !== part.type) kinds.push(part.type);
  if (part.type === "reasoning-delta") thought += part.text;
  if (part.type === "text-delta") text += part.text;
}
const messages = [{ role: "user", content: "hi" }, ...whole.responseMessages, { role: "user", content: "and?" }];
const then = await generateText({ ...SAMPLED, messages, maxOutputTokens: 4 });
const seen = {
  whole: [whole.reasoningText, whole.text],
  streamed: [thought, text],
  kinds,
  tokens: [whole.usage, await stream.usage].map((usage) => usage.outputTokenDetails.reasoningTokens),
  inputs: [whole.usage.inputTokens, then.usage.inputTokens],
};
console.log(JSON.stringify(seen));
