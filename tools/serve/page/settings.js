// The settings: sampling, system prompt, appearance. This browser keeps them, but not the key.
import { keep, recall } from "./chats.js";
import { find } from "./dom.js";

const NUMBERS = {
  temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p",
  repetition_penalty: "repetition_penalty", seed: "seed", max_tokens: "tokens",
};
const PLACEHOLDERS = Object.fromEntries(Object.values(NUMBERS).map((id) => [id, find(id).placeholder]));
const KEPT = [...Object.values(NUMBERS), "system", "theme"];

/** Options of a request; what is empty is the model's. */
export function options() {
  const given = Object.entries(NUMBERS).filter(([, id]) => find(id).value !== "");
  const numbers = Object.fromEntries(given.map(([name, id]) => [name, Number(find(id).value)]));
  const alternatives = find("alternatives").checked ? { logprobs: true, top_logprobs: 5 } : {};
  return { ...numbers, ...alternatives };
}

/** Shows the values that a model's requests have where they give none; without them, what they may be. */
export function showDefaults(defaults) {
  for (const [name, id] of Object.entries(NUMBERS)) {
    find(id).placeholder = defaults ? shown(name, defaults[name]) : PLACEHOLDERS[id];
  }
}

function shown(name, value) {
  if (name === "top_k" && value === 0) return "all tokens";
  const absent = { seed: "random", max_tokens: "what fits", min_p: "0", repetition_penalty: "1" };
  return String(value ?? absent[name]);
}

export function setUpSettings() {
  const kept = recall("settings", {});
  for (const id of KEPT) if (kept[id]) find(id).value = kept[id];
  find("alternatives").checked = Boolean(kept.alternatives);
  applyTheme();
  find("settings").addEventListener("change", () => {
    const values = Object.fromEntries(KEPT.map((id) => [id, find(id).value]));
    keep("settings", { ...values, alternatives: find("alternatives").checked });
    applyTheme();
  });
  find("defaults").addEventListener("click", () => {
    for (const id of KEPT) find(id).value = "";
    find("alternatives").checked = false;
    find("settings").dispatchEvent(new Event("change"));
  });
}

function applyTheme() { document.documentElement.dataset.theme = find("theme").value; }
