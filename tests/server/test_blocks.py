"""A chat's events as blocks, and the items and turns of the APIs as chat messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import BadParameter
from heedful.server.blocks import BlockReader, Closed, Grew, Opened
from heedful.server.message_blocks import messages_of_turns
from heedful.server.response_items import message_of_blocks, messages_of_input
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, Event, TextDelta


def reader() -> BlockReader:
    return BlockReader(text_prefix="t_", call_prefix="c_")


def call(index: int, name: str, *pieces: str, ends: bool = True) -> list[Event]:
    arguments = [CallArguments(index, piece) for piece in pieces]
    return [CallBegin(index, name), *arguments, *([CallEnd(index)] if ends else [])]


def test_blocks_of_texts_and_calls() -> None:
    blocks = reader()
    steps = blocks.read([TextDelta("a"), TextDelta("b"), *call(0, "f", "{", "}"), *call(1, "g", "{}"), TextDelta("c")])
    steps += blocks.close(is_cut=False)
    found = [(block.index, block.name, block.text, block.is_complete) for block in blocks.blocks]
    assert found == [(0, None, "ab", True), (1, "f", "{}", True), (2, "g", "{}", True), (3, None, "c", True)]
    assert len({block.id for block in blocks.blocks}) == 4
    assert [block.id[:2] for block in blocks.blocks] == ["t_", "c_", "c_", "t_"]
    assert len(steps) == 4 + 6 + 4


@pytest.mark.parametrize(
    ("events", "is_cut", "complete"),
    [
        ([TextDelta("a")], False, [True]),
        ([TextDelta("a")], True, [False]),
        (call(0, "f", "{", ends=False), True, [False]),
        (call(0, "f", "{", ends=False), False, [False]),  # it broke
        ([*call(0, "f", "{", ends=False), TextDelta("x")], False, [False, True]),
        (call(0, "f", "{}"), True, [True]),
        ([], True, []),
    ],
)
def test_what_is_complete(events: list[Event], is_cut: bool, complete: list[bool]) -> None:
    blocks = reader()
    blocks.read(events)
    blocks.close(is_cut=is_cut)
    assert [block.is_complete for block in blocks.blocks] == complete


@given(st.lists(st.sampled_from(["text", "call", "broken"]), max_size=8), st.booleans())
def test_steps_open_grow_and_close_one_block_after_another(kinds: list[str], is_cut: bool) -> None:
    events: list[Event] = []
    for i, kind in enumerate(kinds):
        events += [TextDelta(f"{i}")] if kind == "text" else call(i, "f", "{", "}", ends=kind == "call")
    blocks = reader()
    steps = [*blocks.read(events), *blocks.close(is_cut=is_cut)]
    current, texts = None, {block.index: "" for block in blocks.blocks}
    for step in steps:
        match step:
            case Opened(block):
                assert current is None
                current = block
            case Grew(block, text):
                assert block is current
                texts[block.index] += text
            case Closed(block):
                assert block is current
                current = None
    assert current is None
    assert [texts[block.index] for block in blocks.blocks] == [block.text for block in blocks.blocks]


def test_an_answer_goes_on_as_one_turn() -> None:
    blocks = reader()
    blocks.read([TextDelta("So: "), *call(0, "f", '{"x":1}'), TextDelta("and"), *call(1, "g", "{", ends=False)])
    blocks.close(is_cut=True)
    (message,) = message_of_blocks(blocks.blocks)
    assert (message["role"], message["content"]) == ("assistant", "So: and")
    assert [made["function"] for made in message["tool_calls"]] == [{"name": "f", "arguments": '{"x":1}'}]


def test_items_as_messages() -> None:
    """The example of a conversation with calls in OpenAI's guide to function calling, in its shape."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Horoscope?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get", "arguments": '{"sign": "A"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "luck"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"sign": "A"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert messages_of_input(items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Horoscope?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Wait."}], "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "get", "content": "luck"},
        {"role": "tool", "tool_call_id": "c2", "name": "now", "content": [{"type": "text", "text": "noon"}]},
    ]


def test_reading_items_leaves_them_as_they_were() -> None:
    earlier = messages_of_input([{"role": "assistant", "content": "x"}])
    kept = [dict(message) for message in earlier]
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    messages_of_input([{"role": "assistant", "content": "x"}, made])
    assert earlier == kept


def test_turns_as_messages() -> None:
    """The conversation with tools of Anthropic's guide, in its shape."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"of": "Äöü"}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "15 degrees"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "get", "arguments": '{"of": "Äöü"}'}},
        {"id": "t2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert messages_of_turns([{"type": "text", "text": "Be brief."}], turns) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "name": "get", "content": "15 degrees"},
        {"role": "tool", "tool_call_id": "t2", "name": "now", "content": "Error: no clock"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]


@pytest.mark.parametrize(
    "block",
    [
        "text",
        {"type": "text"},
        {"type": "text", "text": 1},
        {"type": "tool_use", "id": "x", "name": "f", "input": {}},
        {"type": "tool_result"},
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]},
        {"type": "document", "source": {}},
        {"type": ["text"]},
    ],
)
def test_blocks_that_nothing_reads(block: Any) -> None:
    with pytest.raises(BadParameter) as caught:
        messages_of_turns(None, [{"role": "user", "content": [block]}])
    assert caught.value.field == "messages"
