"""From the `tokenizer.*` metadata of a GGUF file to a `Vocabulary`. Knows nothing of the file's bytes.

Keys: GGUF specification (ggml-org/ggml docs/gguf.md); defaults where a key is missing: llama.cpp's. The patterns of the
pre-tokenizers are those of the models' own tokenizer.json files, `default` is llama.cpp's. A name that is not listed
here is refused: another's pattern would give slightly wrong ids, and nobody would notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import isfinite
from typing import TYPE_CHECKING, Any

from heedful.errors import TokenizerError
from heedful.text.sentencepiece import ScoredBPE
from heedful.text.vocabulary import (
    Vocabulary,
    byte_level_bytes,
    end_ids,
    is_template_mark,
    sentencepiece_bytes,
    text_bytes,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as ByteLevelBPE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

SPLIT_BY_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CLITICS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CLITICS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE: by each pattern in turn, matches and gaps both standing alone."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is a token is taken as it is, without merging."""
    adds_bos: bool = False
    """Whether bos is added where the file does not say."""
    nfc: bool = False
    """Text is composed first. The model's own tokenizer does so; llama.cpp does not."""


_DIGITS = PreTokenizer((r"\p{N}", SPLIT_BY_WORDS))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
PRE_TOKENIZERS = {
    "dbrx": PreTokenizer((_LLAMA3,)),
    "deepseek-r1-qwen": _QWEN,
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", SPLIT_BY_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((SPLIT_BY_WORDS,)),
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
}


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Vocabulary of a GGUF's metadata (key → value, arrays as lists or numpy arrays). Raises TokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise _unsupported("tokenizer.ggml.model", model, ("gpt2", "llama"))
    tokens = GGUFTokens.from_metadata(metadata)
    return _byte_level_vocabulary(tokens) if model == "gpt2" else _sentencepiece_vocabulary(tokens)


@dataclass(frozen=True)
class GGUFTokens:
    """The metadata, with its token texts and types checked."""

    metadata: Mapping[str, Any]
    texts: list[str]
    types: list[int]
    by_type: dict[int, dict[str, int]]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> GGUFTokens:
        texts = _array(metadata, "tokens", str)
        if _has_surrogates(texts) and _LONE_SURROGATE.search("".join(texts)):
            raise TokenizerError("tokenizer.ggml.tokens has text that no bytes can stand for", _REFETCH)
        types = (
            _array(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(texts)
        )
        _same_length("token_type", types, texts)
        by_type: dict[int, dict[str, int]] = {}
        for token_id, (text, token_type) in enumerate(zip(texts, types, strict=True)):
            by_type.setdefault(token_type, {}).setdefault(text, token_id)
        return cls(metadata, texts, types, by_type)

    def of_type(self, token_type: int) -> dict[str, int]:
        """Text → id. Of two tokens with the same text the first counts."""
        return self.by_type.get(token_type, {})

    @property
    def ordinary(self) -> dict[str, int]:
        """Those that merging may produce."""
        return self.of_type(NORMAL) | self.of_type(UNUSED)

    def id_at(self, name: str) -> int | None:
        """The token id that key `tokenizer.ggml.<name>_token_id` holds."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.texts)):
            raise TokenizerError(
                f"tokenizer.ggml.{name}_token_id is {value!r}; the vocabulary has {len(self.texts):,} tokens", _REFETCH
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    @property
    def template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @cached_property
    def control(self) -> dict[str, int]:
        """What plain text never becomes; user-defined tokens too that the chat template uses as marks."""
        named = (self.id_at(name) for name in ("bos", "eos", "eot", "eom"))
        marks = {t: i for t, i in self.of_type(USER_DEFINED).items() if is_template_mark(t, self.template)}
        return (
            self.of_type(CONTROL) | self.of_type(UNKNOWN) | {self.texts[i]: i for i in named if i is not None} | marks
        )

    @property
    def user_defined(self) -> dict[str, int]:
        """Texts that are one token wherever they stand."""
        return {text: i for text, i in self.of_type(USER_DEFINED).items() if text not in self.control}

    def vocabulary(self, *, adds_bos: bool, **fields: Any) -> Vocabulary:
        bos_id, eos_id = self.id_at("bos"), self.id_at("eos")
        ends = (eos_id, self.id_at("eot"), self.id_at("eom"))
        return Vocabulary(
            size=len(self.texts),
            control=self.control,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=end_ids(self.control, ends),
            prefix_ids=_ids_if(self.flag("add_bos_token", adds_bos), bos_id),
            suffix_ids=_ids_if(self.flag("add_eos_token", False), eos_id),
            template=self.template,
            **fields,
        )


def _byte_level_vocabulary(tokens: GGUFTokens) -> Vocabulary:
    name = tokens.metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise _unsupported("tokenizer.ggml.pre", name, tuple(PRE_TOKENIZERS))
    # Control tokens are left out, so that no text can become one. A byte without a token is dropped, as the models were
    # trained: SmolLM2 lacks eight, such as U+0004.
    bpe = byte_level_bpe(tokens, pre, tokens.ordinary | tokens.user_defined)

    def encode_plain(text: str, at_start: bool) -> list[int]:
        return bpe.encode(text, add_special_tokens=False).ids

    def bytes_of(token_id: int) -> bytes:
        if not 0 <= token_id < len(tokens.texts):
            return b""
        text = tokens.texts[token_id]
        if tokens.types[token_id] in (CONTROL, USER_DEFINED, UNKNOWN):
            return text_bytes(text)
        return byte_level_bytes(text)

    return tokens.vocabulary(adds_bos=pre.adds_bos, encode_plain=encode_plain, bytes_of=bytes_of, leading_space=False)


def byte_level_bpe(tokens: GGUFTokens, pre: PreTokenizer, ids: Mapping[str, int]) -> ByteLevelBPE:
    """`ids`: text → id of the tokens that it knows; user-defined ones among them are found wherever they stand."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    if _has_surrogates(ids):
        ids = {text: token_id for text, token_id in ids.items() if not _ESCAPED_BYTE.search(text)}
    merges = _array(tokens.metadata, "merges", str, may_be_empty=True)  # bytes alone
    pairs = [(left, right) for left, _, right in map(str.partition, merges, repeat(" "))]
    try:
        bpe = Tokenizer(models.BPE(vocab=dict(ids), merges=pairs, ignore_merges=pre.whole_words))
    except Exception:  # it names no merge; looking through all of them takes as long as building does
        _refuse_merges(merges, pairs, ids)
        raise
    if pre.nfc:
        bpe.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in tokens.user_defined if text in ids])
    return bpe


