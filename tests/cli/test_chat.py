"""A chat: what is said and what the model sees of it, commands, Ctrl-C, what is kept."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_llm import KV_HEADS, KV_ROW_BYTES, LAYERS, ScriptedLLM, dense_visits, endless

from heedful.cli.chat_loop import ChatLoop, status_text
from heedful.cli.conversation import Conversation, receipt_from_dict
from heedful.cli.history import ChatMessage, History
from heedful.cli.message_input import MessageReader
from heedful.cli.terminal import LiveTerminal, Screen
from heedful.engine.engine import Live
from heedful.errors import HistoryError, TemplateError, UsageError
from heedful.request import Batch

Typed = str | type[BaseException] | Callable[[], str]
"""A line, what typing it raises, or a function that looks around and gives the line."""


@dataclass
class TypedScript:
    lines: Iterable[Typed]
    recall: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = iter(self.lines)

    def next_line(self, prompt: str) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        if isinstance(line, type):
            raise line
        return line()

    def remember(self, message: str) -> None:
        self.recall.append(message)


@dataclass
class Table:
    """A model and its chat partner at a terminal, or behind a pipe."""

    llm: ScriptedLLM
    history: History | None = None
    system: str | None = None
    is_terminal: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    warnings: list[HistoryError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        sampling = {"max_tokens": 100, "temperature": 0.5, "top_p": 0.9, "seed": None, **self.sampling}
        self.conversation = Conversation(
            self.llm, sampling, system=self.system, history=self.history, warn=self.warnings.append
        )

    def type(self, *lines: Typed, keyboard: int | None = None) -> str:
        """What the screen shows of it."""
        screen = Screen(self.out, self.err, is_terminal=self.is_terminal, is_styled=False)
        reader = MessageReader(TypedScript(lines))
        terminal = LiveTerminal(None, keyboard)
        before = len(self.out.getvalue())
        ChatLoop(self.conversation, reader, screen, terminal, interactive=self.is_terminal).run()
        return self.out.getvalue()[before:]

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(message.role, message.content) for message in self.conversation.messages]


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History.open(tmp_path / "history.db")
    yield history
    history.close()


@pytest.fixture
def keyboard() -> Iterator[int]:
    ours, theirs = pty.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def press_ctrl_c_at_step(number: int, llm: ScriptedLLM) -> None:
    """Counts the engine's steps from now on."""
    steps = iter(range(1, 10**9))

    def on_step(batch: Batch) -> None:
        if next(steps) == number:
            signal.raise_signal(signal.SIGINT)

    llm.runner.on_step = on_step


# Talking


def test_the_model_sees_the_whole_conversation() -> None:
    table = Table(ScriptedLLM([["Hel", "lo."], ["Fine", "."]]), system="Be brief.", is_terminal=False)
    assert table.type("Hi", "How are\\", "you?") == "Hello.\nFine.\n"
    assert table.err.getvalue() == ""
    first, second = (messages for messages, _ in table.llm.asked)
    assert first == [("system", "Be brief."), ("user", "Hi")]
    assert second == [*first, ("assistant", "Hello."), ("user", "How are\nyou?")]
    assert table.llm.held_pages == 0


def test_sampling_reaches_the_engine() -> None:
    table = Table(ScriptedLLM([["a"]]), sampling={"max_tokens": 7, "temperature": 0.25, "top_p": 0.75, "seed": 3})
    table.type("Hi")
    assert table.llm.asked[0][1] == {"max_tokens": 7, "temperature": 0.25, "top_p": 0.75, "seed": 3}


def test_on_a_terminal_the_receipt_follows() -> None:
    shown = Table(ScriptedLLM([["Hel", "lo."]])).type("Hi there")
    # <user> Hi there <answer>; the end token is computed too, but is not output
    assert re.fullmatch(r"Hello\.\n4 in \(0 cached\) · 2 out · .*\n\n", shown), shown
    assert f"{dense_visits(4 + 2)} visits of {dense_visits(4 + 2)} dense" in shown


