"""A model that says what it is told: the real LLM, engine, cache and books over a runner and a tokenizer of scripts.

A token is a word of a message, or a piece of a scripted answer; a message costs one more for its role.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.cost.ledger import Ledger
from heedful.cost.meter import RunnerFacts
from heedful.engine.engine import Engine
from heedful.engine.llm import LLM, TextStream
from heedful.errors import TemplateError
from heedful.models.config import ModelConfig
from heedful.request import Batch, CachePolicy
from heedful.testing import plain_cache

HEADS, LAYERS, KV_HEADS, HEAD_DIM = 2, 3, 1, 4
END = 0
HELD_BACK = "…"
KV_ROW_BYTES = 4 * HEAD_DIM

PAGE_BYTES = LAYERS * 64 * KV_HEADS * 2 * 4 * HEAD_DIM
CONFIG = ModelConfig(  # only its sizes count here
    family="gpt2",
    vocab_size=3000,
    hidden_size=8,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=8,
    context_len=2048,
    windows=(None,) * LAYERS,
    rope=None,
)


def dense_visits(tokens: int) -> int:
    """Of a prompt and answer whose first `tokens` tokens were computed, one query after the other."""
    return HEADS * LAYERS * sum(range(1, tokens + 1))


class WordTemplate:
    def __init__(self, takes_system: bool) -> None:
        self._takes_system = takes_system

    def render(self, messages: Sequence[Mapping[str, Any]], tools: None = None) -> list[str]:
        if not self._takes_system and messages[0]["role"] == "system":
            raise TemplateError("the chat template refuses these messages: no system", "Change them accordingly.")
        return [word for m in messages for word in (f"<{m['role']}>", *m["content"].split())] + ["<answer>"]


class WordTokenizer:
    bos_id = None
    eos_ids = frozenset({END})

    def __init__(self, chat_template: WordTemplate | None) -> None:
        self.chat_template = chat_template
        self._texts = ["<end>"]

    def encode_segments(self, segments: Iterable[str]) -> list[int]:
        return [self.id_of(word) for word in segments]

    def id_of(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def stream(self, *, continues: bool, kept_special: frozenset[int] = frozenset()) -> WordDecoder:
        return WordDecoder(self._texts)


class WordDecoder:
    """Holds back a piece that ends with HELD_BACK, as a real one does part of a character."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + self._texts[token_id]
        self._held = text if text.endswith(HELD_BACK) else ""
        return text.removesuffix(self._held)

    def flush(self) -> str:
        return self._held


class ScriptedRunner:
    """Says the answers in turn. `on_step` gets the batch of every step, before it is computed."""

    def __init__(self, answers: Iterable[Iterable[int]], capacity_tokens: int) -> None:
        self.config = CONFIG
        self.threads = 1
        self.facts = RunnerFacts(linear_bytes=1000, head_bytes=100)
        self.cache = plain_cache(CONFIG.windows, KV_HEADS, HEAD_DIM, capacity_tokens=capacity_tokens)
        self.on_step: Callable[[Batch], None] = lambda batch: None
        self._answers = map(iter, answers)
        self._speaking: dict[int, Any] = {}

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.on_step(batch)
        (chunk,) = batch.chunks
        if not chunk.reaches_end:
            return np.empty((0, CONFIG.vocab_size), dtype=np.float32)
        if chunk.sequence.output_len == 0:
            self._speaking = {id(chunk.sequence): next(self._answers)}
        logits = np.zeros((1, CONFIG.vocab_size), dtype=np.float32)
        logits[0, next(self._speaking[id(chunk.sequence)], END)] = 1e4
        return logits


class ScriptedLLM(LLM):
    """`answers`: each a list of pieces, spaces and all; an unending one is an iterator."""

    def __init__(
        self, answers: Iterable[Iterable[str]] = (), *, context_len: int = 512, takes_system: bool = True
    ) -> None:
        self.name = "toy"
        self.config = CONFIG
        self.context_len = context_len
        self.policy = CachePolicy()
        self.speculate = False
        self.ledger = Ledger()
        self.tokenizer = WordTokenizer(WordTemplate(takes_system))  # type: ignore[assignment]
        self.runner = ScriptedRunner(((self.tokenizer.id_of(p) for p in pieces) for pieces in answers), context_len)
        self.engine = Engine(self.runner, model_name="toy", context_len=context_len, eos_ids=self.tokenizer.eos_ids)
        self.asked: list[tuple[list[tuple[str, str]], dict[str, Any]]] = []
        """Messages as (role, content), and the sampling, of every request."""
        self._inboxes = {}
        self._lock = threading.RLock()
        self.abandoned = deque()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        truncate: bool = False,
        adapter: str | None = None,
        **sampling: Any,
    ) -> TextStream:
        self.asked.append(([(m["role"], m["content"]) for m in messages], sampling))
        return super().stream_chat(messages, truncate=truncate, adapter=adapter, **sampling)

    @property
    def seeds(self) -> list[int | None]:
        return [sampling["seed"] for _, sampling in self.asked]

    @property
    def held_pages(self) -> int:
        return self.runner.cache.taken_bytes // PAGE_BYTES


def endless(word: str = "on") -> Iterable[str]:
    return (f"{word}{i} " for i in count())
