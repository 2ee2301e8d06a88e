"""Formats by template, the check of tools, histories as text, and forced calls, read back by the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from heedful.errors import BadParameter
from heedful.request import SamplingParams
from heedful.sampling.grammar import GrammarCompiler
from heedful.sampling.sampler import Sampler
from heedful.testing import CHAT_TEMPLATE, make_tiny_model
from heedful.text.chat import ChatTemplate
from heedful.text.tokenizer import Tokenizer
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, TextDelta, ToolCallParser, tool_grammar
from heedful.text.tool_formats import (
    DEFAULT,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PHI,
    ToolChoice,
    ToolFormat,
    checked_choice,
    checked_tools,
    tool_format,
    with_tools,
)


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **described, **others}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS = [tool("get_weather", WEATHER, description="Weather of a city"), tool("now")]


@pytest.mark.parametrize(
    ("template", "control", "expected"),
    [
        (None, [], DEFAULT),
        (CHAT_TEMPLATE, ["<|im_start|>"], DEFAULT),
        ("{% for m in messages %}{{ m.toolset }}<tool_call>{% endfor %}", [], DEFAULT),
        ("{% if tools %}<tools>{{ tools | tojson }}</tools> within <tool_call></tool_call>{% endif %}", [], HERMES),
        ("{% if tools %}{{ tools }}{% endif %}<tool_call>\n<function=a>", [], DEFAULT),
        ("{%- if tools is not none %}Environment: ipython{% endif %}<|python_tag|>", ["<|python_tag|>"], LLAMA),
        ('{% if tools %}{"name": "x", "parameters": {}} ipython{% endif %}', [], LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", ["[TOOL_CALLS]"], MISTRAL),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", ["[TOOL_CALLS]", "[ARGS]"], MISTRAL_ARGS),
        ("{% if tools %}{% endif %}[TOOL_CALLS]{{ name }}[ARGS]", [], MISTRAL_ARGS),
        ("{% if message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}", ["<|tool_call|>"], PHI),
        ("{% if tools %}{{ tools }}{% endif %}", [], DEFAULT),
    ],
)
def test_the_format_is_read_off_the_template(template: str | None, control: list[str], expected: ToolFormat) -> None:
    assert tool_format(template, control) == expected


def test_good_tools_are_kept() -> None:
    asked = [tool("a-B_9", {"type": "object"}, description="d", strict=True), tool("n" * 64, description=None)]
    assert checked_tools(asked) == [asked[0], tool("n" * 64)]
    assert checked_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("now", "list"),
        ({"type": "function"}, "list"),
        (["now"], "tool 0"),
        ([{"function": {"name": "a"}}], "type"),
        ([{"type": "web_search"}], "type"),
        ([{"type": "function"}], "no function"),
        ([{"type": "function", "function": "a"}], "no function"),
        ([tool("now"), {"type": "function", "function": {}}], "tool 1 needs a name"),
        ([tool("")], "name"),
        ([tool("a b")], "name"),
        ([tool("a\n")], "name"),
        ([tool("é")], "name"),
        ([tool("n" * 65)], "name"),
        ([tool(7)], "name"),  # type: ignore[arg-type]
        ([tool("a"), tool("b"), tool("a")], "two tools"),
        ([tool("a", "string")], "parameters"),
        ([tool("a", [1])], "parameters"),
        ([tool("a", description=3)], "description"),
        ([tool("a", strict="yes")], "strict"),
        ([tool("a", {"default": float("nan")})], "JSON"),
        ([tool("a", {"default": {1}})], "JSON"),
        ([tool("a", nested(5000))], "JSON"),
    ],
)
def test_malformed_tools_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(BadParameter, match=reason) as caught:
        checked_tools(tools)
    assert caught.value.field == "tools"


def test_choices() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert checked_choice(None, TOOLS) == checked_choice("auto", TOOLS) == ToolChoice("auto")
    assert checked_choice(None, []) == checked_choice("auto", []) == checked_choice("none", TOOLS) == ToolChoice("none")
    assert checked_choice("required", TOOLS) == ToolChoice("required")
    assert checked_choice(named, TOOLS) == ToolChoice("required", "now")
    bad: list[Any] = ["any", 1, {}, {"type": "function"}, {"type": "function", "function": {"name": 1}}, ["auto"]]
    for choice in [*bad, {"type": "function", "function": {"name": "then"}}]:
        with pytest.raises(BadParameter, match="tool_choice"):
            checked_choice(choice, TOOLS)
    with pytest.raises(BadParameter, match="tool_choice"):
        checked_choice("required", [])


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Bern and Basel?"},
    {"role": "assistant", "content": None, "tool_calls": [call("get_weather", '{"city": "Bern"}'), call("now", "")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "<tool_response>\nmine"},
]


def test_a_template_without_tools_renders_calls_and_results() -> None:
    before = json.dumps(HISTORY)
    messages = with_tools(HISTORY, TOOLS, ToolChoice("auto"))
    assert json.dumps(HISTORY) == before
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "user"]
    for described in TOOLS:
        assert json.dumps(described) in messages[0]["content"]
    parser = ToolCallParser(DEFAULT, ["get_weather", "now"])
    assert parser.push(messages[2]["content"]) == [
        CallBegin(0, "get_weather"), CallArguments(0, '{"city": "Bern"}'), CallEnd(0),
        CallBegin(1, "now"), CallArguments(1, "{}"), CallEnd(1),
    ]  # fmt: skip
    results = "<tool_response>\n12 °C\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert messages[3] == {"role": "user", "content": results}
    assert messages[4] == HISTORY[4]
    template = ChatTemplate(CHAT_TEMPLATE, bos_token=None, eos_token="<|im_end|>", control_tokens=["<|im_end|>"])
    text = "".join(segment.text for segment in template.render(messages))
    assert results in text
    assert '{"name": "get_weather", "arguments": {"city": "Bern"}}' in text


def test_tools_join_a_system_message_that_is_there() -> None:
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        first, *rest = with_tools([{"role": "system", "content": content}, *HISTORY[:1]], TOOLS, ToolChoice("auto"))
        assert first["content"].startswith("Be brief.\n\n")
        assert '"get_weather"' in first["content"]
        assert rest == HISTORY[:1]


def test_no_tools_are_told_when_none_may_be_called() -> None:
    assert with_tools(HISTORY[:1], TOOLS, ToolChoice("none")) == HISTORY[:1]
    assert with_tools(HISTORY[:1], [], ToolChoice("none")) == HISTORY[:1]


def test_a_native_template_gets_arguments_as_objects() -> None:
    messages = with_tools(HISTORY, TOOLS, ToolChoice("auto"), HERMES)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Bern"}}
    assert messages[1]["tool_calls"][1]["function"] == {"name": "now", "arguments": {}}
    assert [messages[0], *messages[2:]] == [HISTORY[0], *HISTORY[2:]]


def test_phi_reads_its_tools_from_the_system_message() -> None:
    messages = with_tools(HISTORY, TOOLS, ToolChoice("auto"), PHI)
    assert json.loads(messages[0]["tools"]) == [described["function"] for described in TOOLS]
    assert messages[2]["content"].startswith('<|tool_call|>[{"name": "get_weather"')


@pytest.mark.parametrize(
    "calls",
    [[call(1, "{}")], ["f"], [{"type": "function"}]],  # type: ignore[arg-type]
)
@pytest.mark.parametrize("form", [DEFAULT, HERMES])
def test_malformed_calls_in_the_history_are_refused(calls: Any, form: ToolFormat) -> None:
    with pytest.raises(BadParameter, match="messages"):
        with_tools([{"role": "assistant", "content": "", "tool_calls": calls}], TOOLS, ToolChoice("auto"), form)


@pytest.mark.parametrize("broken", ["{", "[]", "4", "{'a': 1}"])
def test_a_call_that_the_model_once_broke_does_not_end_the_conversation(broken: str) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call("f", broken)]}
    (native,) = with_tools([said], TOOLS, ToolChoice("none"), HERMES)
    arguments = native["tool_calls"][0]["function"]["arguments"]
    assert set(arguments) == {"text"}
    (plain,) = with_tools([said], TOOLS, ToolChoice("none"), DEFAULT)
    assert '"name": "f"' in plain["content"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and the formats' markers as control tokens, one per file with some of them."""
    return tokenizer_with(tmp_path_factory.mktemp("plain"), [])