def test_an_answer_that_was_cut_says_so() -> None:
    shown = Table(ScriptedLLM([endless()]), sampling={"max_tokens": 3}).type("Hi")
    assert shown.startswith("on0 on1 on2 \ncut at 3 tokens; --max-tokens sets the limit\n")


def test_an_answer_without_a_token_ends_too() -> None:
    table = Table(ScriptedLLM([[], ["a"]]))
    table.type("Hi", "Ho")
    assert table.said == [("user", "Hi"), ("assistant", ""), ("user", "Ho"), ("assistant", "a")]


def test_a_slash_is_sent_doubled() -> None:
    table = Table(ScriptedLLM([["a"], ["b"]]))
    table.type("//cost", '"""', "/save", "x", '"""')
    assert [content for role, content in table.said if role == "user"] == ["/cost", "/save\nx"]


def test_a_base_model_is_refused_before_the_first_prompt() -> None:
    llm = ScriptedLLM()
    llm.tokenizer.chat_template = None  # type: ignore[misc]
    with pytest.raises(TemplateError, match="base model"):
        Table(llm)


# Ctrl-C


def test_ctrl_c_stops_the_answer_and_keeps_what_came(keyboard: int, history: History) -> None:
    table = Table(ScriptedLLM([endless(), ["Yes."]]), history=history)
    press_ctrl_c_at_step(4, table.llm)
    shown = table.type("Count", lambda: f"pages held: {table.llm.held_pages}", keyboard=keyboard)
    answer = "on0 on1 on2 on3 "
    assert shown.startswith(answer + "\nstopped; what had come is kept\n3 in (0 cached) · 4 out")
    assert table.said == [("user", "Count"), ("assistant", answer), ("user", "pages held: 0"), ("assistant", "Yes.")]
    assert table.llm.asked[1][0][:2] == [("user", "Count"), ("assistant", answer)]
    stored = list(history.messages(1).values())
    assert [message.cancelled for message in stored] == [False, True, False, False]
    assert [message.content for message in stored] == [content for _, content in table.said]


def test_what_was_held_back_when_the_answer_was_stopped_is_shown(keyboard: int) -> None:
    table = Table(ScriptedLLM([["a ", "b", "c…", "d"]]))
    press_ctrl_c_at_step(3, table.llm)
    assert table.type("Say", keyboard=keyboard).startswith("a bc…\nstopped")
    assert table.said[-1] == ("assistant", "a bc…")


def test_ctrl_c_stops_the_reading_of_a_long_prompt(keyboard: int) -> None:
    table = Table(ScriptedLLM([endless()], context_len=2048))
    press_ctrl_c_at_step(2, table.llm)
    table.type("word " * 1600, keyboard=keyboard)
    assert table.conversation.messages[1].content == ""
    assert table.conversation.messages[1].cancelled
    assert table.conversation.ledger.visits == dense_visits(1024)  # two steps of 512 tokens
    assert table.llm.held_pages == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_it_leaves() -> None:
    table = Table(ScriptedLLM([["a"], ["b"]]))
    ctrl_c = KeyboardInterrupt
    shown = table.type(ctrl_c, "one", ctrl_c, "two", ctrl_c, ctrl_c, "three")
    assert [content for role, content in table.said if role == "user"] == ["one", "two"]
    assert shown.count("Ctrl-C again leaves.") == 3


def test_in_a_pipe_ctrl_c_ends_it_all() -> None:
    table = Table(ScriptedLLM([endless()]), is_terminal=False)
    press_ctrl_c_at_step(3, table.llm)
    with pytest.raises(KeyboardInterrupt):
        table.type("Count")
    assert table.llm.held_pages == 0


