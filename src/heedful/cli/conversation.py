"""A conversation with a model: what was said, what the model sees of it, what it cost, and its copy in the history.

    draft = conversation.ask("Why is the sky blue?")
    for piece in draft.stream: ...
    answer = conversation.keep(draft)

Knows nothing of commands and screens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.cache.prefix import PrefixReport
from heedful.cli.history import ChatMessage, History, StoredChat
from heedful.cost.energy import Energy
from heedful.cost.ledger import Ledger
from heedful.cost.quality import Quality
from heedful.cost.receipt import AdapterUse, Flops, Guesses, KVTraffic, Receipt, Saved, Seconds, Visits, WeightTraffic
from heedful.errors import ContextOverflow, HistoryError, UsageError

if TYPE_CHECKING:
    from heedful.engine.llm import LLM, TextStream
    from heedful.mcp.chat.loop import ToolChat
    from heedful.mcp.chat.turn import ToolTurn


@dataclass(frozen=True)
class Draft:
    """An answer in the making. Nothing of it is part of the conversation until it is kept."""

    question: ChatMessage | None
    """None: it takes the place of the last answer."""
    stream: TextStream
    conversation_tokens: int
    """Of everything said, with the template's own; the stream's prompt has fewer when oldest turns were dropped."""
    tries: int
    """Answers to the same message before it."""

    @property
    def dropped_tokens(self) -> int:
        return self.conversation_tokens - self.stream.sequence.prompt_len


@dataclass(frozen=True)
class ToolDraft:
    """An answer in the making that tools may help with."""

    question: ChatMessage | None
    """None: it takes the place of the last answer."""
    turn: ToolTurn
    tries: int


class Conversation:
    """`sampling`: fields of SamplingParams, with max_tokens; a seed goes up by one at every further try at an answer.

    `adapter`: the one of the LLM's that all answers are made with. `history`: None keeps nothing. When it fails, `warn`
    is told once and the conversation goes on without it.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: Mapping[str, Any],
        *,
        system: str | None = None,
        adapter: str | None = None,
        history: History | None = None,
        warn: Callable[[HistoryError], None],
    ) -> None:
        self.llm = llm
        self.adapter = adapter
        self.sampling = {name: value for name, value in sampling.items() if name != "seed"}
        self.system: str | None = None
        self.messages: list[ChatMessage] = []
        self.ledger = Ledger()
        self.history = history
        self.chat_id: int | None = None
        self._first_seed: int | None = sampling.get("seed")
        self._warn = warn
        self._last_position = -1
        self._tries = 0
        self.set_system(system)

    def resume(self, chat: StoredChat, messages: Mapping[int, ChatMessage]) -> None:
        """Go on with a stored chat; `messages` by position. Its system message holds unless there is one already."""
        self.start_over()
        self.chat_id = chat.id
        self.messages = list(messages.values())
        self._last_position = max(messages, default=-1)
        for message in self.messages:
            for receipt in receipts_of(message):
                self.ledger.add(receipt)
        self.set_system(chat.system if self.system is None else self.system)

    def start_over(self) -> None:
        """An empty conversation; the system message stays."""
        self.messages = []
        self.ledger = Ledger()
        self.chat_id = None

    def set_system(self, system: str | None) -> None:
        """From the next answer on. Raises TemplateError when the model takes no such message, or no chat at all."""
        self.llm.encode_chat(_shown_to_model(system, [ChatMessage("user", "Hello")]))
        self.system = system
        if (chat_id := self.chat_id) is not None:
            self._store(lambda history: history.set_system(chat_id, system))

    def ask(self, text: str) -> Draft:
        """Raises UsageError when the message cannot be answered; the conversation is then as before."""
        question = ChatMessage("user", text)
        return self._draft([*self.messages, question], question, tries=0)

    def ask_again(self) -> Draft:
        """Another answer to the last message."""
        return self._draft(self._before_last_answer(), None, self._tries + 1)

    def _before_last_answer(self) -> list[ChatMessage]:
        if not self.messages:
            raise UsageError("there is no answer yet that could be made again", "Ask something first.")
        return self.messages[:-1]

    def ask_with_tools(
        self, text: str, tools: ToolChat, *, stopped: Callable[[], bool], tick: Callable[[str], None]
    ) -> ToolDraft:
        question = ChatMessage("user", text)
        return self._tool_draft([*self.messages, question], question, 0, tools, stopped, tick)

    def ask_again_with_tools(
        self, tools: ToolChat, *, stopped: Callable[[], bool], tick: Callable[[str], None]
    ) -> ToolDraft:
        """Another answer to the last message."""
        return self._tool_draft(self._before_last_answer(), None, self._tries + 1, tools, stopped, tick)

    def keep_turn(self, draft: ToolDraft) -> ChatMessage:
        """As `keep`."""
        turn, receipt = draft.turn, draft.turn.receipt
        for run in turn.runs:
            self.ledger.add(run)
        of_model = turn.runs[-1].to_dict() if turn.runs else {}
        cost = {**of_model, **({"tools": receipt.to_dict()} if receipt is not None else {})}
        return self._keep(draft.question, turn.text, cost or None, turn.finish_reason == "cancelled", draft.tries)

    def keep(self, draft: Draft) -> ChatMessage:
        """Take the ended answer in, and store it. A stopped one is kept as far as it came."""
        completion = draft.stream.completion
        self.ledger.add(completion.receipt)
        cancelled = completion.finish_reason == "cancelled"
        return self._keep(draft.question, completion.text, completion.receipt.to_dict(), cancelled, draft.tries)

    def _keep(
        self, question: ChatMessage | None, text: str, receipt: dict[str, Any] | None, cancelled: bool, tries: int
    ) -> ChatMessage:
        self._tries = tries
        answer = ChatMessage("assistant", text, receipt, cancelled)
        if question is not None:
            self._add([question, answer])
        elif answer.content or not cancelled:  # stopped before its first word, it leaves the old one in place
            self._replace_last(answer)
        return answer

    def _draft(self, messages: list[ChatMessage], question: ChatMessage | None, tries: int) -> Draft:
        shown = _shown_to_model(self.system, messages)
        conversation_tokens = len(self.llm.encode_chat(shown))
        seed = None if self._first_seed is None else self._first_seed + tries
        try:
            stream = self.llm.stream_chat(shown, truncate=True, adapter=self.adapter, **self.sampling, seed=seed)
        except ContextOverflow as error:
            raise UsageError(
                f"this message and the system message alone have {error.prompt_tokens:,} tokens; of the context of "
                f"{self.llm.context_len:,}, {self.sampling['max_tokens']:,} are kept for the answer",
                "Shorten it, or start again with a larger --context or a smaller --max-tokens.",
            ) from error
        return Draft(question, stream, conversation_tokens, tries)

    def _tool_draft(
        self,
        messages: list[ChatMessage],
        question: ChatMessage | None,
        tries: int,
        tools: ToolChat,
        stopped: Callable[[], bool],
        tick: Callable[[str], None],
    ) -> ToolDraft:
        seed = None if self._first_seed is None else self._first_seed + tries
        shown = _shown_to_model(self.system, messages)
        turn = tools.turn(shown, stopped=stopped, tick=tick, adapter=self.adapter, **self.sampling, seed=seed)
        return ToolDraft(question, turn, tries)

    def _add(self, turn: list[ChatMessage]) -> None:
        self.messages += turn

        def write(history: History) -> None:
            if self.chat_id is None:
                self.chat_id, self._last_position = history.start(self.llm.name, self.system, turn)
            else:
                self._last_position = history.append(self.chat_id, turn)

        self._store(write)

    def _replace_last(self, answer: ChatMessage) -> None:
        self.messages[-1] = answer
        if (chat_id := self.chat_id) is not None:
            self._store(lambda history: history.replace(chat_id, self._last_position, answer))

    def _store(self, write: Callable[[History], None]) -> None:
        if self.history is None:
            return
        try:
            write(self.history)
        except HistoryError as error:
            self.history = None
            self._warn(error)


