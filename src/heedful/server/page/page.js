// The page: who tells whom. Messages and their saving: chat.js; the screen: view.js; choices: settings.js.

import { Chat } from "./chat.js";
import { History } from "./history.js";
import { Settings } from "./settings.js";
import { View } from "./view.js";

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const isTouch = matchMedia("(pointer: coarse)").matches;

const view = new View({ onAgain: () => chat.regenerate() });
const settings = new Settings({ onKey: () => load(), onModel: () => chat.showContext() });
const history = new History({
  onOpen: (id) => open(id),
  onDeleted: (id) => id === chat.id && chat.forget(),
});
const chat = new Chat({ view, settings, history, onChange });

function onChange() {
  byId("send").hidden = chat.isAnswering;
  byId("stop").hidden = !chat.isAnswering;
  const hash = chat.id ? `#${chat.id}` : "";
  if (location.hash !== hash && location.hash !== "#prompt") window.history.replaceState(null, "", hash || location.pathname);
}

async function load() {
  try {
    await settings.loadModels();
    view.problem("");
    await history.refresh();
    const id = location.hash.slice(1);
    if (id.startsWith("conv_") && id !== chat.id) await open(id);
    chat.showContext();
  } catch (error) {
    view.problem(error.message);
  }
}

async function open(id) {
  showSidebar(false);
  try {
    await chat.open(id);
  } catch (error) {
    await chat.begin();
    view.problem(error.message);
  }
  if (!isTouch) prompt.focus();
}

async function send() {
  const text = prompt.value.trim();
  if (!text || chat.isAnswering) return;
  prompt.value = "";
  fit();
  await chat.send(text);
}

// As tall as its text, up to what the style allows.
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function showSidebar(isShown) {
  document.body.classList.toggle("with-sidebar", isShown);
  byId("scrim").hidden = !isShown;
  byId("open-sidebar").setAttribute("aria-expanded", isShown);
  if (isShown) byId("new-chat").focus();
}

function onKey(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && document.body.classList.contains("with-sidebar")) {
    showSidebar(false);
    byId("open-sidebar").focus();
  } else if (event.key === "Escape" && chat.isAnswering) {
    event.preventDefault();
    chat.stop();
  } else if (event.altKey && event.code === "KeyR") {
    event.preventDefault();
    chat.regenerate();
  }
}

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  send();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", async () => {
  await chat.stop();
  prompt.focus();
});
byId("new-chat").addEventListener("click", async () => {
  showSidebar(false);
  await chat.begin();
  prompt.focus();
});
byId("open-sidebar").addEventListener("click", () => showSidebar(true));
byId("close-sidebar").addEventListener("click", () => showSidebar(false));
byId("scrim").addEventListener("click", () => showSidebar(false));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  prompt.focus();
});
document.addEventListener("keydown", onKey);
window.addEventListener("pagehide", () => chat.leave());
window.addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id.startsWith("conv_") && id !== chat.id) open(id);
});

byId("hint").textContent = isTouch ? "" : "Enter sends · Shift+Enter new line · Esc stops · Alt+R again";
prompt.setAttribute("enterkeyhint", isTouch ? "enter" : "send");
view.show([]);
await load();
document.querySelector("main").removeAttribute("aria-busy");
if (!isTouch && document.activeElement === document.body) prompt.focus();
