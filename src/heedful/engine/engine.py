"""Token ids in, token ids out, for any number of sequences at once. Knows no text; llm.py adds that.

sequence = engine.add(request)
while sequence.finish is None:
    engine.step()
receipt = engine.receipt(sequence)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heedful.cache.disk import DiskTier
from heedful.cache.policy_text import with_format
from heedful.cost.energy import EnergyMeter
from heedful.cost.meter import Meter, adapter_shares, weight_shares
from heedful.cost.quality import measured_quality
from heedful.cost.receipt import Receipt
from heedful.engine.drafts import Drafter
from heedful.engine.runner import Runner
from heedful.engine.scheduler import Scheduler
from heedful.errors import BadParameter, ContextOverflow
from heedful.request import MOST_POSITIONS, Batch, CachePolicy, Chunk, Finish, Request, Sequence
from heedful.sampling.sampler import Sampled, Sampler, with_logprobs

if TYPE_CHECKING:
    from heedful.sampling.grammar import Grammar, GrammarState

MOST_GUESSING = 4  # sequences that decode at once; with more of them a step is bound by arithmetic, and guesses cost it


@dataclass(frozen=True)
class NewToken:
    sequence: Sequence
    sampled: Sampled


@dataclass(frozen=True)
class Live:
    """Where an answer stands while it is being computed. Tokens and visits are exact; seconds are wall time."""

    prompt_tokens: int
    prompt_tokens_computed: int
    """Those of a prefix that was there already among them."""
    output_tokens: int
    visits: int
    seconds: float
    """Since the request was added."""
    decode_seconds: float
    """Since the first output token; 0 before it."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, as receipts have it: tokens after the first one."""
        return (self.output_tokens - 1) / self.decode_seconds if self.output_tokens > 1 else None


@dataclass
class _Running:
    sampler: Sampler
    meter: Meter
    max_tokens: int
    grammar: GrammarState | None
    drafter: Drafter | None


@dataclass(frozen=True)
class Prepared:
    """A request that can be answered, not yet queued."""

    sequence: Sequence
    state: _Running
    most_cached: int
    """The most tokens whose K and V the sequence will hold."""


