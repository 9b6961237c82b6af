// The messages of a conversation as elements.
import { button, copyButton, find, make, oncePerFrame } from "./dom.js";
import { drawMarkdown } from "./markdown.js";
import { drawTokens } from "./tokens.js";

/** Appends a turn to the log; `spoken` names its author for screen readers. */
function append(kind, spoken, ...children) {
  const heading = make("h2", { className: "hidden", textContent: spoken });
  const element = make("article", { className: `turn ${kind}` }, heading, ...children);
  find("log").append(element);
  return element;
}

export function addQuestion(message, onEdit) {
  const { text, pictures = [], clips = [], files = [] } = message;
  const shown = [
    ...pictures.map((src, index) => make("img", { src, alt: `Picture ${index + 1}` })),
    ...clips.map(({ name, url }) => make("audio", { src: url, controls: true, title: name })),
    ...files.map(({ name, content }) =>
      make("details", {}, make("summary", { textContent: name }), make("pre", { textContent: content }))),
    make("div", { className: "text", textContent: text }),
  ];
  const actions = make("div", { className: "actions" }, button("Edit", onEdit), copyButton(() => text));
  append("user", "You", ...shown, actions);
}

export function addFault(text, onAgain) {
  const again = make("div", { className: "actions" }, button("Try again", onAgain));
  append("fault", "Error", make("div", { className: "text", textContent: text }), again);
}

/** The view of an output: Markdown, or its tokens on demand. */
export class Answer {
  #message;
  #element;
  #body = make("div", { className: "markdown" });
  #tokens = make("div", { className: "token-view", hidden: true });
  #reasoning = make("div", { className: "text" });
  #thoughts = make("details", { hidden: true }, make("summary", { textContent: "Reasoning" }), this.#reasoning);
  #note = make("p", { className: "note", hidden: true });
  #actions = make("div", { className: "actions", hidden: true });
  #tokensButton;
  #drawn = [];
  #drawSoon = oncePerFrame(() => this.#draw());

  constructor(message, onAgain) {
    this.#message = message;
    const tokens = button("Tokens", () => {
      this.#tokens.hidden = !this.#tokens.hidden;
      this.#body.hidden = !this.#tokens.hidden;
      tokens.setAttribute("aria-pressed", String(this.#body.hidden));
      this.#draw();
    });
    tokens.setAttribute("aria-pressed", "false");
    this.#actions.append(copyButton(() => message.text));
    this.#actions.append(tokens, button("Regenerate", onAgain, { className: "again" }));
    this.#tokensButton = tokens;
    const parts = [this.#thoughts, this.#body, this.#tokens, this.#note, this.#actions];
    this.#element = append("assistant", "Assistant", ...parts);
  }

  /** Adds what one event has; it is drawn with the next frame. */
  add(event) {
    const [choice] = event.choices ?? [];
    const message = this.#message;
    message.text += choice?.delta.content ?? "";
    message.reasoning += choice?.delta.reasoning_content ?? "";
    if (choice?.finish_reason === "length") message.note = "The output reached its maximum length.";
    if (event.edgellm) {
      const { tokens, drafted, accepted, tree } = event.edgellm;
      const logprobs = choice?.logprobs?.content ?? [];
      tokens.forEach(([text, origin], index) => {
        const { logprob, top_logprobs: others } = logprobs[index] ?? {};
        message.tokens.push({ text, origin, drafted, accepted, tree, logprob, others });
      });
    }
    this.#drawSoon();
  }

  /** Draws the complete message, with its actions. */
  finish() {
    this.#drawn = []; // links that are defined later
    this.#actions.hidden = false;
    this.#draw();
  }

  remove() { this.#element.remove(); }

  #draw() {
    const log = find("log"), { text, reasoning, note, tokens = [] } = this.#message;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.#drawn = drawMarkdown(this.#body, text, this.#drawn);
    this.#thoughts.hidden = !reasoning;
    this.#reasoning.textContent = reasoning ?? "";
    this.#note.hidden = !note;
    this.#note.textContent = note ?? "";
    this.#tokensButton.hidden = !tokens.length;
    if (!this.#tokens.hidden) drawTokens(this.#tokens, tokens);
    if (follows) log.scrollTop = log.scrollHeight;
  }
}