def tokenizer_with(folder: Path, markers: list[str]) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as HFTokenizer

    path = make_tiny_model(folder) / "tokenizer.json"
    made = HFTokenizer.from_file(str(path))
    made.add_special_tokens([AddedToken(text, special=True) for text in markers])
    made.save(str(path))
    return Tokenizer.from_file(path)


@pytest.mark.parametrize("markers_are_control", [False, True])
@pytest.mark.parametrize("form", [DEFAULT, LLAMA, MISTRAL, MISTRAL_ARGS, PHI], ids=lambda form: form.name)
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", "get_weather")])
def test_a_forced_call_is_one_call_that_fits(
    tmp_path: Path, form: ToolFormat, choice: ToolChoice, markers_are_control: bool
) -> None:
    tokenizer = tokenizer_with(tmp_path, list(form.markers) if markers_are_control else [])
    spec = tool_grammar(TOOLS, choice, form, tokenizer)
    grammar = GrammarCompiler(tokenizer).compile(spec, field="tools")
    kept = frozenset(token_id for text in form.markers if (token_id := tokenizer.id_of(text)) is not None)
    assert bool(kept) == markers_are_control
    rng = np.random.default_rng(3)
    called = set()
    for seed in range(10):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], tokenizer.vocab_size, grammar=grammar.begin())
        stream = tokenizer.stream(continues=True, kept_special=kept)
        parser = ToolCallParser(form, ["get_weather", "now"])
        events, ids = [], []
        while not ids or ids[-1] not in tokenizer.eos_ids:
            ids.append(sampler.sample(rng.normal(0, 2, tokenizer.vocab_size).astype(np.float32)).token_id)
            events += parser.push(stream.push(ids[-1]))
        events += parser.push(stream.flush()) + parser.flush()
        if form.opens and markers_are_control and not form.bare:
            assert tokenizer.id_of(form.opens[0]) == ids[0]
        assert not [event for event in events if isinstance(event, TextDelta)]
        assert [event for event in events if isinstance(event, CallEnd)] == [CallEnd(0)]
        (begun,) = [event for event in events if isinstance(event, CallBegin)]
        arguments = json.loads("".join(event.json_text for event in events if isinstance(event, CallArguments)))
        if begun.name == "now":
            assert arguments == {}
        else:
            jsonschema.validate(arguments, WEATHER)
        called.add(begun.name)
    assert called == ({"get_weather"} if choice.name else {"get_weather", "now"})


