// The chat page of edgellm-serve: what the buttons and keys do.
import { KeyNeeded, complete, describe, models, setKey, transcribe } from "./api.js";
import { attach, hasAttachments, setAll, setUp as setUpAttachments, takeAll } from "./attachments.js";
import { drawChatList } from "./chat_list.js";
import { isKept, keep, listChats, newChat, saveChat, sentMessages } from "./chats.js";
import { find, make } from "./dom.js";
import { Figures, showContext } from "./figures.js";
import { endRecording, setUpRecording } from "./recording.js";
import { options, setUpSettings, showDefaults } from "./settings.js";
import { drawStart, factsOf } from "./start.js";
import { Answer, addFault, addQuestion } from "./turns.js";

let chat = newChat();
let running = null; // AbortController of the output that is generated
let edited = null; // index of the message that the next one replaces
let model = { id: "", takesPictures: true };
let cards = [];

const say = (text) => { find("state").textContent = text; };

async function showModels() {
  try {
    cards = await models();
    find("models").replaceChildren(...cards.map(({ id }) => make("option", { value: id, textContent: id })));
    await choose(cards[0].id);
    say("");
  } catch (error) {
    say(error.message);
    if (error instanceof KeyNeeded) {
      toggle("panel", true);
      find("settings").open = true;
      find("key").focus();
    }
  }
}

async function choose(id) {
  const capacity = cards.find((card) => card.id === id).max_model_len;
  model = { id, capacity, takesPictures: true, takesAudio: false, transcribes: false, maxBytes: Infinity };
  find("model").textContent = id;
  find("model").hidden = cards.length > 1;
  find("models").hidden = cards.length < 2;
  try {
    const description = await describe(id);
    model.facts = factsOf(description, capacity);
    model.speed = description.edgellm?.tokens_per_second;
    model.defaults = description.edgellm?.defaults;
    model.takesPictures = description.capabilities.includes("vision");
    model.transcribes = description.capabilities.includes("transcription");
    model.takesAudio = model.transcribes || description.capabilities.includes("audio");
    model.maxBytes = description.edgellm?.max_body_bytes ?? Infinity;
  } catch { // an adapter, or another server: its facts stay unknown
  }
  showDefaults(model.defaults);
  setUpAttachments(model, say);
  if (!model.takesAudio) endRecording();
  find("record").hidden = !model.takesAudio;
  document.body.classList.toggle("transcribes", model.transcribes);
  showUsed();
  if (!chat.messages.length) drawStart(model);
}

/** Opens a conversation; without one, a new one. */
function open(given) {
  running?.abort();
  chat = given ?? newChat();
  history.replaceState(null, "", given ? `#${chat.id}` : location.pathname);
  stopEditing();
  new Figures();
  showUsed();
  draw();
  toggle("chats", false);
  find("text").focus();
}

function showUsed() {
  const { used } = chat.messages.at(-1) ?? {};
  if (used) showContext(used, model.capacity);
}

function draw() {
  const log = find("log");
  log.replaceChildren();
  if (!chat.messages.length) drawStart(model);
  chat.messages.forEach((message, index) => {
    if (message.role === "user") {
      addQuestion(message, () => edit(index));
      if (message.fault !== undefined) addFault(message.fault, () => again(index));
    } else {
      new Answer(message, () => again(index - 1)).finish();
    }
  });
  log.scrollTop = log.scrollHeight;
  drawChatList(chat, open);
}

function edit(index) {
  if (running) return;
  edited = index;
  find("text").value = chat.messages[index].text;
  setAll(chat.messages[index]);
  find("editing").hidden = false;
  find("text").focus();
}

function stopEditing() {
  edited = null;
  find("editing").hidden = true;
  find("text").value = "";
  setAll({});
}

/** Asks the question at an index again; what follows it is dropped. */
function again(index) {
  if (running) return;
  chat.messages.length = index + 1;
  delete chat.messages[index].fault;
  draw();
  ask();
}

function submit() {
  const text = find("text").value.trim();
  if (running || (!text && !hasAttachments())) return;
  const isFirst = !chat.messages.length || edited !== null;
  if (edited !== null) chat.messages.length = edited;
  const message = { role: "user", text, ...takeAll() }, index = chat.messages.push(message) - 1;
  stopEditing();
  if (isFirst) draw();
  else addQuestion(message, () => edit(index)); // screen readers read what is added
  find("log").scrollTop = find("log").scrollHeight;
  ask();
}

/** Attaches files to the next message, which is sent at once to a model that transcribes. */
async function add(files) {
  await attach(files);
  if (model.transcribes) submit();
}

