// Figures of one output: speed, acceptance, charts. What has no value is not shown.
import { find, oncePerFrame } from "./dom.js";

export class Figures {
  #begin = performance.now();
  #first = 0;
  #tokens = 0;
  #rounds = []; // drafted tokens that were accepted, and all tokens, of each forward pass
  #speeds = [];
  #drafted = 0;
  #accepted = 0;
  #trees = 0;
  #plot = oncePerFrame(() => this.#draw());

  constructor() {
    for (const id of ["speed", "first", "length", "rate", "prompt"]) put(id);
    find("context").hidden = true;
    this.#draw();
  }

  /** Counts the tokens of one step. */
  count({ tokens, drafted, accepted }) {
    if (!tokens.length) return;
    const now = performance.now();
    if (!this.#tokens) {
      this.#first = now;
      put("first", `${Math.round(now - this.#begin)} ms`);
    } else if (now > this.#first) {  // chunks may arrive in the same millisecond
      const speed = (this.#tokens + tokens.length - 1) / (now - this.#first) * 1e3;
      this.#speeds.push(speed);
      put("speed", speed.toFixed(1));
    }
    this.#tokens += tokens.length;
    this.#rounds.push([Math.min(accepted, tokens.length), tokens.length]);
    if (drafted) {
      this.#trees += 1;
      this.#drafted += drafted;
      this.#accepted += accepted;
      putAcceptance(1 + this.#accepted / this.#trees, this.#accepted / this.#drafted);
    }
    this.#plot();
  }

  /** Shows what the server has counted. */
  finish(usage, metrics, capacity) {
    put("prompt", `${usage.prompt_tokens}, ${usage.prompt_tokens_details?.cached_tokens ?? 0}`);
    if (metrics?.tokens_per_second) put("speed", metrics.tokens_per_second.toFixed(1));
    const { acceptance_length: length, acceptance_rate: rate } = usage.speculation ?? {};
    if (length) putAcceptance(length, rate);
    showContext(usage.prompt_tokens + usage.completion_tokens, capacity);
    this.#plot();
  }

  #draw() {
    const rounds = this.#drafted ? this.#rounds.slice(-60) : [];
    const most = Math.max(2, ...rounds.map(([, all]) => all)), unit = 70 / most;
    chart("passes", rounds.length, `${most} tokens at most`, rounds.flatMap(([accepted, all], index) => {
      const box = { x: 4 * index, width: 3 };
      return [
        ["rect", { ...box, y: 88 - accepted * unit, height: accepted * unit, class: "accepted" }],
        ["rect", { ...box, y: 88 - all * unit, height: (all - accepted) * unit, class: "own" }],
      ];
    }));
    const speeds = this.#speeds.slice(-120), top = Math.max(1, ...speeds);
    const points = speeds.map((speed, index) => `${2 * index},${88 - 70 * speed / top}`).join(" ");
    chart("speeds", speeds.length > 1, `${top.toFixed(0)} tokens/s at most`, [["polyline", { points }]]);
  }
}

/** A figure's value; without one, its row is hidden. */
function put(id, value = "") {
  find(id).textContent = value;
  find(id).parentElement.hidden = !value;
}

function putAcceptance(length, rate) {
  put("length", length.toFixed(2));
  put("rate", `${(100 * rate).toFixed(0)} %`);
}

export function showContext(used, capacity) {
  find("context").hidden = !capacity;
  if (!capacity) return;
  Object.assign(find("meter"), { max: capacity, high: 0.9 * capacity, value: used });
  find("used").textContent = `${used.toLocaleString("en")} of ${capacity.toLocaleString("en")} tokens`;
}

function chart(id, shown, label, shapes) {
  const drawing = find(id);
  drawing.parentElement.hidden = !shown;
  drawing.setAttribute("aria-label", `${drawing.previousElementSibling.textContent}: ${label}`);
  drawing.replaceChildren();
  for (const [tag, attributes, content = ""] of [...shapes, ["text", { x: 4, y: 11 }, label]]) {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    shape.textContent = content;
    drawing.append(shape);
  }
}
