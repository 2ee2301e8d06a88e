// The conversation on the screen: messages, the answer as it grows, the context meter.

import { costCard, facts, liveFacts, liveFigures } from "./cost.js";
import { element, whole } from "./format.js";
import { markdown } from "./markdown.js";

const NEAR_END_PX = 80;
const FOLDED_CHARS = 900;
const FOLDED_LINES = 12;
const ENDS = { cancelled: "Stopped.", length: "Ended at the most tokens allowed.", error: "Ended by an error." };

export class View {
  #log = document.getElementById("log");
  #scroller = document.getElementById("scroller");
  #status = document.getElementById("status");
  #meter = document.getElementById("context");

  // onAgain(): answer the last question once more.
  constructor({ onAgain }) {
    this.onAgain = onAgain;
  }

  show(messages) {
    this.#log.replaceChildren(...messages.map((message) => this.#message(message)));
    if (!messages.length) this.#log.append(welcome());
    this.#offerAgain();
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  add(message) {
    this.#log.querySelector(".welcome")?.remove();
    this.#log.append(this.#message(message));
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  removeLast() {
    this.#log.lastElementChild?.remove();
  }

  // A growing answer; see Growing.
  begin() {
    this.#log.querySelector(".again")?.remove();
    const growing = new Growing(() => this.#follow());
    this.#log.append(growing.article);
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    return growing;
  }

  // The finished answer takes the place of the growing one.
  end(growing, message, problem) {
    const isNear = this.#isNearEnd();
    growing.stop();
    growing.article.replaceWith(this.#message(message, problem));
    this.#offerAgain();
    if (isNear) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  // For those who do not see the page.
  announce(text) {
    this.#status.textContent = text;
  }

  // Of the page rather than of an answer; "" when it is over.
  problem(text) {
    document.getElementById("problem").textContent = text;
  }

  context(used, length) {
    const isKnown = Boolean(used && length);
    this.#meter.hidden = !used;
    this.#meter.querySelector(".fill").style.width = `${isKnown ? Math.min(100, (100 * used) / length) : 0}%`;
    this.#meter.classList.toggle("nearly-full", isKnown && used > 0.9 * length);
    const text = isKnown ? `${whole(used)} of ${whole(length)} tokens` : used ? `${whole(used)} tokens` : "";
    this.#meter.querySelector(".text").textContent = text;
    this.#meter.setAttribute("aria-valuemax", length || 1);
    this.#meter.setAttribute("aria-valuenow", isKnown ? Math.min(used, length) : 0);
    this.#meter.setAttribute("aria-valuetext", text || "unknown");
  }

  #message({ role, content, finish, receipt, live }, problem) {
    if (role !== "assistant") return question(role, content);
    const article = answerShell(finish);
    article.append(body(content));
    if (ENDS[finish]) article.append(element("p", { class: `ending ${finish}` }, problem || ENDS[finish]));
    if (receipt) article.append(costCard(receipt));
    else if (live) article.append(liveFigures(live));
    const copy = element("button", { type: "button", class: "plain small" }, "Copy");
    copy.addEventListener("click", () => this.#copy(copy, content));
    article.append(element("div", { class: "actions" }, copy));
    return article;
  }

  #offerAgain() {
    this.#log.querySelector(".again")?.remove();
    const last = this.#log.lastElementChild;
    const attributes = { type: "button", class: "plain small again", title: "Alt+R", onclick: () => this.onAgain() };
    if (last?.matches(".user")) last.append(element("button", attributes, "Answer"));
    else last?.querySelector(".actions")?.append(element("button", attributes, "Regenerate"));
  }

  async #copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  #isNearEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  // Down with the text, unless the reader has scrolled up.
  #follow() {
    const isNear = this.#isNearEnd();
    return () => isNear && (this.#scroller.scrollTop = this.#scroller.scrollHeight);
  }
}

// An answer while it comes: drawn once a frame at most, its figures also while no text comes.
class Growing {
  #text = "";
  #phase = "";
  #frame = 0;
  #live = null;
  #timer;

  constructor(follow) {
    this.follow = follow;
    this.article = answerShell();
    this.article.setAttribute("aria-busy", "true");
    this.body = body("");
    this.figures = element("p", { class: "figures live" });
    this.article.append(this.body, this.figures);
    this.#timer = setInterval(() => this.#draw(), 250);
  }

  // Before the first token: what is being waited for.
  phase(text) {
    this.#phase = text;
    this.#draw();
  }

  // live(): the counts at the time of the call.
  text(text, live) {
    this.#text = text;
    this.#live = live;
    this.#frame ||= requestAnimationFrame(() => this.#drawText());
  }

  stop() {
    clearInterval(this.#timer);
    cancelAnimationFrame(this.#frame);
  }

  #drawText() {
    this.#frame = 0;
    const follow = this.follow();
    this.body.replaceChildren(markdown(this.#text));
    this.#draw();
    follow();
  }

  #draw() {
    if (this.#live) this.figures.replaceChildren(...facts(liveFacts(this.#live())));
    else this.figures.replaceChildren(element("span", { class: "waiting" }, this.#phase));
  }
}

function question(role, content) {
  const text = element("p", {}, content);
  const article = element("article", { class: role }, element("h2", { class: "hidden" }, "You"), text);
  if (content.length < FOLDED_CHARS && content.split("\n").length < FOLDED_LINES) return article;
  const unfold = element("button", { type: "button", class: "plain small" }, "Show all");
  unfold.addEventListener("click", () => {
    text.classList.toggle("folded");
    unfold.textContent = text.classList.contains("folded") ? "Show all" : "Show less";
  });
  text.classList.add("folded");
  article.append(unfold);
  return article;
}

function answerShell(finish) {
  return element(
    "article",
    { class: "assistant", "data-finish": finish },
    element("h2", { class: "hidden" }, "Answer"),
  );
}

function body(text) {
  return element("div", { class: "body" }, markdown(text));
}

function welcome() {
  return element(
    "div",
    { class: "welcome" },
    element("p", { class: "heading" }, "Ask something."),
    element("p", {}, "The model runs on this server, and every answer says what it cost: a bar of the token visits that ",
      "attention made against those that dense attention would have made, the bytes it read, and the joules."),
    element("p", {}, "Put in a long text, choose another policy above, ask again, and see the bar change."),
  );
}
