"""What a model is told of tools, and in which form: its template's own where that knows tools; else one line a tool, a
call that a grammar forces, and the data put beside the question, as a model of 135M weights can follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heedful.engine.llm import LLM
from heedful.mcp.calls.call import CallDone
from heedful.mcp.catalogue.select import Selection
from heedful.mcp.delegation.delegate import Narrowed
from heedful.text.tool_calls import tool_grammar
from heedful.text.tool_formats import DEFAULT, ToolChoice, tool_format, with_tools

if TYPE_CHECKING:
    from heedful.sampling.grammar import Grammar, GrammarCompiler

Message = dict[str, Any]
_HOW = 'To use one, write <tool_call>\n{"name": "its name", "arguments": {…}}\n</tool_call>'


class ModelPrompt:
    """For one model."""

    def __init__(self, llm: LLM) -> None:
        template, tokenizer = llm.tokenizer.chat_template, llm.tokenizer
        self._llm = llm
        self._compiler: GrammarCompiler | None = None
        self.form = tool_format(getattr(template, "source", None), getattr(tokenizer, "control_texts", frozenset()))
        self.knows_tools = self.form != DEFAULT
        """Its template tells of tools: the model has learned when to call one."""
        marks = (tokenizer.id_of(text) for text in self.form.markers) if self.knows_tools else ()
        self.kept_special = frozenset(mark for mark in marks if mark is not None)

    def told(self, messages: Sequence[Mapping[str, Any]], tools: str) -> list[Message]:
        """`messages` with lines about tools in the system message."""
        text = f"You can use these tools:\n{tools}\n{_HOW}"
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": text}, *map(dict, messages)]
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *map(dict, messages[1:])]

    def for_call(
        self,
        messages: Sequence[Mapping[str, Any]],
        selection: Selection,
        best: Narrowed | None,
        more: Sequence[Message],
    ) -> tuple[list[int], int, Grammar | None]:
        """Token ids, schema tokens among them, and the grammar of a call where one must come: of `best`, for the
        selection is a better judge of tools than a model that knows none. `more`: tools of our own, for the others."""
        if self.knows_tools:
            tools = [*selection.as_json(), *more]
            shown = with_tools(messages, tools, ToolChoice("auto"), self.form)
            ids = self._llm.encode_chat(shown, tools if self.form.is_native else None)
            without = len(self._llm.encode_chat(with_tools(messages, [], ToolChoice("none"), self.form)))
            return ids, max(0, len(ids) - without), None
        assert best is not None, "a model that knows no tools is told which to call"
        lines, choice = best.tool.signature, ToolChoice("required")
        ids = self._llm.encode_chat(self.told(with_tools(messages, [], ToolChoice("none"), self.form), lines))
        function = {"name": best.tool.model_name, "parameters": best.schema}
        spec = tool_grammar([{"type": "function", "function": function}], choice, self.form, self._llm.tokenizer)
        return ids, len(self._llm.tokenizer.encode(lines, add_bos=False)), self._grammars.compile(spec, "tools")

    def exchange(self, calls: Sequence[tuple[str, str]], results: Sequence[CallDone], number: int) -> list[Message]:
        """The calls of a round and their results, as messages; each call has its result."""
        ids = [f"call{number}{at:03}x"[:9] for at in range(len(calls))]  # Mistral's template wants nine characters
        told = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
            for call_id, (name, text) in zip(ids, calls, strict=True)
        ]
        answers = [
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": done.text}
            for call_id, (name, _), done in zip(ids, calls, results, strict=True)
        ]
        return [{"role": "assistant", "content": "", "tool_calls": told}, *answers]

    def for_answer(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """For the answer after calls: no tools told any more."""
        if self.knows_tools:
            return with_tools(messages, [], ToolChoice("none"), self.form)
        last = max(at for at, message in enumerate(messages) if message["role"] == "user")
        data = "\n".join(str(each["content"]) for each in messages[last:] if each["role"] == "tool")
        return [*map(dict, messages[:last]), question_with_data(str(messages[last]["content"]), data)]

    @property
    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            from heedful.sampling.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self._llm.tokenizer)
        return self._compiler


def question_with_data(question: str, data: str) -> Message:
    """Data first, so that the question is what the answer follows; all of it is text of the user's turn."""
    return {"role": "user", "content": f"{data}\n\nFrom this data, answer in one short sentence: {question}"}
