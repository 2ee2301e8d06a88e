"""Rows of chats, and each as the tokens that a model reads, with a mark on those that it is to learn.

What is learned is what the model would have to write itself: all that the template puts after its prompt for an answer,
to the token that ends the turn. It is found by rendering, never by searching: the chat up to an answer with the prompt
for one, the chat with the answer, and the second must go on where the first ends. So white space that a template trims
or adds is learned as it will be generated. Prompt and answer are encoded apart, as they come apart when the model is
run. A template that writes earlier turns in another way once later ones are there (Qwen3 drops what was thought) gives
a chat of its own for each answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.errors import BadParameter, TemplateError
from heedful.text.chat import ChatTemplate, Segment
from heedful.text.tokenizer import Tokenizer
from heedful.text.vocabulary import END_TEXTS
from heedful.train.json_rows import json_rows
from heedful.train.token_store import ChatTokens

_REMEDY = 'Every line is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, or \
{"prompt": "…", "completion": "…"}.'


@dataclass(frozen=True)
class ChatRow:
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    first_learned: int = 0
    """Answers before this message are context."""
    where: str = "a chat"
    """Its line and file."""

    @property
    def answers(self) -> list[int]:
        """Places of the messages to learn."""
        return [
            place
            for place, message in enumerate(self.messages)
            if place >= self.first_learned and message["role"] == "assistant"
        ]


def chat_rows(paths: Iterable[Path]) -> Iterator[ChatRow]:
    """Raises BadParameter, with the place, for a line that is no chat with an answer to a message before it."""
    for found, where in json_rows(paths, "--chat", _REMEDY):
        yield _row(found, where)


def _row(found: dict[str, Any], where: str) -> ChatRow:
    row = _with_messages(found, where)
    if not row.answers:
        raise BadParameter("--chat", f"{where} has no assistant's message, so nothing is to be learned", _REMEDY)
    if row.answers[0] == 0:
        raise BadParameter("--chat", f"{where} begins with the assistant", "Something must come before an answer.")
    return row


def _with_messages(found: dict[str, Any], where: str) -> ChatRow:
    tools = found.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadParameter("--chat", f"{where} has tools that are no list of schemas", _REMEDY)
    of_tools = None if not tools else tuple(tools)
    if "messages" in found:
        return ChatRow(messages_of(found["messages"], "messages", where), of_tools, where=where)
    if "prompt" in found and "completion" in found:
        prompt = messages_of(as_messages(found["prompt"], "user"), "prompt", where)
        completion = messages_of(as_messages(found["completion"], "assistant"), "completion", where)
        return ChatRow(prompt + completion, of_tools, first_learned=len(prompt), where=where)
    raise BadParameter("--chat", f"{where} has no messages: {str(found)[:60]}", _REMEDY)


def as_messages(value: Any, role: str) -> Any:
    """A text alone is what `role` says."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def messages_of(value: Any, name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """Raises BadParameter for what is no list of messages."""
    if not isinstance(value, list) or not value:
        raise BadParameter("--chat", f"{where} has {name} that are no list of messages", _REMEDY)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadParameter("--chat", f"{where} has a message without a role: {str(message)[:60]}", _REMEDY)
    return tuple(value)


@dataclass
class _Sequence:
    """A chat under construction: pieces that are encoded apart."""

    pieces: list[tuple[list[Segment], bool]] = field(default_factory=list)
    """Each with whether it is learned."""
    is_open: bool = True
    """Whether the template wrote all of it, so that it may go on."""

    @property
    def written(self) -> list[Segment]:
        return _joined(segment for piece, _ in self.pieces for segment in piece)


class ChatEncoder:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises BadParameter for a model without any token that ends an answer."""
        self._tokenizer, self._template = tokenizer, template
        texts = {tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokenizer.eos_ids}
        self._ends = texts & tokenizer.control_texts
        if not self._ends:
            raise BadParameter("--base", "has no token that ends an answer", "Take a model with a chat template.")
        self._own_end = next((text for text in END_TEXTS if text in self._ends), min(self._ends))

    def encode(self, row: ChatRow) -> list[ChatTokens]:
        """One, or one for each answer. Raises BadParameter and TemplateError, naming the row."""
        try:
            return [self._encoded(sequence) for sequence in self._sequences(row)]
        except TemplateError as error:
            raise TemplateError(f"{row.where}: {error.message}", error.remedy) from error
        except BadParameter as error:
            raise BadParameter("--chat", f"{row.where}: {error.message}", error.remedy) from error

    def _sequences(self, row: ChatRow) -> list[_Sequence]:
        found: list[_Sequence] = []
        tools = None if row.tools is None else list(row.tools)
        for place in row.answers:
            prompt = self._rendered(row.messages[:place], tools, for_answer=True)
            whole = self._rendered(row.messages[: place + 1], tools, for_answer=False)
            rest = _after(whole, prompt)
            if rest is None:
                raise TemplateError(
                    "the template's prompt for an answer is not how it begins the answered chat",
                    "Give another template: --set data.template=FILE",
                )
            answer, was_ended = self._to_its_end(rest)
            more = _after(prompt, found[-1].written) if found and found[-1].is_open else None
            if more is None:
                found.append(_Sequence())
                more = prompt
            found[-1].pieces += [(more, False), (answer, True)]
            found[-1].is_open = was_ended
        return found

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Mapping[str, Any]] | None, *, for_answer: bool
    ) -> list[Segment]:
        return _joined(self._template.render(messages, add_generation_prompt=for_answer, tools=tools))

    def _to_its_end(self, rest: list[Segment]) -> tuple[list[Segment], bool]:
        """To the first token that ends a turn; where the template writes none, the model's own is put there, or it
        would never learn to stop.
        """
        for place, segment in enumerate(rest):
            if segment.control and segment.text in self._ends:
                return rest[: place + 1], True
        return [*rest, Segment(self._own_end, True)], False

    def _encoded(self, sequence: _Sequence) -> ChatTokens:
        token_ids: list[int] = []
        learned: list[bool] = []
        before = Segment(self._own_end, True)
        for place, (piece, is_learned) in enumerate(sequence.pieces):
            if place == 0:
                ids = self._tokenizer.encode_segments(piece)
            else:  # behind a control token no text is the start of a prompt
                ids = self._tokenizer.encode_segments([before, *piece], add_bos=False)[1:]
            token_ids += ids
            learned += [is_learned] * len(ids)
            if piece:
                before = piece[-1] if piece[-1].control else Segment(self._own_end, True)
        return ChatTokens(token_ids, learned)


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    """Plain neighbours in one, so that two renderings compare."""
    found: list[Segment] = []
    for segment in segments:
        if found and not segment.control and not found[-1].control:
            found[-1] = Segment(found[-1].text + segment.text, False)
        elif segment.text:
            found.append(segment)
    return found


