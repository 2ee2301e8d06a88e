"""From sampled tokens to the text that may be shown, and in the end to a Completion. Knows no engine and no threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heedful.cost.receipt import Receipt
from heedful.request import Finish, Sequence
from heedful.sampling.sampler import Sampled
from heedful.text.stops import StopStrings

if TYPE_CHECKING:
    from heedful.text.tokenizer import IncrementalDecoder


@dataclass(frozen=True)
class Logprob:
    """Natural-log probabilities under the model's own distribution at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, as many as were asked for."""


@dataclass(frozen=True)
class Piece:
    """What one step added: whole code points, "" while a token's bytes or a possible stop string are held back."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    """One a token, where they are asked for."""


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]
    """Output tokens; an end-of-text token is not among them."""
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    """One an output token; None unless asked for."""
    finish_reason: str
    """"stop", "length" or "cancelled"."""
    receipt: Receipt
    dropped_tokens: int = 0
    """Prompt tokens cut off because `truncate` was asked for."""
    prompt_logprobs: tuple[Logprob, ...] | None = None
    """One a prompt token after the first; None unless asked for."""
    matched_stop: str | None = None
    """The stop string that ended the answer."""


class Answer:
    """One sequence's tokens as they come: `take` each, then `complete` once."""

    def __init__(self, sequence: Sequence, decoder: IncrementalDecoder, *, dropped_tokens: int = 0) -> None:
        self.sequence = sequence
        self._decoder = decoder
        self._dropped_tokens = dropped_tokens
        self._stops = StopStrings(sequence.request.sampling.stop)
        self._texts: list[str] = []
        self._taken: list[int] = []
        self._logprobs: list[Logprob] = []

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string is complete: no token counts any more."""
        return self._stops.matched is not None

    def take(self, sampled: Sampled) -> Piece:
        assert not self.has_stopped, self._stops.matched
        logprobs = () if sampled.logprob is None else (logprob_of(sampled),)
        self._logprobs += logprobs
        self._taken.append(sampled.token_id)
        text = self._stops.push(self._decoder.push(sampled.token_id))
        self._texts.append(text)
        return Piece(text, (sampled.token_id,), logprobs)

    def flush(self) -> str:
        """No token comes any more: the text that was held back while a stop string might have followed."""
        if self.has_stopped:
            return ""
        tail = self._stops.push(self._decoder.flush()) + self._stops.flush()
        self._texts.append(tail)
        return tail

    def complete(self, receipt: Receipt) -> Completion:
        """After flush(), of a finished sequence."""
        sequence, sampling = self.sequence, self.sequence.request.sampling
        assert sequence.finish is not None, sequence
        prompt_logprobs = tuple(map(logprob_of, sequence.prompt_logprobs))
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._taken),  # up to the stop string, where a shared step has gone on past it
            prompt_token_ids=sequence.request.prompt_ids,
            logprobs=tuple(self._logprobs) if sampling.logprobs is not None else None,
            finish_reason=(Finish.STOP if self.has_stopped else sequence.finish).value,
            receipt=receipt,
            dropped_tokens=self._dropped_tokens,
            prompt_logprobs=prompt_logprobs if sampling.prompt_logprobs is not None else None,
            matched_stop=self._stops.matched,
        )


def logprob_of(sampled: Sampled) -> Logprob:
    """Of a token whose logprob was asked for."""
    assert sampled.logprob is not None, sampled
    return Logprob(sampled.token_id, sampled.logprob, sampled.top_logprobs)
