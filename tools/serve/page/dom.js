// Elements: found by id, and made.

export const find = (id) => document.getElementById(id);

/** An element with properties and children; texts stay texts. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", textContent: label, onclick, ...properties });
}

/** Runs `draw` at most once a frame, however often the result is called. */
export function oncePerFrame(draw) {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  };
}

/** Copies text; pages that are not served by HTTPS or from this machine have no clipboard API. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(text) {
  const element = button("Copy", async () => {
    await copy(text());
    element.textContent = "Copied";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  }, { className: "copy" });
  return element;
}

/** Saves a file on the user's machine. */
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