def test_a_kill_while_an_answer_streams_frees_its_pages(keyboard: int) -> None:
    table = Table(ScriptedLLM([endless()]))
    table.llm.runner.on_step = lambda batch: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        table.type("Count", keyboard=keyboard)
    assert table.llm.held_pages == 0


# The context


def test_dropped_turns_are_announced_with_the_numbers() -> None:
    table = Table(ScriptedLLM([["a"]] * 3, context_len=40), sampling={"max_tokens": 10})
    shown = table.type("first " * 9, "second " * 9, "third " * 9)
    # each turn: <user>, 9 words, <assistant>, 1 word; the last: <user>, 9 words, <answer>. 35 of 40 - 10 + 1.
    assert shown.count("dropped") == 1
    assert "The conversation has 35 tokens, the context 40, of which 10 are kept for the answer." in shown
    assert "left out: 12 tokens dropped." in shown  # the first question and its answer
    assert "--context goes up to 2,048" in shown
    assert shown.index("dropped") < shown.rindex("a\n")
    receipt = table.conversation.messages[-1].receipt
    assert receipt is not None
    assert receipt["prompt_tokens"] == 23
    assert len(table.said) == 6


def test_a_message_that_can_never_fit_is_refused_and_the_chat_goes_on() -> None:
    table = Table(ScriptedLLM([["a"]], context_len=40), sampling={"max_tokens": 10})
    shown = table.type("word " * 60, "short")
    assert "the last message alone has 62 tokens; the context of 40 leaves 30 for it" in shown
    assert table.said == [("user", "short"), ("assistant", "a")]


def test_in_a_pipe_an_error_ends_it() -> None:
    table = Table(ScriptedLLM([["a"]], context_len=40), is_terminal=False, sampling={"max_tokens": 10})
    with pytest.raises(UsageError, match="62 tokens"):
        table.type("word " * 60, "short")
    assert table.said == []


# Commands


def test_system_shows_sets_and_takes_away() -> None:
    table = Table(ScriptedLLM([["a"], ["b"], ["c"]]))
    shown = table.type("/system", "/system Be  brief.", "Hi", "/system", "/system -", "Ho")
    assert [line for line in shown.splitlines() if line.startswith("system")] == [
        "system: (none)",
        "system: Be  brief.",
        "system: Be  brief.",
        "system: (none)",
    ]
    assert table.llm.asked[0][0][0] == ("system", "Be  brief.")
    assert table.llm.asked[1][0][0] == ("user", "Hi")


def test_a_system_message_that_the_model_does_not_take() -> None:
    table = Table(ScriptedLLM([["a"]], takes_system=False))
    assert "no system" in table.type("/system Be brief.", "Hi")
    assert table.llm.asked[0][0] == [("user", "Hi")]
    with pytest.raises(TemplateError, match="no system"):
        Table(ScriptedLLM(takes_system=False), system="Be brief.")


def test_a_changed_system_message_is_kept_with_the_chat(history: History) -> None:
    Table(ScriptedLLM([["a"]]), history=history).type("Hi", "/system Be brief.")
    stored = history.chat(1)
    assert stored is not None
    assert stored.system == "Be brief."


def test_regenerate_asks_the_same_with_another_seed(history: History) -> None:
    table = Table(ScriptedLLM([["a"], ["b"], ["c"], ["d"]]), history=history, sampling={"seed": 5})
    table.type("Hi", "/regenerate", "/regenerate", "Ho")
    assert table.llm.seeds == [5, 6, 7, 5]
    assert [messages for messages, _ in table.llm.asked[:3]] == [[("user", "Hi")]] * 3
    assert table.said == [("user", "Hi"), ("assistant", "c"), ("user", "Ho"), ("assistant", "d")]
    assert [message.content for message in history.messages(1).values()] == ["Hi", "c", "Ho", "d"]
    assert table.conversation.ledger.requests == 4


def test_regenerate_without_a_seed_stays_random() -> None:
    table = Table(ScriptedLLM([["a"], ["b"]]))
    table.type("Hi", "/regenerate")
    assert table.llm.seeds == [None, None]


