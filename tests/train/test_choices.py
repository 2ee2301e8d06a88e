"""Questions that a run is judged on: likelihoods against a decoder that computes all anew, rows in the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heedful.engine.multiple_choice import ChoiceRow, choice_ids
from heedful.engine.torch_runner import build_decoder
from heedful.errors import BadParameter
from heedful.kernels.attention import DenseAttend
from heedful.testing import make_tiny_model
from heedful.train.choices import loglikelihoods, read_choices
from heedful.train.html_report import read_run
from heedful.train.loop import begin
from heedful.train.settings import TrainSettings, changed
from heedful.weights.load import load


def test_likelihoods_are_those_of_a_full_pass(tmp_path: Path) -> None:
    loaded = load(str(make_tiny_model(tmp_path / "tiny")))
    decoder = build_decoder(loaded.config, loaded.weights)
    for row in (
        ChoiceRow("One two ", ("three", "four five six", "é"), 0),
        ChoiceRow("x" * 150, ("left", "right"), 0),
        ChoiceRow("q", ("abc", "abd", "b"), 0),
    ):
        ids = choice_ids(loaded.tokenizer, row)
        expected = []
        for text, first in zip(ids.texts, ids.scored_from, strict=True):
            with torch.no_grad():
                hidden = decoder(torch.tensor(text), torch.arange(len(text)), DenseAttend([len(text)]))
                logprobs = decoder.logits(hidden).double().log_softmax(-1)
            expected.append(sum(float(logprobs[i - 1, text[i]]) for i in range(first, len(text))))
        assert loglikelihoods(decoder, ids) == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abababababababab. " * 60)
    rows = [{"context": "abab", "choices": ["abab.", "ccdd."], "answer": 0}] * 4
    Path("q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def settings(choices: str) -> TrainSettings:
    values = {
        "data.files": ["text.txt"], "data.tokenizer": "bytes", "data.validation_share": 0.1,
        "model.layers": 1, "model.hidden_size": 32, "model.heads": 2, "model.context_len": 32, "optim.lr": 0.02,
        "run.steps": 20, "run.eval_every": 10, "run.sample_every": 0, "run.threads": 1, "run.eval_choices": choices,
    }  # fmt: skip
    return changed(TrainSettings(), values)


def test_a_run_is_judged_on_them_and_its_report_shows_it(folder: Path) -> None:
    said: list[str] = []
    outcome = begin(folder / "run", settings("q.jsonl"), say=said.append)
    run = read_run(outcome.folder)
    assert run.judged_by == "bits_per_byte"
    assert [step for step, _ in run.figures["choices_acc"]] == [10, 20]
    assert run.figures["choices_acc"][-1][1] == 1.0, "c and d were never there"
    assert any("choices_acc_norm 1.0000" in line for line in said)
    page = (outcome.folder / "report.html").read_text(encoding="utf-8")
    assert 'aria-label="Validation: choices acc norm"' in page
    assert f"report: {(outcome.folder / 'report.html').as_uri()}" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\n", "holds no rows"),
        (b'{"context": "' + b"a" * 40 + b'", "choices": ["a", "b"], "answer": 0}', "has 43 tokens, the context 32"),
    ],
)
def test_files_that_cannot_judge(content: bytes | None, message: str, folder: Path) -> None:
    if content is not None:
        Path("bad.jsonl").write_bytes(content)
    with pytest.raises(BadParameter, match=rf"run\.eval_choices: .*{message}"):
        begin(folder / "run", settings("bad.jsonl"), say=lambda line: None)


def test_none_are_read_where_none_are_named(tmp_path: Path) -> None:
    tokenizer = load(str(make_tiny_model(tmp_path / "tiny"))).tokenizer
    assert read_choices(None, tokenizer, 10).rows == ()
