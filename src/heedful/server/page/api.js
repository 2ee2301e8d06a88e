// The server's API: requests, streams of an answer, and the key where one is asked for.

const KEY = "heedful.key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

// JSON in, JSON out; null for an answer without a body. Throws ApiError. `keepalive`: goes through though the page ends.
export async function request(path, { method = "GET", body, signal, keepalive = false } = {}) {
  const response = await send(path, { method, body, signal, keepalive });
  return response.status === 204 ? null : response.json();
}

// The events of a chat completion as they come. `onOpen`: the model is loaded and reads the prompt.
export async function* streamChat(body, { signal, onOpen }) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await send("/v1/chat/completions", { method: "POST", body: asked, signal });
  onOpen();
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
    yield event;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function send(path, { method, body, signal, keepalive }) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, keepalive, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error;
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  throw new ApiError(error?.message || `The server answered ${response.status}.`, {
    status: response.status,
    code: error?.code,
  });
}

// The data of server-sent events; comments (the server's pings) are none.
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
