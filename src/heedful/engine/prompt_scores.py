"""How likely a model finds texts that are given: prompts read to their ends, for no output.

    requests = [scored_request(ids, scored_from, policy=llm.policy) for ids in ...]
    for sequence, receipt in read_prompts(llm, requests):
        summed_logprob(sequence)

Requests that are given together share what their beginnings have in common: it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from math import fsum

from heedful.cost.receipt import Receipt
from heedful.engine.llm import LLM
from heedful.request import CachePolicy, Finish, Request, SamplingParams, Sequence


def scored_request(
    ids: ListLike[int], scored_from: int, *, policy: CachePolicy, cache_salt: str = "", adapter: str | None = None
) -> Request:
    """Asks for the log-probability of every id from that index on, and for no output."""
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=scored_from)
    return Request(tuple(ids), sampling, policy, cache_salt=cache_salt, adapter=adapter)


def read_prompts(llm: LLM, requests: ListLike[Request]) -> list[tuple[Sequence, Receipt]]:
    """Their sequences, and what each cost. Raises as the engine does, before any is queued, for one that can never be
    answered.
    """
    for request in requests:
        llm.engine.prepare(request)
    sequences: list[Sequence] = []
    receipts: list[Receipt] = []
    try:
        sequences.extend(llm.open_inbox(request)[0] for request in requests)
        for sequence in sequences:
            while sequence.finish is None:
                llm.step(sequence)
    finally:  # a step failed: pages must not stay behind
        for sequence in sequences:
            llm.end(sequence, Finish.CANCELLED)
            receipts.append(llm.close_inbox(sequence))
    return list(zip(sequences, receipts, strict=True))


def summed_logprob(sequence: Sequence) -> float:
    """Of the scored ids, in nats."""
    if sequence.error is not None:
        raise sequence.error
    assert sequence.finish is Finish.LENGTH, sequence.finish
    return fsum(one.logprob for one in sequence.prompt_logprobs)


def common_len(lists: ListLike[ListLike[int]]) -> int:
    """Length of the beginning that all have in common."""
    for at, tokens in enumerate(zip(*lists, strict=False)):
        if len(set(tokens)) > 1:
            return at
    return min(map(len, lists))
