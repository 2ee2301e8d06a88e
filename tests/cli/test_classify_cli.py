"""`heedful classify`: classes of a model's own, labels that are given, how wrong things are named."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers, processors

from heedful.cli.main import run

GOLDEN = Path(__file__).parent.parent / "golden"
GLICLASS = GOLDEN / "decisions" / "gliclass"
SIMPLE = str(GLICLASS / "deberta_simple")
CLASSIFIER = GOLDEN / "encoders" / "modernbert_seqcls_cls"
TEXTS = ["see", "One day I will see the world and dream of science, politics, sport and travel.", "Café naïve 東京"]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def heedful(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """In this process: a program of its own would import torch for every line."""

    def run_line(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = run(["classify", "--threads", "1", *arguments])
        found = capsys.readouterr()
        return Done(status, found.out, found.err)

    return run_line


def recorded(model: str, name: str) -> dict[str, Any]:
    cases = json.loads((GLICLASS / f"{model}.json").read_text())["cases"]
    return next(case for case in cases if case["name"] == name)


@pytest.fixture
def classifier(tmp_path: Path) -> tuple[str, str, list[float]]:
    """(model, text, logits): a recorded classifier with words for its ids, and a recorded text."""
    tensors = load_file(CLASSIFIER / "golden.safetensors")
    ids = tensors["input_ids"][2][tensors["attention_mask"][2].astype(bool)].tolist()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((CLASSIFIER / name).read_bytes())
    vocabulary = {"[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"w{token}": token for token in range(4, 120)}}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path), " ".join(f"w{token}" for token in ids[1:-1]), tensors["logits"][2].tolist()


def test_given_labels_as_recorded(heedful: Callable[..., Done]) -> None:
    case = recorded("deberta_simple", "padded")
    assert case["texts"] == TEXTS
    for arguments, name in ((["--multi"], "sigmoid"), ([], "softmax")):
        done = heedful("-m", SIMPLE, "-l", "travel", "-l", "sport", "--json", *arguments, *TEXTS)
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert set(found) == {"model", "classifications", "receipt"}
        for line, text, alone in zip(found["classifications"], TEXTS, case["alone"], strict=True):
            assert set(line) == {"text", "tokens", "probabilities"}
            assert (line["text"], line["tokens"]) == (text, len(alone["input_ids"]))
            assert line["probabilities"] == pytest.approx(
                dict(zip(["travel", "sport"], alone[name], strict=True)), abs=2e-4
            )
        counts = [len(alone["input_ids"]) for alone in case["alone"]]
        assert found["receipt"]["visits"]["total"] == 2 * 2 * sum(count**2 for count in counts)


def test_the_likeliest_label_stands_first(heedful: Callable[..., Done]) -> None:
    done = heedful("-m", SIMPLE, "-l", "travel", "-l", "sport", "--receipt", "-", stdin=b"see\na\tb\n")
    alone = recorded("deberta_simple", "padded")["alone"][0]
    assert done.stdout.splitlines()[:3] == [
        "see",
        f"  {alone['softmax'][1]:.3f}  sport",
        f"  {alone['softmax'][0]:.3f}  travel",
    ]
    assert done.stdout.splitlines()[3] == "a b"
    assert done.stderr.startswith("2 questions in 2 sequences")


def test_a_prompt(heedful: Callable[..., Done]) -> None:
    case = recorded("modernbert_simple", "prompt")
    labels = [part for label in case["labels"] for part in ("-l", label)]
    arguments = ["-m", str(GLICLASS / "modernbert_simple"), "--prompt", case["prompt"], *labels, "--json"]
    (line,) = json.loads(heedful(*arguments, *case["texts"]).stdout)["classifications"]
    assert list(line["probabilities"].values()) == pytest.approx(case["alone"][0]["softmax"], abs=2e-4)


def test_a_models_own_classes(heedful: Callable[..., Done], classifier: tuple[str, str, list[float]]) -> None:
    model, text, logits = classifier
    powers = [math.exp(z) for z in logits]
    expected = {f"LABEL_{at}": power / sum(powers) for at, power in enumerate(powers)}
    (line,) = json.loads(heedful("-m", model, "--json", text).stdout)["classifications"]
    assert line["probabilities"] == pytest.approx(expected, abs=1e-4)
    plain = heedful("-m", model, text).stdout.splitlines()
    assert plain[1:] == [f"  {expected['LABEL_0']:.3f}  LABEL_0", f"  {expected['LABEL_1']:.3f}  LABEL_1"]


def test_a_regression_has_values(heedful: Callable[..., Done], classifier: tuple[str, str, list[float]]) -> None:
    model, text, logits = classifier
    config = json.loads((Path(model) / "config.json").read_text()) | {"problem_type": "regression"}
    (Path(model) / "config.json").write_text(json.dumps(config))
    (line,) = json.loads(heedful("-m", model, "--json", text).stdout)["classifications"]
    assert list(line["values"].values()) == pytest.approx(logits, abs=1e-4)


def test_truncate_says_what_went(heedful: Callable[..., Done], classifier: tuple[str, str, list[float]]) -> None:
    done = heedful("-m", classifier[0], "--truncate", "--json", "w5 " * 130, "w5")
    assert [line.get("dropped_tokens") for line in json.loads(done.stdout)["classifications"]] == [4, None]
    assert done.stderr == "heedful: 4 tokens of 1 texts were cut to fit the model\n"


def test_json_of_text_that_is_not_utf8(heedful: Callable[..., Done]) -> None:
    """As Python reads a byte of no character in an argument."""
    done = heedful("-m", SIMPLE, "-l", "a", "-l", "é", "--json", "caf\udce9")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["classifications"]
    assert (found["text"], list(found["probabilities"])) == ("caf\udce9", ["a", "é"])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["x"], 2, "--model: is missing"),
        (["-m", SIMPLE, "x"], 2, "--label: is missing"),
        (["-m", SIMPLE, "-l", "a", "-l", "a", "x"], 2, "labels: 'a' is there twice"),
        (["-m", SIMPLE, "-l", "a", "word " * 1200], 2, "text 0 has "),
        (["-m", SIMPLE, "-l", "a"], 2, "TEXT: is missing: there are no lines"),
        (["-m", SIMPLE, "-l", "a", "-f", "/nowhere"], 2, "/nowhere cannot be read"),
        (["-m", "{classifier}", "-l", "a", "x"], 2, "has classes of its own"),
        (["-m", "{classifier}", "--multi", "x"], 2, "has classes of its own"),
        (["-m", "{classifier}", "w5 " * 130], 2, "text 0 has 132 tokens and the model classifies at most 128"),
        (["-m", "/nowhere", "x"], 1, "/nowhere"),
        (["-m", SIMPLE, "-l", "a", "--threads", "0", "x"], 2, "threads: must be between 1 and 1024"),
    ],
)
def test_wrong_things_are_named(
    arguments: list[str], status: int, said: str, heedful: Callable[..., Done], classifier: tuple[str, str, list[float]]
) -> None:
    done = heedful(*(argument.replace("{classifier}", classifier[0]) for argument in arguments))
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
