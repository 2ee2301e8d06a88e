"""`heedful eval`, and what `heedful show` makes of the figures of policies, on a tiny model."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from heedful.cache.policy_text import parse_policy
from heedful.cli.main import run
from heedful.cost.quality import measured_policies, measured_quality
from heedful.engine.needles import needle_cases
from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_len=1024))


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def evaluate(model: str, *more: str) -> int:
    return run(["eval", "policy", "-m", model, "--tokens", "100", "--runner", "torch", *more])


def test_figures_are_printed_and_kept(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(model, "--policy", "kv=f32", "--policy", "window=20,kv=f32") == 0
    out, err = capsys.readouterr()
    heading, exact, windowed, _, note, noise = out.splitlines()
    assert heading.split() == ["policy", "mean", "KLD", "p50", "p99", "max", "ΔNLL", "same", "top", "token"]
    assert exact.split() == ["kv=f32", *["0.00000"] * 4, "+0.00000", "100.0%"]
    assert windowed.startswith("kv=f32,window=20 ")
    assert note.endswith(
        "in Wonderland, chapters I and VII, the last 50 of 100 tokens; torch runner, weights in float32."
    )
    assert re.fullmatch(r"Noise: 0\.0000\d of a mean KLD is there when only the last bits differ\.", noise)
    assert "`heedful show" in err
    found = measured_quality(model, parse_policy("kv=f32,window=20"))
    assert found is not None
    assert f"{found.mean_kld:.5f}" == windowed.split()[1]
    assert found.mean_kld > 0.001
    assert found.needle_recall is None


def test_json_has_all_figures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(model, "--policy", "kv=f32,window=20", "--json", "--no-save") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == model
    (loss,) = (policy["passage"] for policy in found["policies"].values())
    assert set(loss) == {
        "mean_kld", "p50_kld", "p99_kld", "max_kld", "mean_delta_nll", "agreement", "noise_kld", "tokens", "text",
    }  # fmt: skip
    assert loss["p50_kld"] <= loss["mean_kld"] <= loss["p99_kld"] <= loss["max_kld"]
    assert loss["tokens"] == 50
    assert measured_policies(model) == {}


def test_the_same_run_twice_gives_the_same_figures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        evaluate(model, "--policy", "kv=f32,window=20", "--no-save")
    first, second = capsys.readouterr().out.split("policy")[1:]
    assert first == second


def test_needles(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = partial(needle_cases, lengths=(512, 4096), depths=(0.5,))
    monkeypatch.setattr("heedful.engine.needles.needle_cases", few)
    assert evaluate(model, "--policy", "kv=f32,window=80", "--needles") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("found  chosen")
    assert "of 2 planted numbers" in out  # one fact, and one of eight; 4,096 tokens are beyond the context
    needles = measured_policies(model)["kv=f32,window=80"].needles
    assert needles is not None
    assert needles.asked == 2


def test_show_lists_what_was_measured(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["show", model])
    assert "measured policy" not in capsys.readouterr().out
    evaluate(model, "--policy", "kv=f32,window=20")
    capsys.readouterr()
    assert run(["show", model]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    loss = measured_policies(model)["kv=f32,window=20"].passage
    figures = [f"{loss.mean_kld:.5f}", f"{loss.p99_kld:.5f}", f"{loss.mean_delta_nll:+.5f}"]
    assert line.split() == ["kv=f32,window=20", *figures, "not", "measured"]
    assert run(["show", model, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["measured_policies"]["kv=f32,window=20"]["passage"]["tokens"] == 50


def test_receipts_carry_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(model, "--policy", "kv=f32,window=20")
    capsys.readouterr()
    ask = ["generate", "hello", "-m", model, "--max-tokens", "2", "--json", "--runner", "torch"]
    assert run([*ask, "--window", "20", "--kv", "f32"]) == 0
    receipt = json.loads(capsys.readouterr().out)["receipt"]
    assert receipt["quality"]["mean_kld"] == measured_policies(model)["kv=f32,window=20"].passage.mean_kld
    assert run([*ask, "--window", "30", "--kv", "f32"]) == 0
    assert json.loads(capsys.readouterr().out)["receipt"]["quality"] is None


def test_choosing_a_policy_says_what_it_loses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", "hello", "-m", model, "--max-tokens", "2", "--runner", "torch", "--kv", "f32"]
    run([*ask, "--window", "5"])
    wanted = f"heedful eval policy -m {model} --policy kv=f32,window=5"
    assert f"what kv=f32,window=5 loses on {model} is not measured: {wanted}" in capsys.readouterr().err
    evaluate(model, "--policy", "kv=f32,window=5")
    capsys.readouterr()
    run([*ask, "--window", "5"])
    assert "kv=f32,window=5 changes what" in capsys.readouterr().err  # so short a window loses more than the bound
    run(ask)
    assert "changes what" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "kv=q5"], "'kv=q5': kv takes one of"),
        (["--policy", "kv=f32,budget=512"], "kv=f32,budget=512 is not in force within 512 tokens"),
        (["--policy", "kv=f32", "--text", "no/such/file"], "no/such/file cannot be read"),
        (["--policy", "kv=f32", "--tokens", "0"], "--tokens: must be at least 1"),
        (["--policy", "kv=f32", "--runner", "abacus"], "'abacus' is not known"),
        ([], "--policy"),
    ],
)
def test_what_cannot_be_measured(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], data_folder: Path
) -> None:
    assert evaluate(model, *arguments) == 2
    assert said in capsys.readouterr().err
    assert not data_folder.exists()


def test_a_text_of_ones_own(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("an unusual text, " * 30, encoding="utf-8")
    assert evaluate(model, "--policy", "kv=f32,window=20", "--text", str(tmp_path / "mine.txt")) == 0
    assert "the given text, the last 50 of 100 tokens" in capsys.readouterr().out
    (tmp_path / "mine.txt").write_bytes(b"\xff\xfe")
    assert evaluate(model, "--policy", "kv=f32,window=20", "--text", str(tmp_path / "mine.txt")) == 2


def test_figures_that_cannot_be_kept_are_printed_all_the_same(
    model: str, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_folder.write_text("a file in its place")
    assert evaluate(model, "--policy", "kv=f32,window=20") == 0
    out, err = capsys.readouterr()
    assert "kv=f32,window=20" in out
    assert "the figures were not kept" in err


def test_ctrl_c_keeps_nothing(model: str, monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    def interrupted(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("heedful.engine.policy_quality.log_softmax", interrupted)
    assert evaluate(model, "--policy", "kv=f32,window=20") == 130
    assert not data_folder.exists()


def test_multiple_choice(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "What?", "choices": ["this", "that"], "answer": 0}] * 3
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ask = ["eval", "choices", str(tmp_path / "q.jsonl"), "-m", model, "--runner", "torch"]
    assert run(ask) == 0
    acc, acc_norm, chance, cost = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"acc      (0|100)\.0%  \(95 %: [\d.]+% to [\d.]+%\)", acc)
    assert acc_norm.startswith("acc_norm ")
    assert chance == "chance   50.0%  over 3 rows"
    assert re.fullmatch(r"168 tokens in 6 prompts · [\d.]+ k visits of [\d.]+ k dense", cost)  # 28 bytes each
    assert run([*ask, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["chance"], found["cost"]["requests"]) == (3, 0.5, 6)
    assert f"{found['acc']['share']:.1%}" in acc


def test_a_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Some words. " * 10)
    ask = ["eval", "text", str(tmp_path / "a.txt"), "-m", model, "--runner", "torch", "--window", "64"]
    assert run(ask) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"perplexity [\d.]+ a token, [\d.]+ bits a byte", first)
    assert second == "119 tokens, 119 bytes, in windows of 64 tokens"
    assert run([*ask, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert first == f"perplexity {found['perplexity']:.3f} a token, {found['bits_per_byte']:.4f} bits a byte"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"{}\n", "FILE: line 1: row: needs a question or a context"),
        (b'{"question": "q", "choices": ["a", "b"], "answer": 0}\n\n{"a"\n', "FILE: line 3: is not JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_without_questions(
    content: bytes | None, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "q.jsonl").write_bytes(content)
    assert run(["eval", "choices", str(tmp_path / "q.jsonl"), "-m", model]) == 2
    assert message in capsys.readouterr().err
    if content is None:
        assert run(["eval", "text", str(tmp_path / "q.jsonl"), "-m", model]) == 2
        assert message in capsys.readouterr().err
