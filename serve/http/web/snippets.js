// The playground's request as a curl command and as Python code.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(origin, path, body, hasKey) {
  const lines = [`curl -N ${origin}${path}`, "-H 'content-type: application/json'"];
  if (hasKey) lines.push('-H "authorization: Bearer $INFERC_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/** A value as Python writes it. */
export function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const OPENAI = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty",
  "seed", "stop", "logprobs", "top_logprobs", "stream",
]);

/** For OpenAI's client; what it does not know goes into extra_body. */
export function asPython(origin, path, body, hasKey) {
  const { stream_options: _, ...fields } = body;
  const known = Object.entries(fields).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => !OPENAI.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
  const isChat = path.includes("chat");
  const piece = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  const key = hasKey ? 'os.environ["INFERC_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    "for chunk in stream:",
    `    print(${piece} or "", end="", flush=True)`,
    "",
  ].join("\n");
}
