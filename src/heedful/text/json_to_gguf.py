"""From a tokenizer.json and what lies beside it to the `tokenizer.*` keys of a GGUF file, which encode alike.

    keys = gguf_tokenizer_keys(folder / "tokenizer.json", size=config.vocab_size)

GGUF names a pre-tokenizer instead of describing it, so only those that gguf_vocabulary.py knows can be written. What
was made is read again and compared: the bytes of every token, and the ids of texts in which tokenizers differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from heedful.errors import CannotExport
from heedful.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    SPLIT_BY_WORDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_vocabulary,
)
from heedful.text.json_vocabulary import json_vocabulary
from heedful.text.sentencepiece import SPACE
from heedful.text.vocabulary import Vocabulary

PRE_NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "dbrx", "default")
"""Of several names for the same pre-tokenizer this one is written."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_NEVER = -1e9
"""Score of what no merge makes; llama.cpp's are log-probabilities or, as here, minus the number of the merge."""
SAMPLES = (
    "Hello, World! It's what they'll have; I'M SURE we'Ve said 'twas theirs'.",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "3 33 333 3333 33333 3.14 1,000,000 2026-11-30 x86_64 v2.0 ½ ² ٣٤٥ 一二三",
    "naïve café Zürich e\u0301 n\u0303 Ǆ ǅ ǆ ﬁ ß İ Привет, мир! नमस्ते दुनिया こんにちは世界 안녕하세요 שלום مرحبا ไทย",
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 \u00a0\u2003\ufeff\u2028|",
    "def f(x):\n    return {'a': [x**2, \"b\"], **{}}  # ------=======\r\n\tif x != 0 && !y || z <= ~w:\n",
    "''''''```````\"\"\"\"......!!!!!!?????? <a href=\"b\">c</a> https://example.org/a?b=c&d=%20#e a@b.cd $5+6=11^2",
    " leading", "trailing ", "  two  spaces  ", "a", " ", "", "\u0000\u0004\u007f",
)  # fmt: skip


def gguf_tokenizer_keys(path: Path, *, size: int) -> dict[str, Any]:
    """`size`: rows of the embedding; ids that no token has get names of their own, as llama.cpp's converter gives them.

    Raises TokenizerError for a file that cannot be read, CannotExport for a tokenizer that GGUF cannot express.
    """
    vocabulary, file = json_vocabulary(path), json.loads(path.read_bytes())
    model = file["model"]
    if model.get("type") != "BPE":
        raise CannotExport(f"GGUF has no place for a tokenizer of the kind {model.get('type')}", "Export with --to hf.")
    if vocabulary.size > size:
        raise CannotExport(f"the tokenizer has {vocabulary.size:,} tokens, the embedding {size:,} rows", "")
    added = {token["id"]: token["content"] for token in file.get("added_tokens", ())}
    texts = _texts(model["vocab"], added, size)
    of_kind = _sentencepiece_keys(file, texts, added) if _is_sentencepiece(file) else _byte_level_keys(file)
    types = _types(vocabulary, model, added, texts, of_kind["tokenizer.ggml.model"] == "llama")
    keys = {
        **of_kind,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        **_named(vocabulary, model, texts),
    }
    _require_equal(vocabulary, gguf_vocabulary(keys))
    return keys


def _texts(vocab: Mapping[str, int], added: Mapping[int, str], size: int) -> list[str]:
    texts = [f"[PAD{i}]" for i in range(size)]
    for text, token_id in (*vocab.items(), *((text, i) for i, text in added.items())):
        texts[token_id] = text
    return texts


def _types(
    vocabulary: Vocabulary, model: Mapping[str, Any], added: Mapping[int, str], texts: list[str], sentencepiece: bool
) -> list[int]:
    there, control = set(model["vocab"].values()) | set(added), set(vocabulary.control.values())
    unknown = model["vocab"].get(model.get("unk_token")) if sentencepiece else None

    def kind(token_id: int, text: str) -> int:
        if token_id == unknown:
            return UNKNOWN
        if token_id not in there:
            return UNUSED
        if token_id in added:
            return CONTROL if token_id in control else USER_DEFINED
        is_byte = sentencepiece and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        return BYTE if is_byte else NORMAL

    return [kind(token_id, text) for token_id, text in enumerate(texts)]


