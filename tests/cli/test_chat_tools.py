"""`heedful chat --mcp`: rounds of calls that a model writes, guards, the command in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest
import typer
from fake_llm import ScriptedLLM, WordTemplate, WordTokenizer
from typer.testing import CliRunner

import heedful
from heedful.cli.chat import chat
from heedful.cli.chat_loop import ChatLoop
from heedful.cli.conversation import Conversation, receipts_of
from heedful.cli.generate import generate
from heedful.cli.message_input import MessageReader
from heedful.cli.terminal import LiveTerminal, Screen
from heedful.errors import HeedfulError
from heedful.mcp.calls.read_result import READ_RESULT
from heedful.mcp.chat.loop import ToolChat
from heedful.mcp.chat.turn import Called, Calling, Limits
from heedful.mcp.client.blocking import McpThread
from heedful.mcp.settings.config import config_from_json
from heedful.testing import make_tiny_model

SERVER = str(Path(__file__).parents[1] / "mcp" / "servers" / "office.py")
ASKED = "Book the Green room of the office."
"""An order, so no rule has a call for it."""


class ToolTemplate(WordTemplate):
    """Knows tools, as far as anybody can see."""

    source = "{% if tools %}<tool_call>{% endif %}"

    def __init__(self) -> None:
        super().__init__(takes_system=True)
        self.rendered: list[Sequence[Mapping[str, Any]]] = []
        self.told: list[Any] = []

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[str]:
        self.rendered.append(messages)
        self.told += [tools] if tools else []
        return [*(["<tools>", json.dumps(tools)] if tools else []), *super().render(messages)]


class ToolTokenizer(WordTokenizer):
    control_texts: frozenset[str] = frozenset()

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        return [self.id_of(word) for word in text.split()]


class ToolLLM(ScriptedLLM):
    def __init__(self, answers: Iterable[Iterable[str]]) -> None:
        self.template = ToolTemplate()
        answers = list(answers)
        super().__init__(answers)
        texts = self.tokenizer._texts
        self.tokenizer = ToolTokenizer(self.template)  # type: ignore[assignment]
        self.tokenizer._texts = texts


def call(name: str, **arguments: Any) -> list[str]:
    """As the model writes it, in pieces."""
    text = json.dumps({"name": f"office__{name}", "arguments": arguments})
    return ["<tool", "_call>\n", text[:9], text[9:], "\n</tool_call>"]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Callable[..., ToolChat]]:
    opened: list[McpThread] = []

    def make(llm: Any, **options: Any) -> ToolChat:
        entry = {"command": sys.executable, "args": ["-S", SERVER, str(tmp_path)], "x-heedful": {"allow": ["*"]}}
        opened.append(McpThread(config_from_json({"mcpServers": {"office": entry}}), trust=True))
        return ToolChat(llm, opened[-1], **options)

    yield make
    for thread in opened:
        thread.close()


def log(tmp_path: Path) -> list[str]:
    path = tmp_path / "log"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_results_go_back_and_a_handle_is_an_argument(office: Callable[..., ToolChat], tmp_path: Path) -> None:
    """2,000 desks never cross the model: it sees a preview, and hands them on by their handle."""
    llm = ToolLLM([call("list_desks"), call("count_desks", desks={"$handle": "h1"}), ["There are ", "2000 desks."]])
    turn = office(llm).turn([{"role": "user", "content": ASKED}], max_tokens=50)
    events = list(turn)
    assert turn.text == "There are 2000 desks."
    assert [event.tool for event in events if isinstance(event, Calling)] == [
        "office__list_desks",
        "office__count_desks",
    ]
    texts = [event.done.text for event in events if isinstance(event, Called)]
    assert "kept as h1" in texts[0]
    assert len(texts[0].split()) < 600
    assert texts[1].endswith("2000")
    assert [message["role"] for message in llm.template.rendered[-1]] == ["user", *["assistant", "tool"] * 2]
    told = [message["tool_call_id"] for message in llm.template.rendered[-1] if message["role"] == "tool"]
    asked = [message["tool_calls"][0]["id"] for message in llm.template.rendered[-1] if message.get("tool_calls")]
    assert told == asked, "each call has its result"
    receipt = turn.receipt
    assert receipt is not None
    assert (receipt.way, receipt.said_by, len(receipt.runs)) == ("model", "model", 3)
    assert receipt.schema_tokens > 0
    assert receipt.calls[0].held_bytes > 30_000
    assert len(log(tmp_path)) == 2


def test_a_model_reads_parts_of_what_is_kept(office: Callable[..., ToolChat], tmp_path: Path) -> None:
    """A link is read when it is asked for, from the server that gave it, once."""

    def part(**arguments: Any) -> list[str]:
        return ["<tool_call>\n", json.dumps({"name": "read_result", "arguments": arguments}), "\n</tool_call>"]

    script = [
        call("show_plan"),
        part(handle="h1", grep="desk 7:"),
        part(handle="h1", lines="2998:"),
        part(handle="h9"),
        ["By window 2."],
    ]
    llm = ToolLLM(script)
    turn = office(llm).turn([{"role": "user", "content": ASKED}], max_tokens=50)
    texts = [event.done.text for event in turn if isinstance(event, Called)]
    assert "link to office://plan" in texts[0]
    assert "kept as h1" in texts[0]
    assert texts[1].endswith("7: desk 7: window 2\n[1 lines, 1 shown]")
    assert texts[2].endswith("desk 2998: window 3\ndesk 2999: window 4")
    assert texts[3].startswith("error: no result is kept as 'h9'")
    assert turn.text == "By window 2."
    assert [line for line in log(tmp_path) if "plan" in line] == ["show_plan {}", "read office://plan"]
    assert not any(READ_RESULT in str(tools) for tools in llm.template.told[:1]), "nothing was kept yet"
    assert READ_RESULT in str(llm.template.told[-1])


def test_after_a_result_that_gives_orders_nothing_is_changed_unasked(
    office: Callable[..., ToolChat], tmp_path: Path
) -> None:
    """All tools are allowed by name; the notice board pretends to be a part of the prompt."""
    script = [call("book_room", room="Blue"), call("read_board"), call("book_room", room="Green"), ["Well."]]
    turn = office(ToolLLM(script)).turn([{"role": "user", "content": ASKED}], max_tokens=50)
    done = [event.done for event in turn if isinstance(event, Called)]
    assert [each.record.outcome for each in done] == ["ok", "ok", "denied"]
    assert done[1].record.findings
    assert "looks like orders to the model" in done[2].text
    assert log(tmp_path) == ['book_room {"room": "Blue"}', "read_board {}"]


def test_a_failure_goes_back_in_words(office: Callable[..., ToolChat]) -> None:
    script = [call("phone_number", people_name="Zoe"), call("phone_number"), call("nothing"), ["I do not know."]]
    turn = office(ToolLLM(script)).turn([{"role": "user", "content": ASKED}], max_tokens=50)
    events = list(turn)
    outcomes = [event.done.record.outcome for event in events if isinstance(event, Called)]
    assert outcomes == ["tool_error", "bad_arguments"]
    assert "nothing" in turn.text, "a call of a tool that is not there is text"


@pytest.mark.parametrize(
    ("script", "limits", "guard", "calls"),
    [
        ([call("read_board")] * 3 + [["Done."]], Limits(), "stopped: the same call again and again", 1),
        (
            [call("phone_number", people_name=name) for name in ("X", "Y", "Z")] + [["Done."]],
            Limits(),
            "stopped: 3 errors in a row",
            3,
        ),
        (
            [call("room_temperature", room=room) for room in ("Blue", "Green")] + [["Done."]],
            Limits(rounds=2),
            "after 2 rounds",
            2,
        ),
    ],
)
def test_guards_end_the_calls_and_an_answer_follows(
    script: list[list[str]], limits: Limits, guard: str, calls: int, office: Callable[..., ToolChat], tmp_path: Path
) -> None:
    turn = office(ToolLLM(script), limits=limits).turn([{"role": "user", "content": ASKED}], max_tokens=50)
    list(turn)
    assert turn.receipt is not None
    assert (turn.text, turn.receipt.stopped_by) == ("Done.", guard)
    assert len(log(tmp_path)) == calls


def test_in_a_chat(office: Callable[..., ToolChat]) -> None:
    llm = ToolLLM([call("room_temperature", room="Green"), ["It is 17."], ["Hello."]])
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), is_terminal=True, is_styled=False)
    sampling = {"max_tokens": 50, "temperature": 0.0, "top_p": 1.0, "seed": None}
    talk = Conversation(llm, sampling, warn=lambda error: None)

    class Typed:
        lines = iter(
            ["/tools", "What is the temperature in the Blue room?", ASKED, "/tools", "/cost", "/new", "/tools"]
        )

        def next_line(self, prompt: str) -> str:
            return next(self.lines, None) or (_ for _ in ()).throw(EOFError)

        def remember(self, message: str) -> None: ...

    loop = ChatLoop(talk, MessageReader(Typed()), screen, LiveTerminal(None, None), interactive=True, tools=office(llm))
    loop.run()
    shown = out.getvalue()
    assert shown.startswith("nothing was asked yet")
    assert '→ office__room_temperature {"room": "Blue"}\ntemperature: 21\ntool by rules · ' in shown
    assert '→ office__room_temperature {"room": "Green"}\nIt is 17.\ntool by the model · ' in shown
    assert "tools fitted the last message: " in shown
    assert "office__book_room(room: " in shown
    assert shown.rstrip().endswith("nothing was asked yet; tools are chosen for each message")
    assert re.search(r"answers +2 +2\n", shown), "two runs of the model for one answer, none for the other"


def test_receipts_of_stored_answers(office: Callable[..., ToolChat]) -> None:
    llm = ToolLLM([call("read_board"), ["Well."]])
    talk = Conversation(llm, {"max_tokens": 50, "temperature": 0.0}, warn=lambda error: None)
    for text, runs in ((ASKED, 2), ("What is the temperature in the Blue room?", 0)):
        draft = talk.ask_with_tools(text, office(llm), stopped=lambda: False, tick=lambda what: None)
        list(draft.turn)
        answer = talk.keep_turn(draft)
        assert len(receipts_of(answer)) == runs
        assert json.loads(json.dumps(answer.receipt))["tools"]["calls"]


# The command


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(heedful.__file__).parents[1]),
        "HEEDFUL_DATA": str(tmp_path / "data"),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "INPUTRC": os.devnull,
    }


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    entry = {
        "command": sys.executable,
        "args": ["-S", SERVER, str(tmp_path)],
        "x-heedful": {"trusted": True, "ask": ["wait_*"]},
    }
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"office": entry}}), encoding="utf-8")
    model = str(make_tiny_model(tmp_path / "tiny", context_len=4096))
    options = ["--mcp", str(tmp_path / "servers.json"), "--tool-embedder", "none", "--max-tokens", "4", "--seed", "1"]
    return ["-m", "heedful", "chat", "-m", model, *options]


def test_in_a_pipe(command: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    def run(*more: str) -> subprocess.CompletedProcess[str]:
        asked = "What is the temperature in the Blue room?\nWait for the elevator.\n"
        return subprocess.run(
            [sys.executable, *command, *more], input=asked, env=environment, capture_output=True, text=True, check=False
        )

    refused = run()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "MCP server 'office' was not approved" in refused.stderr
    assert "heedful mcp approve --config" in refused.stderr
    done = run("--mcp-trust", "--receipts")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "temperature: 21"
    assert second == "I cannot tell: office__wait_elevator is not allowed: ask 'wait_*' of server 'office'"
    assert "tool by rules · office__room_temperature" in done.stderr
    assert '"wait_elevator" under allow' in done.stderr
    assert log(tmp_path) == ['room_temperature {"room": "Blue"}']


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mcp-trust"], "--mcp-trust: needs servers"),
        (["--mcp", "nowhere.json"], "nowhere.json cannot be read"),
        (["--mcp", os.devnull], "is not JSON"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(arguments: list[str], says: str) -> None:
    app = typer.Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, ["-m", "no-such-model-anywhere", *arguments], input="Hi\n")
    assert isinstance(result.exception, HeedfulError), result.exception
    assert says in result.exception.message


def test_one_answer(command: list[str], tmp_path: Path) -> None:
    """`heedful generate --chat --mcp`."""
    app = typer.Typer()
    app.command()(generate)
    tools = ["--mcp", str(tmp_path / "servers.json"), "--mcp-trust", "--tool-embedder", "none"]
    asked = ["What is the phone number of Ana?", "-m", command[4], *tools]
    done = CliRunner().invoke(app, [*asked, "--chat", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["text"], shown["finish_reason"], shown["receipt"]) == ("4711", "stop", None)
    assert (shown["tools"]["way"], shown["tools"]["output_tokens"]) == ("rules", 0)
    assert [each["tool"] for each in shown["tools"]["calls"]] == ["office__list_people", "office__phone_number"]
    plain = CliRunner().invoke(app, [*asked, "--chat", "--receipt"])
    assert plain.stdout == "4711\n"
    assert '→ office__phone_number {"people_name": "Ana"}\ntool by rules · ' in plain.stderr
    for more, says in (([], "Add --chat"), (["--chat", "--json", "--logprobs", "1"], "")):
        refused = CliRunner().invoke(app, [*asked, *more])
        assert isinstance(refused.exception, HeedfulError)
        assert refused.exception.message.startswith("--mcp: ")
        assert says in refused.exception.remedy


def test_on_a_terminal(command: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    child = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60, dimensions=(24, 200))
    child.expect_exact("MCP server 'office' has not been agreed to yet.")
    child.expect_exact("Start it? [y/N]")
    child.send("y\r")
    child.expect_exact("Let models use these 9 tools? [y/N]")
    child.send("y\r")
    child.expect_exact("> ")
    child.send("What is the temperature in the Blue room?\r")
    child.expect_exact("temperature: 21")
    child.expect_exact("> ")
    child.send("Wait for the elevator.\r")
    child.expect_exact("Call it? [y/N]")
    child.send("n\r")
    child.expect_exact("the user does not want this call")
    child.expect_exact("> ")
    child.send("Wait for the elevator.\r")
    child.expect_exact("Call it? [y/N]")
    child.send("y\r")
    until = time.monotonic() + 30
    while not any("wait_elevator" in line for line in log(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.02)
    child.send("\x03")
    child.expect_exact("stopped")
    child.expect_exact("> ")
    child.send("/quit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert log(tmp_path)[-1] == "cancelled"
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _exists(path)]
    assert not any(str(tmp_path).encode() in line and b"office.py" in line for line in running), "no orphan"


def _exists(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
