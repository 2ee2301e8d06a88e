"""From a `tokenizer.json` and the small JSON files beside it to a `Vocabulary`. Encoding is left to `tokenizers`.

Files as Hugging Face writes them: tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json
and chat_template.jinja; each may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from heedful.errors import TokenizerError
from heedful.text.vocabulary import (
    Vocabulary,
    byte_level_bytes,
    end_ids,
    is_template_mark,
    sentencepiece_bytes,
    text_bytes,
)

if TYPE_CHECKING:
    import tokenizers


MOST_GROWTH = 64
"""Real files replace a space by one character, or a quotation mark by another."""


def json_vocabulary(path: Path, control: Collection[str] = ()) -> Vocabulary:
    """Vocabulary of the tokenizer.json at `path`. `control`: added tokens that are control tokens whatever it says.

    Raises TokenizerError.
    """
    engine = _load(path)
    try:
        return _vocabulary(path, engine, control)
    except TokenizerError:
        raise
    except BaseException as error:  # a file that loads may still fail at the first text
        raise_as_tokenizer_error(path, error)


def raise_as_tokenizer_error(path: Path, error: BaseException) -> NoReturn:
    """What the tokenizers package raises on a malformed file; everything that is not an error of its own goes on."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        raise TokenizerError(f"{path} is no tokenizer that can be used: {error}", "Fetch the file again.") from error
    raise error


def _refuse_explosive_rules(path: Path, content: bytes) -> None:
    """Replace rules that follow one another multiply a text's length; a handful can ask for all memory."""
    if b'"Replace"' not in content:
        return
    try:
        rules = list(_replace_rules(json.loads(content).get("normalizer")))
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise TokenizerError(f"{path} is no tokenizer that can be used: {error}", "Fetch the file again.") from error
    growth = prod(max(1, len(rule["content"])) for rule in rules)
    if growth > MOST_GROWTH:
        raise TokenizerError(
            f"{path}: its Replace rules can make a text {growth:,} times as long", "Take another file."
        )


