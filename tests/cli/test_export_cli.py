"""`heedful export`: what is written runs, and what is wrongly asked is said in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli.main import run
from heedful.testing import make_tiny_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_tiny_model(tmp_path / "tiny")


def answer(model: str, capsys: pytest.CaptureFixture[str]) -> str:
    ask = [
        "generate",
        "-m",
        model,
        "one two",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--runner",
        "torch",
        "--json",
    ]
    assert run(ask) == 0
    text: str = json.loads(capsys.readouterr().out)["text"]
    return text


@pytest.mark.parametrize(("to", "name"), [("hf", "out"), ("gguf", "out.gguf")])
def test_what_is_written_says_the_same(to: str, name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = answer("tiny", capsys)
    assert run(["export", "-m", "tiny", "--to", to, "--out", name, "--type", "f32"]) == 0
    first, how, ours = capsys.readouterr().out.splitlines()
    assert (
        first == f"{name}: 20 tensors, 107.5 kB of f32 weights"
    )  # 4 · (259 · 32 + 2 · (3 · 32² + 3 · 64 · 32 + 64) + 32)
    assert how.startswith({"hf": "transformers: Auto", "gguf": "llama.cpp: llama-cli -m"}[to])
    assert ours == f"heedful: heedful generate -m {name} 'Once'"
    assert answer(name, capsys) == expected


def test_json_and_defaults(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "-m", "tiny", "--to", "gguf", "--out", "a.gguf", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"path": "a.gguf", "type": "f16", "weights_bytes": found["weights_bytes"], "tensors": 20}
    assert run(["export", "-m", "tiny", "--to", "hf", "--out", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "f32", "as it is stored"
    config = json.loads(Path("a/config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float32", ["MistralForCausalLM"])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--to", "onnx", "--out", "a"], 2, "--to: is 'onnx'\n  Known: hf, gguf."),
        (["--to", "hf", "--out", "a", "--type", "q8_0"], 2, "--type: is 'q8_0'\n  With --to hf: f32, f16, bf16."),
        (["--to", "gguf", "--out", "none/a.gguf"], 2, "none is no folder"),
        (["--to", "gguf", "--out", "tiny"], 2, "tiny is there already\n  Name another, or add --force"),
        (["--to", "gguf", "--out", "tiny", "--force"], 1, "tiny is a folder, and a GGUF is a file"),
    ],
)
def test_wrong_words(
    arguments: list[str], status: int, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "-m", "tiny", *arguments]) == status
    assert message in capsys.readouterr().err
    assert [entry.name for entry in Path().iterdir()] == ["tiny"]


def test_encoders_and_unknown_models(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "-m", "minilm", "--to", "hf", "--out", "a"]) == 1
    assert "is an encoder" in capsys.readouterr().err
    assert run(["export", "-m", "smollm3", "--to", "hf", "--out", "a"]) == 1
    assert "no model is called 'smollm3'" in capsys.readouterr().err
