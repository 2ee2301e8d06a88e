"""Ray on this machine, two replicas with one CPU each: prefixes find their replica, one that dies takes only its own
answers with it, and answers are those of a single engine. Slow: Ray takes some twenty seconds to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from heedful.cache.policy import PAGE_LEN
from heedful.engine.llm import LLM
from heedful.testing import make_tiny_model

pytestmark = pytest.mark.skipif(
    not find_spec("ray"), reason="needs Ray Serve: pip install 'heedful[ray]' (some 340 MB)"
)

PREFIXES = [f"{subject} " * 128 for subject in ("river", "stone", "light", "paper")]
"""768 tokens each: bytes are tokens to the tiny model."""
KV_MEMORY = 260_000
"""Of a replica, in bytes: for three of these prompts, and not for four."""
REQUESTS = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048)


@pytest.fixture(scope="module")
def single(tiny: Path) -> LLM:
    return LLM(str(tiny), threads=1)


@contextmanager
def deployed(folder: Path, tiny: Path, port: int, **args: Any) -> Iterator[str]:
    """`heedful deploy` as a user starts it; its URL."""
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "heedful",
                "route_prefix": "/",
                "import_path": "heedful.deploy.app:build",
                "args": {"models": [str(tiny)], "cpus": 1, "kv_memory_bytes": KV_MEMORY, "drain_s": 5.0, **args},
            }
        ],
    }
    file = folder / f"app-{port}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "heedful", "deploy", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "Ctrl-C ends it" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0


def body_of(prefix: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **more}


def ask(url: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """(text, replica, cached tokens)."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["heedful"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], answer.headers["x-heedful-replica"], cached


def hit_share(url: str, single: LLM) -> float:
    """Of the tokens that 64 requests, four at a time, could find because another one had the same beginning. Every
    answer is that of a single engine."""
    bodies = [body_of(PREFIXES[i % 4], f"question {i // 4}") for i in range(REQUESTS)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    for body, (text, _, _) in zip(bodies, answers, strict=True):
        assert text == single.chat(body["messages"], max_tokens=4, temperature=0, ignore_eos=True).text
    lengths = [len(single.encode_chat([body_of(prefix, "")["messages"][0]])) for prefix in PREFIXES]
    reachable = sum(length // PAGE_LEN * PAGE_LEN for length in lengths) * (REQUESTS // 4 - 1)
    return sum(cached for _, _, cached in answers) / reachable


def streamed(lines: Iterator[str]) -> tuple[str, list[dict[str, Any]]]:
    """(text, errors)."""
    text, errors = "", []
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            errors += [event["error"]] if "error" in event else []
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return text, errors


def pid_of(name: str) -> int:
    """Of a replica's process: the one that writes its log, which has its name."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "cmdline").exists():
            try:
                files = [os.readlink(file) for file in (folder / "fd").iterdir()]
            except OSError:
                continue
            if any(f"Engine_{name}" in file for file in files):
                return int(folder.name)
    raise AssertionError(f"no process has a log of {name}")


def test_two_replicas(tiny: Path, single: LLM, tmp_path: Path) -> None:
    with deployed(tmp_path, tiny, 18411, replicas=2) as url:
        by_affinity = hit_share(url, single)
        assert by_affinity >= 0.9

        # metrics are those of the whole
        samples = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if "answers_total{" in line]
        assert sum(float(line.split()[-1]) for line in samples) == REQUESTS
        assert len({line.split('replica="')[1] for line in samples}) == 2

        one_killed(url, single)
    with deployed(tmp_path, tiny, 18412, replicas=2, routing="random") as url:
        by_chance = hit_share(url, single)
    print(f"share of reachable prefix tokens: affinity {by_affinity:.3f}, at random {by_chance:.3f}")
    assert by_chance < by_affinity


def one_killed(url: str, single: LLM) -> None:
    """In the middle of answers: its clients are told, the others' answers go on, and it is replaced."""
    home = {prefix: ask(url, body_of(prefix, "where?"))[1] for prefix in PREFIXES}
    assert len(set(home.values())) == 2
    elsewhere = next(prefix for prefix in PREFIXES if home[prefix] != home[PREFIXES[0]])
    long = {"max_tokens": 1000, "stream": True}

    def stream(prefix: str) -> Any:
        return httpx.stream("POST", f"{url}/v1/chat/completions", json=body_of(prefix, "go on", **long), timeout=60)

    with stream(PREFIXES[0]) as dying, stream(elsewhere) as other:
        first = dying.headers["x-heedful-replica"]  # its home, unless that had more to do
        assert other.headers["x-heedful-replica"] != first
        lines = dying.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        os.kill(pid_of(first), signal.SIGKILL)
        _, errors = streamed(lines)
        text, none = streamed(other.iter_lines())
    assert [error["code"] for error in errors] == ["replica_lost"]
    assert first in errors[0]["message"]
    assert none == []
    expected = single.chat(body_of(elsewhere, "go on")["messages"], max_tokens=1000, temperature=0, ignore_eos=True)
    assert text == expected.text

    # meanwhile whoever asks is answered, and before long by two again: new beginnings go to whoever has less to do
    deadline, answered, i = time.monotonic() + 60, set[str](), 0
    while len(answered) < 2:
        assert time.monotonic() < deadline, answered
        bodies = [body_of(f"new beginning {i} {j} " * 40, "again") for j in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answered |= {replica for _, replica, _ in pool.map(lambda body: ask(url, body), bodies)}
        i += 1
    assert first not in answered
