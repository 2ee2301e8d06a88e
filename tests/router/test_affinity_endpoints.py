"""Three `heedful serve` processes, as a user starts them: two replicas and, before them, a front without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.policies import policy_of

from heedful.cache.policy import PAGE_LEN
from heedful.engine.llm import LLM
from heedful.errors import PolicyError
from heedful.router.policy import OpenAISpec
from heedful.router.replicas import ReplicatedTarget, remote_target

PREFIXES = [f"{subject} " * 40 for subject in ("rivers", "stones", "winter")]
POLICY = """\
version: 1
targets:
  big: {{kind: openai, endpoints: ["{0}/v1", "${{SECOND}}/v1"], model: tiny, breaker: {{failures: 1, cooldown_s: 600}}}}
default: big
"""


class Replica:
    def __init__(self, *arguments: str, ready: str, **environment: str) -> None:
        command = [sys.executable, "-m", "heedful", "serve", "--port", "0", "--threads", "1", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stderr is not None
        said = ""
        while ready not in said:
            line = self.process.stderr.readline()
            assert line, said
            said += line
        self.url = next(word for word in said.split() if word.startswith("http://"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def started(*arguments: str, ready: str, **environment: str) -> Iterator[Replica]:
    replica = Replica(*arguments, ready=ready, **environment)
    try:
        yield replica
    finally:
        replica.kill()


@pytest.fixture
def served(tiny_dir: Path, tmp_path: Path) -> Iterator[tuple[str, dict[str, Replica]]]:
    """(URL of the front, replicas by the names that the front has for them)."""
    with ExitStack() as held:
        name = tmp_path / "tiny"
        name.symlink_to(tiny_dir)
        replicas = [held.enter_context(started("-m", str(name), "--no-history", ready="kernels")) for _ in range(2)]
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(replicas[0].url).replace("model: tiny", f"model: {name}"))
        front = ("--router", str(policy), "--no-history")
        at = held.enter_context(started(*front, ready="auto goes to", SECOND=replicas[1].url))
        yield at.url, {f"big.endpoints[{i}]": replica for i, replica in enumerate(replicas)}


def asked(prefix: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
    return {"model": "auto", "messages": messages, "temperature": 0, "max_tokens": 5, "ignore_eos": True, **more}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(lines: Iterator[str]) -> tuple[str, list[dict[str, Any]]]:
    """(the text, error events)."""
    text, errors = "", []
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            errors.append(event["error"])
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
    return text, errors


def test_replicas_behind_a_front(served: tuple[str, dict[str, Replica]], tiny_dir: Path) -> None:
    url, replicas = served

    # each prefix has its replica, which computes it once; answers are those of a single engine
    single = LLM(str(tiny_dir), threads=1)
    home: dict[str, str] = {}
    for i in range(4):
        for prefix in PREFIXES:
            body = asked(prefix, f"question {i}")
            answer = ask(url, body)
            receipt = answer["usage"]["heedful"]
            assert home.setdefault(prefix, receipt["remote"]) == receipt["remote"]
            expected = single.chat(body["messages"], max_tokens=5, temperature=0, ignore_eos=True)
            assert answer["choices"][0]["message"]["content"] == expected.text
            if i:
                assert receipt["cached_tokens"] >= len(prefix) // PAGE_LEN * PAGE_LEN
    assert set(home.values()) == set(replicas), "both have something to do"

    # one dies in the middle of an answer: its client is told, the other's client notices nothing
    first = home[PREFIXES[0]]
    elsewhere = next(prefix for prefix in PREFIXES if home[prefix] != first)
    long = {"max_tokens": 800, "stream": True}
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=60) as client:

        def other() -> tuple[str, list[dict[str, Any]]]:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked(elsewhere, "go on", **long)) as stream:
                return streamed(stream.iter_lines())

        waiting = pool.submit(other)
        with client.stream("POST", f"{url}/v1/chat/completions", json=asked(PREFIXES[0], "go on", **long)) as stream:
            lines = stream.iter_lines()
            begun = next(line for line in lines if line.startswith("data: {"))
            replicas[first].kill()
            _, errors = streamed(lines)
        assert "error" not in begun
        assert len(errors) == 1
        assert f"target {first}" in errors[0]["message"]
        text, errors = waiting.result()
    messages = asked(elsewhere, "go on")["messages"]
    assert text == single.chat(messages, max_tokens=800, temperature=0, ignore_eos=True).text
    assert not errors

    # and from now on the one that is left answers for both, whole and streaming
    for i in range(3):
        assert ask(url, asked(PREFIXES[0], f"again {i}"))["usage"]["heedful"]["remote"] == home[elsewhere]
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked(PREFIXES[0], "x", stream=True)) as stream:
        assert streamed(stream.iter_lines())[1] == []

    # nobody left: said with a status, before anything else
    replicas[home[elsewhere]].kill()
    answers = [httpx.post(f"{url}/v1/chat/completions", json=asked(PREFIXES[0], "hello")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [502, 503]
    assert "could not be reached" in answers[0].json()["error"]["message"]
    assert "has no endpoint" in answers[1].json()["error"]["message"]


ONE_TARGET = "version: 1\ndefault: big\ntargets:\n  big: {{kind: openai, model: m, {}}}\n"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("endpoints: []", "has none"),
        ("endpoints: [http://a/v1], base_url: http://b/v1", "does not go with base_url"),
        ("endpoints: [http://a/v1, http://a/v1]", "one of them twice"),
        ("endpoints: [http://a/v1, ftp://b]", "http"),
        ("endpoints: {a: b}", "list of texts"),
    ],
)
def test_endpoints_that_cannot_be_meant(tmp_path: Path, keys: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        policy_of(tmp_path, ONE_TARGET.format(keys))
    assert "line 4, targets.big.endpoints" in caught.value.message


def test_what_the_environment_lacks_is_said_with_the_endpoint(tmp_path: Path) -> None:
    spec = policy_of(tmp_path, ONE_TARGET.format('endpoints: ["http://a/v1", "${NO_SUCH_URL}"]')).targets["big"]
    assert isinstance(spec, OpenAISpec)
    with pytest.raises(PolicyError, match=r"targets\.big\.endpoints\[1\]\.base_url: needs NO_SUCH_URL"):
        remote_target(spec)
    one = policy_of(tmp_path, ONE_TARGET.format("endpoints: http://a/v1"), "one.yaml").targets["big"]
    assert isinstance(one, OpenAISpec)
    made = remote_target(one)
    assert isinstance(made, ReplicatedTarget)
    assert list(made.endpoints) == ["big.endpoints[0]"]
