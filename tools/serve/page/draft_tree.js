// The draft tree of a round, on demand: nested lists, with the accepted path marked.
import { make } from "./dom.js";

/** Fills `details`, which keeps its state; it is hidden if nothing was drafted. */
export function drawTree(details, tree) {
  details.hidden = !tree;
  if (!tree) return;
  const drafted = tree.tokens.length - 1, accepted = tree.path.length - 1;
  const summary = make("summary", { textContent: `Draft tree of this round: ${drafted} drafted, ${accepted} accepted` });
  const draw = () => {
    if (details.open) details.replaceChildren(summary, lists(tree), ending(tree));
    else details.replaceChildren(summary);
  };
  details.ontoggle = draw;
  draw();
}

/** A list item is a chain of nodes; the items below it are the branches at its end. */
function lists(tree) {
  const children = tree.tokens.map(() => []);
  tree.parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
  const accepted = new Set(tree.path);
  const item = (first) => {
    const chain = [first];
    while (children[chain.at(-1)].length === 1) chain.push(children[chain.at(-1)][0]);
    const branches = children[chain.at(-1)];
    const below = branches.length ? [make("ul", {}, ...branches.map(item))] : [];
    return make("li", {}, ...chain.map((node) => mark(tree, node, accepted.has(node))), ...below);
  };
  return make("ul", { className: "tree", tabIndex: 0, ariaLabel: "Nodes of the draft tree" }, item(0));
}

function mark({ tokens, confidence }, node, isAccepted) {
  const text = JSON.stringify(tokens[node]).slice(1, -1) || " ";
  if (!node) return make("span", { className: "node root", textContent: text, title: "root: the newest token" });
  const share = `${(100 * (confidence[node] ?? 0)).toFixed(0)} %`;
  const word = isAccepted ? "accepted" : "rejected";
  const spoken = make("span", { className: "hidden", textContent: ` ${word}, ` });
  const small = make("small", { textContent: share, title: "probability by the draft, given its parent" });
  return make("span", { className: `node ${word}`, title: word }, text, spoken, small);
}

function ending({ bonus }) {
  return make("p", { className: "detail", textContent: `Then the model's own token: ${JSON.stringify(bonus)}.` });
}
