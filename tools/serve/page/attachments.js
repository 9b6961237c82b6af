// Pictures, clips of audio and text files of the next message.
import { find, make } from "./dom.js";
import { toWav } from "./recording.js";

const MAX_FILE_BYTES = 256 * 1024;
const TEXTS = "text/*,.md,.json,.py,.c,.cpp,.h,.js,.yml,.toml,.csv,.log";
const FORM_BYTES = 4096; // of a request besides a clip, at most
let pictures = [], clips = [], files = [], model = { takesPictures: true }, report = () => {};

/** Takes what the model takes, and where faults are reported. */
export function setUp(given, onFault) {
  model = given;
  report = onFault;
  const { takesPictures, takesAudio, transcribes } = model;
  const some = takesAudio ? `audio/*,${TEXTS}` : TEXTS;
  find("file").accept = transcribes ? "audio/*" : takesPictures ? "" : some;
  const kinds = [takesPictures && "picture", takesAudio && "audio", "file"].filter(Boolean);
  const named = [kinds.slice(0, -1).join(", "), kinds.at(-1)].filter(Boolean).join(" or ");
  find("attach").textContent = transcribes ? "Audio file" : named[0].toUpperCase() + named.slice(1);
}

export function hasAttachments() { return pictures.length + clips.length + files.length > 0; }

/** The attachments, which are then no longer of the next message. */
export function takeAll() {
  const given = Object.entries({ pictures, clips, files });
  const taken = Object.fromEntries(given.filter(([, list]) => list.length));
  setAll({});
  return taken;
}

export function setAll(given) {
  pictures = [...(given.pictures ?? [])];
  clips = [...(given.clips ?? [])];
  files = [...(given.files ?? [])];
  show();
}

export async function attach(list) {
  for (const file of list) {
    if (file.type.startsWith("audio/")) await attachClip(file);
    else if (model.transcribes) report(`${file.name} is no audio, and this model takes nothing else.`);
    else if (file.type.startsWith("image/")) await attachPicture(file);
    else await attachText(file);
  }
  show();
}

async function attachPicture(file) {
  if (!model.takesPictures) return report("This model takes no pictures.");
  pictures.push(await asUrl(file));
}

/** Chat models get WAV, which every server reads; the servers of speech models read any format. */
async function attachClip(file) {
  if (!model.takesAudio) return report("This model takes no audio.");
  let audio = file;
  try {
    if (!model.transcribes) audio = await toWav(file);
  } catch {
    return report(`${file.name} has no audio that this browser can decode.`);
  }
  const share = model.transcribes ? 1 : 3 / 4; // of bytes in base64
  const most = (model.maxBytes - FORM_BYTES) * share;
  if (audio.size > most) {
    return report(`${file.name} is too large: ${megabytes(audio.size)} of audio, and the server takes ${megabytes(most)}.`);
  }
  clips.push({ name: file.name, url: await asUrl(audio) });
}

const megabytes = (count) => `${(count / 2 ** 20).toFixed(1)} MiB`;

function asUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

async function attachText(file) {
  if (file.size > MAX_FILE_BYTES) return report(`${file.name} is larger than 256 KiB.`);
  try {
    const content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    files.push({ name: file.name, content });
  } catch {
    report(`${file.name} is neither a picture nor a text.`);
  }
}

function show() {
  const chips = [
    ...pictures.map((url, index) => chip(pictures, index, `Picture ${index + 1}`, make("img", { src: url, alt: "" }))),
    ...clips.map(({ name }, index) => chip(clips, index, name, name)),
    ...files.map(({ name }, index) => chip(files, index, name, name)),
  ];
  find("attachments").replaceChildren(...chips);
  find("attachments").hidden = !chips.length;
}

function chip(list, index, name, content) {
  const element = make("button", { type: "button", title: `Remove ${name}` }, content);
  element.setAttribute("aria-label", `Remove ${name}`);
  element.onclick = () => { list.splice(index, 1); show(); find("text").focus(); };
  return element;
}