def _refuse_merges(merges: Iterable[str], pairs: Iterable[tuple[str, str]], ids: Mapping[str, int]) -> None:
    """Raises TokenizerError for the first one of parts that are no tokens, or that makes none."""
    for merge, (left, right) in zip(merges, pairs, strict=True):
        if not (left in ids and right in ids and left + right in ids):
            problem = f"tokenizer.ggml.merges has {merge!r}, whose parts or result are no tokens"
            raise TokenizerError(problem, _REFETCH)


def _has_surrogates(texts: Iterable[str]) -> bool:
    """Whether any text has code points that UTF-8 cannot express; several times as fast as a regular expression."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return True
    return False


def token_scores(tokens: GGUFTokens) -> list[float]:
    """Of a SentencePiece vocabulary, by id."""
    scores = _array(tokens.metadata, "scores", float)
    _same_length("scores", scores, tokens.texts)
    return scores


def _sentencepiece_vocabulary(tokens: GGUFTokens) -> Vocabulary:
    scores = token_scores(tokens)
    byte_ids = _byte_ids(tokens)
    byte_of_id = {token_id: bytes([byte]) for byte, token_id in enumerate(byte_ids)}
    space_prefix = tokens.flag("add_space_prefix", True)
    bpe = ScoredBPE(tokens.ordinary, scores, byte_ids, whole=tokens.user_defined, space_prefix=space_prefix)

    def bytes_of(token_id: int) -> bytes:
        if token_id in byte_of_id:
            return byte_of_id[token_id]
        if not 0 <= token_id < len(tokens.texts):
            return b""
        text = tokens.texts[token_id]
        if tokens.types[token_id] in (CONTROL, USER_DEFINED, UNKNOWN):
            return text_bytes(text)
        return sentencepiece_bytes(text)

    return tokens.vocabulary(
        adds_bos=True,
        encode_plain=lambda text, at_start: bpe.encode(text),
        bytes_of=bytes_of,
        leading_space=space_prefix,
        strips_after=_phi3_strippers(tokens),
    )


def _byte_ids(tokens: GGUFTokens) -> list[int]:
    """Ids of the tokens <0x00> … <0xFF>."""
    ids = tokens.of_type(BYTE)
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if missing:
        raise TokenizerError(
            f"the SentencePiece vocabulary has no byte tokens for {len(missing)} of 256 bytes",
            "Only vocabularies with byte fallback are supported (Gemma, Llama 2, Mistral, Phi-3). "
            "If the model is one of those, convert the original again.",
        )
    return [ids[f"<0x{byte:02X}>"] for byte in range(256)]


def _phi3_strippers(tokens: GGUFTokens) -> frozenset[int]:
    """Phi-3's control tokens swallow the white space after them; GGUF has no key for that, as llama.cpp notes too."""
    if tokens.metadata.get("general.architecture") != "phi3":
        return frozenset()
    control = tokens.of_type(CONTROL)
    return frozenset(i for text, i in control.items() if text not in ("<s>", "<unk>", "<|endoftext|>"))


def _array(metadata: Mapping[str, Any], name: str, item_type: type[Any], *, may_be_empty: bool = False) -> list[Any]:
    """A list of `item_type` from key `tokenizer.ggml.<name>`."""
    found: Any = metadata.get(f"tokenizer.ggml.{name}")
    if hasattr(found, "tolist"):  # a numpy array
        found = found.tolist()
    values: list[Any] = found if isinstance(found, list) else [None]
    kinds = set(map(type, values))
    if not (kinds == {item_type} or (may_be_empty and not kinds)):
        raise TokenizerError(f"tokenizer.ggml.{name} is missing or no list of {item_type.__name__}", _REFETCH)
    if item_type is float and not all(map(isfinite, values)):
        raise TokenizerError(f"tokenizer.ggml.{name} has values that are not finite", _REFETCH)
    return values


def _same_length(name: str, values: Sequence[object], texts: Sequence[str]) -> None:
    if len(values) != len(texts):
        raise TokenizerError(f"tokenizer.ggml.{name} has {len(values):,} entries for {len(texts):,} tokens", _REFETCH)


def _ids_if(wanted: bool, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if wanted and token_id is not None else ()


def _unsupported(key: str, value: object, supported: tuple[str, ...]) -> TokenizerError:
    return TokenizerError(
        f"{key} is {value!r}; supported: {', '.join(supported)}",
        "Use a GGUF made by a recent converter, or the model's own directory with its tokenizer.json.",
    )


_REFETCH = "The file is damaged, or its converter was faulty. Fetch it again, or take another conversion."
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # how the reader keeps a byte that is no UTF-8; no text matches it
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
