"""`heedful generate`, `show`, `doctor`, `bench` and the command line itself, as processes on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest

from heedful import LLM
from heedful.cli.doctor import _decode_bounds
from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), sliding_window=64))


def heedful(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"input": "", "text": True, "capture_output": True, "timeout": 120, **options}
    return subprocess.run([sys.executable, "-m", "heedful", *arguments], check=False, **options)


def test_text_goes_to_stdout_and_nothing_else_when_piped(model: str) -> None:
    done = heedful("generate", "-m", model, "--max-tokens", "5", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == LLM(model).generate("hello", max_tokens=5).text + "\n"


def test_the_receipt_line_on_request(model: str) -> None:
    done = heedful("generate", "-m", model, "--max-tokens", "5", "--receipt", "hello")
    assert done.stderr.startswith("5 in (0 cached) · 5 out · ")
    assert " visits of " in done.stderr


def test_json(model: str) -> None:
    done = heedful("generate", "-m", model, "--max-tokens", "5", "--json", "--logprobs", "2", "a" * 100)
    found = json.loads(done.stdout)
    assert set(found) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "receipt", "logprobs"}
    assert len(found["token_ids"]) == len(found["logprobs"]) == 5
    assert len(found["logprobs"][0]["top"]) == 2
    visits = found["receipt"]["visits"]
    assert visits["dense"] == visits["total"] + sum(visits["saved"].values())
    assert visits["saved"]["window"] > 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (["hello"], "", "hello"),
        (["hello"], "not read", "hello"),
        ([], "from a pipe\n", "from a pipe"),
        (["-"], "from a pipe\r\n", "from a pipe"),
        (["-f", "{file}"], "", "from a file"),
        (["Read:", "-f", "{file}"], "", "Read:\n\nfrom a file"),
        (["Read:", "-f", "-"], "a pipe", "Read:\n\na pipe"),
    ],
)
def test_where_a_prompt_comes_from(model: str, tmp_path: Path, arguments: list[str], stdin: str, prompt: str) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n")
    arguments = [argument.format(file=tmp_path / "prompt.txt") for argument in arguments]
    done = heedful("generate", "-m", model, "--max-tokens", "1", "--json", *arguments, input=stdin)
    assert json.loads(done.stdout)["prompt_token_ids"] == LLM(model).tokenizer.encode(prompt)


def test_chat_system_and_messages_render_the_same_conversation(model: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    expected = LLM(model).encode_chat(messages)
    for arguments in (["--system", "be brief", "hi"], ["--messages", str(tmp_path / "m.json")]):
        done = heedful("generate", "-m", model, "--max-tokens", "1", "--json", *arguments)
        assert json.loads(done.stdout)["prompt_token_ids"] == expected
    piped = heedful(
        "generate", "-m", model, "--max-tokens", "1", "--json", "--messages", "-", input=json.dumps(messages)
    )
    assert json.loads(piped.stdout)["prompt_token_ids"] == expected


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["--max-tokens", "0", "x"], "", "max_tokens: must be at least 1"),
        (["--max-tokens", "few", "x"], "", "Invalid value for '--max-tokens'"),
        (["--temprature", "1", "x"], "", "No such option: --temprature"),
        (["--logprobs", "3", "x"], "", "--logprobs: is shown in JSON only"),
        ([], "", "PROMPT: is empty"),
        (["-f", "/nowhere"], "", "/nowhere cannot be read"),
        ([], b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (["--messages", "-"], "{", "is not JSON"),
        (["--messages", "-"], "[]", "holds no list"),
        (["--messages", "-", "x"], "[]", "holds the whole conversation"),
        (["x" * 600], "", "the prompt has 600 tokens and the context is 512"),
        (["--kv", "q2", "x"], "", "kv: 'q2' is not a format"),
        (["--weights", "q3", "x"], "", "weights: 'q3' is not known"),
    ],
)
def test_wrong_things_are_named_and_leave_with_2(
    model: str, arguments: list[str], stdin: str | bytes, said: str
) -> None:
    options = {"text": False, "input": stdin} if isinstance(stdin, bytes) else {"input": stdin}
    done = heedful("generate", "-m", model, *arguments, **options)
    stderr = done.stderr if isinstance(done.stderr, str) else done.stderr.decode()
    assert done.returncode == 2, stderr
    assert said in stderr
    assert "Traceback" not in stderr


def test_truncate_says_what_went(model: str) -> None:
    done = heedful("generate", "-m", model, "--truncate", "--max-tokens", "12", "--json", "x" * 600)
    assert json.loads(done.stdout)["dropped_tokens"] == 100
    assert "100 prompt tokens were cut" in done.stderr


@pytest.mark.parametrize("content", ["no model", "GGUF"])
def test_files_that_are_no_model(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.txt"
    path.write_text(content)
    for verb in ("show", "generate"):
        done = heedful(verb, *(["-m", str(path), "x"] if verb == "generate" else [str(path)]))
        assert done.returncode == 1
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr


def test_an_encoder_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    environment = {**os.environ, "HEEDFUL_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = heedful("generate", "-m", "minilm", "x", env=environment)
    assert done.returncode == 1
    assert "minilm is an encoder" in done.stderr


def test_a_reader_that_leaves_and_a_full_device(model: str) -> None:
    command = f"{sys.executable} -m heedful generate -m {model} --max-tokens 300 x"
    assert subprocess.run(["bash", "-c", f"{command} | head -c 1"], capture_output=True, check=True).stderr == b""
    full = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "No space left" in full.stderr
    closed = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_on_a_terminal_the_receipt_follows_and_ctrl_c_leaves_at_once(model: str) -> None:
    child = pexpect.spawn(sys.executable, ["-m", "heedful", "generate", "-m", model, "--max-tokens", "5", "hello"])
    child.expect("5 in .* visits of ")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    child = pexpect.spawn(sys.executable, ["-m", "heedful", "generate", "-m", model, "--max-tokens", "400", "hello"])
    child.expect(r"\S")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus in (0, 130)  # 0: it was done before
    assert b"Traceback" not in child.before


def test_show_describes_a_model(model: str) -> None:
    facts = json.loads(heedful("show", model, "--json").stdout)
    assert (facts["layers"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (2, 4, 2, 8)
    assert facts["windows"] == {"64": 2}
    assert facts["kv_bytes_per_1000_tokens"]["f16"] == 1000 * 2 * 2 * 2 * 8 * 2
    assert facts["visits_per_token"]["512"] == 2 * 4 * 64
    table = heedful("show", model).stdout
    assert "2 (attention window: 2 × 64)" in table


def test_doctors_bound_is_the_memorys_speed_over_the_files_size(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(bytes(1000))

    def fetched(name: str, file: str) -> Any:
        return SimpleNamespace(record=SimpleNamespace(name=name), path=tmp_path / file)

    models = [fetched("a", "a.gguf"), fetched("gone", "b.gguf"), fetched("folder", "")]
    assert _decode_bounds(models, bandwidth=5e6) == {"a": 5000.0}


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    environment = {**os.environ, "HEEDFUL_CACHE": str(tmp_path)}
    facts = json.loads(heedful("doctor", "--json", "--quick", env=environment).stdout)
    assert facts["threads"] >= 1
    assert facts["models"] == []
    assert facts["advice"] == ["No model is fetched yet: heedful pull"]
    shown = heedful("doctor", env=environment).stdout
    assert "GB/s measured" in shown


def test_bench_prints_and_saves_the_share_of_the_limit(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    done = heedful("bench", model, "--context", "20", "--json", "--save", str(saved))
    case = json.loads(done.stdout)["cases"][0]
    assert case["context"] == 20
    assert case["decode_tok_s"] > 0
    assert 0 < case["share_of_limit"] < 1
    assert json.loads(saved.read_text()) == json.loads(done.stdout)


def test_help_names_every_verb() -> None:
    done = heedful("--help")
    for verb in ("generate", "chat", "cost", "show", "pull", "models", "doctor", "bench"):
        assert verb in done.stdout
