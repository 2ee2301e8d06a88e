"""`heedful decide --batch`: answers in order, failures in their rows, and going on after whatever stopped it."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from heedful import LLM
from heedful.cli.main import run
from heedful.decide import Choice, Likelihood, Noul
from heedful.decide.calibrate import Calibration
from heedful.decide.calibration_file import write_calibration
from heedful.testing import make_tiny_model

NOUL = ["--noul", "urgent: Is this urgent?"]
OWN = {"team": {"type": "choice", "criteria": {"billing": None, "returns": None}}}
ROWS: list[dict[str, Any]] = [
    {"state": "Charged twice"},
    {"id": "a", "state": {"text": "환불해 주세요"}, "questions": OWN},
    {"id": 7, "state": ["one", "two"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), context_len=1024))


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def decide(model: str, *arguments: Any) -> int:
    return run(["decide", "-m", model, *map(str, arguments)])


def test_a_line_of_answers_for_each_row(model: str, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decide(model, "--batch", batch, *NOUL) == 0
    done = capsys.readouterr()
    assert decide(model, "--batch", batch, *NOUL, "--out", "-") == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["asked"] for line in again] == [json.loads(line)["asked"] for line in done.out.splitlines()]
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [line["id"] for line in found] == [1, "a", 7]
    decider = Likelihood(LLM(model))
    urgent, team = Noul("urgent", "Is this urgent?"), Choice("team", ["billing", "returns"])
    for line, row, question in zip(found, ROWS, (urgent, team, urgent), strict=True):
        expected = decider.decide(row["state"], [question]).to_dict()
        assert {key: line[key] for key in expected} == expected
        assert line["receipt"]["questions"] == 1
    tokens = sum(line["usage"]["input_tokens"] for line in found)
    assert done.err == f"3 answered, 0 failed · {tokens:,} tokens in\n"


def test_rows_come_from_stdin_too(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = io.TextIOWrapper(io.BytesIO(b'\n{"state": "x"}\n\n{"state": "y"}'))
    monkeypatch.setattr(sys, "stdin", text)
    assert decide(model, "--batch", "-", *NOUL) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [2, 4]


BROKEN = [
    (b"{", "row: is not JSON"),
    (b"\xff", "row: is not UTF-8"),
    (b"[" * 100_000, "row: is not JSON"),
    (b"[1]", "row: must be a JSON object"),
    (b"{}", "state: must be text"),
    (b'{"state": 3}', "state: must be text"),
    (b'{"state": "x", "id": true}', "id: must be text or a whole number"),
    (b'{"state": "x", "id": [1]}', "id: must be text or a whole number"),
    (b'{"state": "x", "id": 0}', "id: 0 is that of line 1 too"),
    (b'{"state": "x", "questions": {"a": {"type": "maybe"}}}', "questions['a'].type"),
    (b'{"state": "x", "questions": {}}', "questions: there must be at least one"),
    (b'{"state": "' + b"x" * 2000 + b'"}', "tokens and the context is 1,024"),
]


def test_what_fails_is_said_in_its_row_and_by_the_exit_status(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [b'{"state": "fine", "id": 0}', *(line for line, _ in BROKEN), b'{"state": "fine too", "id": "last"}']
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    assert decide(model, "--batch", tmp_path / "rows.jsonl", *NOUL, "--out", tmp_path / "out.jsonl") == 1
    assert capsys.readouterr().err.startswith(f"2 answered, {len(BROKEN)} failed · ")
    found = read(tmp_path / "out.jsonl")
    assert ["answers" in found[0], "answers" in found[-1], found[-1]["id"]] == [True, True, "last"]
    for line, (_, problem) in zip(found[1:-1], BROKEN, strict=True):
        assert problem in line["error"]["message"]
        assert line["error"]["type"] in ("BadParameter", "ContextOverflow")


def test_a_row_without_questions_needs_some_in_the_options(model: str, batch: Path, tmp_path: Path) -> None:
    assert decide(model, "--batch", batch, "--out", tmp_path / "out.jsonl") == 1
    found = read(tmp_path / "out.jsonl")
    assert ["error" in line for line in found] == [True, False, True]


def test_it_goes_on_where_the_file_ends(
    model: str, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["--batch", batch, "--out", out, *NOUL]
    assert decide(model, *arguments) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)

    asked: list[Any] = []
    answer = Likelihood.decide

    def counted(self: Likelihood, state: Any, questions: Any) -> Any:
        asked.append(state)
        return answer(self, state, questions)

    monkeypatch.setattr(Likelihood, "decide", counted)
    capsys.readouterr()
    assert decide(model, *arguments) == 0
    assert (asked, out.read_bytes()) == ([], whole)
    assert capsys.readouterr().err == "0 answered, 0 failed, 3 were there already · 0 tokens in\n"

    out.write_bytes(lines[0] + lines[1][:-20])  # torn off
    assert decide(model, *arguments) == 0
    assert asked == [row["state"] for row in ROWS[1:]]
    assert [{**line, "receipt": None} for line in read(out)] == [
        {**json.loads(line), "receipt": None} for line in lines
    ]

    asked.clear()
    out.write_bytes(lines[0] + b'{"id": "a", "error": {"type": "QueueFull", "message": "later"}}\n' + lines[2])
    assert decide(model, *arguments) == 0
    assert asked == [ROWS[1]["state"]]  # what failed is asked again, and its error goes
    assert [line["id"] for line in read(out)] == [1, 7, "a"]
    assert not any("error" in line for line in read(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_answers_to_something_else_are_not_taken(
    model: str, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert decide(model, "--batch", batch, "--out", out, *NOUL) == 0
    before = out.read_bytes()
    write_calibration(tmp_path / "c.json", Calibration({"noul": 3.0}), {})
    ways = [
        ["--noul", "urgent: Is this late?"],
        [*NOUL, "--orders", "2"],
        [*NOUL, "--calibration", tmp_path / "c.json"],
    ]
    for way in ways:
        assert decide(model, "--batch", batch, "--out", out, *way) == 2
        assert "--out: its answer 1 is not to line 1" in capsys.readouterr().err
    batch.write_text('{"state": "another"}\n')
    assert decide(model, "--batch", batch, "--out", out, *NOUL) == 2
    assert out.read_bytes() == before


STRANGE = [
    b"hello\n",
    b"hello",
    b'{"a": 1}\n',
    b'{"a": 1}',
    b"[1]\n",
    b'{"id": [], "asked": ""}\n',
    b'{"id": 1, "state": "a row, whose line does not end"}',
    b'{"id": 1, "state": "a row", "error": "of its own"}\n',
    b'{"id": 1, "state": "a row", "asked": "before"}\n',
]


@pytest.mark.parametrize("strange", STRANGE)
def test_a_file_of_something_else_stays_as_it_is(
    strange: bytes, model: str, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_bytes(strange)
    assert decide(model, "--batch", batch, "--out", tmp_path / "notes", *NOUL) == 2
    assert "notes is no answer of a batch" in capsys.readouterr().err
    assert (tmp_path / "notes").read_bytes() == strange


@pytest.mark.parametrize("end", [1, 5, 8, -2])
def test_a_line_may_be_torn_off_anywhere(end: int, model: str, batch: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert decide(model, "--batch", batch, "--out", out, *NOUL) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 1] + whole.splitlines()[1][:end])
    assert decide(model, "--batch", batch, "--out", out, *NOUL) == 0
    assert [line["id"] for line in read(out)] == [1, "a", 7]


def test_answers_do_not_go_into_their_own_rows(
    model: str, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows would grow by what is read of them."""
    assert decide(model, "--batch", batch, "--out", tmp_path / "out.jsonl", *NOUL) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "link").symlink_to("out.jsonl")
    for out in (tmp_path / "out.jsonl", tmp_path / "link"):
        assert decide(model, "--batch", tmp_path / "out.jsonl", "--out", out, *NOUL) == 2
        assert "holds the rows themselves" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_device_without_an_end_is_not_read(model: str, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decide(model, "--batch", batch, "--out", "/dev/zero", *NOUL) == 2
    assert "/dev/zero is no regular file" in capsys.readouterr().err


FAILED = b'{"id": 1, "error": {"type": "QueueFull", "message": "later"}}\n'


def test_a_link_to_the_file_stays_a_link(model: str, batch: Path, tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "out.jsonl").write_bytes(FAILED)
    (tmp_path / "out.jsonl").symlink_to("answers/out.jsonl")
    assert decide(model, "--batch", batch, "--out", tmp_path / "out.jsonl", *NOUL) == 0
    assert (tmp_path / "out.jsonl").is_symlink()
    assert [line["id"] for line in read(tmp_path / "answers" / "out.jsonl")] == [1, "a", 7]


def test_a_full_disk_leaves_the_answers_and_no_draft(
    model: str, batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "out.jsonl").write_bytes(FAILED)
    monkeypatch.setattr(os, "fsync", full)
    assert decide(model, "--batch", batch, "--out", tmp_path / "out.jsonl", *NOUL) == 2
    assert "cannot be written: No space left" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == FAILED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_a_file_that_another_batch_has_just_replaced_is_not_written(
    model: str, batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was opened then is in no folder any more: answers in it would be lost."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"")
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        (tmp_path / "draft").write_bytes(b"")
        os.replace(tmp_path / "draft", out)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert decide(model, "--batch", batch, "--out", out, *NOUL) == 2
    assert "another batch is writing" in capsys.readouterr().err


def test_one_batch_at_a_time_writes_a_file(
    model: str, batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert decide(model, "--batch", batch, "--out", tmp_path / "out.jsonl", *NOUL) == 2
    assert "another batch is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--batch", "nowhere.jsonl"], "--batch: nowhere.jsonl cannot be read"),
        (["--batch", "rows.jsonl", "--text", "x"], "--batch: cannot stand beside --text"),
        (["--text", "x", "--state", "-"], "--text: cannot stand beside --state"),
        ([], "--state: is missing"),
        (["--text", "x", "--out", "y"], "--out: is for a batch"),
        (["--batch", "rows.jsonl", "--out", "/dev/null/x"], "--out: /dev/null/x cannot be written"),
    ],
)
def test_wrong_things_are_named(
    model: str, batch: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(batch.parent)
    assert decide(model, *arguments, *NOUL) == 2
    assert problem in capsys.readouterr().err


def test_text_is_taken_as_it_stands(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert decide(model, "--text", '{"a": 1}', *NOUL, "--json") == 0
    expected = Likelihood(LLM(model)).decide('{"a": 1}', [Noul("urgent", "Is this urgent?")]).to_dict()["answers"]
    assert json.loads(capsys.readouterr().out)["answers"] == expected


def test_ctrl_c_keeps_what_is_done(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows, ours = os.pipe()  # never ends by itself
    command = [sys.executable, "-m", "heedful", "decide", "-m", model, "--batch", "-", "--out", str(out), *NOUL]
    with subprocess.Popen(command, stdin=rows, stderr=subprocess.PIPE, text=True) as process:
        os.write(ours, b'{"state": "one"}\n{"state": "two"}\n')
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 2):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    os.close(rows)
    os.close(ours)
    assert process.returncode == 130
    assert re.match(r"heedful: stopped; 2 answered, 0 failed · [\d,]+ tokens in\n  The same command goes on", said)
    assert "Traceback" not in said
    assert [line["id"] for line in read(out)] == [1, 2]
