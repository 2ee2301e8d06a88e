"""Tokenizers from GGUF keys to tokenizer.json and back: the ids that llama.cpp gave are the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful.errors import CannotExport
from heedful.text.gguf_to_json import tokenizer_files
from heedful.text.json_to_gguf import SAMPLES, gguf_tokenizer_keys
from heedful.text.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text())["byte_level"]
GOLDEN = Path(__file__).parent.parent / "golden"


def byte_level(pre: str, **changes: Any) -> dict[str, Any]:
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": RECORDED["tokens"],
        "token_type": np.array(RECORDED["types"], np.int32),
        "merges": RECORDED["merges"],
        "eos_token_id": RECORDED["tokens"].index("<|end|>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def written(keys: dict[str, Any], folder: Path) -> Path:
    for name, content in tokenizer_files(keys).items():
        (folder / name).write_bytes(content)
    return folder / "tokenizer.json"


@pytest.mark.parametrize("pre", sorted(RECORDED["cases"][0]["ids"]))
def test_files_encode_as_llama_cpp_did(pre: str, tmp_path: Path) -> None:
    path = written(byte_level(pre), tmp_path)
    tokenizer = Tokenizer.from_file(path)
    cases = [case for case in RECORDED["cases"] if pre in case["ids"]]
    assert len(cases) > 10
    for case in cases:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"][pre], case["text"]
    keys = gguf_tokenizer_keys(path, size=len(RECORDED["tokens"]))
    assert keys["tokenizer.ggml.tokens"] == RECORDED["tokens"]
    assert keys["tokenizer.ggml.merges"] == RECORDED["merges"]
    again = Tokenizer.from_gguf(keys)
    for case in cases:
        assert again.encode(case["text"], add_bos=False) == case["ids"][pre], case["text"]
    assert again.eos_ids == tokenizer.eos_ids
    assert again.special_ids == tokenizer.special_ids


def sentencepiece_json(folder: Path, *, first_space: bool) -> Path:
    """As transformers writes Llama 2's: a BPE with bytes to fall back on."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    text = (Path(__file__).parents[2] / "examples" / "moby_dick.txt").read_text(encoding="utf-8")[:20000]
    normalizer = [normalizers.Prepend("▁")] * first_space + [normalizers.Replace(" ", "▁")]
    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.Sequence(normalizer)
    engine.train_from_iterator(text.split("\n"), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = json.loads(engine.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    engine = Tokenizer(model)
    engine.normalizer = normalizers.Sequence(normalizer)
    strip = [decoders.Strip(" ", 1, 0)] * first_space
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    engine.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names[:3]])
    engine.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("first_space", [True, False])
def test_sentencepiece_keeps_its_ids_both_ways(first_space: bool, tmp_path: Path) -> None:
    path = sentencepiece_json(tmp_path, first_space=first_space)
    tokenizer = Tokenizer.from_file(path)
    keys = gguf_tokenizer_keys(path, size=tokenizer.vocab_size + 5)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is first_space
    assert keys["tokenizer.ggml.tokens"][-5:] == [f"[PAD{tokenizer.vocab_size + i}]" for i in range(5)]
    assert keys["tokenizer.ggml.token_type"][:4].tolist() == [2, 3, 3, 6]
    (tmp_path / "back").mkdir()
    kinds = [Tokenizer.from_gguf(keys), Tokenizer.from_file(written(keys, tmp_path / "back"))]
    texts = [*SAMPLES, "Call me Ishmael.", "the whaleship's  voyage — ünïcode"]
    assert len(set(tokenizer.encode("Call me Ishmael."))) > 5
    for text in texts:
        for kind in kinds:
            assert kind.encode(text) == tokenizer.encode(text), text
            assert kind.decode(kind.encode(text)) == text, text


def test_what_plain_text_says_is_no_control_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(written(byte_level("gpt-2"), tmp_path))
    end = RECORDED["tokens"].index("<|end|>")
    assert tokenizer.id_of("<|end|>") == end
    assert end not in tokenizer.encode("a <|end|> b")


def with_changes(folder: Path, **changes: Any) -> Path:
    path = written(byte_level("gpt-2"), folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


UNKNOWN_SPLIT = {"type": "Split", "pattern": {"Regex": "[a-c]+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [UNKNOWN_SPLIT, BYTES]}},
            r"no name for the way .*a-c",
        ),
        ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "no name for the way"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}, "kind WordLevel"),
    ],
)
def test_what_gguf_has_no_name_for_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=what):
        gguf_tokenizer_keys(with_changes(tmp_path, **changes), size=1000)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="tokens, the embedding 100 rows"):
        gguf_tokenizer_keys(with_changes(tmp_path), size=100)


def test_a_tokenizer_of_qwen_is_named(tmp_path: Path) -> None:
    """One that transformers wrote; its two kinds of ends both stay."""
    path = GOLDEN / "decisions" / "kev" / "base" / "tokenizer.json"
    keys = gguf_tokenizer_keys(path, size=512)
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert keys["tokenizer.ggml.eot_token_id"] == Tokenizer.from_file(path).id_of("<|im_end|>")
    assert keys["tokenizer.ggml.add_bos_token"] is False
