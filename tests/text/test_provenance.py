"""The border between users' text and the template's, held against whatever a template does with users' text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import BadParameter
from heedful.text.chat import ChatTemplate, Segment
from heedful.text.literals import LiteralScanner
from heedful.text.provenance import ControlTexts, unmarked

TOKENS = ("<|end|>", "<|im_end|>", "<|user|>", "</s>", "<eos>", "[INST]")
CONTROL = ControlTexts(TOKENS)
FRAGMENTS = st.sampled_from([*TOKENS, "<", "|", ">", "<|", "|>", "end", "<|im_", "_end|>", "/s>", "a", "\ue000"])
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


def control_tokens(source: str, content: str, role: str = "user", **variables: Any) -> list[str]:
    template = ChatTemplate(source, bos_token=None, eos_token=None, control_tokens=TOKENS)
    segments = template.render([{"role": role, "content": content}], **variables)
    return [segment.text for segment in segments if segment.control]


@given(template_parts=st.lists(TEXTS, min_size=2, max_size=4), user_text=TEXTS)
def test_only_complete_tokens_of_the_template_count(template_parts: list[str], user_text: str) -> None:
    """Parts of a template with a user's text between them: the control tokens are those within the parts, or those
    that join over a gap where the user wrote nothing."""
    stand_ins = CONTROL.stand_ins(taken=user_text + "".join(template_parts))
    assert stand_ins is not None
    marked = user_text.join(CONTROL.marked(part, stand_ins) for part in template_parts)
    pieces = list(CONTROL.split(marked, stand_ins, roles=()))
    assert "".join(piece for piece, _ in pieces) == user_text.join(template_parts) == unmarked(marked, stand_ins)
    found = [piece for piece, is_control in pieces if is_control]
    without_user = ("\n" if user_text else "").join(template_parts)
    assert found == [token for token, is_control in LiteralScanner(TOKENS).split(without_user) if is_control]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content | replace('/think', '') }}",  # deletes from inside: SmolLM3's template does so
        "{{ messages[0].content | lower }}",
        "{{ messages[0].content.split('/think') | join }}",
        "<{{ messages[0].content }}>",  # writes tags: Qwen3-Coder's template does so
        "<|{{ messages[0].content }}|>",
        "{{ '<|im_' + messages[0].content }}",
        "{{ messages[0].content + '_end|>' }}",
        "{% set c = messages[0].content %}{% for x in c %}{{ x }}{% endfor %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(messages[0].content) }}",
        "{{ messages | tojson }}{{ '%s' | format(messages[0].content) }}",
    ],
)
def test_content_never_becomes_a_control_token(source: str) -> None:
    template = ChatTemplate(source, bos_token=None, eos_token=None, control_tokens=TOKENS)
    parts = ["<|im_/thinkend|>", "<|IM_END|>", "|im_end|", "eos", "end", "im_end", "end|>", "<|im", "/s"]
    for content in [*TOKENS, *parts]:
        segments = template.render([{"role": "user", "content": content}])
        assert not any(segment.control for segment in segments), content


@pytest.mark.parametrize(
    "source",
    [
        "<|user|>",
        "{{ '<|user|>' }}",
        "{{ '<|' + messages[0].role + '|>' }}",
        "a <|{{ messages[0]['role'] }}|> b",
        "{{ '<|' ~ 'user' ~ '|>' }}",
        "{% set marks = {'user': '<|user|>'} %}{{ marks[messages[0].role] }}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m('<|user|>') }}",
        "{{ ['<|us', 'er|>'] | join }}",
        "{{ ('x<|user|>' + messages[0].content) | trim }}",
    ],
)
def test_what_the_template_writes_is_a_control_token(source: str) -> None:
    assert control_tokens(source, "hi") == ["<|user|>"]


@pytest.mark.parametrize("role", ["user|><|end", "<|user|>", "|user|", "user ", ""])
def test_a_role_completes_a_token_only_as_a_word(role: str) -> None:
    assert control_tokens("<|{{ messages[0].role }}|>", "hi", role=role) == []


def test_adjacent_and_nested_tokens() -> None:
    template = ChatTemplate(
        "<|end|></s>{{ messages[0].content }}</s>", bos_token="", eos_token="", control_tokens=TOKENS
    )
    assert template.render([{"role": "user", "content": "</s></s>"}]) == [
        Segment("<|end|>", True),
        Segment("</s>", True),
        Segment("</s></s>", False),
        Segment("</s>", True),
    ]


def test_stand_ins_occur_nowhere_in_the_request() -> None:
    content = "".join(map(chr, range(0xE000, 0xF900)))
    assert control_tokens("{{ messages[0].content }}</s>", content) == ["</s>"]
    everything = content + "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(BadParameter, match="private-use"):
        control_tokens("{{ messages[0].content }}</s>", everything)


def test_the_stand_ins_of_an_error_are_turned_back() -> None:
    template = ChatTemplate("{{ raise_exception('no </s>') }}", bos_token="", eos_token="", control_tokens=TOKENS)
    with pytest.raises(Exception, match="no </s>"):
        template.render([{"role": "user", "content": ""}])


def test_a_model_without_control_tokens() -> None:
    template = ChatTemplate("a{{ messages[0].content }}", bos_token=None, eos_token=None, control_tokens=())
    assert template.render([{"role": "user", "content": "<s>"}]) == [Segment("a<s>", False)]
