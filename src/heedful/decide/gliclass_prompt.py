"""A text and the labels that it is judged by, as a GLiClass model reads them: token ids.

    uni-encoder  [CLS] <<LABEL>>label<<LABEL>>label<<SEP>>prompt text <<EXAMPLE>>… [SEP], or the text before the labels
    bi-encoder   [CLS] prompt text [SEP], and of each label [CLS] label [SEP]

What a user writes is plain text, marks in it included. Of what does not fit, the text alone is ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from heedful.decide.statements import SHORTER_LABELS, SHORTER_TEXT, TooLongToJudge
from heedful.engine.pooled import marks_around
from heedful.errors import BadParameter, UnsupportedModel
from heedful.models.gliclass_config import GLiClassConfig
from heedful.text.chat import Segment
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load_gliclass import EXAMPLE_MARK, LABEL_MARK, TEXT_MARK

_REFERENCE_TOKENS = 1024
"""Where the reference's pipeline cuts; DeBERTa without learned positions was trained and is run up to there."""


@dataclass(frozen=True)
class Example:
    """A text with the labels that it should get."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Ask:
    """One text and the labels that it is judged by."""

    what: str
    """How an error calls the text."""
    text: str
    labels: tuple[str, ...]
    prompt: str = ""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Read:
    """What the model sees."""

    ids: list[int]
    dropped: int = 0
    """Tokens of the text, cut off because that was asked for."""


class UniReader:
    """Reads text and labels together. Raises UnsupportedModel when the marks around a text alone do not fit."""

    def __init__(self, config: GLiClassConfig, tokenizer: Tokenizer, max_tokens: int | None = None) -> None:
        self.max_tokens = _limit(config, tokenizer, max_tokens)
        self._labels_first = config.labels_first
        self._tokenizer = tokenizer
        self._suffix = marks_around(tokenizer)[1]

    def read(self, ask: Ask, *, truncate: bool = False) -> Read:
        """Raises TooLongToJudge; BadParameter for examples where the model knows none."""
        if ask.examples and self._tokenizer.id_of(EXAMPLE_MARK) is None:
            raise BadParameter("examples", "this model has no mark for them", "Ask without examples.")
        before, after = _around(ask, self._labels_first)
        whole = self._ids([*before, _plain(ask.text), *after])
        if len(whole) <= self.max_tokens:
            return Read(whole)
        frame = len(self._ids([*before, *after]))
        tail = len(self._tokenizer.encode_segments(after, add_bos=False)) + len(self._suffix)
        return _cut(ask, whole, frame, tail, self.max_tokens, truncate)

    def _ids(self, segments: list[Segment]) -> list[int]:
        return [*self._tokenizer.encode_segments(segments), *self._suffix]


class BiReader:
    """Reads texts and labels apart. Raises as UniReader."""

    def __init__(
        self, config: GLiClassConfig, tokenizer: Tokenizer, labels: Tokenizer, max_tokens: int | None = None
    ) -> None:
        assert config.label_encoder is not None, config
        self.max_tokens = _limit(config, tokenizer, max_tokens)
        self._max_label_tokens = config.label_encoder.context_len
        self._tokenizer, self._labels = tokenizer, labels
        self._suffix = marks_around(tokenizer)[1]

    def read(self, ask: Ask, *, truncate: bool = False) -> Read:
        """The text. Raises TooLongToJudge; BadParameter for a text without tokens, and for examples."""
        if ask.examples:
            raise BadParameter("examples", "a bi-encoder reads none", "Ask without examples.")
        lead = f"{ask.prompt} " if ask.prompt else ""
        whole = self._tokenizer.encode(lead + ask.text)
        if not whole:
            raise BadParameter("texts", f"{ask.what} has no tokens", "Give at least one character.")
        if len(whole) <= self.max_tokens:
            return Read(whole)
        frame = len(self._tokenizer.encode(lead))
        return _cut(ask, whole, frame, len(self._suffix), self.max_tokens, truncate)

    def read_label(self, label: str) -> Read:
        """Raises TooLongToJudge; BadParameter for a label without tokens."""
        ids = self._labels.encode(label)
        if not ids:
            raise BadParameter("labels", f"{label!r:.40} has no tokens", "Give at least one character.")
        if len(ids) > self._max_label_tokens:
            raise TooLongToJudge(f"the label {label!r:.40}", len(ids), self._max_label_tokens, "Give a shorter one.")
        return Read(ids)


def _cut(ask: Ask, whole: list[int], frame: int, tail: int, max_tokens: int, truncate: bool) -> Read:
    """`whole` without the end of the text. `frame`: tokens without the text; `tail`: those of them after it."""
    if frame > max_tokens:
        raise TooLongToJudge(f"{ask.what} without its text", frame, max_tokens, SHORTER_LABELS)
    if not truncate:
        raise TooLongToJudge(ask.what, len(whole), max_tokens, SHORTER_TEXT)
    end = len(whole) - tail
    return Read([*whole[: max_tokens - tail], *whole[end:]], len(whole) - max_tokens)


def flat_labels(labels: Any) -> tuple[str, ...]:
    """A list of labels as it is; of mappings within each other every path to a label, joined by dots.

    Raises BadParameter for what is neither, for no labels, and for two that are the same.
    """
    found = tuple(_paths(labels))
    if not found:
        raise BadParameter("labels", "there are none", "Give at least one.")
    if len(set(found)) < len(found):
        twice = next(label for label in found if found.count(label) > 1)
        raise BadParameter("labels", f"{twice!r:.40} is there twice")
    return found


def _paths(labels: Any) -> list[str]:
    if isinstance(labels, Mapping) and all(isinstance(name, str) for name in labels):
        return [f"{name}.{path}" for name, inner in labels.items() for path in _paths(inner)]
    if isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels):
        return list(labels)
    raise BadParameter("labels", f"must be texts, not {labels!r:.40}", 'Give a list: ["travel", "sport"].')


def _around(ask: Ask, labels_first: bool) -> tuple[list[Segment], list[Segment]]:
    """(what stands before the text, what stands after it)"""
    labels = [part for label in ask.labels for part in (_mark(LABEL_MARK), _plain(label))]
    labels += [_mark(TEXT_MARK), _plain(ask.prompt)]
    examples = [part for example in ask.examples for part in (_mark(EXAMPLE_MARK), _plain(_shown(example)))]
    if examples:
        examples.append(_mark(TEXT_MARK))
    return (labels, examples) if labels_first else ([], [*labels, *examples])


def _shown(example: Example) -> str:
    return f"{example.text} \nLabels:\n {', '.join(example.labels)}"


def _mark(text: str) -> Segment:
    return Segment(text, control=True)


def _plain(text: str) -> Segment:
    return Segment(text, control=False)


def _limit(config: GLiClassConfig, tokenizer: Tokenizer, max_tokens: int | None) -> int:
    """The longest input. Raises UnsupportedModel, BadParameter."""
    most = config.encoder.context_len
    if config.encoder.relative is not None and not config.encoder.learned_positions:
        most = max(most, _REFERENCE_TOKENS)
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens <= most):
        raise BadParameter("max_tokens", f"must be from 1 to {most:,}")
    limit = max_tokens or most
    prefix, suffix = marks_around(tokenizer)
    if limit < len(prefix) + len(suffix):
        raise UnsupportedModel(f"the model takes {limit} tokens, its own marks alone are more", "")
    return limit


def listed_examples(examples: ListLike[Any]) -> tuple[Example, ...]:
    """Of Examples, or mappings with `text` and `labels`. Raises BadParameter."""
    return tuple(_example(one) for one in examples)


def _example(one: Any) -> Example:
    if isinstance(one, Example):
        return one
    if not isinstance(one, Mapping) or not isinstance(one.get("text"), str):
        raise BadParameter("examples", f"{one!r:.60} is no example", 'Give {"text": "…", "labels": ["…"]}.')
    return Example(one["text"], flat_labels(one.get("labels")))
