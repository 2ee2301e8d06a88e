"""How well a model foretells a text: perplexity, and bits per byte, which can be compared between tokenizers.

A text beyond the context is read in windows that overlap by half. Of every window but the first the second half counts:
each token is foretold once, with half a context or more before it where the text has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, fsum, log

from heedful.cost.ledger import Ledger
from heedful.engine.llm import LLM
from heedful.engine.prompt_scores import read_prompts, scored_request, summed_logprob
from heedful.errors import BadParameter


@dataclass(frozen=True)
class TextLoss:
    tokens: int
    """Foretold: without bos, the first of the text is not."""
    num_bytes: int
    """Of the text that they stand for."""
    nats: float
    """Σ −ln p."""
    window: int
    """Tokens that a prediction could see at most."""

    @property
    def perplexity(self) -> float:
        """A token."""
        return exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / log(2) / self.num_bytes


def measure_text(
    llm: LLM, text: str, *, window: int | None = None, progress: Callable[[int], None] = lambda tokens: None
) -> tuple[TextLoss, Ledger]:
    """And what it cost. window: tokens, at most the context (the default). Raises BadParameter for a text of less than
    two tokens.
    """
    body = llm.tokenizer.encode(text, add_bos=False)
    begin = llm.tokenizer.encode(text)[: -len(body) or None] if body else []
    size = llm.context_len if window is None else window
    if not 2 + len(begin) <= size <= llm.context_len:
        raise BadParameter("window", f"is {size:,}; {2 + len(begin)} to {llm.context_len:,} are possible")
    unseen = 0 if begin else 1
    if len(body) <= unseen:
        raise BadParameter("text", "has no token that could be foretold", "Give a longer text.")
    ledger, nats = Ledger(), list[float]()
    for start, first, end in windows(len(body), size - len(begin)):
        scored_from = len(begin) + max(first, unseen) - start
        request = scored_request([*begin, *body[start:end]], scored_from, policy=llm.policy)
        ((sequence, receipt),) = read_prompts(llm, [request])
        nats.append(-summed_logprob(sequence))
        ledger.add(receipt)
        progress(end - first)
    num_bytes = len(text.encode("utf-8", "surrogatepass")) - sum(
        len(llm.tokenizer.token_bytes(i)) for i in body[:unseen]
    )
    return TextLoss(len(body) - unseen, num_bytes, fsum(nats), size), ledger


def windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(where it begins, from where on it counts, where it ends) of each."""
    start = first = 0
    while first < length:
        end = min(start + size, length)
        yield start, first, end
        first = end
        start = end - size // 2
