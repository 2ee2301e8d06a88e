"""Everything that a view shows, as one dictionary: what `heedful view --json` prints and the page has inside.

    made = make_view(run, model, config, tokenizer, network)

Counts are of the run itself and sum to its receipt's; weights of attention are of `analysis`. docs/view.md names the
fields.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heedful import __version__
from heedful.cache.pages import KVCache, pages_for
from heedful.cache.policy import PAGE_LEN, PagePolicy
from heedful.cache.policy_text import policy_name, with_format
from heedful.cost.formulas import Shape
from heedful.cost.receipt import Receipt
from heedful.cost.visits import attended
from heedful.engine.answer import Completion
from heedful.errors import BadParameter, UnsupportedModel
from heedful.models.config import ModelConfig
from heedful.request import CachePolicy
from heedful.text.tokenizer import Tokenizer
from heedful.view.coverage import Budget, curve, recommend
from heedful.view.sampled import Samples, choose_samples
from heedful.view.steps import (
    Step,
    VisitParts,
    chosen_keys,
    layer_visits,
    planned_steps,
    position_visits,
    resident_pages,
    step_parts,
    visible_keys,
)

if TYPE_CHECKING:
    from heedful.models.decoder import Decoder
    from heedful.models.qwen3_5 import Qwen35
    from heedful.view.analysis import Analysis

VERSION = 1
MOST_TOKENS = 16_384

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A request that was answered."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    policy: CachePolicy
    receipt: Receipt
    steps: tuple[Step, ...]
    """Of all positions that were computed, those of wrong guesses too where they were recorded."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]

    @property
    def computed_len(self) -> int:
        """Positions whose keys were computed, or were there; the last output token's often was not."""
        return min(len(self.token_ids), max((step.end for step in self.steps), default=0))


def recorded_run(completion: Completion, policy: CachePolicy, steps: Sequence[Step]) -> Run:
    return Run(completion.prompt_token_ids, completion.token_ids, policy, completion.receipt, tuple(steps))


def replanned_run(completion: Completion, policy: CachePolicy, config: ModelConfig, cache: KVCache) -> Run:
    """Of a request whose steps were not recorded. They follow from the policy and the lengths, and must come to what
    the receipt counted, wrong guesses and repeated work aside. Raises UnsupportedModel where they do not."""
    receipt, visits = completion.receipt, completion.receipt.visits
    once = visits.total - visits.rejected - visits.recomputed
    length = len(completion.prompt_token_ids) + len(completion.token_ids)
    for computed in (length - 1, length):  # an end-of-text token takes a step and is not among the tokens
        steps = planned_steps(
            config, cache, policy, receipt.prompt_tokens, receipt.cached_tokens, max(computed, receipt.prompt_tokens)
        )
        if sum(step_parts(step.spans, config.num_heads).made for step in steps) == once:
            return recorded_run(completion, policy, steps)
    raise UnsupportedModel(
        f"the answer's {once:,} visits do not follow from its lengths and policy", "Ask again, without stopping it."
    )


def check_length(tokens: int, config: ModelConfig) -> None:
    """Raises BadParameter for a run that is too long to be looked at."""
    most = min(MOST_TOKENS, config.context_len)
    if tokens > most:
        problem = f"{tokens:,} tokens are more than {most:,}, the most that are looked at"
        raise BadParameter("view", problem, "Take a shorter prompt, or fewer output tokens.")


