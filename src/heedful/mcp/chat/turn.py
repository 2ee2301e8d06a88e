"""One turn of a chat with tools: a call that rules are sure of; else calls that leave words over, scored by the model;
else what the model writes; and the answer, by rules or in the model's words. Guards end calls that lead nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from heedful.cost.formulas import Shape
from heedful.cost.receipt import Receipt
from heedful.engine.llm import TextStream, sampling_params
from heedful.mcp.calls.call import CallDone, CallRecord
from heedful.mcp.calls.read_result import READ_RESULT, read_result, read_result_tool
from heedful.mcp.calls.reading import read
from heedful.mcp.calls.results import Budget, as_data
from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue
from heedful.mcp.catalogue.select import SchemaVisits, Selection, added_visits
from heedful.mcp.chat.choose import likeliest
from heedful.mcp.chat.prompt import question_with_data
from heedful.mcp.chat.tool_receipt import ToolReceipt, Way
from heedful.mcp.delegation.delegate import Narrowed, Plan, fits_somehow, narrowed, near, sure
from heedful.mcp.delegation.mentions import Request as Asked
from heedful.mcp.delegation.say import said
from heedful.request import Request
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, Event, TextDelta, ToolCallParser

if TYPE_CHECKING:
    from heedful.engine.engine import Live
    from heedful.mcp.chat.loop import ToolChat

TICK_S = 0.05
RECENT = 4
MOST_TRIED = 3
"""Calls that are made to see whether they answer."""
_FAULT_CHARS = 200
_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """Of one turn."""

    rounds: int = 6
    """Of calls that the model writes."""
    tool_s: float = 120.0
    errors: int = 3
    """In a row."""
    call_tokens: int = 256
    """Of one call that the model writes."""
    result: Budget = field(default_factory=lambda: Budget(600))
    scored_plans: int = 4


@dataclass(frozen=True)
class Calling:
    """A call begins."""

    tool: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class Called:
    done: CallDone


@dataclass(frozen=True)
class Said:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Noted:
    """Something about the turn that is not part of the answer."""

    text: str


TurnEvent = Calling | Called | Said | Noted


class Stopped(Exception):
    """`stopped` has said so."""


def _said_by(done: CallDone) -> str:
    return as_data(done.output.text)[:_FAULT_CHARS] if done.output is not None else done.text


@dataclass
class _Progress:
    """Of a turn, as far as it has come."""

    calls: list[CallRecord] = field(default_factory=list)
    runs: list[Receipt] = field(default_factory=list)
    schema_tokens: int = 0
    errors: int = 0
    stopped_by: str = ""


class ToolTurn:
    """One answer as it comes. Iterate for events; afterwards text, finish_reason and receipt are there."""

    def __init__(
        self,
        chat: ToolChat,
        messages: Sequence[Mapping[str, Any]],
        stopped: Callable[[], bool],
        tick: Callable[[str], None],
        adapter: str | None,
        sampling: dict[str, Any],
    ) -> None:
        assert messages, messages
        assert messages[-1]["role"] == "user", messages[-1]
        self._chat = chat
        self._messages = list(messages)
        self._stopped = stopped
        self._tick = tick
        self._adapter = adapter
        self._params = sampling_params(**sampling)
        self._progress = _Progress()
        self._stream: TextStream | None = None
        self._pieces: list[str] = []
        self._selection: Selection | None = None
        self._way: Way = "none"
        self._said_by_rules = False
        self.finish_reason = "stop"
        """ "stop", "length" or "cancelled"."""
        self.dropped_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def runs(self) -> list[Receipt]:
        """Of the model, so far; all of them once the turn has ended."""
        return self._progress.runs

    @property
    def live(self) -> Live | None:
        """Of the model's run that is under way."""
        return None if self._stream is None else self._stream.live

    @property
    def receipt(self) -> ToolReceipt | None:
        """None where the turn was stopped before any tool was chosen."""
        if self._selection is None:
            return None
        progress = self._progress
        return ToolReceipt(
            self._way,
            "rules" if self._said_by_rules else "model",
            self._selection,
            progress.schema_tokens,
            self._visits(self._selection),
            tuple(progress.calls),
            tuple(progress.runs),
            progress.stopped_by,
        )

    def __iter__(self) -> Iterator[TurnEvent]:
        try:
            yield from self._events()
        except Stopped:
            self.finish_reason = "cancelled"
        finally:
            self._end_stream()

    def _events(self) -> Iterator[TurnEvent]:
        chat, question = self._chat, str(self._messages[-1]["content"])
        chat.caller.new_turn()
        catalogue = self._wait(chat.tools.manager.catalogue(), "servers start")
        self._check_some(catalogue)
        for why in catalogue.unavailable.values():
            yield Noted(why)
        self._selection = chat.last = chat.selector(catalogue).select(question, recent=chat.recent)
        if not catalogue:
            yield from self._spoken(self._messages)
            return
        before = [str(each["content"]) for each in self._messages[:-1] if each["role"] == "user"]
        plans = self._wait(self._delegate_plans(question, catalogue), "looking for a tool")
        plan = sure(plans)
        if plan is not None:
            self._way = "rules"
        elif maybe := near(question, plans, self._selection):
            heard = yield from self._tried(maybe, before)
            if self._said_by_rules:
                return
            self._way = "likelihood"
            plan = self._likeliest([plan for plan, _ in heard] or maybe)
            if heard:
                done = next(done for each, done in heard if each is plan)
                yield from self._spoken([*self._messages[:-1], question_with_data(question, done.text)])
                return
        if plan is not None:
            yield from self._by_plan(plan, before)
        elif self._selection.abstained or not (chat.prompt.knows_tools or fits_somehow(question, self._selection)):
            yield from self._spoken(self._messages)
        else:
            self._way = "model"
            yield from self._by_model(catalogue)

    async def _delegate_plans(self, question: str, catalogue: Catalogue) -> list[Plan]:
        assert self._selection is not None
        plans, records = await self._chat.delegate.plans(question, catalogue, self._selection)
        self._progress.calls += records
        return plans

    def _check_some(self, catalogue: Catalogue) -> None:
        problems = self._chat.tools.manager.problems()
        if not catalogue and problems:
            raise next(iter(problems.values()))

    # A call that rules have made

    def _likeliest(self, plans: list[Plan]) -> Plan:
        near = plans[: self._chat.limits.scored_plans]
        tools = list({plan.tool.model_name: plan.tool for plan in near}.values())
        told = "\n".join(tool.signature for tool in tools)
        self._progress.schema_tokens += self._chat.count(told) if len(near) > 1 else 0
        asked = self._chat.prompt.told([self._messages[-1]], told)
        chosen, receipts = likeliest(self._chat.llm, asked, near, adapter=self._adapter)
        self._progress.runs += receipts
        return chosen

    def _tried(
        self, plans: Sequence[Plan], before: Sequence[str]
    ) -> Generator[TurnEvent, None, list[tuple[Plan, CallDone]]]:
        """Calls that leave words over, while nobody need be asked: one whose result accounts for all of them answers.
        Returns those that were made and gave a result."""
        may_be_tried = self._chat.delegate.may_be_tried
        plans = [each for each in plans if each.left_over and not each.filled.is_guess and may_be_tried(each)]
        heard = []
        for plan in plans[:MOST_TRIED]:
            done = yield from self._call(plan.tool, plan.arguments)
            if done.output is None or done.output.is_error:
                continue
            heard.append((plan, done))
            asked = self._asked(plan, before)
            found = narrowed(asked, plan, read(done.output.value))
            answer = said(asked, plan.arguments, found[0], about=found[1]) if found is not None else None
            if answer is not None:
                self._way, self._said_by_rules = "rules", True
                yield self._piece(answer)
                break
        return heard

    def _asked(self, plan: Plan, before: Sequence[str]) -> Asked:
        """The question that a result is to answer."""
        return Asked.of(before[-1] if plan.follows and before else str(self._messages[-1]["content"]))

    def _by_plan(self, plan: Plan, before: Sequence[str]) -> Iterator[TurnEvent]:
        question = str(self._messages[-1]["content"])
        done = yield from self._call(plan.tool, plan.arguments)
        if done.error is not None or done.output is None or done.output.is_error:
            yield from self._refused(done)
            return
        reading = read(done.output.value)
        answer = None if plan.left_over else said(self._asked(plan, before), plan.arguments, reading)
        if answer is not None:
            self._said_by_rules = True
            yield self._piece(answer)
        else:
            yield from self._spoken([*self._messages[:-1], question_with_data(question, done.text)])

    def _refused(self, done: CallDone) -> Iterator[TurnEvent]:
        """Said plainly: a model without the data would make one up."""
        self._way, self._said_by_rules = "refused", True
        if done.error is not None and done.error.remedy:
            yield Noted(done.error.remedy)
        why = done.error.message if done.error is not None else f"{done.record.tool} failed: {_said_by(done)}"
        yield self._piece(f"I cannot tell: {why}")

    # A call that the model writes

    def _by_model(self, catalogue: Catalogue) -> Iterator[TurnEvent]:
        """Rounds: the model writes a call, or the answer. One without a format for tools must call first, and answers
        when it has data; the others decide for themselves, and may call what they were not told of: it is under schema
        and policy either way."""
        assert self._selection is not None
        limits, prompt = self._chat.limits, self._chat.prompt
        messages = list(self._messages)
        has_data = False
        best = None
        if not prompt.knows_tools:
            question = str(messages[-1]["content"])
            best = self._wait(self._chat.delegate.narrowed(question, catalogue, self._selection), "looking for a tool")
            if best is None:
                self._way = "none"
                yield from self._spoken(self._messages)
                return
        for number in range(limits.rounds):
            if not prompt.knows_tools and has_data:
                break
            calls = yield from self._written(messages, list(catalogue), best)
            if not calls:
                return  # it was the answer
            results = []
            for name, arguments in calls:
                done = yield from self._call(name, arguments)
                results.append(done)
                has_data = has_data or done.record.outcome == "ok"
                self._progress.errors = 0 if done.record.outcome == "ok" else self._progress.errors + 1
            messages += prompt.exchange(calls, results, number)
            self._progress.stopped_by = self._guard(results)
            if not prompt.knows_tools and number and not has_data:
                break  # it will not find a better one
            if self._progress.stopped_by or all(done.record.outcome == "denied" for done in results):
                break
        else:
            self._progress.stopped_by = f"after {limits.rounds} rounds"
        if not has_data and not prompt.knows_tools:
            yield from self._refused(done)
            return
        yield from self._spoken(prompt.for_answer(messages))

    def _guard(self, results: Sequence[CallDone]) -> str:
        limits, progress = self._chat.limits, self._progress
        if any(done.record.outcome == "repeated" for done in results):
            return "stopped: the same call again and again"
        if progress.errors >= limits.errors:
            return f"stopped: {progress.errors} errors in a row"
        if sum(call.ms for call in progress.calls) > limits.tool_s * 1000:
            return f"stopped: tools took over {limits.tool_s:g} s"
        return ""

    def _written(
        self, messages: Sequence[Mapping[str, Any]], names: Sequence[str], best: Narrowed | None
    ) -> Generator[TurnEvent, None, list[tuple[str, str]]]:
        """Yields what is text; returns the calls, as (name, JSON of the arguments)."""
        assert self._selection is not None
        prompt = self._chat.prompt
        more = read_result_tool(self._chat.store)
        ids, schema_tokens, grammar = prompt.for_call(messages, self._selection, best, [more] if more else [])
        self._progress.schema_tokens += schema_tokens
        parser = ToolCallParser(prompt.form, [*names, *([READ_RESULT] if more else [])])
        calls: list[tuple[str, str]] = []
        for piece in self._streamed(
            ids, grammar=grammar, most_tokens=self._chat.limits.call_tokens if grammar else None
        ):
            yield from self._sorted_out(parser.push(piece), calls)
        yield from self._sorted_out(parser.flush(), calls)
        return calls

    def _sorted_out(self, events: Sequence[Event], calls: list[tuple[str, str]]) -> Iterator[TurnEvent]:
        for event in events:
            if isinstance(event, TextDelta):
                yield self._piece(event.text)
            elif isinstance(event, CallBegin):
                calls.append((event.name, ""))
            elif isinstance(event, CallArguments):
                name, text = calls[event.index]
                calls[event.index] = (name, text + event.json_text)
            else:
                assert isinstance(event, CallEnd), event

    # What both do

    def _call(
        self, tool: CatalogTool | str, arguments: Mapping[str, Any] | str
    ) -> Generator[TurnEvent, None, CallDone]:
        name = tool if isinstance(tool, str) else tool.model_name
        yield Calling(name, arguments)
        chat = self._chat
        if name == READ_RESULT and isinstance(arguments, str):
            done = self._wait(read_result(chat.caller, chat.shower, arguments), name)
        else:
            done = self._wait(chat.caller.call(tool, arguments), name)
        self._progress.calls.append(done.record)
        if done.record.outcome == "ok" and name != READ_RESULT:
            recent = self._chat.recent
            recent[:] = [*[each for each in recent if each != name], name][-RECENT:]
        yield Called(done)
        return done

    def _spoken(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[TurnEvent]:
        """The model's own words."""
        llm = self._chat.llm
        room = llm.prompt_room(self._params, llm.policy)
        messages = list(messages)
        kept = llm.fit(messages, room)
        self.dropped_tokens = len(llm.encode_chat(messages)) - len(kept)
        for text in self._streamed(kept):
            yield self._piece(text)

    def _streamed(self, ids: Sequence[int], *, grammar: Any = None, most_tokens: int | None = None) -> Iterator[str]:
        llm, params = self._chat.llm, self._params
        if grammar is not None:
            params = sampling_params(max_tokens=most_tokens, temperature=0.0)
        request = Request(tuple(ids), params, llm.policy, speculate=llm.speculate, adapter=self._adapter)
        kept = self._chat.prompt.kept_special
        self._stream = TextStream(llm, request, dropped_tokens=0, continues=False, grammar=grammar, kept_special=kept)
        shown = 0
        for piece in self._stream:
            yield piece.text
            shown += len(piece.text)
            if self._stopped():
                break
        completion = self._end_stream()
        assert completion is not None
        yield completion.text[shown:]  # what was held back when it was stopped
        if completion.finish_reason == "cancelled":
            raise Stopped
        self.finish_reason = completion.finish_reason

    def _end_stream(self) -> Any:
        if self._stream is None:
            return None
        stream, self._stream = self._stream, None
        stream.close()
        self._progress.runs.append(stream.completion.receipt)
        return stream.completion

    def _piece(self, text: str) -> Said:
        self._pieces.append(text)
        return Said(text)

    def _wait(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """For the servers' thread; whoever stops meanwhile cancels it there."""
        future = self._chat.tools.submit(work)
        try:
            while not future.done():
                wait([future], timeout=TICK_S)
                self._chat.desk.answer()
                self._tick(what)
                if self._stopped():
                    raise Stopped
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _visits(self, selection: Selection) -> SchemaVisits:
        shape = Shape.from_config(self._chat.llm.config)
        prompt_tokens = len(self._chat.llm.encode_chat(self._messages))
        of_chosen = selection.visits(shape, prompt_tokens)
        shown = self._progress.schema_tokens
        if shown == selection.schema_tokens:
            return of_chosen
        return SchemaVisits(added_visits(shape, prompt_tokens, shown), of_chosen.all_tools, of_chosen.selection)