def test_regenerate_without_temperature_warns() -> None:
    table = Table(ScriptedLLM([["a"], ["a"]]), sampling={"temperature": 0})
    assert table.type("Hi", "/regenerate").count("will be the same") == 1


def test_regenerate_with_nothing_to_regenerate() -> None:
    assert "no answer yet" in Table(ScriptedLLM()).type("/regenerate")


@pytest.mark.parametrize(("step", "kept"), [(1, "new0 "), (3, "new0 new1 new2 ")])
def test_a_stopped_regeneration_takes_the_place_as_far_as_it_came(keyboard: int, step: int, kept: str) -> None:
    table = Table(ScriptedLLM([["old"], endless("new")]))
    table.type("Hi", lambda: press_ctrl_c_at_step(step, table.llm) or "/regenerate", keyboard=keyboard)
    assert table.said == [("user", "Hi"), ("assistant", kept)]
    assert table.conversation.messages[1].cancelled


def test_a_regeneration_stopped_before_its_first_word_leaves_the_old_answer(keyboard: int) -> None:
    table = Table(ScriptedLLM([["old"], endless("new")], context_len=2048))
    question = "word " * 1600
    # under another system message all of the question is computed anew, in several steps
    lines = "/system Be brief.", lambda: press_ctrl_c_at_step(1, table.llm) or "/regenerate"
    table.type(question, *lines, keyboard=keyboard)
    assert table.said == [("user", question), ("assistant", "old")]
    assert not table.conversation.messages[1].cancelled
    assert table.conversation.ledger.requests == 2


def test_cost_is_exact_for_conversation_and_session() -> None:
    table = Table(ScriptedLLM([["a"], ["b", "c"]]))
    shown = table.type("one two", "/new", "three", "/cost")
    first, second = dense_visits(4 + 1), dense_visits(3 + 2)
    rows = {line[:14].strip(): line[14:].split() for line in shown[shown.index("this conv") - 20 :].splitlines()}
    assert rows["answers"] == ["1", "2"]
    assert rows["tokens in"] == ["3", "7"]
    assert rows["tokens out"] == ["2", "3"]
    assert rows["visits"] == rows["dense visits"] == [f"{second}", f"{first + second}"]
    assert rows["saved"] == ["0.0%", "0.0%"]
    # keys and values of all tokens so far, in every step: a prompt of 3, then 4 and 5 tokens; of 4, then 5
    second_kv, first_kv = (2 * KV_HEADS * LAYERS * KV_ROW_BYTES * sum(lengths) for lengths in ((3, 4, 5), (4, 5)))
    assert re.search(rf"KV read +{second_kv / 1000:.3g} kB +{(first_kv + second_kv) / 1000:.3g} kB\n", shown)
    assert "estimated" in shown or "measured" in shown


def test_save_as_markdown(tmp_path: Path, keyboard: int) -> None:
    table = Table(ScriptedLLM([["Hello."], endless()]), system="Be brief.")
    file = tmp_path / "talk one.md"
    stop = lambda: press_ctrl_c_at_step(2, table.llm) or "Count"  # noqa: E731
    assert f"saved 4 messages to {file}\n" in table.type("Hi", stop, f"/save {file}", keyboard=keyboard)
    text = file.read_text(encoding="utf-8")
    for part in ("# A conversation with toy", "**System:** Be brief.", "## You\n\nHi\n", "## toy\n\nHello.\n\n*6 in"):
        assert part in text
    assert text.count("*(stopped here)*") == 1
    assert text.index("on0 on1 ") < text.index("*(stopped here)*")
    assert os.listdir(tmp_path) == ["talk one.md"]


