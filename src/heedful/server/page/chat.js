// One conversation: its messages, the answer that is being written, and that the server keeps both.

import { request, streamChat } from "./api.js";
import { titleOf } from "./history.js";

export class Chat {
  #open = conversation();
  #view;
  #settings;
  #history;
  #answer = null; // while one is written: {content, tokens, begun, first, abort, done}
  #promptTokens = 0;
  #saving = Promise.resolve();
  #onChange;

  // onChange(): begins or ends to answer, or another conversation is open.
  constructor({ view, settings, history, onChange }) {
    this.#view = view;
    this.#settings = settings;
    this.#history = history;
    this.#onChange = onChange;
  }

  // As the server names it; null before it was stored.
  get id() {
    return this.#open.id;
  }

  get messages() {
    return this.#open.messages;
  }

  get isAnswering() {
    return this.#answer !== null;
  }

  get canRegenerate() {
    return !this.isAnswering && this.messages.some(({ role }) => role === "user");
  }

  async begin() {
    await this.stop();
    this.#show(conversation());
  }

  // The user has deleted this conversation: nothing more of it is kept.
  forget() {
    this.#open.isDeleted = true;
    return this.begin();
  }

  // Raises ApiError.
  async open(id) {
    await this.stop();
    await this.#saving;
    const { messages, model, settings } = await this.#history.read(id);
    this.#settings.restore(model, settings);
    this.#show(conversation(id, messages));
  }

  async send(text) {
    if (this.isAnswering) return;
    const message = { role: "user", content: text };
    this.messages.push(message);
    this.#view.add(message);
    this.#save();
    await this.#write();
  }

  async regenerate() {
    if (!this.canRegenerate) return;
    while (this.messages.at(-1).role === "assistant") {
      this.messages.pop();
      this.#view.removeLast();
    }
    await this.#write();
  }

  // The server frees the answer's pages; what came stays.
  async stop() {
    this.#answer?.abort.abort();
    await this.#answer?.done;
  }

  // The page goes away: what has come is sent on its own.
  leave() {
    if (!this.#answer || !this.id) return;
    const messages = [...this.messages, this.#message("cancelled")];
    this.#change(this.#open, messages, { keepalive: true }).catch(() => {});
  }

  showContext() {
    const last = this.messages.findLast(({ receipt }) => receipt)?.receipt;
    const used = this.#answer ? this.#promptTokens + this.#answer.tokens : last ? last.prompt_tokens + last.output_tokens : 0;
    this.#view.context(this.#answer && !this.#promptTokens ? 0 : used, this.#settings.contextLength);
  }

  #show(open) {
    this.#open = open;
    this.#view.show(open.messages);
    this.#history.mark(open.id);
    this.showContext();
    this.#onChange();
  }

  async #write() {
    let finished;
    this.#promptTokens = 0;
    this.#answer = { content: "", tokens: 0, begun: performance.now(), first: 0, abort: new AbortController() };
    this.#answer.done = new Promise((resolve) => (finished = resolve));
    const growing = this.#view.begin();
    this.#onChange();
    let problem = "";
    let message;
    try {
      message = await this.#stream(growing);
    } catch (error) {
      problem = error.name === "AbortError" ? "" : error.message;
      message = this.#message(problem ? "error" : "cancelled");
    }
    this.#answer = null;
    this.messages.push(message);
    this.#view.end(growing, message, problem);
    this.#view.announce(problem || (message.finish === "cancelled" ? "Stopped." : "The answer is complete."));
    this.showContext();
    this.#save();
    finished();
    this.#onChange();
  }

  async #stream(growing) {
    const answer = this.#answer;
    const { signal } = answer.abort;
    const body = { ...this.#settings.body, messages: this.#asked() };
    let finish = "stop";
    let receipt = null;
    growing.phase(this.#settings.isLoaded ? "waiting for the server…" : "loading the model…");
    const onOpen = () => {
      growing.phase("reading the prompt…");
      this.#countPrompt(body, growing, answer);
    };
    for await (const event of streamChat(body, { signal, onOpen })) {
      const choice = event.choices[0];
      if (choice?.delta.content) this.#grow(growing, choice.delta.content);
      finish = choice?.finish_reason ?? finish;
      receipt = event.usage?.heedful ?? receipt;
    }
    return { ...this.#message(finish), receipt };
  }

  #grow(growing, text) {
    const answer = this.#answer;
    answer.first ||= performance.now();
    answer.content += text;
    answer.tokens += 1; // the server sends a piece a token, but for those that end inside a character
    growing.text(answer.content, () => this.#live(answer));
    this.showContext();
  }

  #live({ tokens, begun, first }) {
    const now = performance.now();
    const writing = first ? (now - first) / 1000 : 0;
    const speed = tokens > 1 && writing > 0 ? (tokens - 1) / writing : null;
    return { tokens, seconds: (now - begun) / 1000, tokens_per_second: speed };
  }

  #message(finish) {
    return { role: "assistant", content: this.#answer.content, finish, live: this.#live(this.#answer) };
  }

  #asked() {
    const { system } = this.#settings;
    const isSaid = ({ role, content }) => role === "user" || content; // not an answer that failed before it began
    const said = this.messages.filter(isSaid).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  // For the context meter while the answer grows; its receipt has the number in the end.
  async #countPrompt({ model, messages }, growing, answer) {
    try {
      if (!this.#settings.isLoaded) await this.#settings.loadModels();
      const asked = { method: "POST", body: { model, messages }, signal: answer.abort.signal };
      const { count } = await request("/tokenize", asked);
      if (this.#answer !== answer) return;
      this.#promptTokens = count;
      growing.phase(`reading the prompt… ${count.toLocaleString("en")} tokens`);
      this.showContext();
    } catch {
      // the meter waits for the receipt
    }
  }

  // One save after another, each of what is said now.
  #save() {
    const [open, messages] = [this.#open, [...this.messages]];
    const told = (text) => this.#view.problem(text);
    const failed = (error) => told(`The conversation is not saved: ${error.message}`);
    this.#saving = this.#saving.then(() => this.#store(open, messages)).then(() => told(""), failed);
  }

  async #store(open, messages) {
    if (!this.#history.isKept || open.isDeleted) return;
    if (open.id === null) return this.#create(open, messages);
    try {
      await this.#change(open, messages);
      open.stored = messages;
    } catch (error) {
      open.stored = [];
      if (error.status === 409) await this.#store(open, messages); // another tab has shortened it
      else if (error.status === 404) await this.#create(open, messages); // or deleted it
      else throw error;
    }
  }

  async #create(open, messages) {
    const title = titleOf(messages.find(({ role }) => role === "user").content);
    open.id = await this.#history.create({ title, messages, ...this.#settings.named });
    open.stored = messages;
    if (open !== this.#open) return;
    this.#history.mark(open.id);
    this.#onChange();
  }

  // Brings only what the server does not have.
  #change(open, messages, options) {
    const differs = messages.findIndex((message, i) => message !== open.stored[i]);
    const keep = differs < 0 ? messages.length : differs;
    return this.#history.change(open.id, { messages: messages.slice(keep), keep, ...this.#settings.named }, options);
  }
}

// `stored`: the messages that the server has.
function conversation(id = null, messages = []) {
  return { id, messages, stored: [...messages], isDeleted: false };
}
