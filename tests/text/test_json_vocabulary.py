"""tokenizer.json and its neighbours. Judge: golden ids, and the `tokenizers` package reading a whole chat at once."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from heedful.errors import TokenizerError
from heedful.text.chat import Segment
from heedful.text.tokenizer import Tokenizer

SPACE = "▁"


def write(folder: Path, engine: tokenizers.Tokenizer, **settings: Mapping[str, Any]) -> Path:
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    engine.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def llama_like(*, scheme: str = "first") -> tokenizers.Tokenizer:
    """SentencePiece BPE as newer Llama 2 and Mistral files hold it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPACE, "h", "i", "<", "s", ">", "hi", f"{SPACE}hi"]
    merges = [("h", "i"), (SPACE, "hi")]
    engine = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    replace = decoders.Replace(SPACE, " ")
    engine.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.add_special_tokens([AddedToken(p, normalized=False) for p in ("<unk>", "<s>", "</s>", "[INST]")])
    engine.add_tokens([AddedToken("<tool>", normalized=False)])
    return engine


def byte_level_like() -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2 and ModernBERT have it, with a token that swallows white space on both sides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>", AddedToken("[MASK]", lstrip=True, rstrip=True, normalized=False)])
    return engine


def test_minilm_golden(minilm_dir: Path, golden_json: Callable[[str], Any]) -> None:
    tokenizer = Tokenizer.from_file(minilm_dir / "tokenizer.json")
    cases = golden_json("encoders/minilm/wordpiece.json")["strings"]
    assert len(cases) == 177
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"][1:-1]


def test_minilm_facts(minilm_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(minilm_dir / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.id_of("[SEP]")) == (30522, None, 102)
    assert len(tokenizer.encode("word " * 600)) == 602  # the file asks for cutting and padding to 128
    assert tokenizer.decode(tokenizer.encode("Hello, unaffable world!")) == "hello, unaffable world!"
    assert 101 not in tokenizer.encode("[CLS] [SEP]", add_bos=False)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    "parts",
    [
        ["hi"],
        ["hi hi", "<s>", "hi"],
        ["[INST]", " hi ", "[INST]", "hi<tool>hi", "</s>"],
        ["<s>", "<s>", " hi\n"],
    ],
)
def test_segments_encode_as_the_whole_chat_does(tmp_path: Path, scheme: str, parts: list[str]) -> None:
    path = write(tmp_path, llama_like(scheme=scheme))
    segments = [Segment(part, part in ("<s>", "</s>", "[INST]")) for part in parts]
    whole = tokenizers.Tokenizer.from_file(str(path)).encode("".join(parts), add_special_tokens=False).ids
    assert Tokenizer.from_file(path).encode_segments(segments, add_bos=False) == whole


def test_tokens_that_swallow_white_space_do_so_in_segments(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level_like())
    segments = [Segment("a  ", False), Segment("[MASK]", True), Segment(" \n b", False), Segment("[MASK]", True)]
    whole = tokenizers.Tokenizer.from_file(str(path)).encode("a  [MASK] \n b[MASK]").ids
    assert Tokenizer.from_file(path).encode_segments(segments) == whole
    assert len(whole) == 4


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_bos_of_the_post_processor(tmp_path: Path, scheme: str) -> None:
    tokenizer = Tokenizer.from_file(write(tmp_path, llama_like(scheme=scheme)))
    assert [tokenizer.encode("hi", add_bos=wish) for wish in (None, True, False)] == [[1, 266], [1, 266], [266]]
    assert tokenizer.encode_segments([Segment("<s>", True), Segment("hi", False)])[0:2] != [1, 1]


@pytest.mark.parametrize(("add_bos_token", "prefix"), [(True, [1]), (False, []), (None, [1])])
def test_add_bos_token_of_the_settings_wins(tmp_path: Path, add_bos_token: bool | None, prefix: list[int]) -> None:
    settings = {"bos_token": "<s>", "add_bos_token": add_bos_token}
    tokenizer = Tokenizer.from_file(write(tmp_path, llama_like(), tokenizer_config=settings))
    assert tokenizer.encode("") == prefix


def test_add_bos_token_without_a_post_processor(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True}
    tokenizer = Tokenizer.from_file(write(tmp_path, byte_level_like(), tokenizer_config=settings))
    assert tokenizer.encode("") == [256]


