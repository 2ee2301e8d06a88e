"""Constraints first, then the first rule or route that fits, else the default; the same inputs, the same choice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.policies import policy_of

from heedful.decide.answer import answer_to
from heedful.decide.question import Question
from heedful.errors import BadParameter, HeedfulError
from heedful.router.breaker import Breaker, BreakerLimits
from heedful.router.choose import Choice, Chooser, Judged, Thresholds
from heedful.router.pins import Pins
from heedful.router.signals import Asked, signals_of

POLICY = """\
version: 1
targets:
  tiny: {kind: local, model: t}
  small: {kind: local, model: s}
  big: {kind: local, model: b}
constraints:
  - {if: has_pii, never: [big]}
  - {if: tokens > 1000, never: [tiny]}
rules:
  - {match: '^hi\\W*$', to: tiny, max_tokens: 8}
  - {when: wants_json, to: big}
decision:
  timeout_s: 20
  breaker: {failures: 2, cooldown_s: 60}
  questions:
    intent: [lookup, chat]
    easy: "Is it easy?"
  calibration: none-yet.json
routes:
  - {to: tiny, when: intent == "lookup", min_p: 0.8, else: small}
  - {to: small, when: easy, min_p: calibrated}
default: big
fallbacks: {big: small, small: tiny}
stick: {no_downgrade_above_tokens: 100, turn_ttl_s: 60}
"""


class Decider:
    def __init__(self, lookup: float = 0.5, easy: float = 0.5) -> None:
        self.lookup, self.easy = lookup, easy
        self.calls = 0
        self.problem: Exception | None = None
        self.seconds = 0.0

    async def __call__(self, text: str, questions: tuple[Question, ...], salt: str) -> Judged:
        self.calls += 1
        await asyncio.sleep(self.seconds)
        if self.problem is not None:
            raise self.problem
        weights = {"intent": [self.lookup, 1 - self.lookup], "easy": [1 - self.easy, self.easy]}
        return Judged({q.name: answer_to(q, weights[q.name]) for q in questions}, {"visits": None})


def chooser(folder: Path, decider: Decider | None, policy: str = POLICY, **by_route: float | None) -> Chooser:
    thresholds = Thresholds({"easy -> small": by_route["easy"]} if by_route else {}, "v1")
    return Chooser(policy_of(folder, policy), decider, thresholds)


def choose(made: Chooser, asked: Asked | str) -> Choice:
    return asyncio.run(made.choose(Asked.of_text(asked) if isinstance(asked, str) else asked))


@pytest.mark.parametrize(
    ("text", "lookup", "easy", "target", "cause", "threshold"),
    [
        ("hi!", 0.9, 0.9, "tiny", "rule 1", None),
        ("where?", 0.9, 0.1, "tiny", "route 1", 0.8),
        ("where?", 0.8, 0.1, "tiny", "route 1", 0.8),  # at the threshold is enough
        ("where?", 0.79, 0.9, "small", "route 1 is not sure enough", 0.8),
        ("so?", 0.2, 0.9, "small", "route 2", 0.7),
        ("so?", 0.2, 0.6, "big", "default: no route fits", None),
        ("so? a@b.example", 0.2, 0.2, "small", "default big is forbidden: no route fits", None),
        ("so? " * 1100, 0.9, 0.9, "small", "route 2", 0.7),
    ],
)
def test_the_first_that_fits(
    tmp_path: Path, text: str, lookup: float, easy: float, target: str, cause: str, threshold: float | None
) -> None:
    choice = choose(chooser(tmp_path, Decider(lookup, easy), easy=0.7), text)
    assert (choice.target, choice.cause, choice.threshold) == (target, cause, threshold)
    assert (choice.policy_hash, choice.calibration_version) == (policy_of(tmp_path, POLICY).sha256[:12], "v1")


def test_a_rule_asks_no_decider(tmp_path: Path) -> None:
    decider = Decider()
    choose(chooser(tmp_path, decider), "hi")
    assert decider.calls == 0


def test_a_route_that_nobody_has_calibrated_is_never_taken(tmp_path: Path) -> None:
    assert choose(chooser(tmp_path, Decider(0.1, 1.0)), "so?").target == "big"
    assert choose(chooser(tmp_path, Decider(0.1, 1.0), easy=None), "so?").target == "big"


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["hi", "x", "a@b.example", "y" * 5000, "a@b.example" * 500]))
def test_constraints_hold_whatever_the_decider_says_and_choices_repeat(
    tmp_path_factory: pytest.TempPathFactory, lookup: float, easy: float, text: str
) -> None:
    folder = tmp_path_factory.mktemp("p")
    choices = [choose(chooser(folder, Decider(lookup, easy), easy=0.7), text) for _ in range(2)]
    first, second = ({**one.to_dict(), "router_ms": 0} for one in choices)
    assert first == second
    assert choices[0].target not in choices[0].forbidden
    if "@" in text:
        assert choices[0].target != "big"
    if len(text) > 4000:
        assert choices[0].target != "tiny"


class _Odd(Exception):
    """None of ours."""


@pytest.mark.parametrize("problem", [HeedfulError("down"), _Odd("a bug"), ValueError("a bug")])
def test_a_broken_decider_means_the_default_and_is_left_alone_after_a_while(tmp_path: Path, problem: Exception) -> None:
    decider = Decider()
    decider.problem = problem
    made = chooser(tmp_path, decider)
    causes = [choose(made, "so?").cause for _ in range(4)]
    failed = f"default: decider failed: {type(problem).__name__}"
    assert causes == [failed, failed, *["default: decider left alone after failures"] * 2]
    assert decider.calls == 2


def test_a_slow_decider_means_the_default_within_its_time(tmp_path: Path) -> None:
    decider = Decider()
    decider.seconds = 30.0
    choice = choose(chooser(tmp_path, decider, POLICY.replace("timeout_s: 20", "timeout_s: 0.05")), "so?")
    assert (choice.target, choice.cause) == ("big", "default: decider took longer than 0.05 s")
    assert choice.receipt is not None
    assert choice.receipt["visits"] is None


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]
RESULT = [{"role": "tool", "tool_call_id": "1", "content": "a result"}]


def test_a_tool_loop_stays_on_its_model(tmp_path: Path) -> None:
    made = chooser(tmp_path, Decider(0.9))
    asked = Asked([user("so?")])
    assert choose(made, asked).target == "tiny"
    made.answered(asked, "small")  # a fallback answered
    loop = Asked([user("so?"), *CALL, *RESULT])
    choice = choose(made, loop)
    assert (choice.target, choice.cause) == ("small", "tool loop stays on its model")
    longer = Asked([*loop.messages, *CALL, *RESULT])
    assert choose(made, longer).target == "small"
    assert choose(made, Asked([user("so?"), *CALL, *RESULT], salt="another caller")).target == "tiny"
    assert choose(made, Asked([*loop.messages, user("next")])).target == "tiny"


def test_a_pinned_target_that_is_forbidden_now_is_left(tmp_path: Path) -> None:
    made = chooser(tmp_path, Decider(0.1))
    made.answered(Asked([user("so?")]), "big")
    leaking = [{"role": "tool", "tool_call_id": "1", "content": "jane@example.org"}]
    assert choose(made, Asked([user("so?"), *CALL, *leaking])).target == "small"


def test_a_long_conversation_is_not_sent_down(tmp_path: Path) -> None:
    made = chooser(tmp_path, Decider(0.9))
    first = Asked([user("so? " * 150)])
    made.answered(first, "big")
    second = Asked([*first.messages, {"role": "assistant", "content": "yes"}, user("where?")])
    choice = choose(made, second)
    assert choice.target == "big"
    assert choice.cause == "no downgrade above 100 tokens (else tiny: route 1)"
    short = Asked([user("so?")])
    made.answered(short, "big")
    assert (
        choose(made, Asked([*short.messages, {"role": "assistant", "content": "y"}, user("where?")])).target == "tiny"
    )


def test_pins_end_and_are_bounded() -> None:
    now = 0.0
    pins = Pins(10.0, most=2, clock=lambda: now)
    asked = [Asked([user(str(i))]) for i in range(3)]
    for one in asked:
        pins.put(one, "small")
    assert (len(pins), pins.of_turn(asked[0]), pins.of_turn(asked[2])) == (2, None, "small")
    now = 11.0
    assert pins.of_turn(asked[2]) is None


def test_one_fallback_and_no_second(tmp_path: Path) -> None:
    made = chooser(tmp_path, None)
    choice = choose(made, "so?")
    other = made.stand_in(choice, "HTTP 500")
    assert other is not None
    assert (other.target, other.cause) == ("small", "fallback from big (default: no route fits)")
    assert other.reason == "big: HTTP 500; fallback from big (default: no route fits)"
    assert made.stand_in(other, "again") is None


def test_nobody_left_is_said(tmp_path: Path) -> None:
    text = "version: 1\ntargets: {a: {kind: local, model: m}, b: {kind: local, model: n}}\ndefault: a\nconstraints:\n"
    text += "  - {if: has_pii, never: [a]}\n  - {if: has_digits, never: [b]}\n"
    made = Chooser(policy_of(tmp_path, text), None)
    with pytest.raises(BadParameter, match=r"no target may answer this: has_pii, has_digits"):
        choose(made, "a@b.example 1")


def test_a_header_is_one_line_of_ascii(tmp_path: Path) -> None:
    choice = Choice("small", "caüse\r\nx-evil: 1" + "y" * 500, 0.5, 0.25)
    assert choice.reason.isascii()
    assert choice.reason.isprintable()
    assert len(choice.reason) == 200


def test_signals() -> None:
    body = {
        "messages": [{"role": "system", "content": "jane@example.org"}, user("a"), *CALL, *RESULT],
        "tools": [{"type": "function"}],
        "max_tokens": 7,
        "response_format": {"type": "json_schema"},
        "stream": True,
    }
    found = signals_of(Asked.of_body(body))
    assert found == {
        "tokens": found["tokens"], "chars": 1, "turns": 1, "tools": 1, "max_tokens": 7, "has_pii": True,
        "has_code": False, "has_digits": False, "wants_json": True, "tool_loop": True, "stream": True,
    }  # fmt: skip
    assert signals_of(Asked.of_text("x" * 401))["tokens"] == 101
    assert signals_of(Asked.of_text("def f(x):\n  return x"))["has_code"] is True


def test_a_breaker_lets_one_try_after_its_time() -> None:
    now = 0.0
    breaker = Breaker(BreakerLimits(failures=2, cooldown_s=10.0), lambda: now)
    assert [breaker.admits() for _ in range(3)] == [True] * 3
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.state == "closed"  # two in a row, not two
    breaker.failed()
    assert (breaker.state, breaker.admits(), breaker.seconds_left) == ("open", False, 10.0)
    now = 10.0
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert (breaker.admits(), breaker.seconds_left) == (False, 10.0)
    now = 20.0
    assert breaker.admits()
    breaker.left()
    assert breaker.admits()
    breaker.succeeded()
    assert breaker.state == "closed"
