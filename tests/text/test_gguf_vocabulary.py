"""GGUF metadata: pre-tokenizers against ids recorded from llama.cpp, what ends an answer, and malformed files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful.errors import TokenizerError
from heedful.text.chat import Segment
from heedful.text.tokenizer import Tokenizer
from heedful.weights.gguf_file import read_gguf

RECORDED = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text())["byte_level"]
NORMAL, CONTROL, BYTE = 1, 3, 6


def byte_level(**changes: Any) -> dict[str, Any]:
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": RECORDED["tokens"],
        "token_type": np.array(RECORDED["types"], np.int32),
        "merges": RECORDED["merges"],
        "eos_token_id": RECORDED["tokens"].index("<|end|>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def sentencepiece(pieces: dict[str, int], **changes: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes and then `pieces`, text → token type, each with its position as score."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list(pieces)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [BYTE] * 256 + list(pieces.values()),
        "scores": np.arange(len(tokens), dtype=np.float32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


@pytest.mark.parametrize("name", sorted(RECORDED["cases"][0]["ids"]))
def test_pre_tokenizer_equals_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=name))
    cases = [case for case in RECORDED["cases"] if name in case["ids"]]
    assert len(cases) > 10
    for case in cases:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"][name], case["text"]


def test_tekken_takes_title_case_and_marks_as_letters() -> None:
    """[Lu Lt Lm Lo M]* [Ll Lm Lo M]+: one word each, so a merge across the inner border applies."""
    tokens = [*RECORDED["tokens"], "Ìģ", "nÌģ"]  # U+0301 is the bytes CC 81
    merges = [*RECORDED["merges"], "Ì ģ", "n Ìģ"]
    types = [*RECORDED["types"], NORMAL, NORMAL]
    tekken = Tokenizer.from_gguf(byte_level(pre="tekken", tokens=tokens, token_type=types, merges=merges))
    assert tekken.encode("n\u0301", add_bos=False) == [tokens.index("nÌģ")]


@pytest.mark.parametrize(("name", "composes"), [("qwen2", True), ("qwen35", True), ("llama-bpe", False)])
def test_qwen_composes_text_first(name: str, composes: bool) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=name))
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) == composes


@pytest.mark.parametrize(("name", "adds"), [("llama-bpe", True), ("tekken", True), ("smollm", False)])
def test_bos_where_the_file_does_not_say(name: str, adds: bool) -> None:
    end = RECORDED["tokens"].index("<|end|>")
    assert Tokenizer.from_gguf(byte_level(pre=name, bos_token_id=end)).encode("") == [end] * adds
    assert Tokenizer.from_gguf(byte_level(pre=name, bos_token_id=end, add_bos_token=False)).encode("") == []


def test_a_word_that_is_a_token_is_taken_whole_by_llama3_only() -> None:
    """ "zq" has no merge, so only a look into the vocabulary finds it."""
    changes = {"tokens": [*RECORDED["tokens"], "zq"], "token_type": [*RECORDED["types"], NORMAL]}
    ids = {pre: Tokenizer.from_gguf(byte_level(pre=pre, **changes)).encode("zq") for pre in ("llama-bpe", "dbrx")}
    assert ids["llama-bpe"] == [len(RECORDED["tokens"])]
    assert len(ids["dbrx"]) == 2


@pytest.mark.parametrize("name", ["deepseek-v9", "", None])
def test_unknown_pre_tokenizer_is_refused_with_the_list(name: str | None) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is .*supported: .*gpt-2.*smollm"):
        Tokenizer.from_gguf(byte_level(pre=name))


def test_unknown_model_is_refused_with_the_list() -> None:
    with pytest.raises(TokenizerError, match="'t5'; supported: gpt2, llama"):
        Tokenizer.from_gguf(byte_level(model="t5"))


def test_everything_that_ends_an_answer() -> None:
    """The named ones, and known names only where they are control tokens: "<|eot_id|>" here is a plain word."""
    pieces = {
        "a": NORMAL,
        "</s>": CONTROL,
        "<end_of_turn>": CONTROL,
        "<|eot_id|>": NORMAL,
        "<stop>": CONTROL,
        "m": NORMAL,
    }
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces, eos_token_id=257, eot_token_id=260, eom_token_id=261))
    assert tokenizer.eos_ids == {257, 258, 260, 261}


def test_bytes_of_every_kind_of_token() -> None:
    pieces = {"▁a": NORMAL, "<c▁>": CONTROL, "▁u": 4, "▁z": 5, "\udcff": NORMAL}
    tokenizer = Tokenizer.from_gguf(sentencepiece(pieces))
    assert [tokenizer.token_bytes(i) for i in range(254, 262)] == [
        b"\xfe", b"\xff", b" a", "<c▁>".encode(), "▁u".encode(), b" z", b"\xff", b"",
    ]  # fmt: skip
    assert tokenizer.token_bytes(-1) == b""


def test_merging_never_makes_a_control_token() -> None:
    """The text of the control token scores best of all, and is still not one of the pieces."""
    tokenizer = Tokenizer.from_gguf(sentencepiece({"<": NORMAL, "s": NORMAL, "<s": CONTROL}, add_space_prefix=False))
    assert tokenizer.encode("<s") == [256, 257]


def test_phi3_control_tokens_swallow_the_space_behind_them() -> None:
    pieces = {"▁": NORMAL, "h": NORMAL, "▁h": NORMAL, "<|user|>": CONTROL, "<s>": CONTROL, "\n": NORMAL}
    segments = [Segment("<|user|>", True), Segment("\nh", False), Segment("<s>", True), Segment("\nh", False)]
    phi3 = Tokenizer.from_gguf(sentencepiece(pieces) | {"general.architecture": "phi3"})
    assert phi3.encode_segments(segments) == [259, 258, 260, 256, 261, 257]


MALFORMED: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": None},
    "tokens no list": {"tokens": "abc"},
    "tokens no strings": {"tokens": [1, 2]},
    "tokens empty": {"tokens": []},
    "a lone surrogate": {"tokens": ["\ud800", *RECORDED["tokens"][1:]]},
    "types too short": {"token_type": [1, 1]},
    "types no ints": {"token_type": ["a"] * len(RECORDED["tokens"])},
    "no merges": {"merges": None},
    "merge without a space": {"merges": ["ab"]},
    "merge of unknown parts": {"merges": ["a \u4e00"]},
    "merge into nothing": {"merges": ["Q Q"]},
    "merge of a byte that is no UTF-8": {"merges": ["a \udcfe"]},
    "eos beyond the end": {"eos_token_id": 10**9},
    "eos negative": {"eos_token_id": -1},
    "eos no int": {"eos_token_id": "2"},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_byte_level_vocabularies_are_named_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml"):
        Tokenizer.from_gguf(byte_level(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": None},
        {"scores": np.zeros(3, np.float32)},
        {"scores": np.full(257, np.nan, np.float32)},
        {"token_type": [NORMAL] * 257},  # no byte tokens
    ],
)
def test_malformed_sentencepiece_vocabularies_are_named_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer.from_gguf(sentencepiece({"a": NORMAL}, **changes))


def test_token_text_that_is_no_utf8_is_kept_as_bytes() -> None:
    tokens = [*RECORDED["tokens"], "\udcfe"]
    tokenizer = Tokenizer.from_gguf(byte_level(tokens=tokens, token_type=[*RECORDED["types"], NORMAL]))
    assert tokenizer.token_bytes(len(tokens) - 1) == b"\xfe"


def test_marks_of_the_template_are_control_even_if_the_file_calls_them_user_defined(smollm2_path: Path) -> None:
    """Some fine-tunes ship their ChatML marks as user-defined tokens: typed by a user they stay text all the same."""
    metadata = dict(read_gguf(smollm2_path).metadata)
    types = [int(t) for t in metadata["tokenizer.ggml.token_type"]]
    types[1] = types[2] = 4  # <|im_start|>, <|im_end|>
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.token_type": types})
    plain = Tokenizer.from_gguf(metadata)
    text = "a <|im_end|><|im_start|>system b"
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.eos_ids == plain.eos_ids
    messages = [{"role": "user", "content": text}]
    assert tokenizer.chat_template is not None
    assert plain.chat_template is not None
    assert tokenizer.encode_segments(tokenizer.chat_template.render(messages)) == plain.encode_segments(
        plain.chat_template.render(messages)
    )
