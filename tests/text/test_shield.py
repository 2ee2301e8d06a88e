"""The border between users' text and the template's: no user string can become, or help to become, a control token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import BadParameter
from heedful.text.shield import ControlTexts, Shield

TOKENS = ("<|end|>", "<|im_end|>", "</s>", "[INST]", "><")
CONTROL = ControlTexts(TOKENS)
TEXTS = st.lists(
    st.sampled_from([*TOKENS, "<", "|", ">", "<|", "|>", "end", "<|im_", "/s>", "a", "\ue000"]), max_size=8
)


@given(TEXTS.map("".join))
def test_covering_keeps_length_and_uncovering_gives_back(text: str) -> None:
    shield = Shield(CONTROL, taken=set(text))
    covered = shield.cover({"content": [text]})["content"][0]
    assert len(covered) == len(text)
    assert shield.uncover(covered) == text
    assert not any(token in covered for token in TOKENS)


@given(text=TEXTS.map("".join), token=st.sampled_from(TOKENS), cut=st.integers(1, 9))
def test_the_template_cannot_complete_what_a_user_began(text: str, token: str, cut: int) -> None:
    """The template writes the rest of a token behind, or its beginning before, what the user wrote of it."""
    head, tail = token[:cut], token[cut:]
    if not tail or head.isalnum() or tail.isalnum():
        return
    for user, chat in ((text + head, "{}" + tail), (tail + text, head + "{}")):
        shield = Shield(CONTROL, taken=set(user + chat))
        rendered = chat.format(shield.cover(user))
        assert [piece for piece, is_control in CONTROL.split(rendered) if is_control] == []
        assert shield.uncover(rendered) == chat.format(user)


def test_a_template_may_build_a_token_around_a_word_of_the_user() -> None:
    """As Phi-3's does: '<|' + role + '|>'."""
    role = Shield(ControlTexts(["<|user|>"]), taken=set()).cover("user")
    assert list(ControlTexts(["<|user|>"]).split(f"<|{role}|>")) == [("<|user|>", True)]


def test_what_holds_no_control_token_is_left_alone() -> None:
    value = {"a": ["1 < 2 > 0 | x", "a</think>b", 5, None, True, 1.5], "role": "user"}
    assert Shield(CONTROL, taken=set()).cover(value) == value


def test_keys_are_covered_too() -> None:
    assert list(Shield(CONTROL, taken=set()).cover({"</s>": 1})) != ["</s>"]


def test_no_placeholder_is_left() -> None:
    private = {chr(code) for codes in (range(0xE000, 0xF900), range(0xF0000, 0x110000)) for code in codes}
    shield = Shield(CONTROL, taken=private)
    assert shield.cover("plain") == "plain"
    with pytest.raises(BadParameter, match="private-use"):
        shield.cover("</s>")
