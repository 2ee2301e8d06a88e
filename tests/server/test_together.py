"""Requests that share steps get what they get alone: greedy, with a seed, under every policy, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from tests.server.conftest import RunningServer

from heedful import LLM, CachePolicy

POLICIES: list[dict[str, Any]] = [
    {},
    {"kv": "q4"},
    {"kv": "f16"},
    {"window": 70, "sinks": 4},
    {"budget": 256},
    {"prefill": "sparse"},
    {"speculate": True},
]
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 11, "top_p": 0.9}]


def bodies() -> list[dict[str, Any]]:
    words = ["once", "upon", "a", "time", "there", "was", "a", "very", "long", "road"]
    return [
        {
            "prompt": " ".join(words[i % 5 :] * (3 + 5 * (i % 4))),
            "max_tokens": 30 + 10 * (i % 3),
            "ignore_eos": True,
            "heedful": POLICIES[i % len(POLICIES)],
            "stream": i % 2 == 1,
            **SAMPLING[i % len(SAMPLING)],
        }
        for i in range(28)
    ]


def alone(llm: LLM, body: dict[str, Any]) -> str:
    options = {name: value for name, value in body["heedful"].items() if name != "speculate"}
    policy = CachePolicy(
        kv_format=options.pop("kv", None), sparse_prefill=options.pop("prefill", "") == "sparse", **options
    )
    sampling = {
        name: body[name] for name in ("max_tokens", "ignore_eos", "temperature", "seed", "top_p") if name in body
    }
    return llm.generate(body["prompt"], policy=policy, **sampling).text


async def text_of(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    answer = await client.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    if not body["stream"]:
        return str(answer.json()["choices"][0]["text"])
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_many_at_once_get_the_answers_that_they_get_alone(server: RunningServer, llm: LLM) -> None:
    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(text_of(client, server.url, body) for body in bodies()))

    said = asyncio.run(ask_all())
    for body, text in zip(bodies(), said, strict=True):
        assert text == alone(llm, body), body
