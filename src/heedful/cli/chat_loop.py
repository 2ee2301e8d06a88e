"""The loop of a chat: a message or a command comes in, an answer or what was asked for goes out. Owns the commands.

How lines are typed, how the screen draws and what the model is told live in message_input.py, terminal.py and
conversation.py.
"""

from __future__ import annotations

import difflib
import os
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli import transcript
from heedful.cli.conversation import Conversation, Draft, ToolDraft
from heedful.cli.history import ChatMessage
from heedful.cli.message_input import MessageReader
from heedful.cli.terminal import LiveTerminal, Screen
from heedful.cost.ledger import Ledger
from heedful.cost.receipt import human
from heedful.errors import HeedfulError, UsageError

if TYPE_CHECKING:
    from heedful.engine.engine import Live
    from heedful.mcp.catalogue.catalog import CatalogTool
    from heedful.mcp.chat.loop import ToolChat
    from heedful.mcp.client.elicit import Answer, Question

LISTED_CHATS = 20
TAIL_MESSAGES = 4
TAIL_LINES = 8
"""Of each old message, when a chat is resumed."""

_INPUT_HELP = '''\
  A line is a message. A line that ends with \\ goes on in the next one; lines between
  two lines of """ are one message. //text sends a text that begins with a slash.
  Ctrl-C stops an answer, or clears the line, twice in a row it leaves; Ctrl-D leaves.'''


@dataclass(frozen=True)
class Command:
    usage: str
    help: str
    run: Callable[[str], None]
    """Takes the rest of the line."""