def _after(whole: list[Segment], beginning: list[Segment]) -> list[Segment] | None:
    """What comes in `whole` after `beginning`; None where it begins otherwise. Both joined."""
    if not beginning:
        return whole
    *firsts, last = beginning
    if whole[: len(firsts)] != firsts or len(whole) < len(beginning):
        return None
    there, rest = whole[len(firsts)], whole[len(beginning) :]
    if there == last:
        return rest
    if there.control or last.control or not there.text.startswith(last.text):
        return None
    return [Segment(there.text[len(last.text) :], False), *rest]


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of a chat that are all learned, or all context."""

    text: str
    learned: bool


def pieces(chat: ChatTokens, tokenizer: Tokenizer) -> list[Piece]:
    found: list[Piece] = []
    begin = 0
    for place in range(1, len(chat.token_ids) + 1):
        if place == len(chat.token_ids) or chat.learned[place] != chat.learned[begin]:
            text = tokenizer.decode(chat.token_ids[begin:place], skip_special=False, continues=begin > 0)
            found.append(Piece(text, chat.learned[begin]))
            begin = place
    return found


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Raises BadParameter for a model that has none."""
    if tokenizer.chat_template is None:
        raise BadParameter("--base", "has no chat template", "Give one: --set data.template=FILE, in Jinja's language")
    return tokenizer.chat_template
