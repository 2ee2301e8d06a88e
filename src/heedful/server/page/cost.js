// The cost of an answer: a bar of its visits against dense ones, and the other numbers of its receipt.

import { request } from "./api.js";
import { bytes, element, human, percent, rate, seconds, short, whole } from "./format.js";
import { segments } from "./visits.js";

const NAMES = {
  full: "full attention",
  window: "in the window",
  sink: "sinks",
  selected: "selected pages",
  made: "made",
  rejected: "wrong guesses",
  recomputed: "computed again",
  saved_window: "saved by the window",
  saved_pages: "saved by pages",
  saved_prefix: "saved by the prefix",
};

export function costCard(receipt) {
  return element(
    "section",
    { class: "cost", "aria-label": "Cost of this answer" },
    bar(receipt),
    legend(receipt),
    figures(receipt),
    viewButton(receipt),
    element("details", {}, element("summary", {}, "All numbers"), table(receipt), copyLine(receipt)),
  );
}

// A page of where the visits went is made when it is asked for: that takes seconds, and PyTorch on the server.
function viewButton({ seconds: took }) {
  const button = element("button", { type: "button", class: "plain small" }, "Where the visits went");
  const place = element("p", { class: "look", role: "status" }, button);
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Rebuilding attention…";
    try {
      const { url } = await request("/view", { method: "POST", body: { receipt: { seconds: took } } });
      const link = element("a", { href: url, target: "_blank", rel: "noopener" }, "Open the view in a new tab");
      place.replaceChildren(link);
      link.focus();
    } catch (error) {
      place.replaceChildren(error.message);
    }
  });
  return place;
}

// A stopped or broken answer has no receipt; what the page counted stays.
export function liveFigures(live) {
  return element("p", { class: "figures live" }, ...facts(liveFacts(live)));
}

export function liveFacts({ tokens, seconds: elapsed, tokens_per_second: speed }) {
  const found = [[tokens ? `≈ ${whole(tokens)}` : "0", tokens === 1 ? "token" : "tokens"]];
  if (speed) found.push([`≈ ${rate(speed)}`, "tokens/s"]);
  found.push([seconds(elapsed), ""]);
  return found;
}

export function facts(pairs) {
  return pairs.map(([value, unit]) => element("span", {}, element("b", {}, value), unit ? ` ${unit}` : ""));
}

function bar(receipt) {
  const { total, dense } = receipt.visits;
  const label = `${human(total)} token visits of ${human(dense)} dense`;
  const made = element("div", { class: "bar", role: "img", "aria-label": label });
  for (const { part, visits } of segments(receipt)) {
    const piece = element("span", { class: `part ${part}`, "data-part": part, "data-visits": visits });
    piece.style.flexGrow = visits / dense;
    piece.title = `${NAMES[part]}: ${whole(visits)} visits, ${percent(visits, dense)}`;
    made.append(piece);
  }
  return made;
}

function legend(receipt) {
  const { total, dense } = receipt.visits;
  const items = segments(receipt).map(({ part, visits }) =>
    element(
      "li",
      { "data-part": part },
      element("i", { class: `part ${part}` }),
      `${NAMES[part]} `,
      element("b", {}, human(visits)),
    ),
  );
  const sum = element(
    "li",
    { class: "sum" },
    element("b", {}, human(total)),
    " visits of ",
    element("b", {}, human(dense)),
    ` dense (${percent(total, dense)})`,
  );
  return element("ul", { class: "legend" }, sum, ...items);
}

function figures(receipt) {
  const { kv, energy, seconds: took, tokens_per_second: speed } = receipt;
  const pairs = [[whole(receipt.output_tokens), receipt.output_tokens === 1 ? "token" : "tokens"]];
  if (speed.decode) pairs.push([rate(speed.decode), "tokens/s"]);
  pairs.push([seconds(took.total), ""]);
  pairs.push([bytes(kv.bytes_read), `KV read (${kv.format})`]);
  pairs.push([`~${short(energy.joules)} J`, energyNote(energy)]);
  return element("p", { class: "figures" }, ...facts(pairs));
}

