// What the user chose: model, policy, sampling, colours, key. Kept in the browser; the key only until the tab closes.

import { apiKey, request } from "./api.js";
import { element } from "./format.js";

const STORE = "heedful.settings";
const THEMES = ["system", "light", "dark"];
const THEME_SIGNS = { system: "◐", light: "☀", dark: "☾" };

// What each choice sends as `heedful`; null: the custom fields.
export const POLICIES = {
  default: ["as the server has it", {}],
  exact: ["exact · q8", { kv: "q8" }],
  f16: ["exact · f16", { kv: "f16" }],
  q4: ["q4", { kv: "q4" }],
  window: ["window 1024 + 4 sinks", { window: 1024, sinks: 4 }],
  budget: ["budget 1024", { budget: 1024 }],
  custom: ["custom…", null],
};
const DEFAULTS = { model: "", policy: "default", temperature: 0.7, max_tokens: 1024, system: "", theme: "system", custom: {} };
const CUSTOM = ["kv", "precise", "window", "sinks", "budget", "prefill"];
const FIELDS = ["system", "temperature", "max_tokens", "truncate", "speculate"];
const OF_A_CONVERSATION = ["policy", "custom", ...FIELDS];

export class Settings {
  #values = { ...DEFAULTS, ...stored() };
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");
  #model = document.getElementById("model");
  #policy = document.getElementById("policy");
  #models = [];

  constructor({ onKey, onModel }) {
    this.#fillPolicies();
    this.#paintTheme();
    this.#policy.addEventListener("change", () => this.#choosePolicy());
    this.#model.addEventListener("change", () => {
      this.#set({ model: this.#model.value });
      onModel();
    });
    document.getElementById("theme").addEventListener("click", () => this.#nextTheme());
    document.getElementById("open-settings").addEventListener("click", () => this.open());
    document.getElementById("close-settings").addEventListener("click", () => this.#dialog.close());
    document.addEventListener("key-needed", () => this.#askForKey());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#dialog.close();
    });
    this.#dialog.addEventListener("close", () => this.#read(onKey));
  }

  open(field) {
    if (this.#dialog.open) return;
    const inputs = this.#form.elements;
    for (const name of FIELDS) {
      if (inputs[name].type === "checkbox") inputs[name].checked = Boolean(this.#values[name]);
      else inputs[name].value = this.#values[name] ?? "";
    }
    for (const name of CUSTOM) inputs[name].value = this.#values.custom[name] ?? "";
    inputs.key.value = apiKey.get();
    this.#dialog.showModal();
    if (field) inputs[field].focus();
  }

  // Raises ApiError.
  async loadModels() {
    this.#models = (await request("/v1/models")).data;
    this.#model.replaceChildren(...this.#models.map(({ id }) => element("option", { value: id }, id)));
    const known = this.#models.some(({ id }) => id === this.#values.model);
    this.#model.value = known ? this.#values.model : this.#models[0]?.id;
  }

  get model() {
    return this.#model.value || null;
  }

  get isLoaded() {
    return Boolean(this.#about?.loaded);
  }

  // Tokens; undefined until the model is loaded.
  get contextLength() {
    return this.#about?.context_length;
  }

  get system() {
    return this.#values.system.trim();
  }

  // Fields of a request's body, messages aside.
  get body() {
    const { temperature, max_tokens, truncate, speculate } = this.#values;
    const heedful = { ...(POLICIES[this.#values.policy][1] ?? this.#values.custom) };
    if (truncate) heedful.truncate = true;
    if (speculate) heedful.speculate = true;
    const body = { model: this.model, heedful };
    if (temperature !== null) body.temperature = temperature;
    if (max_tokens !== null) body.max_tokens = max_tokens;
    return body;
  }

  // As a conversation is stored with them.
  get named() {
    const settings = Object.fromEntries(OF_A_CONVERSATION.map((name) => [name, this.#values[name]]));
    return { model: this.model, settings };
  }

  // A stored conversation goes on as it was.
  restore(model, settings) {
    const known = OF_A_CONVERSATION.filter((name) => settings[name] !== undefined);
    this.#set(Object.fromEntries(known.map((name) => [name, settings[name]])));
    if (!POLICIES[this.#values.policy]) this.#set({ policy: DEFAULTS.policy });
    this.#policy.value = this.#values.policy;
    if (this.#models.some(({ id }) => id === model)) this.#model.value = model;
  }

  get #about() {
    return this.#models.find(({ id }) => id === this.model);
  }

  #set(values) {
    Object.assign(this.#values, values);
    localStorage.setItem(STORE, JSON.stringify(this.#values));
  }

  #fillPolicies() {
    const options = Object.entries(POLICIES).map(([value, [label]]) => element("option", { value }, label));
    this.#policy.replaceChildren(...options);
    if (!POLICIES[this.#values.policy]) this.#values.policy = DEFAULTS.policy;
    this.#policy.value = this.#values.policy;
  }

  #choosePolicy() {
    this.#set({ policy: this.#policy.value });
    if (this.#policy.value === "custom") this.open("kv");
  }

  #read(onKey) {
    const inputs = this.#form.elements;
    const valueOf = ({ type, value, checked }) =>
      type === "checkbox" ? checked : type === "number" ? (value === "" ? null : Number(value)) : value;
    const values = Object.fromEntries(FIELDS.map((name) => [name, valueOf(inputs[name])]));
    const custom = CUSTOM.map((name) => [name, valueOf(inputs[name])]).filter(([, value]) => value !== "" && value !== null);
    this.#set({ ...values, custom: Object.fromEntries(custom) });
    const key = inputs.key.value.trim();
    if (key === apiKey.get()) return;
    apiKey.set(key);
    onKey();
  }

  #askForKey() {
    document.getElementById("key-note").textContent = apiKey.get()
      ? "The server does not know this key."
      : "The server asks for a key; it is forgotten when the tab closes.";
    this.open("key");
  }

  #nextTheme() {
    this.#set({ theme: THEMES[(THEMES.indexOf(this.#values.theme) + 1) % THEMES.length] });
    this.#paintTheme();
  }

  #paintTheme() {
    const theme = THEMES.includes(this.#values.theme) ? this.#values.theme : "system";
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = THEME_SIGNS[theme];
    button.setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system has them" : theme}`);
    button.title = button.getAttribute("aria-label");
  }
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}
