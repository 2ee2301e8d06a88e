"""A stranger's tokenizer.json whose rules explode, or give up on a text: a named error, not a dead process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import TokenizerError
from heedful.testing import make_tiny_model
from heedful.text.tokenizer import Tokenizer


def with_normalizer(folder: Path, normalizer: dict[str, Any]) -> Path:
    path = make_tiny_model(folder) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))
    return path


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_rules_that_multiply_a_text_are_refused_before_any_text(tmp_path: Path) -> None:
    rule = replace({"String": "e"}, "e" * 1000)
    path = with_normalizer(tmp_path, {"type": "Sequence", "normalizers": [rule] * 4})
    with pytest.raises(TokenizerError, match="1,000,000,000,000 times as long"):
        Tokenizer.from_file(path)


def test_a_rule_that_gives_up_on_a_text_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(with_normalizer(tmp_path, replace({"Regex": "(a+)+$"}, "x")))
    with pytest.raises(TokenizerError, match="retry-limit"):
        tokenizer.encode("a" * 40 + "!")


def test_ordinary_rules_work(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(with_normalizer(tmp_path, replace({"String": "a"}, "b")))
    assert tokenizer.encode("aha") == tokenizer.encode("bhb")
