// The tokens of an output: coloured by origin; one token's alternatives and its round on demand.
import { make } from "./dom.js";
import { drawTree } from "./draft_tree.js";

const ORIGINS = {
  drafted: "drafted and accepted",
  bonus: "the model's own, after the accepted tokens",
  plain: "from a forward pass without drafted tokens",
};

export function drawTokens(element, tokens) {
  const legend = make("ul", { className: "legend" });
  for (const [origin, meaning] of Object.entries(ORIGINS)) {
    const count = tokens.filter((token) => token.origin === origin).length;
    const mark = make("span", { className: origin, textContent: origin });
    if (count) legend.append(make("li", {}, mark, `: ${meaning} (${count})`));
  }
  const list = make("div", { className: "tokens", tabIndex: 0 });
  list.setAttribute("role", "group");
  list.setAttribute("aria-label", "Tokens. The arrow keys choose one.");
  list.append(...tokens.map(({ text, origin }) => make("span", { className: origin, textContent: text })));
  const detail = make("p", { className: "detail", textContent: "Choose a token for its details." });
  detail.setAttribute("role", "status");
  const tree = make("details", { className: "tree-view", hidden: true });
  let chosen = -1;
  const choose = (index) => {
    if (index < 0 || index >= tokens.length) return;
    list.children[chosen]?.classList.remove("chosen");
    chosen = index;
    list.children[chosen].classList.add("chosen");
    detail.textContent = describe(tokens[chosen]);
    drawTree(tree, tokens[chosen].tree);
  };
  list.onclick = ({ target }) => choose([...list.children].indexOf(target));
  list.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(chosen + step);
  };
  element.replaceChildren(legend, list, detail, tree);
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const quoted = (text) => JSON.stringify(text);

function describe({ text, origin, drafted, accepted, logprob, others }) {
  const round = drafted ? ` Round: ${drafted} drafted, ${accepted} accepted.` : "";
  const chance = logprob === undefined ? "" : ` Probability ${percent(logprob)}.`;
  const list = (others ?? []).map((other) => `${quoted(other.token)} ${percent(other.logprob)}`);
  const likeliest = list.length ? ` Likeliest: ${list.join(", ")}.` : "";
  return `${quoted(text)}: ${ORIGINS[origin]}.${round}${chance}${likeliest}`;
}