def _replace_rules(normalizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "Replace" and isinstance(normalizer.get("content"), str):
            yield normalizer
        for inner in normalizer.get("normalizers") or ():
            yield from _replace_rules(inner)


def _vocabulary(path: Path, engine: tokenizers.Tokenizer, also_control: Collection[str]) -> Vocabulary:
    settings = _Settings(path.parent)
    added = engine.get_added_tokens_decoder()
    bos_id = _first(settings.token_id("bos", engine), *settings.model_ids("bos"))
    eos_id = _first(settings.token_id("eos", engine), *settings.model_ids("eos"))
    template = settings.template()
    named = {bos_id, eos_id, *settings.model_ids("eos")}
    control = {
        token.content: i
        for i, token in added.items()
        if token.special or i in named or token.content in also_control or is_template_mark(token.content, template)
    }
    before, after = _wrapping_ids(engine)
    bytes_of, leading_space = _token_bytes(engine, {i: token.content for i, token in added.items()})
    return Vocabulary(
        size=max(engine.get_vocab_size(), max(added, default=-1) + 1),
        encode_plain=_plain_encoder(path, engine, frozenset(control.values())),
        bytes_of=bytes_of,
        control=control,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=end_ids(control, (eos_id, *settings.model_ids("eos"))),
        prefix_ids=settings.prefix_ids(before, bos_id),
        suffix_ids=after,
        leading_space=leading_space,
        strips_before=frozenset(i for i, token in added.items() if token.special and token.lstrip),
        strips_after=frozenset(i for i, token in added.items() if token.special and token.rstrip),
        template=template,
    )


def _load(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        if path.exists() and not path.is_file():
            raise TokenizerError(f"{path} is not a regular file", "A model folder has a tokenizer.json.")
        content = path.read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise TokenizerError(reason, "A model folder has a tokenizer.json.") from error
    _refuse_explosive_rules(path, content)
    try:
        engine = Tokenizer.from_buffer(content)
    except BaseException as error:  # the package raises the bare class, and panics that are no Exception at all
        raise_as_tokenizer_error(path, error)
    # Settings of some training run; cutting and padding are the caller's.
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # i.e. "as text": control tokens in a text are not recognised
    return engine


class _Settings:
    """The files beside tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = _json_object(folder / "tokenizer_config.json")
        self._special = _json_object(folder / "special_tokens_map.json")
        self._models = [_json_object(folder / "generation_config.json"), _json_object(folder / "config.json")]

    def token_id(self, name: str, engine: tokenizers.Tokenizer) -> int | None:
        """Id of the token named as `<name>_token`: its text, or an object with the text as `content`."""
        token = self._tokenizer.get(f"{name}_token") or self._special.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        return engine.token_to_id(text) if isinstance(text, str) else None

    def model_ids(self, name: str) -> list[int]:
        """Ids under `<name>_token_id`, one or a list, in the model's own settings."""
        values = [settings.get(f"{name}_token_id") for settings in self._models]
        flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
        return [item for item in flat if type(item) is int]

    def prefix_ids(self, from_processor: tuple[int, ...], bos_id: int | None) -> tuple[int, ...]:
        """What stands before a text: what the post-processor puts there, unless `add_bos_token` says otherwise."""
        add_bos = self._tokenizer.get("add_bos_token")
        if add_bos is True and bos_id is not None and bos_id not in from_processor:
            return (bos_id, *from_processor)
        if add_bos is False and from_processor[:1] == (bos_id,):
            return from_processor[1:]
        return from_processor

    def template(self) -> str | None:
        """The chat template: its own file, or the one named `default` of several, or the only one."""
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
        template = self._tokenizer.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        return template if isinstance(template, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", "Fetch the file again.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object", "Fetch the file again.")
    return value


def _first(*candidates: int | None) -> int | None:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _wrapping_ids(engine: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text, seen on one letter."""
    plain = engine.encode("a", add_special_tokens=False).ids
    wrapped = engine.encode("a", add_special_tokens=True).ids
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            return tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :])
    raise TokenizerError(f"the post-processor turns {plain} into {wrapped}, which does not hold it", "")


def _plain_encoder(
    path: Path, engine: tokenizers.Tokenizer, control_ids: frozenset[int]
) -> Callable[[str, bool], list[int]]:
    inner = cache(lambda: _without_first_space(engine))  # made when a chat first needs it: it costs another load
    unknown_ids = {token.id for token in engine.model.tokenize("\U000f1234")}

    def encode(text: str, at_start: bool) -> list[int]:
        try:
            ids = (engine if at_start else inner()).encode(text, add_special_tokens=False).ids
            return [part for token_id in ids for part in disarmed(token_id)]
        except BaseException as error:  # a rule of the file that gives up on this text
            raise_as_tokenizer_error(path, error)

    def disarmed(token_id: int) -> Iterator[int]:
        """A Unigram model finds control tokens in plain text by itself; they are spelled out instead."""
        text = engine.id_to_token(token_id) or ""
        if token_id not in control_ids or token_id in unknown_ids or len(text) == 1:
            yield token_id
            return
        for piece in filter(None, (text[:1], text[1:])):
            for token in engine.model.tokenize(piece):
                yield from disarmed(token.id)

    return encode


def _without_first_space(engine: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for text that stands later in a prompt: with scheme `first`, no space is put before it."""
    from tokenizers import Tokenizer, pre_tokenizers

    metaspace = engine.pre_tokenizer
    if not isinstance(metaspace, pre_tokenizers.Metaspace) or metaspace.prepend_scheme != "first":
        return engine
    inner = Tokenizer.from_str(engine.to_str())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(metaspace.replacement, prepend_scheme="never", split=metaspace.split)
    inner.encode_special_tokens = True
    return inner


def _token_bytes(engine: tokenizers.Tokenizer, added: Mapping[int, str]) -> tuple[Callable[[int], bytes], bool]:
    """(id → bytes, whether decoding takes a leading space away), by the kind of decoder that the file names."""
    to_bytes, leading_space = _decoding(engine)

    @cache
    def bytes_of(token_id: int) -> bytes:
        if token_id in added:
            return text_bytes(added[token_id])
        piece = engine.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return b"" if piece is None else to_bytes(piece)

    return bytes_of, leading_space


def _decoding(engine: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    steps = _decoder_steps(engine)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes, False
    if kinds == {"WordPiece"}:
        return _word_piece_bytes(steps[0]["prefix"]), True
    if kinds == {"Metaspace"}:
        return sentencepiece_bytes, steps[0]["prepend_scheme"] != "never"
    if "Replace" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return (_byte_fallback_bytes if "ByteFallback" in kinds else sentencepiece_bytes), "Strip" in kinds
    if not kinds:
        return lambda piece: b" " + text_bytes(piece), True
    return _refuse_decoding(kinds), False


def _decoder_steps(engine: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if engine.decoder is None:
        return []
    state = json.loads(engine.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _word_piece_bytes(prefix: str) -> Callable[[str], bytes]:
    """A piece without the continuation prefix starts a word; four marks stand close to the word before them."""

    def to_bytes(piece: str) -> bytes:
        if piece.startswith(prefix):
            return text_bytes(piece.removeprefix(prefix))
        return text_bytes(piece if piece in (".", ",", "!", "?") else " " + piece)

    return to_bytes


def _byte_fallback_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return sentencepiece_bytes(piece)


def _refuse_decoding(kinds: set[str]) -> Callable[[str], bytes]:
    """Encoding may still be all that is wanted, so the refusal waits until something is decoded."""

    def to_bytes(piece: str) -> bytes:
        raise TokenizerError(f"text cannot be decoded: the tokenizer.json has a decoder of kind {sorted(kinds)}", "")

    return to_bytes
