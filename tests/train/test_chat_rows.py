"""Which tokens of a chat are learned: exactly what the model must write itself, for templates of many families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import BadParameter, TemplateError
from heedful.text.tokenizer import Tokenizer
from heedful.train.chat_rows import ChatEncoder, ChatRow, chat_rows, pieces
from heedful.train.chat_store import as_plain_text, chat_of, write_chat_store
from heedful.train.token_store import ChatTokens, TokenStore

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
THINKING = (  # as Qwen3's: what was thought is shown in the last answer alone
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501

FAMILIES: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "chatml": (CHATML, "<|im_end|>", lambda text: text + "<|im_end|>"),
    "llama-3": (LLAMA_3, "<|eot_id|>", lambda text: text.strip() + "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>", lambda text: text.strip() + "<end_of_turn>"),
    "llama-2": (LLAMA_2, "</s>", lambda text: f" {text.strip()} </s>"),
    "phi-3": (PHI_3, "<|end|>", lambda text: text + "<|end|>"),
    "thinking": (THINKING, "<|im_end|>", lambda text: f"<think>\n\n</think>\n\n{text}<|im_end|>"),
    "without an end": (NO_END, "<|endoftext|>", lambda text: f"{text}\n<|endoftext|>"),
}
"""Template, end of a turn, and by hand what is to be learned of an answer."""
CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|system|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, ChatEncoder]]:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Engine

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(["\n\n\n  the cat sat\n\non the mat  and so on\n", "assistant\n\nuser\n"] * 4, trainer)
    found = {}
    for name, (template, end, _) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        engine.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
        assert tokenizer.chat_template is not None
        found[name] = (tokenizer, ChatEncoder(tokenizer, tokenizer.chat_template))
    return found


def answers_of(chats: list[ChatTokens], tokenizer: Tokenizer) -> list[str]:
    return [piece.text for chat in chats for piece in pieces(chat, tokenizer) if piece.learned]


PARTS = [" ", "\n", "\t", "a", "cat", "é", "<|im_end|>", "</s>", "<end_of_turn>", ":", "</think>"]
TEXT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_what_is_learned_is_what_is_to_be_generated(
    family: str, encoders: dict[str, tuple[Tokenizer, ChatEncoder]], turns: list[tuple[str, str]]
) -> None:
    """By hand for each family; and behind the very tokens that the model is given when it is asked."""
    tokenizer, encoder = encoders[family]
    expected = FAMILIES[family][2]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    chats = encoder.encode(ChatRow(tuple(messages)))
    assert answers_of(chats, tokenizer) == [expected(answer) for _, answer in turns]
    assert all(chat.learned[-1] for chat in chats), "nothing comes after the last answer"
    template = tokenizer.chat_template
    assert template is not None
    asked = tokenizer.encode_segments(template.render(messages[:1]))
    assert chats[0].token_ids[: len(asked)] == asked
    assert chats[0].learned.index(True) == len(asked)
    learned = [np.array(chat.token_ids)[chat.learned] for chat in chats]
    ends = sum(int(np.isin(ids, list(tokenizer.eos_ids)).sum()) for ids in learned)
    assert ends == len(turns), "texts of control tokens stay texts"


def test_a_template_that_forgets_gives_a_chat_for_each_answer(
    encoders: dict[str, tuple[Tokenizer, ChatEncoder]],
) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2]
    for family, chats in (("chatml", 1), ("llama-2", 1), ("phi-3", 1), ("thinking", 2), ("without an end", 2)):
        assert len(encoders[family][1].encode(ChatRow(tuple(turns)))) == chats, family
    tokenizer, encoder = encoders["thinking"]
    last = encoder.encode(ChatRow(tuple(turns)))[1]
    assert as_plain_text(pieces(last, tokenizer)) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nb<|im_end|>]]"
    )


def test_rows_of_both_forms(tmp_path: Path, encoders: dict[str, tuple[Tokenizer, ChatEncoder]]) -> None:
    path = tmp_path / "chat.jsonl"
    turns = (("user", "q"), ("assistant", "shown"), ("user", "r"))
    asked = [{"role": role, "content": text} for role, text in turns]
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": asked, "completion": [{"role": "assistant", "content": "b"}]},
        {"messages": [*asked, {"role": "assistant", "content": "c"}], "id": 3},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tokenizer, encoder = encoders["chatml"]
    found = [answers_of(encoder.encode(row), tokenizer) for row in chat_rows([path])]
    assert found == [["a<|im_end|>"], ["b<|im_end|>"], ["shown<|im_end|>", "c<|im_end|>"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 of .* is no JSON"),
        ("[1]", "is no object"),
        ('{"text": "x"}', "has no messages"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": [{"content": "x"}]}', "a message without a role"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant's message"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "begins with the assistant"),
        ('{"prompt": "x", "completion": 3}', "no list of messages"),
        ('{"prompt": "x", "completion": "y", "tools": "z"}', "tools that are no list"),
    ],
)
def test_rows_that_are_none_are_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(line)
    with pytest.raises(BadParameter, match=message):
        list(chat_rows([tmp_path / "chat.jsonl"]))
    with pytest.raises(BadParameter, match="No such file"):
        list(chat_rows([tmp_path / "none.jsonl"]))


def test_a_row_that_the_template_refuses_is_named(encoders: dict[str, tuple[Tokenizer, ChatEncoder]]) -> None:
    from heedful.text.chat import ChatTemplate

    tokenizer, _ = encoders["chatml"]
    row = ChatRow(({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}), where="line 7 of x")
    for source, message in (
        ("{{ raise_exception('never') }}", "line 7 of x: .*never"),
        ("{% if add_generation_prompt %}ask{% else %}told{% endif %}", "line 7 of x: the template's prompt"),
    ):
        template = ChatTemplate(source, bos_token=None, eos_token="<|im_end|>", control_tokens=tokenizer.control_texts)
        with pytest.raises(TemplateError, match=message):
            ChatEncoder(tokenizer, template).encode(row)


def test_rows_that_do_not_fit_are_left_out_whole_and_counted(
    tmp_path: Path, encoders: dict[str, tuple[Tokenizer, ChatEncoder]]
) -> None:
    path = tmp_path / "chat.jsonl"
    rows = [{"prompt": "q", "completion": "z" * length} for length in (5, 200, 6, 300)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer, encoder = encoders["chatml"]
    chats = [encoder.encode(row)[0] for row in chat_rows([path])]
    said = write_chat_store(tmp_path / "store", [path], tokenizer, len(chats[0].token_ids) + 1, "train")
    assert f"2 rows left out: longer than {len(chats[0].token_ids) + 1} tokens" in said
    assert f"--context {len(chats[3].token_ids) - 1})" in said
    store = TokenStore.open(tmp_path / "store")
    assert [chat_of(store, i) for i in range(2)] == [chats[0], chats[2]]
    assert store.facts.documents == 2
    with pytest.raises(BadParameter, match="every row is longer than 4 tokens"):
        write_chat_store(tmp_path / "other", [path], tokenizer, 4, "train")
