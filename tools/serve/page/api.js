// Requests to the server.

// The page may be served below a prefix: this file is at PREFIX/page/api.js.
const root = new URL("..", import.meta.url);
let key = "";

export const prefix = root.pathname;
export function setKey(value) { key = value; }

export class KeyNeeded extends Error {}

async function send(path, options = {}) {
  const isForm = options.body instanceof FormData; // its type has a boundary, which the browser sets
  const type = !isForm && { "content-type": "application/json" };
  const headers = { ...type, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(new URL(path, root), { ...options, headers });
  if (response.status === 401) throw new KeyNeeded("This server needs an API key.");
  if (!response.ok) throw new Error(await problem(response));
  return response;
}

async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server returned ${response.status}: ${text.slice(0, 200)}`;
  }
}

/** The server's models: id and max_model_len. */
export async function models() {
  return (await (await send("v1/models")).json()).data;
}

/** What a model is and takes, in Ollama's form. */
export async function describe(model) {
  const response = await send("api/show", { method: "POST", body: JSON.stringify({ model }) });
  return response.json();
}

/** The events of a chat completion. */
export function complete(request, signal) {
  return stream("v1/chat/completions", JSON.stringify(request), signal);
}

/** The transcripts of clips, one after another, as the events of a chat completion. */
export async function* transcribe(model, clips, signal) {
  for (const [index, { name, url }] of clips.entries()) {
    const form = new FormData();
    form.set("model", model);
    form.set("stream", "true");
    form.set("file", new Blob([bytesOf(url)]), name);
    if (index) yield spoken("\n\n");
    for await (const { type, delta } of stream("v1/audio/transcriptions", form, signal)) {
      if (type === "transcript.text.delta") yield spoken(delta);
    }
  }
}

function bytesOf(url) {
  return Uint8Array.from(atob(url.split(",")[1]), (letter) => letter.charCodeAt(0));
}

const spoken = (content) => ({ choices: [{ delta: { content } }] });

async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body, signal });
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a ping
      const data = part.replace(/^data: /, "");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