def _shown_to_model(system: str | None, messages: list[ChatMessage]) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, *({"role": message.role, "content": message.content} for message in messages)]


def receipts_of(message: ChatMessage) -> list[Receipt]:
    """Of the model's runs that made a stored answer: with tools there may be several, or none."""
    if message.receipt is None:
        return []
    tools = message.receipt.get("tools")
    return [receipt_from_dict(run) for run in (tools["runs"] if tools else [message.receipt])]


def receipt_from_dict(fields: Mapping[str, Any]) -> Receipt:
    """The inverse of Receipt.to_dict()."""
    parts = {
        "visits": Visits(**{**fields["visits"], "saved": Saved(**fields["visits"]["saved"])}),
        "kv": KVTraffic(**fields["kv"]),
        "weights": WeightTraffic(**fields["weights"]),
        "flops": Flops(**fields["flops"]),
        "seconds": Seconds(**fields["seconds"]),
        "energy": Energy(**fields["energy"]),
        "quality": Quality(**fields["quality"]) if fields.get("quality") else None,
        "guesses": Guesses(**fields.get("guesses", {})),
        "adapter": AdapterUse(**fields["adapter"]) if fields.get("adapter") else None,
        "prefix": PrefixReport(**fields["prefix"]) if fields.get("prefix") else None,
    }
    derived = {"tokens_per_second", "tools"}
    return Receipt(**{**{name: value for name, value in fields.items() if name not in derived}, **parts})
