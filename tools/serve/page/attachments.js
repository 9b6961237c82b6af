// Pictures and text files of the next message.
import { find, make } from "./dom.js";

const MAX_FILE_BYTES = 256 * 1024;
let pictures = [], files = [], takesPictures = true, report = () => {};

/** Says whether the model takes pictures, and where faults are reported. */
export function setUp(model, onFault) {
  takesPictures = model.takesPictures;
  report = onFault;
  find("file").accept = takesPictures ? "" : "text/*,.md,.json,.py,.c,.cpp,.h,.js,.yml,.toml,.csv,.log";
}

export function hasAttachments() { return pictures.length + files.length > 0; }

/** The attachments, which are then no longer of the next message. */
export function takeAll() {
  const taken = { ...(pictures.length && { pictures }), ...(files.length && { files }) };
  setAll({});
  return taken;
}

export function setAll(given) {
  pictures = [...(given.pictures ?? [])];
  files = [...(given.files ?? [])];
  show();
}

export async function attach(list) {
  for (const file of list) {
    if (file.type.startsWith("image/")) await attachPicture(file);
    else await attachText(file);
  }
  show();
}

async function attachPicture(file) {
  if (!takesPictures) return report("This model takes no pictures.");
  pictures.push(await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  }));
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
