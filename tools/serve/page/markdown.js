// Markdown as elements. Raw HTML stays text, and pictures of other hosts become links.
import { Marked } from "./vendor/marked.js";
import purify from "./vendor/dompurify.js";
import { copyButton, make } from "./dom.js";

const SAFE = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (character) => ENTITIES[character]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ raw }) => escape(raw),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) { // below the page's own headings
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

/** Draws Markdown into an element; blocks that are as before keep their elements. */
export function drawMarkdown(element, text, drawn = []) {
  const blocks = marked.lexer(text);
  blocks.forEach((block, index) => {
    if (drawn[index] === block.raw) return;
    const content = drawBlock(marked.parser([block]));
    if (index < element.children.length) element.children[index].replaceWith(content);
    else element.append(content);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
  return blocks.map((block) => block.raw);
}

function drawBlock(html) {
  const element = make("div", { className: "block" });
  element.append(purify.sanitize(html, SAFE));
  for (const link of element.querySelectorAll("a[href]")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  }
  for (const code of element.querySelectorAll("pre > code")) frameCode(code);
  for (const table of element.querySelectorAll("table")) {
    const frame = make("div", { className: "wide", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  return element;
}

function frameCode(code) {
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const pre = code.parentElement;
  pre.tabIndex = 0; // scrolls by keyboard
  const frame = make("div", { className: "code" });
  pre.replaceWith(frame);
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }));
  head.append(copyButton(() => code.textContent));
  frame.append(head, pre);
}