def make_view(
    run: Run,
    model: str,
    config: ModelConfig,
    cache: KVCache,
    tokenizer: Tokenizer,
    network: Decoder | Qwen35,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Json:
    """`network`: the plain model with the weights of the run's. `progress`: see `analysis.analyse`.

    Raises BadParameter for a run that is too long.
    """
    from heedful.view.analysis import analyse  # torch takes seconds to import

    check_length(len(run.token_ids), config)
    prompt_len, computed = len(run.prompt_ids), run.computed_len
    samples = choose_samples(prompt_len, computed, pages_for(computed), len(config.windows))
    found = analyse(network, run.token_ids, samples, prompt_len, _seen(run, config), progress)
    policy = with_format(run.policy, cache.default)
    return {
        "version": VERSION,
        "heedful": __version__,
        "model": model,
        "policy": policy_name(policy),
        "shape": {
            "layers": len(config.windows),
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "windows": list(config.windows),
            "page_len": PAGE_LEN,
        },
        "receipt": run.receipt.to_dict(),
        "receipt_line": run.receipt.line(),
        "prompt_tokens": prompt_len,
        "computed_tokens": computed,
        "tokens": _tokens(run, config, tokenizer, found),
        "queries": _queries(tokenizer, samples, found),
        "steps": _steps(run, config),
        "layers": _heads(run, config, found),
        "pages": _pages(run, config, cache.policy(run.policy), samples, found),
        "coverage": _coverage(run, model, config, policy, found),
        "lens": _lens(run, tokenizer, samples, found),
    }


# ---- counts


def _steps(run: Run, config: ModelConfig) -> list[Json]:
    """In order; a prefix that was there comes first, as saved visits. Together they are the receipt's dense ones."""
    receipt = run.receipt
    rows = []
    if receipt.cached_tokens:
        dense = config.num_heads * len(config.windows) * attended(0, receipt.cached_tokens, None)
        prefix = receipt.visits.saved.prefix
        rows.append(
            _step_row("cached", 0, receipt.cached_tokens, VisitParts(saved_window=dense - prefix, saved_prefix=prefix))
        )
    for step in run.steps:
        kind = "prefill" if step.start < len(run.prompt_ids) else "decode"
        rows.append(_step_row(kind, step.start, step.end, step_parts(step.spans, config.num_heads)))
    return rows


def _step_row(kind: str, start: int, end: int, parts: VisitParts) -> Json:
    return {"kind": kind, "start": start, "end": end, **{name: count for name, count in asdict(parts).items() if count}}


def _costs(run: Run, config: ModelConfig) -> list[int]:
    """Visits that computing each position made; of one that was computed twice those of the last time."""
    costs = [0] * len(run.token_ids)
    for step in run.steps:
        for position in range(step.start, min(step.end, len(costs))):
            costs[position] = position_visits(step, position, config.num_heads)
    return costs


# ---- what attention saw


def _seen(run: Run, config: ModelConfig) -> Callable[[int, int], npt.NDArray[np.bool_] | None]:
    step_at = {position: step for step in run.steps for position in range(step.start, step.end)}
    group_of = {layer: index for index, span in enumerate(run.steps[0].spans) for layer in span.layers}

    def seen(layer: int, position: int) -> npt.NDArray[np.bool_] | None:
        step = step_at.get(position)
        if step is None:
            return None
        span = step.spans[group_of[layer]]
        chosen = chosen_keys(span, layer, position)
        if chosen is None:
            return visible_keys(span, position)[None, :]
        return chosen if step.knows_choice else None

    return seen


def _tokens(run: Run, config: ModelConfig, tokenizer: Tokenizer, found: Analysis) -> Json:
    """Columns over all tokens."""
    return {
        "text": token_texts(tokenizer, run.token_ids),
        "id": run.token_ids,
        "surprisal": [None if np.isnan(bits) else round(float(bits), 2) for bits in found.surprisal],
        "visits": _costs(run, config),
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character that several share stands with the last of them."""
    stream = tokenizer.stream(skip_special=False, continues=True)
    texts = [stream.push(token_id) for token_id in ids]
    if texts:
        texts[-1] += stream.flush()
    return texts


def _queries(tokenizer: Tokenizer, samples: Samples, found: Analysis) -> Json:
    """Columns over the sampled queries."""
    return {
        "at": list(samples.queries),
        "sources": [[[at, _share(share)] for at, share in pairs] for pairs in found.sources],
        "sinks": [_share(share) for share in found.sink_share],
        "predicted": [[[_word(tokenizer, token), _share(p)] for token, p in pairs] for pairs in found.predicted],
    }


def _heads(run: Run, config: ModelConfig, found: Analysis) -> Json:
    """Tables (layers, heads); visits are exact, the rest are means over the sampled queries."""
    sums = found.heads
    return {
        "visits": layer_visits(run.steps, len(config.windows)),
        "entropy": np.round(sums.entropy, 3).tolist(),
        "distance": np.round(sums.distance, 1).tolist(),
        "sink_mass": np.round(sums.sink_mass, 4).tolist(),
        "light": np.round(sums.light, 4).tolist(),
        "kept": np.round(sums.kept, 4).tolist(),
    }


def _pages(run: Run, config: ModelConfig, policy: PagePolicy, samples: Samples, found: Analysis) -> Json:
    """Bytes in base64: `mass` (layers + 1, rows, pages) holds 255 · sqrt(share), `read` and `held` (rows, pages)
    255 · share of (layer, KV head) pairs. `formats`: of each row runs [format, first page, end page]."""
    at = [samples.queries[index] for index in samples.map_rows]
    pages = found.page_mass.shape[-1]
    step_at = {position: step for step in run.steps for position in range(step.start, step.end)}
    read, held = np.zeros((len(at), pages)), np.zeros((len(at), pages))
    formats: list[list[list[Any]]] = []
    for row, position in enumerate(at):
        step = step_at.get(position)
        formats.append([] if step is None else _page_formats(step))
        if step is not None:
            read[row], held[row] = _pages_read(step, position, config, pages), _pages_held(step, config, policy, pages)
    return {
        "at": at,
        "count": pages,
        "mass": _as_bytes(np.sqrt(found.page_mass.astype(np.float64))),
        "read": _as_bytes(read),
        "held": _as_bytes(held),
        "formats": formats,
        "shared": run.receipt.cached_tokens // PAGE_LEN,
    }


def _pages_read(step: Step, position: int, config: ModelConfig, pages: int) -> npt.NDArray[np.float64]:
    """Share of (layer, KV head) pairs whose query at `position` read something of each page."""
    total = np.zeros(pages)
    for span in step.spans:
        visible = _any_of_page(visible_keys(span, position), pages)
        for layer in span.layers:
            chosen = chosen_keys(span, layer, position)
            if chosen is None:
                total += visible
            elif step.knows_choice:
                total += np.mean([_any_of_page(of_head, pages) for of_head in chosen], axis=0)
            else:
                total += _likely_read(step, span.selection, position // PAGE_LEN + 1, pages)
    return total / len(config.windows)


def _likely_read(step: Step, selection: Any, own_pages: int, pages: int) -> npt.NDArray[np.float64]:
    """Where it is not known which pages were chosen: those that always are, and of the others each as likely."""
    found = np.zeros(pages)
    candidates = own_pages - 2 - selection.local_pages
    found[1 : 1 + candidates] = (selection.num_pages - 2 - selection.local_pages) / candidates
    found[0] = 1
    found[1 + candidates : own_pages] = 1
    return found


def _any_of_page(keys: npt.NDArray[np.bool_], pages: int) -> npt.NDArray[np.bool_]:
    padded = np.zeros(pages * PAGE_LEN, dtype=bool)
    padded[: len(keys)] = keys
    return np.asarray(padded.reshape(pages, PAGE_LEN).any(axis=1))


def _pages_held(step: Step, config: ModelConfig, policy: PagePolicy, pages: int) -> npt.NDArray[np.float64]:
    held = np.zeros(pages)
    for window in config.windows:
        mine = resident_pages(policy, window, step)[:pages]
        held[np.flatnonzero(mine)] += 1
    return held / len(config.windows)


def _page_formats(step: Step) -> list[list[Any]]:
    return [[run.format.name, run.begin // PAGE_LEN, pages_for(run.end)] for run in step.spans[0].formats]


def _as_bytes(shares: npt.NDArray[np.float64]) -> str:
    return base64.b64encode(np.round(255 * np.clip(shares, 0, 1)).astype(np.uint8).tobytes()).decode()


# ---- what would do


def _coverage(run: Run, model: str, config: ModelConfig, policy: CachePolicy, found: Analysis) -> Json:
    from heedful.view.analysis import BUDGETS, SINKS, WINDOWS

    prompt, computed, form = len(run.prompt_ids), run.computed_len, policy.kv_format
    shape, covered = Shape.from_config(config), found.coverage
    kinds = {
        "window": ([CachePolicy(form, window=width) for width in WINDOWS], covered.window),
        "sinks": ([CachePolicy(form, window=width, sinks=SINKS) for width in WINDOWS], covered.sinks),
        "pages": ([CachePolicy(form, budget=tokens) for tokens in BUDGETS], covered.pages),
    }
    curves: dict[str, list[Budget]] = {}
    for name, (policies, mass) in kinds.items():
        shorter = [i for i, one in enumerate(policies) if (one.window or one.budget or 0) < computed]
        curves[name] = curve([policies[i] for i in shorter], mass.T[shorter].tolist(), shape, prompt, computed)
    dense = config.num_heads * len(config.windows) * attended(0, computed, None)
    best = recommend(model, [one for name in ("sinks", "pages") for one in curves[name]], dense)
    return {
        "queries": covered.queries,
        "dense_visits": dense,
        "curves": {name: [_budget(one) for one in budgets] for name, budgets in curves.items()},
        "recommended": None if best.budget is None else _budget(best.budget),
        "quality": None if best.quality is None else asdict(best.quality),
        "measure": best.measure,
    }


def _budget(one: Budget) -> Json:
    return {
        "options": one.options,
        "tokens": one.tokens,
        "mass": _share(one.mass),
        "layers_enough": one.layers_enough,
        "visits": one.visits,
    }


def _lens(run: Run, tokenizer: Tokenizer, samples: Samples, found: Analysis) -> Json:
    """Rows are the model's blocks, columns the positions."""
    return {
        "at": list(samples.lens),
        "rows": [[[_word(tokenizer, token), _share(p)] for token, p in row] for row in found.lens],
    }


def _word(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _share(number: float) -> float:
    return round(min(float(number), 1.0), 4)
