"""Which of some calls a model finds likeliest for a request: the calls are given, and no token is generated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from heedful.cost.receipt import Receipt
from heedful.engine.llm import LLM
from heedful.engine.prompt_scores import common_len, read_prompts, scored_request, summed_logprob
from heedful.mcp.delegation.delegate import Plan


def likeliest(
    llm: LLM, messages: Sequence[Mapping[str, Any]], plans: Sequence[Plan], *, adapter: str | None = None
) -> tuple[Plan, list[Receipt]]:
    """The plan whose call has the highest mean log-likelihood a token as the assistant's answer to `messages`, and what
    scoring cost."""
    assert plans
    if len(plans) == 1:
        return plans[0], []
    asked = llm.encode_chat(messages)
    texts = [asked + llm.tokenizer.encode(call_text(plan), add_bos=False) for plan in plans]
    shared = max(len(asked), common_len(texts))
    read = read_prompts(
        llm, [scored_request(ids, shared, policy=llm.policy, adapter=adapter) for ids in texts if len(ids) > shared]
    )
    in_turn = iter(read)
    scores = [
        summed_logprob(next(in_turn)[0]) / (len(ids) - shared) if len(ids) > shared else float("-inf") for ids in texts
    ]
    return plans[scores.index(max(scores))], [receipt for _, receipt in read]


def call_text(plan: Plan) -> str:
    """As models write calls."""
    return json.dumps({"name": plan.tool.model_name, "arguments": plan.arguments}, ensure_ascii=False)
