"""From the `tokenizer.*` metadata of a GGUF file to a tokenizer.json and tokenizer_config.json, which encode alike.

    files = tokenizer_files(read_gguf(path).metadata)      # file name → content

Ids stay. A SentencePiece vocabulary has scores and no merges; tokenizer.json wants merges, so every pair that makes a
piece becomes one, best score first (as transformers does when it converts such a model).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from heedful.errors import CannotExport
from heedful.text.gguf_vocabulary import (
    PRE_TOKENIZERS,
    UNKNOWN,
    GGUFTokens,
    byte_level_bpe,
    gguf_vocabulary,
    token_scores,
)
from heedful.text.sentencepiece import SPACE
from heedful.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Raises TokenizerError for metadata that cannot be read, CannotExport for what JSON cannot hold."""
    vocabulary, tokens = gguf_vocabulary(metadata), GGUFTokens.from_metadata(metadata)
    ids = {text: token_id for token_id, text in reversed(list(enumerate(tokens.texts)))}  # of two alike the first
    ids = {text: ids[text] for text in sorted(ids, key=ids.__getitem__) if _is_unicode(text)}
    if metadata["tokenizer.ggml.model"] == "gpt2":
        engine = _byte_level(tokens, ids)
    else:
        engine = _sentencepiece(tokens, ids, vocabulary.leading_space)
    _add_special(engine, vocabulary)
    return {
        "tokenizer.json": engine.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(_settings(tokens, vocabulary), indent=1) + "\n").encode(),
    }


def _is_unicode(text: str) -> bool:
    """Bytes outside of UTF-8 have no place in JSON; no text becomes such a token."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _byte_level(tokens: GGUFTokens, ids: Mapping[str, int]) -> Tokenizer:
    from tokenizers import decoders

    engine = byte_level_bpe(tokens, PRE_TOKENIZERS[tokens.metadata["tokenizer.ggml.pre"]], ids)
    engine.decoder = decoders.ByteLevel()
    return engine


def _sentencepiece(tokens: GGUFTokens, ids: dict[str, int], space_prefix: bool) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    unknown = next(iter(tokens.of_type(UNKNOWN)), None)
    merges = list(_merges(tokens.ordinary, token_scores(tokens)))
    engine = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend(SPACE)] if space_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    engine.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    engine.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    engine.add_tokens([AddedToken(text, normalized=False) for text in tokens.user_defined if text in ids])
    return engine


def _merges(pieces: Mapping[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that is a piece; the best result first."""
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        for cut in range(1, len(piece)):
            if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces:
                yield left, right


def _add_special(engine: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens, and what the model wants around a text."""
    from tokenizers import AddedToken, processors

    by_id = sorted(vocabulary.control.items(), key=lambda entry: entry[1])
    added = [
        AddedToken(text, special=True, normalized=False, rstrip=token_id in vocabulary.strips_after)
        for text, token_id in by_id
        if _is_unicode(text)
    ]
    engine.add_special_tokens(added)
    moved = [text for text, token_id in by_id if _is_unicode(text) and engine.token_to_id(text) != token_id]
    if moved:
        raise CannotExport(
            f"tokenizer.json has no place for the token {moved[0]!r} beside another of the same text", ""
        )
    if vocabulary.prefix_ids or vocabulary.suffix_ids:
        names = {token_id: text for text, token_id in by_id}
        before, after = ([names[i] for i in ids] for ids in (vocabulary.prefix_ids, vocabulary.suffix_ids))
        engine.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A", *after]),
            special_tokens=[(text, engine.token_to_id(text)) for text in dict.fromkeys([*before, *after])],
        )


def _settings(tokens: GGUFTokens, vocabulary: Vocabulary) -> dict[str, Any]:
    named = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}
    named |= {"unk": tokens.id_at("unknown"), "pad": tokens.id_at("padding")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens.texts[token_id] for name, token_id in named.items() if token_id is not None},
        **({} if vocabulary.template is None else {"chat_template": vocabulary.template}),
        "clean_up_tokenization_spaces": False,
    }