/** Generates the output for the last question. */
async function ask() {
  const asked = chat, abort = new AbortController();
  const question = asked.messages.at(-1);
  save(asked);
  drawChatList(chat, open);
  setRunning(abort);
  say("waiting");
  const message = { role: "assistant", text: "", reasoning: "", tokens: [] };
  const index = asked.messages.length - 1;
  const answer = new Answer(message, () => again(index)), figures = new Figures();
  let fault = "";
  try {
    for await (const event of outputOf(asked, abort.signal)) {
      if (event.edgellm?.tokens.length && chat === asked) say("answering");
      answer.add(event);
      if (event.edgellm) figures.count(event.edgellm);
      if (event.usage) finish(message, event, figures);
    }
  } catch (error) {
    fault = error.name === "AbortError" ? "Stopped." : error.message;
  }
  if (message.text || message.reasoning) {
    if (fault) message.note = fault;
    asked.messages.push(message);
  } else {
    question.fault = fault || "The output is empty.";
  }
  setRunning(null);
  if (chat === asked) end(answer, fault, question);
  if (chat === asked || isKept(asked)) save(asked); // unless it was deleted meanwhile
  drawChatList(chat, open);
  if (model.transcribes) submit(); // what was attached meanwhile
}

function outputOf(asked, signal) {
  if (model.transcribes) return transcribe(model.id, asked.messages.at(-1).clips ?? [], signal);
  return complete(request(asked), signal);
}

function end(answer, fault, question) {
  if (question.fault !== undefined) {
    const index = chat.messages.length - 1;
    answer.remove();
    addFault(question.fault, () => again(index));
  } else {
    answer.finish();
  }
  say(fault === "Stopped." ? "stopped" : fault && "failed");
  const isFree = document.activeElement === document.body || find("form").contains(document.activeElement);
  if (isFree) find("text").focus();
}

function request(asked) {
  return {
    ...(model.id && { model: model.id }),
    messages: sentMessages(asked.messages, find("system").value.trim()),
    ...options(),
    stream: true,
    stream_options: { include_usage: true, include_tokens: true, include_trees: true },
  };
}

function finish(message, { usage, metrics }, figures) {
  message.used = usage.prompt_tokens + usage.completion_tokens;
  figures.finish(usage, metrics, model.capacity);
  if (metrics?.tokens_per_second) keep(`speed:${model.id}`, metrics.tokens_per_second);
}

function save(asked) {
  if (!saveChat(asked)) say("The browser's storage is full: pictures and audio of this conversation are not kept.");
  if (chat === asked) history.replaceState(null, "", `#${asked.id}`);
}

function setRunning(abort) {
  running = abort;
  find("stop").hidden = !abort;
  find("send").disabled = Boolean(abort);
  find("log").setAttribute("aria-busy", String(Boolean(abort)));
}

/** Shows or hides a column on narrow screens; wide ones show both. */
function toggle(name, shown = !document.body.classList.contains(`with-${name}`)) {
  document.body.classList.toggle(`with-${name}`, shown);
  find(`show-${name}`).setAttribute("aria-expanded", String(shown));
}

function closeColumns() {
  for (const name of ["chats", "panel"]) toggle(name, false);
}

find("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
find("text").addEventListener("paste", (event) => add([...event.clipboardData.files]));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited !== null) stopEditing();
  closeColumns();
});
find("chat").addEventListener("click", closeColumns);
find("stop").addEventListener("click", () => running?.abort());
find("cancel").addEventListener("click", () => { stopEditing(); find("text").focus(); });
find("key").addEventListener("change", () => { setKey(find("key").value.trim()); showModels(); });
find("models").addEventListener("change", () => choose(find("models").value));
find("file").addEventListener("change", async ({ target }) => {
  await add([...target.files]);
  target.value = "";
});
find("fresh").addEventListener("click", () => open(null));
for (const name of ["chats", "panel"]) find(`show-${name}`).addEventListener("click", () => toggle(name));
for (const kind of ["dragover", "dragleave", "drop"]) {
  find("chat").addEventListener(kind, (event) => {
    event.preventDefault();
    find("chat").classList.toggle("over", kind === "dragover");
    if (kind === "drop") add([...event.dataTransfer.files]);
  });
}
addEventListener("storage", () => drawChatList(chat, open)); // another tab has changed the list
setUpSettings();
setUpRecording((recording) => add([recording]), say);
open(listChats().find(({ id }) => `#${id}` === location.hash));
showModels();
