"""Calls in a stream. Texts are made from known calls, by json; whatever the cuts, just these must come back."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.text.json_steps import JsonSteps
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, Event, TextDelta, ToolCallParser
from heedful.text.tool_formats import DEFAULT, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PHI, ToolFormat

NAMES = ("get_weather", "now", "f")
FORMS = [HERMES, DEFAULT, LLAMA, MISTRAL, MISTRAL_ARGS, PHI]

Plain = str | tuple[str, str, bool]
"""Text, or a call: name, its arguments, joined, and whether it is complete."""


def merged(events: list[Event]) -> list[Event]:
    """Adjacent deltas of one kind in one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            out[-1] = CallArguments(last.index, last.json_text + event.json_text)
        else:
            out.append(event)
    return out


def events_of(form: ToolFormat, pieces: list[str]) -> list[Event]:
    parser = ToolCallParser(form, NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.flush())


def plain(events: list[Event]) -> list[Plain]:
    """`events` without their cuts; checks their order and indices on the way."""
    out: list[Plain] = []
    calls = 0
    begun = False
    for event in events:
        if isinstance(event, TextDelta):
            assert event.text
            out.append(event.text)
            begun = False
        elif isinstance(event, CallBegin):
            assert event.index == calls
            calls += 1
            out.append((event.name, "", False))
            begun = True
        else:
            last = out[-1]
            assert begun, events
            assert isinstance(last, tuple)
            assert event.index == calls - 1
            if isinstance(event, CallArguments):
                assert event.json_text
                out[-1] = (last[0], last[1] + event.json_text, False)
            else:
                out[-1] = (last[0], last[1], True)
                begun = False
    return out


def parsed(form: ToolFormat, text: str) -> list[Plain]:
    """What comes of `text`, the same whole and one character at a time."""
    whole = events_of(form, [text])
    assert events_of(form, list(text)) == whole
    return plain(whole)


