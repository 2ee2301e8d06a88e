"""What each step of one request was told to read: recorded while it runs, or planned again afterwards.

    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder            # then answer one request
    recorder.steps

    planned_steps(config, cache, policy, prompt_len, cached_len, computed_len)

Both give the spans that a cache planned, so counts made of them are those of `cost.visits`. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from heedful.cache.pages import KVCache, kept_pages, pages_for, plain_layout
from heedful.cache.policy import PAGE_LEN, PagePolicy
from heedful.cost.meter import RunnerFacts
from heedful.cost.visits import attended, dense_visits, selected_layers, visits
from heedful.engine.runner import Runner
from heedful.engine.scheduler import TOKEN_BUDGET
from heedful.models.config import ModelConfig
from heedful.request import KV_ROW_BYTES, Batch, CachePolicy, Chunk, KeySpan, Request, Sequence


@dataclass(frozen=True, eq=False)
class Step:
    """The positions [start, end) that a step computed, and what their queries read."""

    start: int
    end: int
    spans: tuple[KeySpan, ...]
    """One a layer group. Chosen pages are as they were in this step."""
    knows_choice: bool = True
    """Whether `selection.chosen` of the spans is what a kernel chose; a plan knows how many pages, not which."""


@dataclass(frozen=True)
class VisitParts:
    """Token visits by why they were made, and those that dense attention would have added, by what saved them."""

    full: int = 0
    window: int = 0
    sink: int = 0
    selected: int = 0
    saved_window: int = 0
    saved_pages: int = 0
    saved_prefix: int = 0

    @property
    def made(self) -> int:
        return self.full + self.window + self.sink + self.selected

    @property
    def dense(self) -> int:
        return self.made + self.saved_window + self.saved_pages + self.saved_prefix

    def plus(self, other: VisitParts) -> VisitParts:
        names = self.__dataclass_fields__
        return VisitParts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class RecordingRunner:
    """Hands every batch on and keeps its spans. For one request at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.config: ModelConfig = runner.config
        self.cache: KVCache = runner.cache
        self.facts: RunnerFacts = runner.facts
        self.threads: int = runner.threads
        self.steps: list[Step] = []

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As Runner.run. Pages are chosen while it runs, so spans are kept afterwards."""
        logits = self._runner.run(batch)
        self.steps += [step_of(chunk) for chunk in batch.chunks]
        return logits


def step_of(chunk: Chunk, *, knows_choice: bool = True) -> Step:
    return Step(chunk.start, chunk.end, tuple(map(_frozen, chunk.spans)), knows_choice)


def _frozen(span: KeySpan) -> KeySpan:
    """The next step writes into the same array of chosen pages."""
    if span.selection is None:
        return span
    return replace(span, selection=replace(span.selection, chosen=span.selection.chosen.copy()))


def planned_steps(
    config: ModelConfig, cache: KVCache, policy: CachePolicy, prompt_len: int, cached_len: int, computed_len: int
) -> list[Step]:
    """The steps of a request that was answered: a prompt in chunks from `cached_len` on, then one token a step.

    `cache`: whose formats and defaults hold; its pages are left alone.
    """
    paper = KVCache(
        config.windows,
        config.num_kv_heads,
        config.head_dim,
        lambda form: plain_layout(form, config.num_kv_heads, config.head_dim),
        default=cache.default,
        numbers=tuple(KV_ROW_BYTES),
        capacity_tokens=8 * (computed_len + TOKEN_BUDGET),  # of the default format: f32 takes seven times as much as q4
    )
    sequence = Sequence(Request((0,) * prompt_len, policy=policy), [0] * computed_len, cached_len=cached_len)
    steps: list[Step] = []
    while (start := sequence.cached_len) < computed_len:
        end = min(prompt_len, start + TOKEN_BUDGET) if start < prompt_len else start + 1
        chunk = paper.plan(sequence, paper.chunk_end(sequence, min(end, computed_len)))
        steps.append(step_of(chunk, knows_choice=False))
        sequence.cached_len = chunk.end
    return steps


def step_parts(spans: Iterable[KeySpan], heads: int) -> VisitParts:
    """Of all layers. `heads`: query heads of a layer."""
    total = VisitParts()
    for span in spans:
        total = total.plus(_span_parts(span, heads))
    return total


def position_visits(step: Step, position: int, heads: int) -> int:
    """What computing one of the step's positions visited in all layers."""
    return sum(visits(replace(span, start=position, end=position + 1), heads) for span in step.spans)


def layer_visits(steps: Iterable[Step], layers: int) -> list[int]:
    """Visits of one query head of each layer; all heads of a layer make as many."""
    found = [0] * layers
    for step in steps:
        for span in step.spans:
            chosen = set(selected_layers(span))
            of_chosen = visits(replace(span, layers=tuple(sorted(chosen))), 1) // len(chosen) if chosen else 0
            plain = attended(span.start, span.end, _most_seen(span))
            for layer in span.layers:
                found[layer] += of_chosen if layer in chosen else plain
    return found


def resident_pages(policy: PagePolicy, own_window: int | None, step: Step) -> npt.NDArray[np.bool_]:
    """Which pages of the sequence are held in a layer with this window when the step has run: bool (pages,)."""
    sink_pages, first_kept = kept_pages(policy, own_window, step.start)
    pages = np.arange(pages_for(step.end))
    found: npt.NDArray[np.bool_] = (pages < sink_pages) | (pages >= first_kept)
    return found


def visible_keys(span: KeySpan, position: int) -> npt.NDArray[np.bool_]:
    """What a query at `position` may see in the span's layers without a choice of pages: bool (position + 1,)."""
    keys = np.arange(position + 1)
    if span.window is None:
        return np.ones(position + 1, dtype=bool)
    seen: npt.NDArray[np.bool_] = (position - keys < span.window) | (keys < span.sinks)
    return seen


def chosen_keys(span: KeySpan, layer: int, position: int) -> npt.NDArray[np.bool_] | None:
    """What each KV head of a layer read where it has chosen pages: bool (K, position + 1); None: it did not choose."""
    if layer not in selected_layers(span):
        return None
    assert span.selection is not None, span
    pages = np.zeros((span.selection.chosen.shape[1], pages_for(position + 1)), dtype=bool)
    np.put_along_axis(pages, span.selection.chosen[layer].astype(np.int64), True, axis=1)
    return pages.repeat(PAGE_LEN, axis=1)[:, : position + 1]


def _most_seen(span: KeySpan) -> int | None:
    return None if span.window is None else span.window + span.sinks


def _span_parts(span: KeySpan, heads: int) -> VisitParts:
    made, dense = visits(span, heads), dense_visits(span, heads)
    if span.selection is not None:
        dense_layers = tuple(set(span.layers) - set(selected_layers(span)))
        full = heads * len(dense_layers) * attended(span.start, span.end, _most_seen(span))
        return VisitParts(full=full, selected=made - full, saved_pages=dense - made)
    if span.window is None:
        return VisitParts(full=made)
    window = heads * len(span.layers) * attended(span.start, span.end, span.window)
    return VisitParts(window=window, sink=made - window, saved_window=dense - made)