def test_save_as_json_is_what_generate_reads(tmp_path: Path) -> None:
    from heedful.cli.generate import _read_messages

    table = Table(ScriptedLLM([["Hé."]]), system="Be brief.")
    table.type("Hi", f"/save {tmp_path}/a.json")
    saved = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert saved["model"] == "toy"
    assert saved["messages"][2]["receipt"] == table.conversation.messages[1].receipt
    read = [(message["role"], message["content"]) for message in _read_messages(tmp_path / "a.json")]
    assert read == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hé.")]


def test_save_overwrites_only_when_told(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("mine")
    table = Table(ScriptedLLM())
    shown = table.type(f"/save {file}")
    assert f"{file} exists" in shown
    assert f"/save! {file}" in shown
    assert file.read_text() == "mine"
    table.type(f"/save! {file}")
    assert file.read_text().startswith("# A conversation")


@pytest.mark.parametrize("name", ["missing/a.md", "", "~nobody-is-called-so/a.md", "a\0b"])
def test_save_where_nothing_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = Table(ScriptedLLM()).type(f"/save {name}")
    assert "cannot be written" in shown or "needs the name" in shown
    assert "saved" not in shown
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("/sytem x", "/system"), ("/exit", "/quit"), ("/COST", "/cost"), ("/regen", "/regenerate"), ("/", "/")],
)
def test_an_unknown_command_names_the_nearest(typed: str, nearest: str) -> None:
    table = Table(ScriptedLLM())
    shown = table.type(typed)
    assert f"there is no command {typed.split()[0]}; the nearest is {nearest}" in shown
    assert "//text" in shown
    assert table.llm.asked == []


def test_help_lists_every_command() -> None:
    shown = Table(ScriptedLLM()).type("/help")
    for name in ("system", "regenerate", "save", "cost", "history", "new", "help", "quit"):
        assert f"  /{name}" in shown


def test_quit_leaves() -> None:
    table = Table(ScriptedLLM([["a"]]))
    assert table.type("/quit", "Hi") == ""
    assert table.said == []


# What is kept


def test_every_finished_turn_is_stored_at_once(history: History) -> None:
    table = Table(ScriptedLLM([["a"], ["b"], ["c"]]), history=history, system="Be brief.")
    stored: list[list[str]] = []

    def look() -> str:
        stored.append([message.content for message in history.messages(1).values()])
        return "look"

    table.type("Hi", look, look)
    assert stored == [["Hi", "a"], ["Hi", "a", "look", "b"]]
    chat_row = history.chat(1)
    assert chat_row is not None
    assert (chat_row.model, chat_row.system) == ("toy", "Be brief.")
    assert [message.receipt for message in history.messages(1).values()][1] == table.conversation.messages[1].receipt


def test_nothing_is_stored_of_a_chat_without_answers(history: History) -> None:
    Table(ScriptedLLM(), history=history).type("/system Be brief.", "/cost")
    assert history.latest_id() is None


def test_new_starts_another_chat_with_the_same_system_message(history: History) -> None:
    table = Table(ScriptedLLM([["a"], ["b"]]), history=history, system="Be brief.")
    table.type("Hi", "/new", "Ho")
    assert table.llm.asked[1][0] == [("system", "Be brief."), ("user", "Ho")]
    assert [summary.opening for summary in history.summaries(5)] == ["Hi", "Ho"]


def test_history_lists_the_chats(history: History) -> None:
    table = Table(ScriptedLLM([["a"], ["b"]]), history=history)
    shown = table.type("/history", "Tell me\\", "a story", "/new", "Ho", "/history")
    assert shown.startswith("no chats are kept yet\n")
    last = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "WHEN", line) for line in shown.splitlines()[-2:]]
    assert last == ["     1  WHEN    2 messages  Tell me a story (toy)", "*    2  WHEN    2 messages  Ho (toy)"]
    assert "no history is kept" in Table(ScriptedLLM()).type("/history")


