// The list of conversations: open, rename, export, delete.
import { asMarkdown, deleteChat, listChats, saveChat } from "./chats.js";
import { button, download, find, make } from "./dom.js";

/** Draws the list; `current` is the open conversation, `open` opens another, or none. */
export function drawChatList(current, open) {
  const redraw = () => drawChatList(current, open);
  const chats = listChats();
  for (const id of ["chats", "show-chats"]) find(id).hidden = !chats.length;
  find("chat-list").replaceChildren(...chats.map((chat) => {
    const isOpen = chat.id === current.id;
    const title = button(chat.title, () => open(chat), { className: "title" });
    const item = make("li", {}, title);
    if (!isOpen) return item;
    title.setAttribute("aria-current", "true");
    item.append(make("div", { className: "actions" },
      button("Rename", () => rename(item, current, redraw)),
      button("Markdown", () => exportAs(chat, "md", "text/markdown", asMarkdown), { title: "Export as Markdown" }),
      button("JSON", () => exportAs(chat, "json", "application/json", asJson), { title: "Export as JSON" }),
      button("Delete", () => {
        if (!confirm(`Delete “${chat.title}”?`)) return;
        deleteChat(chat);
        open(null);
      }),
    ));
    return item;
  }));
}

function rename(item, chat, redraw) {
  const input = make("input", { value: chat.title, maxLength: 80 });
  input.setAttribute("aria-label", "Name of the conversation");
  let isOver = false;
  const end = (keeps) => {
    if (isOver) return; // a removed input blurs
    isOver = true;
    if (keeps && input.value.trim()) {
      chat.title = input.value.trim();
      saveChat(chat);
    }
    redraw();
  };
  input.onblur = () => end(true);
  input.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault(); // the button that gets the focus is not pressed
    end(event.key === "Enter");
    document.querySelector("#chat-list [aria-current]").focus();
  };
  item.replaceChildren(input);
  input.select();
}

function exportAs(chat, ending, type, write) {
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  download(`${name || "chat"}.${ending}`, write(chat), type);
}

function asJson(chat) { return JSON.stringify(chat, null, 2); }
