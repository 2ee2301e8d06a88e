"""Questions that a server of ours puts back to its caller in the middle of a request, the same way in both revisions.

In 2025-11-25 a question is a request of ours, which the handler waits for. In 2026-07-28 the result of the request is
the question; the caller makes the request again with the answers, and the handler runs anew from its start. What was
answered in earlier rounds travels with the caller as `requestState`, sealed (app.py), so that no handler keeps
anything between rounds: it asks again, and is answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from heedful.errors import BadParameter
from heedful.mcp.schemas.validate import schema_fault

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import ElicitRequest, ElicitResult, InputRequest, InputRequiredResult

JSON = dict[str, Any]
Kind = Literal["elicitation", "sampling", "roots"]


class NeedsInput(Exception):
    """The request's result is questions; only in 2026-07-28."""

    def __init__(self, questions: Mapping[str, InputRequest], state: str) -> None:
        super().__init__(f"questions: {', '.join(questions)}")
        self.questions = dict(questions)
        self.state = state

    def result(self) -> InputRequiredResult:
        from mcp_types import InputRequiredResult

        return InputRequiredResult(input_requests=self.questions, request_state=self.state)


class Asker:
    """Of one request. `given`: answers that came with it; `state`: what NeedsInput.state was, unsealed."""

    def __init__(
        self, context: ServerRequestContext[Any, Any], given: Mapping[str, Any] | None = None, state: str | None = None
    ) -> None:
        self._context = context
        self._given = dict(given or {})
        self._earlier: JSON = {} if state is None else json.loads(state)
        self.is_continued = state is not None
        """Whether it comes with a state of ours, which was not changed and is not too old."""

    def can_ask(self, kind: Kind) -> bool:
        """Whether the caller has said that it answers such questions; of elicitation: that it shows forms."""
        has = self._context.session.client_capabilities
        found = getattr(has, kind, None)
        if kind == "elicitation" and found is not None:
            return found.form is not None or found.url is None  # {} is older than the two kinds, and means forms
        return found is not None

    async def ask(self, questions: Mapping[str, InputRequest]) -> dict[str, Any]:
        """The SDK's results (ElicitResult, CreateMessageResult, ListRootsResult) by the questions' names, which must be
        the same in each round. Raises MCPError for what the caller cannot be asked, BadParameter for an answer that is
        not what was asked for, NeedsInput, which the server makes a result of."""
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS

        for question in questions.values():
            self._require(question)
        if self._context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return {name: await self._sent(question) for name, question in questions.items()}
        answers = {name: self._answer(name, question) for name, question in questions.items()}
        missing = {name: question for name, question in questions.items() if answers[name] is None}
        known = {name: _wire(answer) for name, answer in answers.items() if answer is not None}
        if missing:
            raise NeedsInput(missing, json.dumps({**self._earlier, **known}))
        self._earlier |= known
        return answers

    async def _sent(self, question: InputRequest) -> Any:
        from mcp.shared.message import ServerMessageMetadata

        metadata = ServerMessageMetadata(related_request_id=self._context.request_id)
        answer = await self._context.session.send_request(question, _answer_type(question), metadata=metadata)
        _check(question, answer)
        return answer

    def _answer(self, name: str, question: InputRequest) -> Any:
        """None where there is none of this kind."""
        from pydantic import ValidationError

        given = self._earlier.get(name)
        if given is None and name in self._given:
            given = _wire(self._given[name])
        if given is None:
            return None
        try:
            answer = _answer_type(question).model_validate(given, by_name=False)
        except ValidationError:
            return None
        _check(question, answer)
        return answer

    def _require(self, question: InputRequest) -> None:
        from mcp import MCPError
        from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY

        kind = _KINDS[question.method]
        if not self.can_ask(kind):
            wanted: JSON = {"requiredCapabilities": {kind: {}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, f"This needs a client with {kind}", wanted)


_KINDS: dict[str, Kind] = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}


def _answer_type(question: InputRequest) -> Any:
    import mcp_types

    names = {"elicitation": "ElicitResult", "sampling": "CreateMessageResult", "roots": "ListRootsResult"}
    return getattr(mcp_types, names[_KINDS[question.method]])


def _wire(answer: Any) -> Any:
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)


def _check(question: InputRequest, answer: Any) -> None:
    """That a form was filled in as it says. Raises BadParameter."""
    schema = getattr(question.params, "requested_schema", None)
    if schema is None or answer.action != "accept":
        return
    fault = schema_fault(answer.content or {}, schema)
    if fault:
        raise BadParameter("answer", f"is not what was asked for: {fault}")


def form(message: str, properties: JSON, required: list[str] | None = None) -> ElicitRequest:
    """A question for the person at the other end, of a flat form; without properties it is a yes or no."""
    from mcp_types import ElicitRequest, ElicitRequestFormParams

    schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


async def agreed(asker: Asker, name: str, message: str) -> bool:
    """Whether the person says yes."""
    answer: ElicitResult = (await asker.ask({name: form(message, {})}))[name]
    return answer.action == "accept"