class ChatLoop:
    """`interactive`: somebody types. Then an error is shown and the chat goes on; in a pipe it ends the chat. `tools`:
    that may help with answers. `receipts`: a line of what each answer took."""

    def __init__(
        self,
        conversation: Conversation,
        reader: MessageReader,
        screen: Screen,
        terminal: LiveTerminal,
        *,
        interactive: bool,
        tools: ToolChat | None = None,
        receipts: bool | None = None,
    ) -> None:
        self._conversation = conversation
        self._reader = reader
        self._screen = screen
        self._terminal = terminal
        self._interactive = interactive
        self._tools = tools
        self._receipts = screen.is_terminal if receipts is None else receipts
        self._leaving = False
        self._commands = {
            "system": Command("/system [TEXT]", "Show or set the system message; - takes it away.", self._system),
            "regenerate": Command("/regenerate", "Answer the last message again, with another seed.", self._regenerate),
            "save": Command("/save FILE", "Write the conversation as Markdown, or as JSON to *.json.", self._save),
            "save!": Command("/save! FILE", "The same, over a file that exists.", self._save_over),
            "cost": Command("/cost", "What this conversation and this session have cost.", self._cost),
            "history": Command("/history", "The chats that are kept; --resume ID goes on with one.", self._history),
            "new": Command("/new", "Start an empty conversation; the system message stays.", self._new),
            "help": Command("/help", "This list.", self._help),
            "tools": Command("/tools", "The tools that fitted the last message, and what they took.", self._show_tools),
            "quit": Command("/quit", "Leave.", self._quit),
        }

    def run(self) -> None:
        """Until the end of the input, /quit, or Ctrl-C twice in a row."""
        interrupts = 0
        while interrupts < 2 and not self._leaving:
            try:
                message = self._reader.read()
                if message is None:
                    break
                interrupts = 0
                self._handle(message)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                interrupts += 1
                self._screen.line()
                if interrupts == 1:
                    self._screen.note("Ctrl-C again leaves.")
            except HeedfulError as error:
                if not self._interactive:
                    raise
                self.show_error(error)

    def show_error(self, error: HeedfulError) -> None:
        self._screen.note(f"{error.message}\n  {error.remedy}" if error.remedy else error.message)

    def show_tail(self) -> None:
        """The end of a conversation that goes on."""
        messages = self._conversation.messages
        if earlier := len(messages[:-TAIL_MESSAGES]):
            self._screen.note(f"… {earlier} earlier messages")
        for message in messages[-TAIL_MESSAGES:]:
            self._screen.note(_old_message(message))

    def _handle(self, message: str) -> None:
        if message.startswith("//"):
            self._ask(message[1:])
        elif message.startswith("/"):
            name, *rest = message[1:].split(maxsplit=1) or [""]
            self._command(name).run(rest[0].strip() if rest else "")
        else:
            self._ask(message)

    def _ask(self, text: str) -> None:
        if self._tools is None:
            self._answer(self._conversation.ask(text))
        else:
            draft = self._conversation.ask_with_tools(
                text, self._tools, stopped=self._is_stopped, tick=self._show_waiting
            )
            self._answer_with_tools(draft)

    def _command(self, name: str) -> Command:
        if name in self._commands:
            return self._commands[name]
        nearest = difflib.get_close_matches(name.lower(), self._commands, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"there is no command /{name[:40]}; the nearest is /{nearest}",
            "/help lists them. To send a text that begins with a slash, double it: //text.",
        )

    def _answer(self, draft: Draft) -> None:
        self._tell_dropped(draft)
        with self._terminal as terminal:
            self._stream(draft, terminal)
            answer = self._conversation.keep(draft)  # here, so that no Ctrl-C comes between
        completion = draft.stream.completion
        if answer.cancelled:
            self._screen.note("stopped; what had come is kept")
        elif completion.finish_reason == "length":
            self._screen.note(f"cut at {len(completion.token_ids):,} tokens; --max-tokens sets the limit")
        if self._receipts:
            self._screen.note(completion.receipt.line() + "\n")

    def _answer_with_tools(self, draft: ToolDraft) -> None:
        from heedful.cli.tool_answer import show_turn

        turn = draft.turn
        with self._terminal as terminal:
            show_turn(turn, self._screen, terminal, status_text)
            if turn.finish_reason != "cancelled" or turn.text:
                self._conversation.keep_turn(draft)  # here, so that no Ctrl-C comes between
        if turn.finish_reason == "cancelled":
            self._screen.note("stopped; what had come is kept" if turn.text else "stopped")
        if turn.finish_reason == "length":
            self._screen.note("cut; --max-tokens sets the limit")
        if turn.dropped_tokens:
            self._screen.note(f"The oldest turns were left out: {turn.dropped_tokens:,} tokens dropped.")
        if turn.finish_reason == "cancelled" and not turn.text:
            return
        if self._receipts and turn.receipt is not None:
            self._screen.note(turn.receipt.line() + ("" if turn.runs else "\n"))
        if self._receipts and turn.runs:
            self._screen.note(turn.runs[-1].line() + "\n")

    def _is_stopped(self) -> bool:
        return self._terminal.stopped

    def _show_waiting(self, what: str) -> None:
        self._terminal.show(f"{what} … Ctrl-C stops", self._screen.open_line)

    def wants_call(self, tool: CatalogTool, arguments: Mapping[str, Any], why: str) -> bool:
        """Asks the person."""
        from heedful.cli.tool_answer import question_text

        with self._terminal.given_back():
            try:
                answer = self._reader.read_answer(question_text(tool, arguments, why))
            except KeyboardInterrupt:
                return False
        return not self._terminal.stopped and answer.strip().lower() in ("y", "yes")

    def answers(self, question: Question) -> Answer:
        """Puts a server's question to the person; Ctrl-C declines it, and the turn goes on."""
        from heedful.cli.form_answer import answer_of

        def read(prompt: str) -> str:
            with interrupting():
                return self._reader.read_answer(prompt)

        with self._terminal.given_back():
            return answer_of(question, read, self._screen.note)

    def _stream(self, draft: Draft, terminal: LiveTerminal) -> None:
        """Show the answer until it ends or is stopped; its completion is there afterwards."""
        shown_len = 0
        with draft.stream as stream:
            for piece in stream if self._read_prompt(draft, terminal) else ():
                self._screen.text(piece.text)
                shown_len += len(piece.text)
                if (live := stream.live) is not None:
                    terminal.show(status_text(live), self._screen.open_line)
                if terminal.stopped:
                    break
        self._screen.line(stream.completion.text[shown_len:])  # what was held back when it was stopped

    def _read_prompt(self, draft: Draft, terminal: LiveTerminal) -> bool:
        """Compute a long prompt step by step, so that its progress shows and Ctrl-C is heard in between.

        Returns whether it got to the end, where the answer's first token has come too.
        """
        while (live := draft.stream.live) is not None and live.prompt_tokens_computed < live.prompt_tokens:
            if terminal.stopped:
                return False
            terminal.show(status_text(live))
            self._conversation.llm.step()
        return True

    def _tell_dropped(self, draft: Draft) -> None:
        if draft.dropped_tokens:
            llm, answer_tokens = self._conversation.llm, self._conversation.sampling["max_tokens"]
            most = llm.config.context_len
            larger = f"; --context goes up to {most:,}" if llm.context_len < most else ""
            self._screen.note(
                f"The conversation has {draft.conversation_tokens:,} tokens, the context {llm.context_len:,}, "
                f"of which {answer_tokens:,} are kept for the answer.\n"
                f"The oldest turns are left out: {draft.dropped_tokens:,} tokens dropped.\n"
                f"/new starts afresh; a smaller --max-tokens leaves more room{larger}."
            )

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system(None if text == "-" else text)
        self._screen.line(f"system: {self._conversation.system or '(none)'}")

    def _regenerate(self, _: str) -> None:
        if self._tools is not None:
            again = self._conversation.ask_again_with_tools(
                self._tools, stopped=self._is_stopped, tick=self._show_waiting
            )
            self._answer_with_tools(again)
            return
        draft = self._conversation.ask_again()
        if self._conversation.sampling["temperature"] == 0:
            self._screen.note("The temperature is 0, so the answer will be the same; --temperature 0.5 varies it.")
        self._answer(draft)

    def _show_tools(self, _: str) -> None:
        if self._tools is None:
            raise UsageError("this chat has no tools", "Start it with them: heedful chat --mcp servers.json")
        from heedful.cli.tool_answer import selection_lines

        for line in selection_lines(self._tools.last):
            self._screen.line(line)

    def _save(self, name: str, *, overwrite: bool = False) -> None:
        if not name:
            raise UsageError("/save needs the name of a file", "For instance: /save chat.md, or /save chat.json.")
        talk = self._conversation
        path = Path(os.path.expanduser(name))  # Path.expanduser raises where ~name is nobody
        transcript.save(path, talk.llm.name, talk.system, talk.messages, overwrite=overwrite)
        self._screen.line(f"saved {len(talk.messages)} messages to {path}")

    def _save_over(self, name: str) -> None:
        self._save(name, overwrite=True)

    def _cost(self, _: str) -> None:
        columns = (self._conversation.ledger, self._conversation.llm.ledger)
        rows = [("", "this conversation", "this session"), *zip(_COST_LABELS, *map(cost_column, columns), strict=True)]
        for label, *cells in rows:
            self._screen.line(f"{label:<14}" + "".join(f"{cell:>22}" for cell in cells))

    def _history(self, _: str) -> None:
        history = self._conversation.history
        if history is None:
            raise UsageError("no history is kept in this session")
        summaries = history.summaries(LISTED_CHATS)
        if not summaries:
            self._screen.line("no chats are kept yet")
        for summary in summaries:
            chat, opening = summary.chat, textwrap.shorten(summary.opening, 40, placeholder=" …")
            here = "*" if chat.id == self._conversation.chat_id else " "
            when = chat.created[:16].replace("T", " ")
            facts = f"{when}  {summary.num_messages:>3} messages"
            self._screen.line(f"{here}{chat.id:>5}  {facts}  {opening} ({chat.model.rpartition('/')[2]})")

    def _new(self, _: str) -> None:
        self._conversation.start_over()
        if self._tools is not None:
            self._tools.start_over()
        self._screen.note("a new conversation" + ("; the system message stays" if self._conversation.system else ""))

    def _help(self, _: str) -> None:
        for command in self._commands.values():
            self._screen.line(f"  {command.usage:<16}{command.help}")
        self._screen.line(_INPUT_HELP)

    def _quit(self, _: str) -> None:
        self._leaving = True


