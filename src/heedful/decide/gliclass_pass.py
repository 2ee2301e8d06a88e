"""Texts with their labels to logits and receipts: what a GLiClass model's two architectures do alike, without torch.

`UniEncoder` passes text and labels through one encoder, together; `BiEncoder` passes the labels of a call through an
encoder of their own, each once, whatever the number of texts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds
from heedful.cost.energy import EnergyMeter
from heedful.decide.gliclass_prompt import Ask, BiReader, Read, UniReader
from heedful.engine.encoder import trunk_facts
from heedful.engine.pooled import TokenIds, TrunkFacts, pass_receipt, plan_steps
from heedful.errors import BadLogits
from heedful.models.gliclass_config import GLiClassConfig

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Judged:
    """In the order of the asks."""

    logits: list[tuple[float, ...]]
    """Of each text one number a label."""
    reads: list[Read]
    receipts: list[EncoderReceipt]
    """Of each encoder that ran."""


class LabelJudge(Protocol):
    def __call__(self, asks: ListLike[Ask], *, truncate: bool) -> Judged:
        """Raises what the readers raise; BadLogits when the model computes no usable numbers."""
        ...


class UniEncoder(LabelJudge):
    """`run`: ids of texts with their labels that fit one step → of each the logits of its labels."""

    def __init__(
        self,
        name: str,
        config: GLiClassConfig,
        reader: UniReader,
        run: Callable[[list[TokenIds]], list[Floats]],
        *,
        saved_bytes: int = 0,
    ) -> None:
        self._name, self._config, self._reader, self._run = name, config, reader, run
        self._facts = trunk_facts(config.encoder, saved_bytes)

    def __call__(self, asks: ListLike[Ask], *, truncate: bool) -> Judged:
        reads = [self._reader.read(ask, truncate=truncate) for ask in asks]
        labels, config = sum(len(ask.labels) for ask in asks), self._config
        rows, receipt = _run_pass(
            self._name,
            self._facts,
            reads,
            lambda step: self._run([reads[i].ids for i in step]),
            head_weights=config.text_weights + config.label_weights + config.pair_weights,
            head_products=config.text_weights * len(asks) + (config.label_weights + config.pair_weights) * labels,
        )
        return Judged([tuple(row.tolist()) for row in rows], reads, [receipt])


class BiEncoder(LabelJudge):
    """`run_labels`: ids of labels that fit one step → their vectors (labels, C). `run`: ids of texts that fit one step,
    and of each its labels' vectors → of each the logits of its labels.
    """

    def __init__(
        self,
        name: str,
        config: GLiClassConfig,
        reader: BiReader,
        run_labels: Callable[[list[TokenIds]], Floats],
        run: Callable[[list[TokenIds], list[Floats]], list[Floats]],
        *,
        saved_bytes: tuple[int, int] = (0, 0),
    ) -> None:
        assert config.label_encoder is not None, config
        self._name, self._config, self._reader = name, config, reader
        self._run_labels, self._run = run_labels, run
        self._facts, self._label_facts = (
            trunk_facts(of, saved)
            for of, saved in zip((config.encoder, config.label_encoder), saved_bytes, strict=True)
        )

    def __call__(self, asks: ListLike[Ask], *, truncate: bool) -> Judged:
        reads = [self._reader.read(ask, truncate=truncate) for ask in asks]
        vectors, label_receipt = self._label_vectors(asks)
        of_text = [np.stack([vectors[label] for label in ask.labels]) for ask in asks]
        pairs, config = sum(len(ask.labels) for ask in asks), self._config
        rows, receipt = _run_pass(
            self._name,
            self._facts,
            reads,
            lambda step: self._run([reads[i].ids for i in step], [of_text[i] for i in step]),
            head_weights=config.text_weights + config.pair_weights,
            head_products=config.text_weights * len(asks) + config.pair_weights * pairs,
        )
        return Judged([tuple(row.tolist()) for row in rows], reads, [label_receipt, receipt])

    def _label_vectors(self, asks: ListLike[Ask]) -> tuple[dict[str, Floats], EncoderReceipt]:
        """Of each label that occurs its vector (C,)."""
        labels = list(dict.fromkeys(label for ask in asks for label in ask.labels))
        reads = [self._reader.read_label(label) for label in labels]
        vectors, receipt = _run_pass(
            self._name,
            self._label_facts,
            reads,
            lambda step: list(self._run_labels([reads[i].ids for i in step])),
            head_weights=self._config.label_weights,
            head_products=self._config.label_weights * len(labels),
        )
        return dict(zip(labels, vectors, strict=True)), receipt


def _run_pass(
    name: str,
    facts: TrunkFacts,
    reads: list[Read],
    run: Callable[[list[int]], list[Floats]],
    *,
    head_weights: int,
    head_products: int,
) -> tuple[list[Floats], EncoderReceipt]:
    """What `run` gives for each text, called with the places of those that run together, and what that cost.

    head_weights: stored after the encoder; head_products: multiplications with them, over all texts and labels.
    """
    began, cpu_began, meter = perf_counter(), process_time(), EnergyMeter()
    meter.start()
    lengths = [len(read.ids) for read in reads]
    steps = plan_steps(lengths)
    rows: list[Floats] = [np.zeros(0, dtype=np.float32)] * len(reads)
    for step in steps:
        for place, row in zip(step, run(step), strict=True):
            rows[place] = row
    if not all(np.isfinite(row).all() for row in rows):
        raise BadLogits(f"{name} computes no usable numbers for these texts", "Fetch the model again.")
    seconds = perf_counter() - began
    energy = meter.read(process_time() - cpu_began, (facts.linear_bytes + 4 * head_weights) * len(steps))
    receipt = pass_receipt(
        name,
        facts,
        lengths,
        sum(read.dropped for read in reads),
        len(steps),
        EncoderSeconds(prefill=seconds, total=seconds),
        energy,
        head_weights=head_weights,
    )
    linear = 2 * (facts.linear_weights * sum(lengths) + head_products)
    return rows, replace(receipt, flops=replace(receipt.flops, linear=linear))