class Engine:
    """`context_len` bounds prompt and answer together; `eos_ids` end an answer and are not part of it.

    `disk`: where pages of shared prefixes are kept; close() waits until they are.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model_name: str,
        context_len: int,
        eos_ids: Collection[int],
        disk: DiskTier | None = None,
    ) -> None:
        self.runner = runner
        self.model_name = model_name
        self.context_len = context_len
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(runner.cache, disk=disk)
        self._state: dict[Sequence, _Running] = {}
        self._energy = EnergyMeter()
        self.last_step_bytes = 0
        """Weights, KV rows and bounds that the last step read."""
        self.last_step_sequences = 0

    def add(self, request: Request, grammar: Grammar | None = None) -> Sequence:
        """Queue a request, whose answer is in `grammar` if there is one.

        Raises BadParameter, ContextOverflow or CacheFull when it can never be answered.
        """
        return self.enqueue(self.prepare(request, grammar))

    def prepare(self, request: Request, grammar: Grammar | None = None) -> Prepared:
        """All of `add` that can fail. Changes nothing, so that any thread may call it while another one steps."""
        prompt, vocab_size = request.prompt_ids, self.runner.config.vocab_size
        if not prompt:
            raise BadParameter("prompt", "has no tokens", "Give at least one character.")
        if bad := [token for token in prompt if not 0 <= token < vocab_size]:
            raise BadParameter("prompt", f"token id {bad[0]} is not in the vocabulary of {vocab_size:,}")
        adapter_sha256 = self._adapter_sha256(request.adapter)
        longest = self.longest(request.policy)
        if len(prompt) > longest:
            raise ContextOverflow(len(prompt), longest)
        room, asked = max(1, longest - len(prompt)), request.sampling.max_tokens
        max_tokens = room if asked is None else min(asked, room)
        most_cached = len(prompt) + max(0, max_tokens - 1)
        self.scheduler.check_room(request.policy, most_cached)
        sequence = Sequence(request, list(prompt), adapter_sha256=adapter_sha256)
        state = None if grammar is None else grammar.begin()
        sampler = Sampler(request.sampling, prompt, vocab_size, state)
        drafter = Drafter(sequence.token_ids) if request.speculate and self.can_guess(request.policy) else None
        return Prepared(sequence, _Running(sampler, Meter(sequence), max_tokens, state, drafter), most_cached)

    def enqueue(self, prepared: Prepared) -> Sequence:
        self.scheduler.add(prepared.sequence, longest=prepared.most_cached)
        self._state[prepared.sequence] = prepared.state
        return prepared.sequence

    def _adapter_sha256(self, name: str | None) -> str:
        adapters = self.runner.facts.adapters
        if name is not None and name not in adapters:
            known = ", ".join(adapters) or "none"
            raise BadParameter("adapter", f"none is called {name!r:.80}", f"Loaded with the model: {known}.")
        return "" if name is None else adapters[name].sha256

    def longest(self, policy: CachePolicy) -> int:
        """Tokens of prompt and answer together: the context, unless a window keeps every distance within it.

        A model with learned positions knows none beyond its context.
        """
        config = self.runner.config
        if policy.window is None or policy.window + policy.sinks > self.context_len or config.rope is None:
            return self.context_len
        return MOST_POSITIONS

    def can_guess(self, policy: CachePolicy) -> bool:
        """Whether guessed tokens can be checked: a budget reads pages for one query at a time, and a recurrent state
        that has seen a wrong guess cannot be taken back."""
        return policy.budget is None and self.runner.cache.states is None

    def step(self) -> list[NewToken]:
        """Schedule, run, count, sample. Returns the tokens that this step produced, end-of-text ids left out."""
        began, cpu_began = perf_counter(), process_time()
        self._energy.start()
        self._guess()
        batch = self.scheduler.schedule()  # which reads prefixes from disk
        if not batch.chunks:
            return []
        for chunk in batch.chunks:
            meter = self._state[chunk.sequence].meter
            if meter.started is None:
                meter.started = began
                policy = self.runner.cache.policy(chunk.sequence.request.policy)
                meter.count_prefix(chunk.sequence.prefix, self.runner.config, policy)
        self.last_step_sequences = len(batch.chunks)
        logits = self._run(batch)
        self._count(batch, busy_core_seconds=process_time() - cpu_began)
        tokens: list[NewToken] = []
        first_row = 0
        for chunk in batch.chunks:
            tokens += self._choose(chunk, logits[first_row : first_row + chunk.num_logits])
            first_row += chunk.num_logits
        return tokens

    def _run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """A step that breaks off leaves rows that the next one writes again, but recurrent states half moved on: their
        sequences end with it."""
        try:
            return self.runner.run(batch)
        except BaseException as error:
            for chunk in batch.chunks if self.runner.cache.states is not None else ():
                if isinstance(error, Exception):
                    chunk.sequence.error = error
                self.end(chunk.sequence, Finish.ERROR if isinstance(error, Exception) else Finish.CANCELLED)
            raise

    def _guess(self) -> None:
        """Put drafts on the sequences that decode, where they are few enough for it to pay."""
        if self.scheduler.num_decoding > MOST_GUESSING:
            return
        for sequence, state in self._state.items():
            if state.drafter is not None and sequence.finish is None and sequence.output_len > 0:
                sequence.drafts = state.drafter.guess(state.max_tokens - sequence.output_len - 1)

    def _choose(self, chunk: Chunk, logits: npt.NDArray[np.float32]) -> list[NewToken]:
        """The tokens that a chunk's logits (num_logits, vocab) give: none, one, or with right guesses several.

        A sequence for which nothing can be chosen ends alone, with its error; the others of the step go on.
        """
        sequence = chunk.sequence
        state = self._state[sequence]
        drafts, sequence.drafts = sequence.drafts, []
        known_len, right = len(sequence.token_ids), 0
        tokens: list[NewToken] = []
        sequence.cached_len = min(chunk.end, known_len)
        try:
            for position, row in enumerate(logits, start=chunk.logits_from):
                if position + 1 < known_len:
                    self._note_prompt(sequence, position, row)
                    continue
                sequence.cached_len = position + 1  # of what is known by now; a wrong guess behind it is written over
                if state.max_tokens == 0:
                    self.end(sequence, Finish.LENGTH)
                    break
                token = self._commit(sequence, state.sampler.sample(row))
                tokens += [] if token is None else [token]
                guess_at = position + 1 - known_len
                is_right = token is not None and guess_at < len(drafts) and token.sampled.token_id == drafts[guess_at]
                right += is_right
                if sequence.finish is not None or not is_right:
                    break
        except Exception as error:
            sequence.error = error
            self.end(sequence, Finish.ERROR)
        self._judge(chunk, chunk.end - known_len, right)
        return tokens

    def _note_prompt(self, sequence: Sequence, position: int, row: npt.NDArray[np.float32]) -> None:
        """Logprob of the prompt's token after `position`."""
        count = sequence.request.sampling.prompt_logprobs
        assert count is not None, position
        del sequence.prompt_logprobs[position - sequence.logits_wanted_from :]  # preempted, and read again
        sequence.prompt_logprobs.append(with_logprobs(sequence.token_ids[position + 1], row, count))

    def _judge(self, chunk: Chunk, guessed: int, right: int) -> None:
        """Of the `guessed` tokens at the end of a chunk, `right` were."""
        if guessed <= 0:
            return
        state = self._state[chunk.sequence]
        assert state.drafter is not None, chunk
        state.drafter.judge(guessed, right)
        state.meter.count_guesses(chunk, guessed, right, self.runner.config)

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """Finish a sequence now: abort it, or end it for a reason that lies outside (a stop string). Idempotent."""
        if sequence.finish is None:
            sequence.finish = finish
            self._state[sequence].meter.ended = perf_counter()
            self.scheduler.remove(sequence)

    def close(self) -> None:
        """Wait until the pages that are to go to disk are there; after it none are written."""
        self.scheduler.sharing.close()

    def live(self, sequence: Sequence) -> Live:
        """The counts so far of a sequence whose receipt has not been asked for."""
        meter, now = self._state[sequence].meter, perf_counter()
        return Live(
            prompt_tokens=sequence.prompt_len,
            prompt_tokens_computed=min(meter.cached_tokens + meter.tokens_computed, sequence.prompt_len),
            output_tokens=sequence.output_len,
            visits=meter.prefill_visits + meter.decode_visits,
            seconds=now - meter.created,
            decode_seconds=0.0 if meter.first_token is None else now - meter.first_token,
        )

    def receipt(self, sequence: Sequence) -> Receipt:
        """The cost of a finished sequence; the engine forgets it, so ask once."""
        assert sequence.finish is not None, "the sequence is still running"
        request, config = sequence.request, self.runner.config
        policy = self.runner.cache.policy(request.policy)
        asked = with_format(request.policy, self.runner.cache.default)
        quality = measured_quality(self.model_name, asked) if request.adapter is None else None
        adapter = self.runner.facts.adapters.get(request.adapter or "")
        return self._state.pop(sequence).meter.receipt(self.model_name, config, policy, quality, adapter)

    def _count(self, batch: Batch, busy_core_seconds: float) -> None:
        facts, config = self.runner.facts, self.runner.config
        meters = [self._state[chunk.sequence].meter for chunk in batch.chunks]
        shares = zip(batch.chunks, meters, weight_shares(batch, facts), adapter_shares(batch, facts), strict=True)
        read = [
            base + adapter + meter.count(chunk, config, base + adapter, adapter)
            for chunk, meter, base, adapter in shares
        ]
        self.last_step_bytes = sum(read)
        energy = self._energy.read(busy_core_seconds, dram_bytes=self.last_step_bytes)
        for meter, mine in zip(meters, read, strict=True):
            meter.add_energy(energy, mine / self.last_step_bytes)

    def _commit(self, sequence: Sequence, sampled: Sampled) -> NewToken | None:
        state = self._state[sequence]
        if state.meter.first_token is None:
            state.meter.first_token = perf_counter()
        if sampled.token_id in self.eos_ids and not sequence.request.sampling.ignore_eos:
            self.end(sequence, Finish.STOP)
            return None
        sequence.token_ids.append(sampled.token_id)
        if state.grammar is not None and state.grammar.is_complete:
            self.end(sequence, Finish.STOP)
        elif sequence.output_len == state.max_tokens:
            self.end(sequence, Finish.LENGTH)
        return NewToken(sequence, sampled)
