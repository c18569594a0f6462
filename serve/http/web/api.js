// Requests to the server that this page is from.

const KEY = "inferc.key";

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  return apiKey() ? { ...more, authorization: `Bearer ${apiKey()}` } : more;
}

/** The answer to a request; one that is no success is thrown as an ApiError with the server's sentence. */
async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    const message = body.error ? body.error.message : `The server answered with status ${answer.status}.`;
    if (answer.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
    throw new ApiError(answer.status, message, answer.headers.get("retry-after"));
  }
  return answer;
}

export async function getJson(path) {
  return (await ask(path)).json();
}

export async function getText(path) {
  return (await ask(path)).text();
}

/** The objects of a stream of server-sent events, as they come. */
export async function* postStream(path, body, signal) {
  const answer = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  yield* events(answer.body.getReader());
}

/** Events of a reader of bytes, which may end anywhere: in a line, or in a character. */
export async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const parts = rest.split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(found.error.code, found.error.message);
      yield found;
    }
    if (done) throw new ApiError(0, "The connection broke before the answer was whole.");
  }
}
