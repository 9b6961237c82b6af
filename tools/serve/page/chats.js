// Conversations, kept in this browser: one entry of its storage for each.
import { prefix } from "./api.js";

const PLACE = `edgellm:${prefix}:`;
const CHAT = `${PLACE}chat:`;
const UNTITLED = "New chat";

export function newChat() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: UNTITLED, changed: 0, messages: [] };
}

/** Conversations, the latest first. */
export function listChats() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(CHAT))
    .map((name) => load(name))
    .filter((chat) => Array.isArray(chat?.messages))
    .sort((one, other) => other.changed - one.changed);
}

/** Keeps a conversation without its tokens, which are large; false if only its texts fit, or nothing. */
export function saveChat(chat) {
  chat.changed = Date.now();
  if (chat.title === UNTITLED) chat.title = titleOf(chat);
  const messages = chat.messages.map(({ tokens, ...message }) => message);
  if (store(CHAT + chat.id, { ...chat, messages })) return true;
  const texts = messages.map(({ pictures, clips, ...message }) => message);
  store(CHAT + chat.id, { ...chat, messages: texts });
  return false;
}

function titleOf({ messages }) {
  const [first] = messages;
  const text = first?.text.trim().split("\n", 1)[0] || (first?.files ?? first?.clips)?.[0]?.name;
  return text?.slice(0, 60) || UNTITLED;
}

export function isKept({ id }) { return localStorage.getItem(CHAT + id) !== null; }
export function deleteChat({ id }) { localStorage.removeItem(CHAT + id); }

/** A stored value; `fallback` if there is none that can be read. */
export function recall(name, fallback) { return load(PLACE + name) ?? fallback; }
export function keep(name, value) { return store(PLACE + name, value); }

function load(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch { // full, or switched off
    return false;
  }
}

/** A message's text, with its files as fenced blocks. */
export function fullText({ text, files = [] }) {
  const blocks = files.map(({ name, content }) => {
    const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content}\n${fence}`;
  });
  return [...blocks, text].filter(Boolean).join("\n\n");
}

/** Messages in OpenAI's form, without those that got no output. */
export function sentMessages(messages, system) {
  const head = system ? [{ role: "system", content: system }] : [];
  const sent = messages.filter((message) => message.fault === undefined);
  return [...head, ...sent.map((message) => {
    const text = fullText(message), { role, pictures = [], clips = [] } = message;
    if (!pictures.length && !clips.length) return { role, content: text };
    const parts = [
      ...pictures.map((url) => ({ type: "image_url", image_url: { url } })),
      ...clips.map(({ url }) => ({ type: "input_audio", input_audio: { data: url.split(",")[1], format: "wav" } })),
    ];
    return { role, content: text ? [...parts, { type: "text", text }] : parts };
  })];
}

export function asMarkdown({ title, messages }) {
  const names = { user: "User", assistant: "Assistant" };
  const parts = messages.map((message) => `## ${names[message.role]}\n\n${fullText(message)}\n`);
  return [`# ${title}\n`, ...parts].join("\n");
}
