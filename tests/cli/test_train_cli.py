"""`heedful train` from the command line: options, config file, dry run, signals, resuming, and the model it makes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful.cli.main import run
from heedful.train.network import generated
from heedful.train.run_files import open_run, read_metrics
from heedful.train.trainer import Trainer
from heedful.weights.load import load
from heedful.weights.run_folder import model_in

TEXT = "One old man had two hats; the red one was for the sea, and the blue one for the house on the hill. " * 40
SMALL = """
[model]
layers = 2
hidden_size = 32
heads = 4
kv_heads = 2
context_len = 48
windows = "SL"
window = 16
[data]
vocab_size = 300
[optim]
batch_tokens = 192
lr = 0.01
[run]
threads = 1
log_every = 5
eval_every = 10
sample_every = 10
sample_tokens = 12
save_every = 10
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def train(*more: str) -> int:
    return run(["train", "--out", "runs/a", "--data", "text.txt", "--config", "small.toml", *more])


def test_from_text_to_a_model_that_generates(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "40", "--prompt", "One old") == 0
    out = capsys.readouterr().out
    assert re.search(r"^train: 1 document, 3,960 bytes, [\d,]+ tokens of \d+$", out, re.MULTILINE)
    line = (
        r"^step 40/40 · loss \d\.\d{4} \(smoothed \d\.\d{4}\) · lr \S+ · grad \d+\.\d\d · [\d,]+ tok/s · "
        r"\d+% of peak · [\d.]+ k visits · 0 s left$"
    )
    assert re.search(line, out, re.MULTILINE), out
    assert re.search(r"^step 40: validation \d\.\d{4} bits a byte$", out, re.MULTILINE)
    assert re.search(r"^step 40 writes: One old", out, re.MULTILINE)
    assert " │█" in out
    assert out.splitlines()[-1] == "run it: heedful generate -m runs/a 'Once'"
    rows = list(read_metrics(Path("runs/a")))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 2
    assert [row["step"] for row in rows if "bits_per_byte" in row] == [10, 20, 30, 40]

    for runner in ("torch", "native"):
        assert run(["generate", "-m", "runs/a", "One old man", "--max-tokens", "24", "--json", "--runner", runner]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["text"] == fully_recomputed("One old man", 24), runner
    assert model_in(Path("runs/a")).name == "step-00000040"


def fully_recomputed(prompt: str, max_tokens: int) -> str:
    """The training code's own: no cache, every step from the start."""
    runs = open_run(Path("runs/a"))
    trainer = Trainer(runs)
    trainer.load(model_in(runs.folder))
    ids = generated(trainer.decoder, runs.tokenizer.encode(prompt), max_tokens, {runs.end_id})
    assert len(ids) == max_tokens, "long enough to tell them apart"
    return runs.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "more", [[], ["--set", "model.qk_norm=false", "--set", "model.windows=L", "--set", "model.tied_head=false"]]
)
def test_the_files_load_in_transformers(more: list[str], files: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert train("--steps", "10", *more) == 0
    folder = model_in(Path("runs/a"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "the red one was for the sea, and the blue one for the house"
    ids = tokenizer(prompt)["input_ids"]
    assert ids == load("runs/a").tokenizer.encode(prompt)
    assert len(ids) > 16, "longer than the window"
    runs = open_run(Path("runs/a"))
    trainer = Trainer(runs)
    trainer.load(folder)
    from heedful.train.network import last_logits

    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(last_logits(trainer.decoder, ids), expected, atol=1e-4)


def test_a_dry_run_counts_and_leaves_nothing(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "300", "--dry-run") == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "parameters", "memory", "a step", "visits", "the run", "time",
    ]  # fmt: skip
    assert not Path("runs").exists()
    assert train("--steps", "300", "--tokenizer", "bytes", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # by hand: width 32, q 32 + k and v 16 each + out 32 rows, MLP 3 · 128, norms 2 · 32 + 2 · 8 a layer and one more
    matrices = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 128)
    assert found["parameters"] == matrices + 259 * 32 + 2 * (2 * 32 + 2 * 8) + 32
    assert found["state_bytes"] == 16 * found["parameters"]
    # full contexts of 48: heads · (one layer all, one layer at most 16)
    assert found["dense_visits"] / found["tokens"] * 300 == pytest.approx(4 * 2 * (48 + 1) / 2, rel=1e-3)
    assert 0.5 < found["step_visits"] / found["dense_visits"] < 0.9
    assert found["step_seconds"] > 0


def test_sigterm_saves_and_says_how_to_go_on(files: Path) -> None:
    command = [sys.executable, "-m", "heedful", "train", "--out", "runs/a", "--data", "text.txt"]
    more = ["--config", "small.toml", "--steps", "100000", "--set", "run.log_every=1"]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "step " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    stopped = re.search(
        r"^stopped after step ([\d,]+); go on with: (heedful train --resume --out runs/a)$", out, re.MULTILINE
    )
    assert stopped, out
    step = int(stopped[1].replace(",", ""))
    assert int(model_in(Path("runs/a")).name.removeprefix("step-")) == step
    assert run([*stopped[2].split()[1:], "--steps", str(step + 2)]) == 0
    losses = [row["step"] for row in read_metrics(Path("runs/a")) if "loss" in row]
    assert losses == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "optim.lrr=1"], "optim.lrr: there is no such setting\n  Did you mean optim.lr"),
        (["--set", "lr=1"], "Did you mean optim.lr?"),
        (["--set", "optim.lr"], "sets nothing"),
        (["--set", "optim.lr=fast"], "optim.lr: is 'fast', it must be a number"),
        (["--set", "run.steps=1.5"], "run.steps: is 1.5, it must be a whole number"),
        (["--set", "model.qk_norm=1"], "it must be true or false"),
        (["--set", "optim.lr=-1"], "optim.lr: is -1.0; 0 to 10 are possible"),
        (["--set", "optim.lr=NaN"], "optim.lr: is nan"),
        (["--optimizer", "sgd"], "Known: adamw, muon."),
        (["--size", "huge"], "Known: tiny, small, medium."),
        (["--steps", "0"], "run.steps: is 0"),
        (["--set", "model.windows=LX"], "pattern of S and L"),
        (["--set", "model.qk_norm=false"], "model.windows: need model.qk_norm"),
        (["--set", "model.kv_heads=3"], "cannot share 3 KV heads evenly"),
        (["--set", "model.heads=3"], "do not fit 32 channels"),
        (["--set", "optim.decay=0.99"], "together more than all steps"),
        (["--batch-tokens", "20"], "less than a context of 48"),
        (["--data", "missing.txt"], "missing.txt cannot be read: No such file"),
        (["--resume"], "goes on with the settings of the run; data.files, --config cannot be given"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    more: list[str], message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "1", *more) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/a/run.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "[model\n", "is not valid"),
        ("a.json", "[1]", "holds no table"),
        ("a.toml", "layers = 3\n", "there is no such setting"),
        ("a.toml", "[modle]\nlayers = 3\n", "Did you mean model.layers?"),
        ("a.json", '{"run": {"steps": "many"}}', "run.steps: is 'many', it must be a whole number"),
    ],
)
def test_a_config_file_is_checked(
    name: str, content: str, message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(content, encoding="utf-8")
    assert run(["train", "--out", "runs/a", "--data", "text.txt", "--config", name]) == 2
    assert message in capsys.readouterr().err


def test_options_go_over_the_file_and_set_over_both(files: Path) -> None:
    assert train("--steps", "1", "--lr", "0.5", "--set", "run.steps=2", "--tokenizer", "bytes") == 0
    settings = open_run(Path("runs/a")).settings
    assert (settings.optim.lr, settings.run.steps, settings.model.window) == (0.5, 2, 16)
    assert open_run(Path("runs/a")).tokenizer.vocab_size == 259


def test_validation_by_another_file_or_by_none(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "other.jsonl").write_text('{"text": "the blue hat"}\n{"text": "a"}\n', encoding="utf-8")
    assert train("--steps", "1", "--validation", "other.jsonl") == 0
    out = capsys.readouterr().out
    assert "validation: 2 documents, 13 bytes, " in out
    assert "step 1: validation " in out
    assert len(open_run(Path("runs/a")).data.validation_segments) == 2
    more = ["--config", "small.toml", "--steps", "1", "--set", "data.validation_share=0"]
    assert run(["train", "--out", "runs/b", "--data", "text.txt", *more]) == 0
    assert not re.search(r"\bvalidation[ :]", capsys.readouterr().out)


def test_a_run_without_a_checkpoint_is_no_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "runs" / "a" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert run(["generate", "-m", "runs/a", "x"]) == 1
    assert "a training run without a whole checkpoint" in capsys.readouterr().err