def written(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Calls, arguments as JSON, as the models of this format write them."""
    key = form.arguments_key
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if form in (HERMES, DEFAULT):
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if form == LLAMA:
        return "; ".join(objects)
    if form == MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if form == MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    return f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>"


awkward = st.sampled_from(
    ['{"a": 1}', "}", "]", '"', "\\", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", ";", "\n", "é😀", "\u2028", "\x00"]
)
leaves = st.one_of(
    st.text(), awkward, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)
values = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=8)
objects = st.one_of(st.just({}), st.dictionaries(st.one_of(st.text(), awkward, st.just("name")), values, max_size=4))
arguments = st.builds(
    lambda value, ascii_only, spaced: json.dumps(value, ensure_ascii=ascii_only, indent=2 if spaced else None),
    objects,
    st.booleans(),
    st.booleans(),
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=4)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMS), calls, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from(["", "\n", " \n\n"])
)
def test_calls_come_back_whatever_the_cuts(
    form: ToolFormat, asked: list[tuple[str, str]], places: list[int], space: str
) -> None:
    text = space + written(form, asked) + space
    whole = events_of(form, [text])
    assert plain(whole) == [(name, text, True) for name, text in asked]
    assert events_of(form, cut(text, places)) == whole
    assert events_of(form, list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([HERMES, MISTRAL, MISTRAL_ARGS, PHI]),
    calls,
    st.sampled_from(["Let me see.", "a < b", "<tool", "[TOOL", "<|tool_", "x\n"]),
)
def test_text_before_and_after(form: ToolFormat, asked: list[tuple[str, str]], around: str) -> None:
    expected: list[Plain] = [around, *((name, text, True) for name, text in asked), around]
    assert parsed(form, around + written(form, asked) + around) == expected


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"]
SNIPPETS = [
    '{"name": "now", "arguments": ', '{"name": "f", "parameters": {', '{"a": 1', '"arguments": {}', '"name": "f"',
    '"name": "nobody"', '"x', "1.5e", "-", "tru", "null", ", ", *'<}{][,: ', "}}",
]  # fmt: skip
pieces = st.one_of(st.text(max_size=5), awkward, st.sampled_from(MARKERS + SNIPPETS))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMS), st.lists(pieces, max_size=14), st.lists(st.integers(0, 10_000), max_size=8))
def test_nothing_breaks_it_and_cuts_never_matter(form: ToolFormat, made_of: list[str], places: list[int]) -> None:
    text = "".join(made_of)
    whole = events_of(form, [text])
    assert events_of(form, list(text)) == whole
    assert events_of(form, cut(text, places)) == whole
    for item in plain(whole):
        if isinstance(item, tuple) and item[2]:
            assert isinstance(json.loads(item[1]), dict)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMS), st.text())
def test_text_without_calls_comes_back_as_it_is(form: ToolFormat, text: str) -> None:
    assert parsed(form, text) == ([text] if text else [])


CALL = '{"name": "f", "arguments": {"a": 1}}'
DONE = ("f", '{"a": 1}', True)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # Hermes: a list inside, no end marker, a missing brace, the start twice, keys in another order, other keys
        (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", [DONE, DONE]),
        (HERMES, f"<tool_call>{CALL}", [DONE]),
        (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", [DONE, DONE]),
        (HERMES, f"<tool_call>{CALL[:-1]}</tool_call>", [DONE]),
        (HERMES, f"<tool_call>{CALL[:-1]}\n</tool_call> and", [DONE, " and"]),
        (HERMES, f"<tool_call>\n<tool_call>{CALL}</tool_call>", ["<tool_call>\n", DONE]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [DONE]),
        (HERMES, '<tool_call>{"id": 12, "name": "f", "x": [{}], "arguments": {"a": 1}, "y": -1e5}</tool_call>', [DONE]),
        (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [DONE]),
        # arguments: none, null, JSON in a string, raw line breaks in a string, the key twice
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}", True)]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}", True)]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [DONE]),
        (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', [DONE]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', [("f", '{"a": "x\\ny"}', True)]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>', [DONE]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"arguments": {}, "name": "now"}}</tool_call>',
         [("f", '{"arguments": {}, "name": "now"}', True)]),
        # what is no call comes back
        (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', None),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', None),
        (HERMES, "<tool_call>{name: f}</tool_call>", None),
        (HERMES, "<tool_call>f()</tool_call>", None),
        (HERMES, "<tool_call>[]</tool_call>", None),
        (HERMES, "\n <tool_call>\n", None),
        (HERMES, '<tool_call>{"name": "f", ', None),
        (HERMES, "\n\n", None),
        (HERMES, f"<tool_call>[{CALL}, 7]</tool_call> x", [DONE, ", 7]</tool_call> x"]),
        (HERMES, f"no <tool_call> {CALL[:-2]}", ["no ", ("f", '{"a": 1', False)]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
         [("f", '{"a": ', False), "oops}}</tool_call>"]),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n\n", [DONE]),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n\nThen.", [DONE, "\n\nThen."]),
        (HERMES, f"<tool_call>{CALL}\nThen.", [DONE, "\nThen."]),
        (HERMES, CALL, None),
        # Llama
        (LLAMA, CALL, [DONE]),
        (LLAMA, f"<|python_tag|>{CALL}", [DONE]),
        (LLAMA, f"\n{CALL};{CALL} ; \n{CALL}", [DONE, DONE, DONE]),
        (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', [DONE]),
        (LLAMA, f"{CALL} and {CALL}", [DONE, f" and {CALL}"]),
        (LLAMA, f"{CALL}; no", [DONE, "; no"]),
        (LLAMA, f"See {CALL}", None),
        (LLAMA, '{"city": "Bern"}', None),
        (LLAMA, '{"name": "Ann"}', None),
        (LLAMA, '{"name": "f", "age": 3}', None),
        (LLAMA, "; a", None),
        (LLAMA, "<|python_tag|>print(1)", None),
        # Mistral
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", [DONE]),
        (MISTRAL, f"[TOOL_CALLS]{CALL}", [DONE]),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}", None),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', [DONE]),
        (MISTRAL_ARGS, '[TOOL_CALLS]f{"a": 1}x', [DONE, "x"]),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', [DONE, ("now", "{}", True)]),
        (MISTRAL_ARGS, f"[TOOL_CALLS][{CALL}]", [DONE]),
        (MISTRAL_ARGS, f"[TOOL_CALLS]{CALL}.", [DONE, "."]),
        (MISTRAL_ARGS, "[TOOL_CALLS]nobody[ARGS]{}", None),
        (MISTRAL_ARGS, "[TOOL_CALLS]" + "f" * 500, None),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]", None),
        # Phi
        (PHI, f"<|tool_call|>[{CALL}]</|tool_call|>", [DONE]),
        (PHI, f"<|tool_call|>{CALL}<|/tool_call|>.", [DONE, "."]),
    ],
)  # fmt: skip
def test_cases(form: ToolFormat, text: str, expected: list[Plain] | None) -> None:
    """None: it is text, all of it."""
    assert parsed(form, text) == ([text] if expected is None else expected)


def test_a_call_after_one_without_arguments_keeps_its_own() -> None:  # vLLM 47901
    text = written(HERMES, [("now", "{}"), ("f", '{"a": 1}'), ("now", "{}")])
    assert parsed(HERMES, text) == [("now", "{}", True), DONE, ("now", "{}", True)]


def test_arguments_stream_as_they_come() -> None:  # vLLM 30439, 9693
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>\n{"name": "f", "arguments"') == []
    assert parser.push(': {"a": ') == [CallBegin(0, "f"), CallArguments(0, '{"a": ')]
    assert parser.push('"x') == [CallArguments(0, '"x')]
    assert parser.push('"}}') == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.push("\n</tool_call>") == []
    assert parser.flush() == []


def test_only_a_live_beginning_of_a_marker_is_held_back() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("a <") == [TextDelta("a ")]
    assert parser.push("tool") == []
    assert parser.push("box") == [TextDelta("<toolbox")]
    assert parser.push(" {") == [TextDelta(" {")]


def test_several_tokens_a_delta_and_calls_in_one() -> None:  # vLLM 55082
    text = "Yes. " + written(HERMES, [("f", '{"a": {"b": "}"}}'), ("now", "{}")])
    events = ToolCallParser(HERMES, NAMES).push(text)
    assert [type(event) for event in events] == [TextDelta, *([CallBegin, CallArguments, CallEnd] * 2)]


def test_deep_arguments_neither_break_nor_go_on_for_ever() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000
    (begun, rest) = parsed(HERMES, text)
    assert isinstance(begun, tuple)
    assert isinstance(rest, str)
    assert begun[1] + rest == '{"a": ' + "[" * 5000


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 20_000, "<tool_call>{" * 20_000, '<tool_call>{"' * 20_000, "<" * 200_000]
)
def test_each_character_is_read_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the steps instead of the time."""
    steps = 0
    step = JsonSteps.step

    def counting(self: JsonSteps, char: str) -> bool:
        nonlocal steps
        steps += 1
        return step(self, char)

    monkeypatch.setattr(JsonSteps, "step", counting)
    parser = ToolCallParser(HERMES, NAMES)
    events = parser.push(text) + parser.flush()
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text
    assert steps <= len(text)


def json_says(text: str) -> bool:
    def no_constant(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=no_constant, strict=False)
    except ValueError:
        return False
    return True


def steps_say(text: str) -> bool:
    steps = JsonSteps()
    return all(steps.step(char) for char in text + " ") and steps.state == "done"


json_pieces = st.sampled_from(
    [
        '"',
        "\\",
        "u00e9",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "0",
        "12",
        "-",
        ".",
        "e",
        "E+",
        "true",
        "false",
        "null",
        "a",
        " ",
        "\n",
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.lists(json_pieces, max_size=8).map("".join), values.map(json.dumps), st.text(max_size=5)))
def test_json_steps_agree_with_json(text: str) -> None:
    assert steps_say(text) == json_says(text)
