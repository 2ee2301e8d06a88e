"""Ids against golden (llama.cpp), decoding against the bytes themselves, whole and token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.errors import BadParameter
from heedful.testing import make_tiny_model
from heedful.text.chat import Segment
from heedful.text.tokenizer import Tokenizer
from heedful.weights.gguf_file import read_gguf

GoldenJson = Callable[[str], Any]
MODELS = ("smollm2", "gemma3_270m")


@pytest.fixture(scope="module")
def tokenizers(smollm2_path: Path, gemma_path: Path) -> dict[str, Tokenizer]:
    paths = {"smollm2": smollm2_path, "gemma3_270m": gemma_path}
    return {name: Tokenizer.from_gguf(read_gguf(path).metadata) for name, path in paths.items()}


@pytest.mark.parametrize("model", MODELS)
def test_awkward_strings(model: str, tokenizers: dict[str, Tokenizer], golden_json: GoldenJson) -> None:
    tokenizer = tokenizers[model]
    cases = golden_json(f"{model}/tokenizer_cases.json")["strings"]
    assert len(cases) == 177
    for case in cases:
        ids = tokenizer.encode(case["text"], add_bos=False)
        assert ids == case["ids"], case["text"]
        original = bytes.fromhex(case["decoded_hex"]) if "decoded_hex" in case else case["text"].encode()
        assert tokenizer.decode(ids).encode() == original


@pytest.mark.parametrize("model", MODELS)
def test_prompts_and_passage(model: str, tokenizers: dict[str, Tokenizer], golden_json: GoldenJson) -> None:
    tokenizer = tokenizers[model]
    cases = [case for case in golden_json(f"{model}/cases.json")["cases"] if case["kind"] == "text"]
    assert len(cases) >= 5
    for case in [*cases, golden_json(f"{model}/passage.json")]:
        assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("model", MODELS)
def test_continuations(model: str, tokenizers: dict[str, Tokenizer], golden_json: GoldenJson) -> None:
    """Golden bytes of 32 greedy tokens, control tokens among them, and where the answer would end."""
    tokenizer = tokenizers[model]
    for case in golden_json(f"{model}/cases.json")["cases"]:
        ids = case["greedy_ids"]
        raw = bytes.fromhex(case["greedy_bytes_hex"])
        assert b"".join(map(tokenizer.token_bytes, ids)) == raw
        assert tokenizer.decode(ids, skip_special=False) == raw.decode("utf-8", "replace")
        ends = [i for i, token_id in enumerate(ids) if token_id in tokenizer.eos_ids]
        assert next(iter(ends), None) == case["greedy_first_stop_index"]


def test_facts_of_the_real_models(tokenizers: dict[str, Tokenizer]) -> None:
    smollm2, gemma = tokenizers["smollm2"], tokenizers["gemma3_270m"]
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, {0, 2})
    assert (gemma.vocab_size, gemma.bos_id, gemma.eos_ids) == (262144, 2, {1, 106})
    assert (smollm2.id_of("<|im_start|>"), smollm2.id_of("a"), smollm2.id_of("<bos>")) == (1, None, None)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_bytes(1) == b"<|im_start|>"
    assert gemma.chat_template is None


def test_add_bos(tokenizers: dict[str, Tokenizer]) -> None:
    smollm2, gemma = tokenizers["smollm2"], tokenizers["gemma3_270m"]
    assert [gemma.encode("a", add_bos=wish) for wish in (None, True, False)] == [[2, 236746], [2, 236746], [236746]]
    assert [smollm2.encode("a", add_bos=wish) for wish in (None, True, False)] == [[81], [1, 81], [81]]


def test_bos_is_not_added_to_a_chat_that_begins_with_it(tokenizers: dict[str, Tokenizer]) -> None:
    gemma = tokenizers["gemma3_270m"]
    assert gemma.encode_segments([Segment("<bos>", True), Segment("a", False)]) == [2, 236746]
    assert gemma.encode_segments([Segment("a", False)]) == [2, 236746]
    assert gemma.encode_segments([Segment("<bos>", False)], add_bos=False) == [236820, 46757, 236813]


def test_plain_segments_in_a_row_are_one_text(tokenizers: dict[str, Tokenizer]) -> None:
    smollm2 = tokenizers["smollm2"]
    assert smollm2.encode_segments([Segment("hello w", False), Segment("orld", False)]) == smollm2.encode("hello world")


def test_a_segment_that_is_no_control_token_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(BadParameter, match="'<bos>' is no control token"):
        tokenizers["smollm2"].encode_segments([Segment("<bos>", True)])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udfff", "\ufffd"),
        ("\ud83d\ude00 \udc80\ud800", "😀 \ufffd\ufffd"),  # a pair is a character
    ],
)
def test_lone_surrogates_become_the_replacement_character(
    model: str, text: str, decoded: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[model]
    assert tokenizer.decode(tokenizer.encode(text)) == decoded
    assert tokenizer.decode(tokenizer.encode_segments([Segment(text, False)])) == decoded


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", ["x" * 200_000, "\n" * 200_000, "\0" * 1000, "é😀" * 20_000, "<|" * 50_000])
def test_long_odd_texts_come_back(model: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers[model].decode(tokenizers[model].encode(text)) == text


SCRIPTS = st.text(st.sampled_from("ab \n\t0é한한글👩🔬\u200d🇯🇵👍🏽❤\ufe0f\u0301漢\u2028\xa0"), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(model=st.sampled_from(MODELS), text=SCRIPTS)
def test_text_comes_back_in_whole_characters(model: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[model]
    stream = tokenizer.stream()
    chunks = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(chunks)
    assert "".join(chunks) == text
    assert stream.flush() == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    model=st.sampled_from(MODELS),
    ids=st.lists(st.one_of(st.integers(0, 400), st.integers(0, 48_000), st.integers(250_000, 270_000)), max_size=30),
    skip_special=st.booleans(),
)
def test_streaming_any_ids_equals_decoding_them(
    model: str, ids: list[int], skip_special: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[model]
    stream = tokenizer.stream(skip_special=skip_special)
    streamed = "".join([stream.push(token_id) for token_id in ids]) + stream.flush()
    kept = [token_id for token_id in ids if not (skip_special and token_id in tokenizer.special_ids)]
    assert streamed == b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", "replace")
    assert streamed == tokenizer.decode(ids, skip_special=skip_special)


def test_a_leading_space_belongs_to_sentencepiece_only_at_the_start(gemma_path: Path) -> None:
    metadata = read_gguf(gemma_path).metadata | {"tokenizer.ggml.add_space_prefix": True}
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(" Hello world")
    assert tokenizer.decode(ids) == " Hello world"
    hello = tokenizer.encode("Hello", add_bos=False)
    assert tokenizer.decode(hello) == "Hello"
    assert tokenizer.decode(hello, continues=True) == " Hello"
    stream = tokenizer.stream()
    assert [stream.push(i) for i in [2, *hello, *hello]] == ["", "Hello", " Hello"]


def test_some_control_tokens_can_be_kept(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(make_tiny_model(tmp_path) / "tokenizer.json")
    start, end = tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>")
    assert start is not None
    assert end is not None
    ids = [start, *tokenizer.encode("a", add_bos=False), end]
    assert tokenizer.stream().push_all(ids) == "a"
    assert tokenizer.stream(kept_special=frozenset({start})).push_all(ids) == "<|im_start|>a"
    assert (
        tokenizer.stream(skip_special=False, kept_special=frozenset({start})).push_all(ids) == "<|im_start|>a<|im_end|>"
    )