@contextmanager
def interrupting() -> Iterator[None]:
    """While it is entered, Ctrl-C raises KeyboardInterrupt, whatever it does elsewhere."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def status_text(live: Live) -> str:
    visits, seconds = f"{human(live.visits).strip()} visits", f"{live.seconds:.1f} s"
    if live.prompt_tokens_computed < live.prompt_tokens:
        return f"reading {live.prompt_tokens_computed:,} of {live.prompt_tokens:,} tokens · {visits} · {seconds}"
    rate = live.tokens_per_second
    speed = [f"{rate:.1f} tok/s"] if rate is not None else []
    return " · ".join([f"{live.output_tokens:,} tokens", *speed, visits, seconds, "Ctrl-C stops"])


_COST_LABELS = (
    "answers",
    "tokens in",
    "tokens out",
    "visits",
    "dense visits",
    "saved",
    "KV read",
    "seconds",
    "energy",
    "",
)


def cost_column(ledger: Ledger) -> list[str]:
    """The cells under a heading of /cost, in the order of its labels."""
    saved = 1 - ledger.visits / ledger.dense_visits if ledger.dense_visits else 0.0
    return [
        f"{ledger.requests:,}",
        f"{ledger.prompt_tokens:,}",
        f"{ledger.output_tokens:,}",
        f"{ledger.visits:,}",
        f"{ledger.dense_visits:,}",
        f"{saved:.1%}",
        f"{human(ledger.kv_bytes_read)}B",
        f"{ledger.seconds:.1f}",
        f"{ledger.joules:.2g} J",
        _energy_source(ledger),
    ]


def _energy_source(ledger: Ledger) -> str:
    if ledger.joules_low == ledger.joules_high:
        return "measured" if ledger.joules else ""
    return f"estimated {ledger.joules_low:.2g}–{ledger.joules_high:.2g}"


def _old_message(message: ChatMessage) -> str:
    lines = message.content.splitlines() or [""]
    first, *others = [*lines[:TAIL_LINES], *(["…"] if len(lines) > TAIL_LINES else [])]
    mark, end = "> " if message.role == "user" else "  ", " (stopped)" if message.cancelled else ""
    return "\n".join([mark + first, *("  " + line for line in others)]) + end
