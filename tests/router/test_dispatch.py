"""What happens between a choice and its answer: fallbacks, drafts, limits, and the random slice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.router.policies import policy_of

from heedful.errors import BadParameter, CacheFull, ContextOverflow, HeedfulError, QueueFull, TargetFailed
from heedful.router.choose import Chooser
from heedful.router.dispatch import Dispatcher, Routed
from heedful.router.ledger import RouteLedger, read_ledger
from heedful.router.policy import LedgerSpec
from heedful.router.signals import JSON, Asked
from heedful.router.target import Opened, WholeAnswer, text_of_body

POLICY = """\
version: 1
targets:
  small: {kind: local, model: s, max_tokens: 50, verify: {regex: good}, escalate: big}
  big: {kind: local, model: b}
constraints: [{if: has_pii, never: [big]}]
rules: [{match: '^big', to: big, max_tokens: 9}]
default: small
fallbacks: {big: small, small: big}
"""
RECEIPT = {"visits": None, "prompt_tokens": 1, "output_tokens": 1, "seconds": {"total": 0.1}}


class Fake:
    books_itself = False

    def __init__(self, name: str, text: str = "good") -> None:
        self.name = name
        self.text = text
        self.problem: Exception | None = None
        self.asked: list[Asked] = []
        self.released = 0

    async def open(self, asked: Asked, held: AsyncExitStack) -> Opened:
        self.asked.append(asked)
        held.callback(self._release)
        if self.problem is not None:
            raise self.problem
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        return WholeAnswer({"id": "x", "choices": [choice], "usage": {"heedful": RECEIPT}})

    def _release(self) -> None:
        self.released += 1

    async def aclose(self) -> None:
        pass


class Bench:
    def __init__(self, folder: Path, policy: str = POLICY, **more: Any) -> None:
        self.path = folder / "ledger.jsonl"
        self.small, self.big = Fake("small"), Fake("big")
        chooser = Chooser(policy_of(folder, policy), None)
        ledger = RouteLedger(LedgerSpec(self.path, "never"))
        targets = {"small": self.small, "big": self.big}
        self.dispatcher = Dispatcher(chooser.policy, chooser, targets, ledger, **more)

    def ask(self, *texts: str, stream: bool = False, **body: Any) -> list[tuple[Routed, JSON]]:
        async def run() -> list[tuple[Routed, JSON]]:
            found = []
            for text in texts:
                asked = Asked.of_body({"messages": [{"role": "user", "content": text}], "stream": stream, **body})
                async with AsyncExitStack() as held:
                    routed = await self.dispatcher.open(asked, held)
                    found.append((routed, await _joined(routed.chunks()) if stream else await routed.whole()))
                await self.dispatcher.settled()
            return found

        return asyncio.run(run())


async def _joined(chunks: AsyncGenerator[JSON, None]) -> JSON:
    return {"text": "".join([one["delta"].get("content", "") async for c in chunks for one in c["choices"]])}


def test_an_answer_that_passes_is_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ((routed, body),) = bench.ask("hello", max_tokens=80)
    assert (routed.choice.target, text_of_body(body), routed.finish) == ("small", "good", "stop")
    assert body["usage"]["heedful"]["route"]["target"] == "small"
    assert bench.small.asked[0].body["max_tokens"] == 50
    assert bench.small.released == 1
    (line,) = read_ledger(bench.path)
    assert [(part["target"], part["phase"]) for part in line["spent"]] == [("small", "answer")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_draft_that_fails_is_a_waste(tmp_path: Path, stream: bool) -> None:
    bench = Bench(tmp_path)
    bench.small.text = "bad"
    ((routed, body),) = bench.ask("hello", stream=stream)
    assert (body["text"] if stream else text_of_body(body)) == "good"
    assert routed.choice.target == "big"
    assert routed.choice.reason == (
        "small: the draft failed its check; escalated from small (default: nothing else fits)"
    )
    (line,) = read_ledger(bench.path)
    assert [(part["target"], part["phase"]) for part in line["spent"]] == [("small", "wasted"), ("big", "answer")]
    assert bench.small.released == 1  # before big began


def test_a_draft_is_shown_where_nobody_above_may_answer(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.small.text = "bad"
    ((routed, body),) = bench.ask("jane@example.org")
    assert (routed.choice.target, text_of_body(body), bench.big.asked) == ("small", "bad", [])


@pytest.mark.parametrize(
    "problem", [TargetFailed("big", "is away"), ContextOverflow(9, 8), QueueFull(3), CacheFull("full", "wait")]
)
def test_what_is_the_targets_own_goes_to_its_fallback(tmp_path: Path, problem: HeedfulError) -> None:
    bench = Bench(tmp_path)
    bench.big.problem = problem
    ((routed, _),) = bench.ask("big question", max_completion_tokens=20)
    assert routed.choice.target == "small"
    assert len(routed.choice.hops) == 1
    assert bench.big.asked[0].body["max_completion_tokens"] == 9
    assert (bench.big.released, bench.small.released) == (1, 1)


def test_what_is_the_callers_fault_goes_to_nobody_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.big.problem = BadParameter("tools", "is odd")
    with pytest.raises(BadParameter):
        bench.ask("big question")
    assert bench.small.asked == []
    (line,) = read_ledger(bench.path)
    assert (line["target"], line["finish"]) == ("big", "failed: BadParameter")


def test_a_second_failure_is_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.big.problem, bench.small.problem = TargetFailed("big", "is away"), TargetFailed("small", "is away too")
    with pytest.raises(TargetFailed, match="small is away too"):
        bench.ask("big question")
    assert (len(bench.big.asked), len(bench.small.asked)) == (1, 1)


def test_the_slice_is_drawn_and_its_share_is_logged(tmp_path: Path) -> None:
    share = "counterfactual: {share: 0.3, targets: [big, small]}\n"
    bench = Bench(tmp_path, POLICY + share, draw=random.Random(5))
    bench.ask(*["hello"] * 40, "jane@example.org")
    lines = read_ledger(bench.path)
    requests = [line for line in lines if line["kind"] == "request"]
    beside = [line for line in lines if line["kind"] == "counterfactual"]
    drawn = random.Random(5)
    is_in = [drawn.random() < 0.3 for _ in requests]
    assert [line["slice"] for line in requests] == [{"share": 0.3, "is_in": one} for one in is_in]
    assert [line["id"] for line in beside] == [line["id"] for line in requests[:40] if line["slice"]["is_in"]]
    assert {(line["target"], line["spent"][0]["phase"]) for line in beside} == {("big", "counterfactual")}


def test_a_counterfactual_that_fails_harms_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POLICY + "counterfactual: {share: 1, targets: [big]}\n")
    bench.big.problem = TargetFailed("big", "is away")
    ((routed, _),) = bench.ask("hello")
    assert routed.finish == "stop"
    assert [line["finish"] for line in read_ledger(bench.path)] == ["stop", "failed: TargetFailed"]