def test_eos_ids_of_every_neighbour(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        llama_like(),
        special_tokens_map={"eos_token": {"content": "[INST]"}, "bos_token": "<s>"},
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "bos_token_id": 5},
    )
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.eos_ids == {2, 267, 7, 8, 9}  # 2 is </s>, a known end token
    assert tokenizer.bos_id == 1


@pytest.mark.parametrize(
    ("config", "jinja", "source"),
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": "one"}, "of the file", "of the file"),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, None, None),
        ({}, None, None),
    ],
)
def test_where_the_chat_template_comes_from(
    tmp_path: Path, config: dict[str, Any], jinja: str | None, source: str | None
) -> None:
    path = write(tmp_path, llama_like(), tokenizer_config=config)
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    template = Tokenizer.from_file(path).chat_template
    assert (template and template.source) == source


def test_the_template_knows_bos_and_eos(tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}hi{{ eos_token }}"}
    template = Tokenizer.from_file(write(tmp_path, llama_like(), tokenizer_config=settings)).chat_template
    assert template is not None
    segments = template.render([{"role": "user", "content": ""}])
    assert segments == [Segment("<s>", True), Segment("hi", False), Segment("</s>", True)]


def test_unigram_finds_no_control_token_in_plain_text(tmp_path: Path) -> None:
    """As in DeBERTa's file: "[CLS]" is a piece of the vocabulary, with the best score of all."""
    chars = [(c, -9.0) for c in f"{SPACE}[]CLSa"]
    engine = tokenizers.Tokenizer(models.Unigram([("[UNK]", 0.0), ("[CLS]", 0.0), *chars], unk_id=0))
    engine.normalizer = normalizers.NFKC()
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    engine.decoder = decoders.Metaspace(prepend_scheme="always")
    engine.add_special_tokens(["[UNK]", "[CLS]"])
    tokenizer = Tokenizer.from_file(write(tmp_path, engine))
    assert 1 in engine.encode("a[CLS]").ids
    for text in ("a[CLS]", "a［CLS］"):  # the second one is normalised to the first
        ids = tokenizer.encode(text)
        assert 1 not in ids
        assert tokenizer.decode(ids) == "a[CLS]"
    assert tokenizer.encode("Q")[-1] == 0


def test_a_control_token_of_one_character_is_that_character(tmp_path: Path) -> None:
    """There is no other way to spell it."""
    engine = byte_level_like()
    engine.add_special_tokens(["x"])
    tokenizer = Tokenizer.from_file(write(tmp_path, engine))
    assert tokenizer.decode(tokenizer.encode("a xylophone", add_bos=False), skip_special=False) == "a xylophone"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write(tmp_path_factory.mktemp("byte_level"), byte_level_like()))


@given(ids=st.lists(st.integers(0, 257), max_size=20), skip_special=st.booleans())
def test_byte_level_decoding_equals_the_package(byte_level: Tokenizer, ids: list[int], skip_special: bool) -> None:
    stream = byte_level.stream(skip_special=skip_special)
    streamed = "".join([*map(stream.push, ids), stream.flush()])
    decoded = byte_level.decode(ids, skip_special=skip_special)
    assert streamed == decoded == byte_level_like().decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([266, 265], "hihi"),
        ([259, 266], " hi"),
        ([1, 266, 2], "hi"),
        ([3 + 0xE2, 3 + 0x82, 1, 3 + 0xAC], "€"),
        ([3 + 0xE2, 265], "\ufffdhi"),
        ([265, 10_000, 2**40, -1], "hi"),
    ],
)
def test_sentencepiece_decoding(tmp_path: Path, ids: list[int], text: str) -> None:
    tokenizer = Tokenizer.from_file(write(tmp_path, llama_like()))
    stream = tokenizer.stream()
    assert tokenizer.decode(ids) == "".join(map(stream.push, ids)) + stream.flush() == text


def test_an_unknown_decoder_is_refused_when_decoding(tmp_path: Path) -> None:
    engine = llama_like()
    engine.decoder = decoders.CTC()
    tokenizer = Tokenizer.from_file(write(tmp_path, engine))
    assert tokenizer.encode("hi", add_bos=False) == [266]
    with pytest.raises(TokenizerError, match="CTC"):
        tokenizer.decode([266])


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"not json", b'{"version":"1.0","model":{"type":"Magic"}}', b"\xff" * 40]
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read: No such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_neighbour_that_is_malformed(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, llama_like())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        Tokenizer.from_file(path)