def test_a_history_that_fails_is_warned_of_once_and_the_chat_goes_on(history: History) -> None:
    table = Table(ScriptedLLM([["a"], ["b"], ["c"]]), history=history)

    def break_it() -> str:
        history._connection.execute("DROP TABLE messages")
        return "Ho"

    table.type("Hi", break_it, "Ha")
    assert len(table.warnings) == 1
    assert len(table.said) == 6


def test_a_resumed_chat_goes_on(history: History) -> None:
    before = Table(ScriptedLLM([["a"], ["b"]]), history=history, system="Be brief.")
    before.type("Hi", "Ho")
    table = Table(ScriptedLLM([["c"]]), history=history)
    stored = history.chat(1)
    assert stored is not None
    table.conversation.resume(stored, history.messages(1))
    shown = table.type("Ha", "/cost")
    assert table.llm.asked[0][0] == [("system", "Be brief."), *before.said, ("user", "Ha")]
    assert [message.content for message in history.messages(1).values()] == ["Hi", "a", "Ho", "b", "Ha", "c"]
    assert re.search(r"answers +3 +1\n", shown)
    assert table.conversation.ledger.visits == before.llm.ledger.visits + table.llm.ledger.visits


def test_a_resumed_answer_can_be_made_again(history: History) -> None:
    Table(ScriptedLLM([["a"], ["b"]]), history=history).type("Hi", "Ho")
    table = Table(ScriptedLLM([["c"]]), history=history)
    stored = history.chat(1)
    assert stored is not None
    table.conversation.resume(stored, history.messages(1))
    table.type("/regenerate")
    assert [message.content for message in history.messages(1).values()] == ["Hi", "a", "Ho", "c"]


def test_a_given_system_message_takes_the_place_of_the_resumed_one(history: History) -> None:
    Table(ScriptedLLM([["a"]]), history=history, system="Old.").type("Hi")
    stored = history.chat(1)
    assert stored is not None
    table = Table(ScriptedLLM(), history=history, system="New.")
    table.conversation.resume(stored, history.messages(1))
    changed = history.chat(1)
    assert changed is not None
    assert (table.conversation.system, changed.system) == ("New.", "New.")


def test_the_tail_of_a_resumed_chat_is_shown() -> None:
    table = Table(ScriptedLLM())
    long = "\n".join(f"line {i}" for i in range(20))
    table.conversation.messages = [ChatMessage("user", "1st"), ChatMessage("assistant", "x")] * 2 + [
        ChatMessage("user", "last\nquestion"),
        ChatMessage("assistant", long, cancelled=True),
    ]
    screen = Screen(table.out, table.err, is_terminal=True, is_styled=False)
    reader, terminal = MessageReader(TypedScript([])), LiveTerminal(None, None)
    ChatLoop(table.conversation, reader, screen, terminal, interactive=True).show_tail()
    shown = table.out.getvalue().splitlines()
    assert shown[:5] == ["… 2 earlier messages", "> 1st", "  x", "> last", "  question"]
    assert shown[5:] == [f"  line {i}" for i in range(8)] + ["  … (stopped)"]


def test_a_receipt_survives_the_history() -> None:
    table = Table(ScriptedLLM([["a", "b"]]))
    table.type("Hi")
    stored = json.loads(json.dumps(table.conversation.messages[1].receipt))
    assert receipt_from_dict(stored).to_dict() == stored


# The status line


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (Live(1834, 512, 0, 2_500_000, 1.25, 0.0), "reading 512 of 1,834 tokens · 2.5 M visits · 1.2 s"),
        (Live(10, 10, 1, 900, 0.5, 0.0), "1 tokens · 900 visits · 0.5 s · Ctrl-C stops"),
        (Live(10, 10, 41, 4321, 4.5, 4.0), "41 tokens · 10.0 tok/s · 4.32 k visits · 4.5 s · Ctrl-C stops"),
    ],
)
def test_the_status_line(live: Live, text: str) -> None:
    assert status_text(live) == text
