"""A policy that loads can be followed; what is wrong with one is named with its line and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.router.policies import policy_of

from heedful.errors import PolicyError
from heedful.router.patterns import compiled, has_pii
from heedful.router.policy import DeciderSpec, LocalSpec, OpenAISpec
from heedful.router.remote import OpenAITarget

GOOD = """\
version: 1
targets:
  labels: {kind: decider, model: d, question: [positive, negative], say: {positive: Yes.}}
  small: {kind: local, model: smollm2, max_tokens: 200}
  big: {kind: openai, base_url: "${ROUTE_TEST_URL}", model: x, api_key_env: ROUTE_TEST_KEY, breaker: {failures: 2}}
patterns: {secret: 'sk-[a-z0-9]{8,}'}
constraints:
  - {if: has_pii or has_secret, never: [big]}
rules:
  - {match: '^(hi|thanks)\\W*$', to: small, max_tokens: 16}
decision:
  questions:
    intent: {sentiment: "positive or negative?", other: null}
    easy: "Is it easy?"
routes:
  - {to: labels, when: intent == "sentiment", min_p: 0.9}
  - {to: small, when: easy and p_easy > 0.75, max_tokens: 60}
default: big
fallbacks: {big: small}
stick: {no_downgrade_above_tokens: 4000}
"""


def test_what_the_file_says_is_what_is_read(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, GOOD)
    assert list(policy.targets) == ["labels", "small", "big"]
    labels, small, big = policy.targets.values()
    assert isinstance(labels, DeciderSpec)
    assert (labels.question.labels, labels.say) == (("positive", "negative"), {"positive": "Yes."})
    assert isinstance(small, LocalSpec)
    assert (small.model, small.max_tokens) == ("smollm2", 200)
    assert isinstance(big, OpenAISpec)
    assert (big.base_url, big.breaker.failures, big.retries) == ("${ROUTE_TEST_URL}", 2, 2)
    assert policy.local_models == ("smollm2",)
    assert policy.deciders("mine") == ("mine", "d")
    assert [route.name for route in policy.routes] == [
        'intent == "sentiment" -> labels',
        "easy and p_easy > 0.75 -> small",
    ]


def test_the_hash_is_of_what_is_meant(tmp_path: Path) -> None:
    first = policy_of(tmp_path, GOOD).sha256
    assert policy_of(tmp_path, "# a comment\n" + GOOD).sha256 == first
    moved = GOOD.replace("version: 1\n", "") + "version: 1\n"
    assert policy_of(tmp_path, moved).sha256 == first
    assert policy_of(tmp_path, GOOD.replace("0.9", "0.91")).sha256 != first


def test_toml_says_the_same(tmp_path: Path) -> None:
    text = 'version = 1\ndefault = "a"\n[targets.a]\nkind = "local"\nmodel = "m"\n'
    same = "version: 1\ndefault: a\ntargets: {a: {kind: local, model: m}}\n"
    assert policy_of(tmp_path, text, "p.toml").sha256 == policy_of(tmp_path, same).sha256
    with pytest.raises(PolicyError, match=r"p\.toml, targets\.a\.modle"):
        policy_of(tmp_path, text.replace("model =", 'model = "n"\nmodle ='), "p.toml")


@pytest.mark.parametrize(
    ("old", "new", "where", "said"),
    [
        ("small: {kind: local", "small: {kid: local", "line 4, targets.small", "kind by kid"),
        ("default: big", "default: bigg", "line 18, default", "Did you mean big?"),
        ("has_pii or", "has_pi or", "line 8, constraints[0].if", "Did you mean has_pii?"),
        ("max_tokens: 200", "max_token: 200", "line 4, targets.small.max_token", "Did you mean max_tokens?"),
        ("max_tokens: 200", "max_tokens: 0", "line 4, targets.small.max_tokens", "between 1 and"),
        ("max_tokens: 200", "max_tokens: yes", "line 4, targets.small.max_tokens", "whole number"),
        ("kind: openai", "kind: opeani", "line 5, targets.big.kind", "Did you mean openai?"),
        ("api_key_env: ROUTE_TEST_KEY", "api_key: sk-123", "line 5, targets.big.api_key", "api_key_env"),
        ("version: 1", "version: 2", "line 1, version", "must be 1"),
        ("version: 1", "version: 1\nversion: 1", "line 2, version", "stands twice"),
        ("never: [big]", "never: [labels, small, big]", "line 8, constraints[0].never", "nobody could answer"),
        ("never: [big]", "never: [bog]", "line 8, constraints[0].never", "is no target"),
        ("min_p: 0.9", "min_p: 1.9", "line 16, routes[0].min_p", "between 0 and 1"),
        ("min_p: 0.9", "min_p: calibrated", "line 16, routes[0].min_p", "has no calibration"),
        ('"sentiment"', '"sentimant"', "line 16, routes[0].when", "Did you mean 'sentiment'?"),
        ("max_tokens: 60", "min_p: 0.5, when: tokens > 1", "line 17, routes[1].when", "stands twice"),
        ("easy and p_easy > 0.75", "tokens > 3, min_p: 0.5", "line 17, routes[1].min_p", "asks no question"),
        ("easy: ", "tokens: ", "line 14, decision.questions.tokens", "no name for a question"),
        ("fallbacks: {big: small}", "fallbacks: {big: big}", "line 19, fallbacks.big", "stand in for itself"),
        ("'^(hi|thanks)\\W*$'", "'^(hi'", "line 10, rules[0].match", "no regular expression"),
        ("'^(hi|thanks)\\W*$'", "'^(h+i?)+$'", "line 10, rules[0].match", "repeats something that repeats"),
        ("say: {positive: Yes.}", "say: {postive: Yes.}", "line 3, targets.labels.say", "no option"),
        ("default: big", "default: [", "line", "is not YAML"),
        ("default: big", "default: *x", "line 18", "is not YAML"),
        (GOOD, "", "policy.yaml", "must map names"),
        (GOOD, "- 1", "policy.yaml", "must map names"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, where: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(PolicyError) as caught:
        policy_of(tmp_path, GOOD.replace(old, new, 1))
    assert where in caught.value.where
    assert said in str(caught.value)


def test_aliases_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [" + f"*a{i - 1}, " * 9 + "x]" for i in range(1, 9)]
    with pytest.raises(PolicyError, match="holds more than"):
        policy_of(tmp_path, "\n".join(lines))


def test_keys_and_addresses_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = policy_of(tmp_path, GOOD).targets["big"]
    assert isinstance(spec, OpenAISpec)
    with pytest.raises(PolicyError, match="needs ROUTE_TEST_URL"):
        OpenAITarget(spec)
    monkeypatch.setenv("ROUTE_TEST_URL", "https://user:hunter2@example.test")
    with pytest.raises(PolicyError) as caught:
        OpenAITarget(spec)
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("ROUTE_TEST_URL", "https://example.test/v1")
    with pytest.raises(PolicyError, match="ROUTE_TEST_KEY is not in the environment"):
        OpenAITarget(spec)
    monkeypatch.setenv("ROUTE_TEST_KEY", "sk bad")
    with pytest.raises(PolicyError, match="is no key"):
        OpenAITarget(spec)
    assert "sk bad" not in repr(spec)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        (r"(a+)+", True), (r"(?:a|b)*", True), (r"((a+)b)*", True), (r"(a*)*", True), (r"([a+])+", False),
        (r"(ab)+", False), (r"a+b+", False), (r"(\+)+", False), (r"(a{2,})+", True), (r"(a{2,3})+", False),
        (r"(a|b){1,3}", False), (r"(a)\1", True), ("a" * 501, True), ("[", True),
    ],
)  # fmt: skip
def test_patterns_whose_time_has_no_bound_are_refused(text: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(PolicyError):
            compiled(text, "here")
    else:
        compiled(text, "here")


# published examples: ISO 13616's, the test numbers of card networks, numbers reserved for fiction
@pytest.mark.parametrize(
    ("text", "is_some"),
    [
        ("write to jane.doe+x@mail.example.org", True),
        ("GB82 WEST 1234 5698 7654 32", True),
        ("GB82 WEST 1234 5698 7654 33", False),
        ("card 4111 1111 1111 1111", True),
        ("card 4111 1111 1111 1112", False),
        ("call +44 20 7946 0958", True),
        ("SSN 078-05-1120", True),
        ("what is 123456789 * 987654321?", False),
        ("version 10.0.0.1 at 12:30, 2026-11-30", False),
        ("x" * 9_000 + " jane@example.org " + "y" * 9_000, True),
    ],
)
def test_personal_data_is_found_wherever_it_stands(text: str, is_some: bool) -> None:
    assert has_pii(text) is is_some
