"""--adapter of generate, chat and serve: what answers, what the receipt says, and what is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from heedful import LLM
from heedful.cli.conversation import receipt_from_dict
from heedful.cli.main import run
from heedful.errors import BadParameter
from heedful.testing import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_adapter(tmp_path_factory.mktemp("adapter")))


def heedful(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heedful", *arguments]
    return subprocess.run(command, input=text, text=True, capture_output=True, timeout=120, check=False)


def test_generate_answers_with_it(model: str, adapter: str) -> None:
    llm = LLM(model, adapters={"it": Path(adapter)})
    plain, wanted = (llm.generate("hello", max_tokens=6, adapter=name) for name in (None, "it"))
    done = heedful("generate", "-m", model, "--adapter", adapter, "--max-tokens", "6", "--json", "hello")
    found = json.loads(done.stdout)
    assert tuple(found["token_ids"]) == wanted.token_ids != plain.token_ids
    assert found["receipt"]["adapter"]["name"] == adapter
    assert wanted.receipt.adapter is not None
    assert found["receipt"]["adapter"]["sha256"] == wanted.receipt.adapter.sha256


def test_a_kept_receipt_still_says_which(model: str, adapter: str) -> None:
    receipt = LLM(model, adapters={"it": adapter}).generate("hello", max_tokens=2, adapter="it").receipt
    assert receipt.adapter is not None
    assert receipt_from_dict(json.loads(json.dumps(receipt.to_dict()))) == receipt


def test_chat_answers_with_it(model: str, adapter: str) -> None:
    llm = LLM(model, adapters={"it": adapter})
    asked = [{"role": "user", "content": "hello"}]
    wanted = llm.chat(asked, max_tokens=6, adapter="it").text
    how = ("--no-history", "--temperature", "0", "--max-tokens", "6")
    done = heedful("chat", "-m", model, "--adapter", adapter, *how, text="hello\n")
    assert done.stdout.strip() == wanted.strip() != llm.chat(asked, max_tokens=6).text.strip()


def test_what_cannot_be_one_is_refused_in_a_line_or_two(
    model: str, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, problem in (
        (("generate", "-m", model, "--adapter", "nowhere", "a"), 1, "no adapter is at 'nowhere'"),
        (("generate", "-m", model, "--adapter", model, "a"), 1, "has no adapter_config.json"),
        (("generate", "-m", model, "--adapter", "", "a"), 2, "'' is no name"),
        (("serve", "-m", model, "--port", "0", "--adapter", adapter), 2, "is not NAME=DIR"),
        (("serve", "-m", model, "--port", "0", "--adapter", "law="), 2, "is not NAME=DIR"),
        (("serve", "-m", model, "--port", "0", "--adapter", f"{model}={adapter}"), 2, "two models would be called"),
    ):
        assert run(arguments) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("heedful: "), arguments
        assert problem in said.err


def test_serve_says_so_before_it_serves(model: str, tmp_path: Path) -> None:
    done = heedful("serve", "-m", model, "--port", "0", "--no-history", "--adapter", f"law={tmp_path}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"heedful: {tmp_path} has no adapter_config.json")


@pytest.mark.parametrize("adapters", [{"": "x"}, {"a": 5}, {7: "x"}])
def test_names_and_sources_are_checked(model: str, adapters: dict[str, str]) -> None:
    with pytest.raises(BadParameter, match="adapters"):
        LLM(model, adapters=adapters)


def test_a_name_that_was_not_loaded(model: str, adapter: str) -> None:
    with pytest.raises(BadParameter, match="none is called 'verse'") as refused:
        LLM(model, adapters={"law": adapter}).generate("a", adapter="verse")
    assert "law" in refused.value.remedy
