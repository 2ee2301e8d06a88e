"""`heedful train --base … --chat …` from the command line: what it shows, what it refuses, and that the run answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from heedful.cli import train as verb
from heedful.cli.main import run
from heedful.train.chat_rows import Piece

TEXT = "One old man had two hats; the red one was for the sea, and the blue one for the house on the hill. " * 20
ROW = {"messages": [{"role": "user", "content": "hat?"}, {"role": "assistant", "content": "red"}]}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(ROW)}\n" * 6, encoding="utf-8")
    return tmp_path


@pytest.fixture
def base(files: Path, capsys: pytest.CaptureFixture[str]) -> str:
    shape = ["--layers", "1", "--context", "48", "--tokenizer", "bytes", "--set", "model.hidden_size=32"]
    shape += ["--set", "model.heads=2"]
    assert run(["train", "--data", "text.txt", "--out", "base", "--steps", "2", "--threads", "1", *shape]) == 0
    capsys.readouterr()
    return "base"


def tune(base: str, *more: str) -> int:
    asked = ["--base", base, "--chat", "chat.jsonl", "--out", "tuned", "--steps", "2", "--threads", "1"]
    return run(["train", *asked, "--set", "run.sample_tokens=4", *more])


@pytest.mark.parametrize("more", [[], ["--lora", "2"]])
def test_a_row_is_shown_and_the_run_answers(more: list[str], base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(base, *more) == 0
    out = capsys.readouterr().out
    assert "train: 6 rows, " in out
    assert "<|im_start|>user\nhat?<|im_end|>\n<|im_start|>assistant\n[[red<|im_end|>]]\n" in out
    assert re.search(r"^step 2: validation \d\.\d{4} nats a target$", out, re.MULTILINE)
    assert out.splitlines()[-1] == "run it: heedful chat -m tuned"
    assert run(["generate", "-m", "tuned", "--chat", "hat?", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["receipt"]["output_tokens"] <= 3


def test_in_a_terminal_the_row_has_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    verb._show([Piece("[bold]hat?\n", False), Piece("red", True)])
    out = capsys.readouterr().out
    assert "\x1b[2m[bold]hat?" in out, "text is no markup"
    assert "\x1b[1;32mred\x1b[0m" in out


def test_a_dry_run_tells_the_base_from_what_is_trained(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(base, "--lora", "2", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # by hand: q, k, v, out, gate, up, down of width 32 with KV heads as wide as q, MLP 128
    sides = [(32, 32), (16, 32), (16, 32), (32, 32), (128, 32), (128, 32), (32, 128)]
    kv = found["trained_parameters"] - 2 * sum(rows + columns for rows, columns in (sides[0], *sides[3:]))
    assert kv in (2 * 2 * (16 + 32), 2 * 2 * (32 + 32))
    assert found["state_bytes"] == 16 * found["trained_parameters"]
    assert found["frozen_bytes"] == 4 * (found["parameters"] - found["trained_parameters"])
    assert tune(base, "--lora", "2", "--dry-run") == 0
    assert "for the base as its file has it" in capsys.readouterr().out
    assert not Path("tuned").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--chat", "chat.jsonl"], "--chat: needs a base"),
        (["--chat", "chat.jsonl", "--data", "text.txt", "--base", "base"], "--data are two kinds of training"),
        (["--lora", "4", "--data", "text.txt"], "lora.rank: needs a base"),
        (["--base", "base", "--lora", "4", "--set", "lora.targets=qproj"], "lora.targets: has qproj"),
        (["--base", "base", "--lora", "4", "--optimizer", "muon"], "muon is for whole matrices"),
        (["--base", "nowhere", "--chat", "chat.jsonl"], "no model is called 'nowhere'"),
    ],
)
def test_what_does_not_go_together_leaves_nothing(
    asked: list[str], message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--out", "tuned", *asked]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not Path("tuned").exists()


def test_the_template_may_be_given_and_a_wrong_one_leaves_nothing(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    Path("own.jinja").write_text(turns + "{% if add_generation_prompt %}Answer:{% endif %}")
    assert tune(base, "--set", "data.template=own.jinja") == 2
    assert "line 1 of chat.jsonl: the template's prompt for an answer is not how" in capsys.readouterr().err
    assert not Path("tuned").exists()
    Path("own.jinja").write_text(turns + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    assert tune(base, "--set", "data.template=own.jinja") == 0
    assert "<|im_start|>hat?<|im_end|><|im_start|>[[red<|im_end|>]]" in capsys.readouterr().out
