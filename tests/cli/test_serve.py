"""`heedful serve` as a user starts it: what it says, how it ends, what it refuses before it loads anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "heedful", "serve", *arguments]


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """(process, URL, what it said at the start)."""
    process = subprocess.Popen(
        command("--port", "0", *arguments), stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stderr is not None
    said = ""
    while "kernels" not in said:  # the last line at the start, whatever warnings come before
        said += process.stderr.readline()
    try:
        yield process, next(word for word in said.split() if word.startswith("http://")), said
    finally:
        process.kill()
        process.communicate()


def refusal(*arguments: str) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("heedful: ")
    return done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_says_where_it_is_and_ends_in_order(tiny: Path, tmp_path: Path, number: int, code: int) -> None:
    with running("-m", str(tiny), "--history", str(tmp_path / "page.sqlite")) as (process, url, said):
        assert str(tiny) in said
        assert "threads" in said
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["model"] == str(tiny)
        process.send_signal(number)
        _, rest = process.communicate(timeout=30)
        assert process.returncode == code
        assert "Traceback" not in rest
    assert (tmp_path / "page.sqlite").exists()


def test_a_second_signal_ends_the_time_that_answers_have(tiny: Path) -> None:
    with running("-m", str(tiny), "--no-history", "--drain", "600", "--window", "64") as (process, url, _said):
        body = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("heedful: finishing an answer, at most 600 s; again to stop")
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-1]
        _, left = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in left


def test_a_key_from_the_environment_is_asked_for(tiny: Path) -> None:
    with running("-m", str(tiny), "--no-history", HEEDFUL_API_KEY="one, two") as (_, url, _said):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for key in ("one", "two"):
            assert httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).status_code == 200


def test_the_policy_of_the_command_line_is_everybodys(tiny: Path) -> None:
    with running(str(tiny), "--no-history", "--window", "70", "--sinks", "4") as (_, url, _said):
        body = {"prompt": "a" * 200, "max_tokens": 2, "ignore_eos": True}
        receipt = httpx.post(f"{url}/v1/completions", json=body).json()["usage"]["heedful"]
        assert receipt["policy"]["sinks"] == 4
        assert receipt["visits"]["saved"]["window"] > 0


def test_deciders_are_named_and_answer(tiny: Path, tmp_path: Path) -> None:
    decider = make_tiny_model(tmp_path / "decider", seed=1)
    body = {"model": "jev-latest", "state": "x", "questions": {"q": {"type": "noul"}}}
    with running("-m", str(tiny), "--decider", str(decider), "--no-history") as (_, url, said):
        assert f"deciders are {decider}" in said
        answers = {
            name: httpx.post(f"{url}/v1/systemone", json={**body, "model": name}, timeout=60).json()
            for name in ("jev-latest", str(decider), str(tiny))
        }
    assert [answer["model"] for answer in answers.values()] == [str(decider), str(decider), str(tiny)]
    assert answers["jev-latest"]["answers"] == answers[str(decider)]["answers"] != answers[str(tiny)]["answers"]


def test_a_taken_port_is_told_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refusal("--port", str(taken.getsockname()[1]), "-m", "no-such-model")
    assert "cannot be had" in said
    assert "--port" in said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--port", "99999"), "--port"),
        (("--window", "0"), "window"),
        (("--sinks", "4"), "sinks"),
        (("--kv-memory", "much"), "--kv-memory"),
        (("--max-waiting", "0"), "--max-waiting"),
        (("--drain", "-1"), "--drain"),
        (("--host", "256.0.0.1"), "--host: '256.0.0.1' is no address"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], part: str) -> None:
    assert part in refusal(*arguments)


def test_memory_that_holds_nothing_is_refused_at_the_start(tiny: Path) -> None:
    assert "hold no answers" in refusal("-m", str(tiny), "--port", "0", "--kv-memory", "1kB")


def test_an_unknown_model_is_told_on_the_terminal(tiny: Path) -> None:
    for arguments in (("-m", "smolm2"), ("-m", str(tiny), "--decider", "smolm2")):
        done = subprocess.run(
            command(*arguments, "--port", "0"), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert "Did you mean smollm2?" in done.stderr