function energyNote({ low, high, source }) {
  return source === "estimated" ? `(estimated ${short(low)}–${short(high)})` : `(${source})`;
}

function table(receipt) {
  const { visits, kv, seconds: took, tokens_per_second: speed, weights } = receipt;
  const rows = [
    ["Policy", policyWords(receipt.policy)],
    ["Prompt", `${whole(receipt.prompt_tokens)} tokens, ${whole(receipt.cached_tokens)} of them cached`],
    receipt.dropped_tokens ? ["Dropped", `${whole(receipt.dropped_tokens)} of the oldest tokens`] : null,
    ["Visits", `${whole(visits.prefill)} prefill, ${whole(visits.decode)} decode`],
    ["Dense", whole(visits.dense)],
    visits.rejected ? ["Wrong guesses", `${whole(visits.rejected)} visits`] : null,
    visits.recomputed ? ["Computed again", `${whole(visits.recomputed)} visits`] : null,
    ["KV", `${bytes(kv.bytes_read)} read, ${bytes(kv.bytes_written)} written, ${bytes(kv.bytes_held_peak)} held at most`],
    ["Weights", `${bytes(weights.bytes_read)} read`],
    ["Speed", speedWords(speed)],
    ["Time", `${seconds(took.queue)} queue, ${seconds(took.prefill)} prefill, ${seconds(took.decode)} decode`],
    ["Energy", `~${short(receipt.energy.joules)} J ${energyNote(receipt.energy)}`],
    ["Quality", qualityWords(receipt)],
  ];
  const cells = rows.filter(Boolean).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
  return element("dl", {}, ...cells);
}

function speedWords({ prefill, decode }) {
  const said = [prefill && `${rate(prefill)} tokens/s prefill`, decode && `${rate(decode)} tokens/s decode`];
  return said.filter(Boolean).join(", ") || "too short to say";
}

export function policyWords(policy) {
  const words = [policy.kv];
  for (const [window, layers] of Object.entries(policy.windows || {}))
    words.push(window === "full" ? `${layers} layers full` : `${layers} layers window ${whole(Number(window))}`);
  if (policy.sinks) words.push(`${policy.sinks} sinks`);
  if (policy.budget) words.push(`budget ${whole(policy.budget)}`);
  if (policy.prefill) words.push(`${policy.prefill} prefill`);
  if (policy.precise) words.push(`newest ${policy.precise.newest} in ${policy.precise.kv}`);
  return words.join(" · ");
}

function qualityWords({ quality, policy }) {
  if (quality) {
    const recall = quality.needle_recall == null ? "" : `, ${percent(quality.needle_recall, 1)} of planted facts found`;
    return (
      `mean KLD ${quality.mean_kld.toFixed(4)}, ΔNLL ${signed(quality.mean_delta_nll)}${recall}, ` +
      `measured on ${quality.measured_on}`
    );
  }
  return changesOutput(policy) ? "not measured" : "not measured: full attention";
}

function changesOutput(policy) {
  return Boolean(policy.budget || policy.sinks || policy.prefill || policy.precise || !policy.windows?.full);
}

function signed(number) {
  return `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(4)}`;
}

// As the terminal prints it.
export function receiptLine(receipt) {
  const { visits, kv, energy, tokens_per_second: speed } = receipt;
  return [
    `${whole(receipt.prompt_tokens)} in (${whole(receipt.cached_tokens)} cached)`,
    `${whole(receipt.output_tokens)} out`,
    speed.decode ? `${speed.decode.toFixed(0)} tok/s` : null,
    `${human(visits.total)} visits of ${human(visits.dense)} dense`,
    `KV ${bytes(kv.bytes_held_peak)} ${kv.format}`,
    `~${short(energy.joules)} J ${energyNote(energy)}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function copyLine(receipt) {
  return element("p", { class: "receipt-line" }, receiptLine(receipt));
}