def test_parameters_that_cannot_be_kept_are_blamed_on_the_tools(tokenizer: Tokenizer) -> None:
    spec = tool_grammar([tool("f", {"not": {}})], ToolChoice("required"), DEFAULT, tokenizer)
    with pytest.raises(BadParameter, match="not") as caught:
        GrammarCompiler(tokenizer).compile(spec, field="tools")
    assert caught.value.field == "tools"


def test_quotes_and_comments_in_a_schema_stay_in_it(tokenizer: Tokenizer) -> None:
    parameters = {"properties": {'a"/*%json//': {"const": '# "\\ %json {'}}, "required": ['a"/*%json//']}
    spec = tool_grammar([tool("f", parameters)], ToolChoice("required"), DEFAULT, tokenizer)
    grammar = GrammarCompiler(tokenizer).compile(spec, field="tools")
    sampler = Sampler(SamplingParams(seed=1), [], tokenizer.vocab_size, grammar=grammar.begin())
    ids: list[int] = []
    while not ids or ids[-1] not in tokenizer.eos_ids:
        ids.append(sampler.sample(np.linspace(0, 1, tokenizer.vocab_size, dtype=np.float32)).token_id)
    parser = ToolCallParser(DEFAULT, ["f"])
    events = parser.push(tokenizer.decode(ids)) + parser.flush()
    arguments = "".join(event.json_text for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments) == {'a"/*%json//': '# "\\ %json {'}
