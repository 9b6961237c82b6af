// The chat page of edgellm-serve. Text is only ever set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
let messages = []; // the conversation, as the server is sent it
const pictures = []; // data: URIs of the next message
let running = null; // AbortController of the answer that is coming
let figures = null;

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function showModel() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (answer.status === 401) {
    document.querySelector("details").open = true;
    $("state").textContent = "this server asks for an API key";
    $("key").focus();
  } else {
    $("model").textContent = (await answer.json()).data[0].id;
    $("state").textContent = "";
  }
}

function turn(kind) {
  const element = document.createElement("div");
  element.className = `turn ${kind}`;
  $("log").append(element);
  return element;
}

function add(parent, tag, content, kind) {
  const element = document.createElement(tag);
  element.textContent = content;
  if (kind) element.className = kind;
  parent.append(element);
  return element;
}

function scrollDown(before) {
  const log = $("log");
  if (before) log.scrollTop = log.scrollHeight;
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request() {
  const system = $("system").value.trim();
  const head = system ? [{ role: "system", content: system }] : [];
  return {
    messages: [...head, ...messages],
    temperature: $("temperature").value === "" ? null : Number($("temperature").value),
    max_tokens: Math.max(1, Math.round(Number($("tokens").value)) || 256),
    stream: true,
    stream_options: { include_usage: true, include_tokens: true },
  };
}

async function ask() {
  const text = $("text").value.trim();
  if (running || (!text && !pictures.length)) return;
  const talk = messages;
  addQuestion(text);
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  $("state").textContent = "waiting";
  figures = { begin: performance.now(), passes: [], speeds: [], tokens: 0, drafted: 0, accepted: 0, trees: 0 };
  const element = turn("assistant");
  let answered = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) answered += show(element, event);
    $("state").textContent = "";
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("state").textContent = stopped ? "stopped" : "failed";
    if (!stopped) {
      element.classList.add("fault");
      add(element, "div", error.message);
    }
  }
  if (answered) talk.push({ role: "assistant", content: answered });
  else talk.pop(); // an unanswered question is not asked again
  running = null;
  $("stop").disabled = true;
  $("send").disabled = false;
  $("text").focus();
}

function addQuestion(text) {
  const element = turn("user");
  for (const url of pictures) add(element, "img", "").src = url;
  element.append(text);
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({
    role: "user", content: parts.length ? [...parts, { type: "text", text }] : text,
  });
  pictures.length = 0;
  showPictures();
  $("text").value = "";
  scrollDown(true);
}

// Draws one event; the text that it adds.
function show(element, event) {
  if (event.error) throw new Error(event.error.message);
  if (event.usage) showUsage(event.usage, event.metrics);
  if (!event.edgellm) return event.choices[0]?.delta.content ?? "";
  const follows = isAtEnd();
  for (const [text, origin] of event.edgellm.tokens) if (text) add(element, "span", text, origin);
  scrollDown(follows);
  count(event.edgellm);
  return event.choices[0].delta.content ?? "";
}

function count({ tokens, drafted, accepted }) {
  if (!tokens.length) return;
  const now = performance.now();
  if (!figures.tokens) {
    figures.first = now;
    $("first").textContent = `${Math.round(now - figures.begin)} ms`;
    $("state").textContent = "answering";
  } else {
    const speed = (figures.tokens + tokens.length - 1) / (now - figures.first) * 1e3;
    figures.speeds.push(speed);
    $("speed").textContent = speed.toFixed(1);
  }
  figures.tokens += tokens.length;
  figures.passes.push([Math.min(accepted, tokens.length), tokens.length]);
  if (drafted) {
    figures.trees += 1;
    figures.drafted += drafted;
    figures.accepted += accepted;
    $("length").textContent = (1 + figures.accepted / figures.trees).toFixed(2);
    $("rate").textContent = `${(100 * figures.accepted / figures.drafted).toFixed(0)} %`;
  }
  figures.waits ??= requestAnimationFrame(() => { figures.waits = undefined; plot(); });
}

function showUsage(usage, metrics) {
  $("prompt").textContent = `${usage.prompt_tokens}, ${usage.prompt_tokens_details.cached_tokens}`;
  if (metrics?.tokens_per_second) $("speed").textContent = metrics.tokens_per_second.toFixed(1);
  if (usage.speculation) {
    $("length").textContent = usage.speculation.acceptance_length.toFixed(2);
    $("rate").textContent = `${(100 * usage.speculation.acceptance_rate).toFixed(0)} %`;
  } else {
    $("length").textContent = $("rate").textContent = "–";
  }
  plot();
}

function svg(parent, tag, attributes, content = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = content;
  parent.append(element);
}

function plot() {
  const bars = $("passes"), line = $("speeds");
  bars.replaceChildren();
  line.replaceChildren();
  const latest = figures.passes.slice(-60);
  const most = Math.max(2, ...latest.map(([, all]) => all));
  latest.forEach(([accepted, all], index) => {
    const unit = 70 / most, box = { x: 4 * index, width: 3 };
    svg(bars, "rect", { ...box, y: 88 - accepted * unit, height: accepted * unit, class: "accepted" });
    svg(bars, "rect", { ...box, y: 88 - all * unit, height: (all - accepted) * unit, class: "own" });
  });
  svg(bars, "text", { x: 4, y: 11 }, `${most} tokens at most`);
  const speeds = figures.speeds.slice(-120);
  const top = Math.max(1, ...speeds);
  const points = speeds.map((speed, index) => `${2 * index},${88 - 70 * speed / top}`);
  svg(line, "polyline", { points: points.join(" ") });
  svg(line, "text", { x: 4, y: 11 }, `${top.toFixed(0)} tokens/s at most`);
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, index) => {
    const button = document.createElement("button"), image = document.createElement("img");
    button.type = "button";
    button.title = "Remove this picture";
    image.src = url;
    image.alt = `Picture ${index + 1}; press to remove it`;
    button.append(image);
    button.onclick = () => { pictures.splice(index, 1); showPictures(); $("text").focus(); };
    return button;
  }));
}

function take(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => { pictures.push(reader.result); showPictures(); };
    reader.readAsDataURL(file);
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
$("text").addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", showModel);
$("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
$("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  $("text").focus();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("chat").addEventListener(kind, (event) => {
    event.preventDefault();
    $("chat").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
showModel();
