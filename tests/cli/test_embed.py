"""`heedful embed`, run as a program: where texts come from, what is printed, and how wrong things are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from heedful.kernels import native
from heedful.testing import make_tiny_model

GOLDEN = Path(__file__).parent.parent / "golden" / "encoders" / "minilm"
SENTENCES = [s["text"] for s in json.loads((GOLDEN / "sentences.json").read_text())["sentences"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", autouse=True)
def fetched(minilm_dir: Path) -> None:
    """The default model is there before a command asks for it."""


def heedful(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heedful", "embed", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_line_a_text_with_the_recorded_vectors() -> None:
    done = heedful(*SENTENCES[:7])
    found = lines(done)
    assert done.stderr == ""
    assert [line["text"] for line in found] == SENTENCES[:7]
    assert [line["tokens"] for line in found] == [9, 9, 9, 17, 27, 21, 3]
    assert [set(line) for line in found] == [{"text", "tokens", "embedding"}] * 7
    expected = load_file(GOLDEN / "golden.safetensors")["embeddings"][:7]
    assert np.abs(np.array([line["embedding"] for line in found]) - expected).max() < 1e-5


def test_json_is_one_object_with_the_receipt() -> None:
    done = heedful("--json", "--similarity", *SENTENCES[:3])
    (found,) = lines(done)
    assert set(found) == {"model", "dimensions", "embeddings", "similarity", "receipt"}
    assert (found["model"], found["dimensions"], len(found["embeddings"])) == ("minilm", 384, 3)
    expected = load_file(GOLDEN / "golden.safetensors")["cosine"][:3, :3]
    assert np.abs(np.array(found["similarity"]) - expected).max() < 1e-5
    assert found["receipt"]["visits"]["total"] == 6 * 12 * 3 * 9 * 9
    assert done.stderr == ""


def test_a_table_of_similarities() -> None:
    done = heedful("--similarity", *SENTENCES[:2], "ab\ncd " * 20)
    cosine = load_file(GOLDEN / "golden.safetensors")["cosine"][0, 1]
    header, first, second, third = done.stdout.splitlines()
    assert header.split() == ["1", "2", "3"]
    assert first.split()[:3] == ["1", "1.000", f"{cosine:.3f}"]
    assert first.endswith("  " + SENTENCES[0])
    assert second.split()[1:3] == [f"{cosine:.3f}", "1.000"]
    assert third.endswith("  " + ("ab cd " * 20)[:39] + "…")


@pytest.mark.parametrize(
    ("arguments", "stdin", "texts"),
    [
        (["one", "two"], b"not read", ["one", "two"]),
        ([], b"one\r\n\ntwo", ["one", "", "two"]),
        (["-"], b"one\ntwo\n", ["one", "two"]),
        (["-f", "{file}"], b"not read", ["from", "a file"]),
        (["one", "-f", "{file}"], b"", ["one", "from", "a file"]),
        (["one", "-f", "-"], b"two\n", ["one", "two"]),
        (["Café 😀 \u2028 한"], b"", ["Café 😀 \u2028 한"]),
        ([], "Café\u2028\x0b😀\n".encode(), ["Café\u2028\x0b😀"]),
        ([""], b"", [""]),
    ],
)
def test_where_texts_come_from(tmp_path: Path, arguments: list[str], stdin: bytes, texts: list[str]) -> None:
    (tmp_path / "texts.txt").write_text("from\na file\n")
    done = heedful(*(argument.format(file=tmp_path / "texts.txt") for argument in arguments), stdin=stdin)
    assert [line["text"] for line in lines(done)] == texts


def test_an_argument_that_is_not_utf_8_still_gives_json() -> None:
    command = [sys.executable.encode(), b"-m", b"heedful", b"embed", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert len(json.loads(done.stdout)["embedding"]) == 384


def test_a_decoder_is_pooled(model: str) -> None:
    done = heedful("-m", model, "--receipt", "hello")
    (found,) = lines(done)
    assert (found["tokens"], len(found["embedding"])) == (5, 32)
    assert abs(np.linalg.norm(found["embedding"]) - 1) < 1e-6
    assert done.stderr.startswith("1 text, 5 in · ")
    assert f"{2 * 4 * 15} visits of" in done.stderr


def test_truncate_says_what_went() -> None:
    done = heedful("--truncate", "word " * 260, "short", "word " * 300)
    found = lines(done)
    assert [line.get("dropped_tokens") for line in found] == [6, None, 46]
    assert done.stderr == "heedful: 52 tokens of 2 texts were cut to fit the model\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "said"),
    [
        (["word " * 300], b"", 2, "text 0 has 302 tokens and the model embeds at most 256"),
        (["short", "word " * 300, "--json"], b"", 2, "text 1 has 302 tokens"),
        ([], b"", 2, "TEXT: is missing"),
        (["-f", "/nowhere"], b"", 2, "/nowhere cannot be read"),
        ([], b"\xff\xfe", 2, "is not UTF-8 text (byte 0)"),
        (["--threads", "0", "x"], b"", 2, "threads: must be between 1 and 1024"),
        (["--threads", "few", "x"], b"", 2, "Invalid value for '--threads'"),
        (["-m", "minilmm", "x"], b"", 1, "Did you mean minilm"),
        (["-m", "{tiny}", "x", ""], b"", 2, "texts: text 1 has no tokens"),
    ],
)
def test_wrong_things_are_named(model: str, arguments: list[str], stdin: bytes, status: int, said: str) -> None:
    done = heedful(*(argument.replace("{tiny}", model) for argument in arguments), stdin=stdin)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from heedful.cli.main import run\n"
        "status = run(sys.argv[1:])\n"
        "sys.exit(3 if 'torch' in sys.modules else status)\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_without_torch_the_remedy_is_named(model: str) -> None:
    done = without_torch("embed", "-m", model, "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'heedful[torch]'" in done.stderr


@pytest.mark.skipif(not native.is_built(), reason="no compiler: the native kernels are not built")
def test_a_bert_needs_no_torch(minilm_dir: Path) -> None:
    done = without_torch("embed", "-m", str(minilm_dir), "a text")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["embedding"]) == 384


def test_show_describes_an_encoder(minilm_dir: Path) -> None:
    command = [sys.executable, "-m", "heedful", "show", str(minilm_dir)]
    table = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "256 tokens of a context of 512" in table
    assert "384 numbers, pooled by mean, of length 1" in table
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True).stdout
    facts = json.loads(shown)
    assert (facts["layers"], facts["heads"], facts["head_dim"], facts["max_tokens"]) == (6, 12, 32, 256)
    assert facts["visits_per_text"]["256"] == 6 * 12 * 256 * 256
