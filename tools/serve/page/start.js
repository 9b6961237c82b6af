// What an empty conversation shows: the model, and examples to begin with.
import { recall } from "./chats.js";
import { button, find, make } from "./dom.js";

const EXAMPLES = [
  "Explain speculative decoding in three sentences.",
  "Write a Python function that tells whether a number is prime.",
  "Compare tea and coffee in a table.",
];

/** Draws the start of a conversation with a model, whose `facts` may be unknown. */
export function drawStart({ id, facts = [], speed, transcribes }) {
  const last = recall(`speed:${id}`);
  const shown = [...facts];
  if (last) shown.push(`${last.toFixed(1)} tokens/s in the last output`);
  else if (speed) shown.push(`about ${speed.toFixed(0)} tokens/s without drafts, as the build measured`);
  const examples = EXAMPLES.map((text) => button(text, () => {
    find("text").value = text;
    find("text").focus();
  }));
  const element = make("div", { id: "start" }, make("h2", { textContent: id || "edgellm" }));
  if (shown.length) element.append(make("p", { textContent: shown.join(" · ") }));
  if (!transcribes) element.append(make("div", { className: "examples" }, ...examples));
  find("log").replaceChildren(element);
}

/** Facts of a model from the server's description. */
export function factsOf({ model_info: info, capabilities, edgellm }, capacity) {
  const count = info["general.parameter_count"];
  const transcribes = capabilities.includes("transcription");
  return [
    info["general.architecture"],
    ...(count ? [`${size(count)} parameters`] : []),
    ...(capacity && !transcribes ? [`${capacity.toLocaleString("en")} tokens of context`] : []),
    ...(capabilities.includes("vision") ? ["takes pictures"] : []),
    ...(capabilities.includes("audio") ? ["takes audio"] : []),
    ...(transcribes ? ["transcribes speech"] : []),
    ...(edgellm?.device ? [edgellm.device] : []),
  ];
}

function size(count) {
  return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(count);
}
