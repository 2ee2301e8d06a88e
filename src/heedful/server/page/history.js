// Conversations kept by the server, and the list of them. A server that keeps none leaves a page that works without.

import { request } from "./api.js";
import { element } from "./format.js";

const SEARCH_MS = 200;
const TITLE_CHARS = 80;

export class History {
  isKept = true;
  #list = document.getElementById("conversations");
  #note = document.getElementById("history-note");
  #search = document.getElementById("search");
  #current = null;
  #timer = 0;
  #asked = 0;

  // onOpen(id), onDeleted(id): the user chose so.
  constructor({ onOpen, onDeleted }) {
    this.onOpen = onOpen;
    this.onDeleted = onDeleted;
    this.#search.addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.refresh(), SEARCH_MS);
    });
    document.getElementById("export").addEventListener("click", () => this.#export());
  }

  async refresh() {
    const asked = ++this.#asked;
    const query = this.#search.value.trim();
    try {
      const { conversations } = await request(`/history${query ? `?q=${encodeURIComponent(query)}` : ""}`);
      if (asked !== this.#asked) return; // a later search has been sent
      this.isKept = true;
      this.#list.replaceChildren(...conversations.map((one) => this.#item(one)));
      this.#say(conversations.length ? "" : query ? "Nothing found." : "Conversations appear here.");
    } catch (error) {
      this.isKept = error.code !== "no_history";
      this.#list.replaceChildren();
      this.#say(this.isKept ? error.message : "This server keeps no conversations.");
    }
    for (const id of ["search", "export"]) document.getElementById(id).hidden = !this.isKept;
  }

  mark(id) {
    this.#current = id;
    for (const item of this.#list.children) setCurrent(item, item.dataset.id === id);
  }

  read(id) {
    return request(`/history/${encodeURIComponent(id)}`);
  }

  async create(conversation) {
    const { id } = await request("/history", { method: "POST", body: conversation });
    this.refresh();
    return id;
  }

  // In `fields`, `messages` follow the first `keep` stored ones.
  change(id, fields, { keepalive = false } = {}) {
    return request(`/history/${encodeURIComponent(id)}`, { method: "PUT", body: fields, keepalive });
  }

  #say(text) {
    this.#note.textContent = text;
  }

  #item({ id, title }) {
    const open = element("button", { type: "button", class: "open", onclick: () => this.onOpen(id) }, title || "Untitled");
    const rename = element("button", { type: "button", class: "plain small", title: "Rename", "aria-label": `Rename ${title}` }, "✎");
    const remove = element("button", { type: "button", class: "plain small", title: "Delete", "aria-label": `Delete ${title}` }, "✕");
    const item = element("li", { "data-id": id }, open, rename, remove);
    rename.addEventListener("click", () => this.#rename(item, id, title));
    askTwice(remove, () => this.#delete(id));
    setCurrent(item, id === this.#current);
    return item;
  }

  #rename(item, id, title) {
    const input = element("input", { value: title, maxlength: TITLE_CHARS, "aria-label": "Title" });
    item.replaceChildren(input);
    input.focus();
    input.select();
    const finish = async (isKept) => {
      input.onblur = input.onkeydown = null;
      const wanted = input.value.trim();
      if (isKept && wanted && wanted !== title)
        await this.change(id, { title: wanted }).catch((error) => this.#say(error.message));
      await this.refresh();
    };
    input.onblur = () => finish(true);
    input.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
    };
  }

  async #delete(id) {
    try {
      await request(`/history/${encodeURIComponent(id)}`, { method: "DELETE" });
      this.onDeleted(id);
      await this.refresh();
    } catch (error) {
      this.#say(error.message);
    }
  }

  async #export() {
    try {
      const all = await request("/history/export");
      const url = URL.createObjectURL(new Blob([JSON.stringify(all, null, 1)], { type: "application/json" }));
      element("a", { href: url, download: "heedful-conversations.json" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 0);
    } catch (error) {
      this.#say(error.message);
    }
  }
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

function setCurrent(item, isCurrent) {
  const open = item.querySelector(".open");
  if (isCurrent) open?.setAttribute("aria-current", "page");
  else open?.removeAttribute("aria-current");
}

// The first press asks, the second does it; leaving the button takes the question back.
function askTwice(button, act) {
  const [sign, label] = [button.textContent, button.getAttribute("aria-label")];
  const reset = () => {
    button.textContent = sign;
    button.setAttribute("aria-label", label);
    button.classList.remove("sure");
  };
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) return act();
    button.textContent = "Delete?";
    button.setAttribute("aria-label", `${label}: press again to confirm`);
    button.classList.add("sure");
    button.focus();
  });
}