def _named(vocabulary: Vocabulary, model: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    """Special ids, what stands around a text, the chat template."""
    bos, eos, control = vocabulary.bos_id, vocabulary.eos_id, vocabulary.control
    around = (vocabulary.prefix_ids, vocabulary.suffix_ids)
    if around[0] not in ((), (bos,)) or around[1] not in ((), (eos,)):
        raise CannotExport(f"GGUF has no place for what this tokenizer puts around a text: the ids {around}", "")
    turn_end = next((control[text] for text in _TURN_ENDS if text in control and control[text] != eos), None)
    ids = {"bos": bos, "eos": eos, "eot": turn_end, "unknown": model["vocab"].get(model.get("unk_token"))}
    return {
        **{f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items() if token_id is not None},
        "tokenizer.ggml.add_bos_token": bool(around[0]),
        "tokenizer.ggml.add_eos_token": bool(around[1]),
        **({} if vocabulary.template is None else {"tokenizer.chat_template": vocabulary.template}),
    }


# ---- byte-level BPE


def _byte_level_keys(file: Mapping[str, Any]) -> dict[str, Any]:
    model = file["model"]
    patterns, nfc = _patterns(file.get("pre_tokenizer")), (file.get("normalizer") or {}).get("type")
    whole_words = bool(model.get("ignore_merges"))
    for name in PRE_NAMES:
        pre = PRE_TOKENIZERS[name]
        if (pre.patterns, pre.whole_words, "NFC" if pre.nfc else None) == (patterns, whole_words, nfc):
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
            return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}
    raise CannotExport(
        "GGUF has no name for the way in which this tokenizer cuts text before merging: "
        f"patterns {str(patterns)[:120]}, normalizer {nfc}, {'' if whole_words else 'not '}whole words first",
        "Export with --to hf.",
    )


def _patterns(pre: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """What cuts the text, one after another; None where it is nothing that GGUF could name."""
    steps = (pre or {}).get("pretokenizers") or ([] if pre is None else [pre])
    found = []
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [SPLIT_BY_WORDS] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(r"\p{N}")
        elif kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex"))
        else:
            return None
    return tuple(found)


# ---- SentencePiece's BPE


def _is_sentencepiece(file: Mapping[str, Any]) -> bool:
    return bool(file["model"].get("byte_fallback"))


def _sentencepiece_keys(file: Mapping[str, Any], texts: list[str], added: Mapping[int, str]) -> dict[str, Any]:
    """A piece's score is minus the number of the first merge that makes it: so the same merge comes first."""
    vocab, scores = file["model"]["vocab"], np.full(len(texts), _NEVER, np.float32)
    for number, merge in reversed(list(enumerate(file["model"]["merges"]))):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        scores[vocab["".join(parts)]] = -number
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": _puts_space_first(file),
    }


def _puts_space_first(file: Mapping[str, Any]) -> bool:
    normalizer, pre = file.get("normalizer") or {}, file.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    by_normalizer = any(step.get("type") == "Prepend" and step.get("prepend") == SPACE for step in steps)
    return by_normalizer or (pre.get("type") == "Metaspace" and pre.get("prepend_scheme", "always") != "never")


# ---- the proof


def _require_equal(wanted: Vocabulary, found: Vocabulary) -> None:
    for token_id in range(wanted.size):
        if wanted.bytes_of(token_id) != found.bytes_of(token_id):
            raise CannotExport(f"token {token_id} would stand for other bytes in a GGUF file", "Export with --to hf.")
    for sample in SAMPLES:
        ids = [vocabulary.encode_plain(sample, True) if sample else [] for vocabulary in (wanted, found)]
        if ids[0] != ids[1]:
            raise CannotExport(
                f"{sample[:40]!r} would become other tokens with a GGUF file: {ids[1][:12]}, not {ids[0][:12]}",
                "Export with --to hf.",
            )
