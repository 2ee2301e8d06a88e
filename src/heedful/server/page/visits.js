// A receipt's visits, told apart by why each was made. The receipt has their sums; which layers have which window, the
// sinks and the budget are in its policy, so the parts follow from the positions that were computed. They are shown only
// where they add up to the receipt's own sums: to the same whole number of heads for the prompt and for the answer.

const PAGE = 64;
const DENSE_LAYERS = 2; // under a budget the first layers read everything
const SPARSE = { sinks: 128, window: 1920, tail: 100 };
const PARTS = ["full", "window", "sink", "selected"];

// [{part, visits}]: full, window, sink, selected (or made, where they cannot be told apart), rejected, recomputed, and
// saved_window, saved_pages, saved_prefix. They sum to receipt.visits.dense.
export function segments(receipt) {
  const { saved, rejected = 0, recomputed = 0, total } = receipt.visits;
  const parts = made(receipt) ?? { made: total - rejected - recomputed };
  const all = {
    ...parts,
    rejected,
    recomputed,
    saved_window: saved.window,
    saved_pages: saved.pages,
    saved_prefix: saved.prefix,
  };
  return Object.entries(all)
    .filter(([, visits]) => visits > 0)
    .map(([part, visits]) => ({ part, visits }));
}

function made(receipt) {
  const { visits, policy, prompt_tokens: prompt, cached_tokens: cached, output_tokens: output } = receipt;
  if (!policy.windows || output < 1) return null;
  for (let dense = policy.budget ? DENSE_LAYERS : 0; dense >= 0; dense--) {
    const reading = count(policy, cached, prompt, prompt, dense);
    // the last token is not fed back, unless it was followed by the end of the answer, which is no output token
    for (const end of [prompt + output - 1, prompt + output]) {
      const writing = count(policy, prompt, end, prompt, dense);
      const heads = headsOf(visits, sum(reading), sum(writing));
      if (heads) return Object.fromEntries(PARTS.map((part) => [part, heads * (reading[part] + writing[part])]));
    }
  }
  return null;
}

function headsOf({ total, prefill, rejected = 0, recomputed = 0 }, reading, writing) {
  const heads = (total - rejected - recomputed) / (reading + writing);
  const fits = Number.isInteger(heads) && (recomputed > 0 || heads * reading === prefill);
  return fits ? heads : 0;
}

// Keys seen by one head of every layer, for the queries at positions [start, end).
function count(policy, start, end, prompt, denseLayers) {
  const seen = { full: 0, window: 0, sink: 0, selected: 0 };
  const widths = Object.keys(policy.windows).filter((name) => name !== "full").map(Number);
  const narrowed = Math.max(...widths); // a policy's window is never narrower than the ones that it leaves
  const fullLayers = policy.windows.full || 0;
  for (let position = start; position < end; position++) {
    for (const width of widths)
      look(seen, policy.windows[width], position, width, width === narrowed ? policy.sinks || 0 : 0);
    if (!fullLayers) continue;
    const isSparse = policy.prefill === "sparse" && position < prompt - SPARSE.tail;
    const pages = policy.budget && position >= prompt ? policy.budget / PAGE : Infinity;
    if (isSparse) look(seen, fullLayers, position, SPARSE.window, SPARSE.sinks);
    else if (Math.floor(position / PAGE) + 1 > pages) {
      const dense = Math.min(denseLayers, fullLayers);
      seen.full += dense * (position + 1);
      seen.selected += (fullLayers - dense) * ((pages - 1) * PAGE + (position % PAGE) + 1);
    } else seen.full += fullLayers * (position + 1);
  }
  return seen;
}

function look(seen, layers, position, window, sinks) {
  const keys = position + 1;
  seen.window += layers * Math.min(keys, window);
  seen.sink += layers * Math.min(Math.max(keys - window, 0), sinks);
}

function sum(seen) {
  return PARTS.reduce((total, part) => total + seen[part], 0);
}
