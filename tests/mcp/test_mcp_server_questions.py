"""What a server of ours asks back, answered by the SDK's own client in both revisions: rounds, who cannot be asked,
answers that are no answers, states that were changed or belong elsewhere, and a model that is to be fetched first."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp_types import ElicitResult, InputRequiredResult

from heedful.mcp.server import fetch as server_fetch
from heedful.mcp.server.app import make_server
from heedful.mcp.server.call import Call, Done, ServerTool
from heedful.mcp.server.files import Roots
from heedful.mcp.server.http import HttpSettings, make_app
from heedful.mcp.server.models import ModelNames, ServedModels
from heedful.mcp.server.offer import heedful_server
from heedful.mcp.server.questions import form

Running = Callable[[Coroutine[Any, Any, Any]], Any]
MODES = ("legacy", "2026-07-28")
MODERN = MODES[1]
ANY = {"type": "object", "properties": {"of": {"type": "string"}}}
NAME = form("What is your name?", {"name": {"type": "string", "maxLength": 10}}, ["name"])
COLOUR = form("And your colour?", {"colour": {"type": "string", "enum": ["red", "blue"]}}, ["colour"])


async def introduce(arguments: dict[str, Any], call: Call) -> Done:
    name = (await call.asker.ask({"name": NAME}))["name"]
    if name.action != "accept":
        return Done({"said": name.action})
    colour = (await call.asker.ask({"colour": COLOUR}))["colour"]
    return Done({"said": f"{name.content['name']} likes {colour.content['colour']}"})


def tool(name: str) -> ServerTool:
    return ServerTool(name, name, "Asks two things.", ANY, None, introduce)


def answering(*answers: dict[str, Any] | str) -> tuple[list[str], Any]:
    """What was asked, and a callback that gives these answers in turn."""
    asked: list[str] = []
    left = list(answers)

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        given = left.pop(0)
        return ElicitResult(action=given) if isinstance(given, str) else ElicitResult(action="accept", content=given)

    return asked, answer


def text_of(result: Any) -> str:
    return str(result.content[0].text)


@pytest.mark.parametrize("mode", MODES)
def test_questions_come_one_after_the_other(mode: str, running: Running) -> None:
    asked, answer = answering({"name": "Ada"}, {"colour": "blue"})

    async def work() -> Any:
        async with Client(make_server([tool("a")]), mode=mode, elicitation_callback=answer) as client:
            return await client.call_tool("a", {"of": "Ada"})

    assert running(work()).structured_content == {"said": "Ada likes blue"}
    assert asked == ["What is your name?", "And your colour?"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["decline"], '{"said": "decline"}'),
        (["cancel"], '{"said": "cancel"}'),
        ([{"name": "x" * 11}], "answer: is not what was asked for: name: 'xxxxxxxxxxx' is too long."),
        ([{}], "answer: is not what was asked for: 'name' is a required property."),
        ([{"name": "Ada"}, {"colour": "green"}], "answer: is not what was asked for: colour: 'green' is not one of"),
    ],
)
def test_answers_that_are_none_end_the_call(mode: str, answers: list[Any], expected: str, running: Running) -> None:
    _, answer = answering(*answers)

    async def work() -> Any:
        async with Client(make_server([tool("a")]), mode=mode, elicitation_callback=answer) as client:
            return await client.call_tool("a", {})

    result = running(work())
    assert text_of(result).startswith(expected)
    assert bool(result.is_error) == ("answer" in expected)


@pytest.mark.parametrize("mode", MODES)
def test_who_cannot_be_asked_is_told_so(mode: str, running: Running) -> None:
    async def work() -> None:
        async with Client(make_server([tool("a")]), mode=mode) as client:
            with pytest.raises(MCPError, match="needs a client with elicitation") as caught:
                await client.call_tool("a", {})
            assert (caught.value.code, caught.value.data) == (-32021, {"requiredCapabilities": {"elicitation": {}}})

    running(work())


# ---- States -------------------------------------------------------------------------------------------------------


def test_a_state_is_good_for_the_call_that_it_came_from_alone(running: Running) -> None:
    accepted = {"name": ElicitResult(action="accept", content={"name": "Ada"})}
    _, unasked = answering()

    async def work() -> None:
        server = make_server([tool("a"), tool("b")])
        async with Client(server, mode=MODERN, elicitation_callback=unasked) as client:

            async def call(name: str, arguments: dict[str, Any], state: str | None, answers: Any = None) -> Any:
                return await client.session.call_tool(
                    name, arguments, request_state=state, input_responses=answers, allow_input_required=True
                )

            first = await call("a", {"of": "x"}, None)
            assert isinstance(first, InputRequiredResult)
            second = await call("a", {"of": "x"}, first.request_state, accepted)
            assert list(second.input_requests) == ["colour"]
            state = second.request_state
            assert "Ada" not in state, "it is sealed"
            blue = {"colour": ElicitResult(action="accept", content={"colour": "blue"})}
            for name, arguments, changed in (
                ("b", {"of": "x"}, state),
                ("a", {"of": "y"}, state),
                ("a", {"of": "x"}, state + "A"),
                ("a", {"of": "x"}, state[:-1]),
                ("a", {"of": "x"}, state[:20] + ("B" if state[20] == "A" else "A") + state[21:]),
                ("a", {"of": "x"}, json.dumps({"name": {"action": "accept", "content": {"name": "Eve"}}})),
                ("a", {"of": "x"}, ""),
            ):
                with pytest.raises(MCPError, match="Invalid or expired requestState"):
                    await call(name, arguments, changed, blue)
            done = await call("a", {"of": "x"}, state, blue)
            assert done.structured_content == {"said": "Ada likes blue"}
            again = await call("a", {"of": "x"}, None, blue)
            assert list(again.input_requests) == ["name"], "a later answer does not stand for an earlier one"

    running(work())


def test_a_state_is_good_for_the_key_that_it_came_to_alone(running: Running) -> None:
    import httpx

    server = make_server([tool("a")])
    app = make_app(server, HttpSettings(api_keys=("one", "two")), 8090)

    async def call(http: httpx.AsyncClient, key: str, **more: Any) -> dict[str, Any]:
        meta = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}},
        }
        params = {"name": "a", "arguments": {}, "_meta": meta, **more}
        headers = {
            "Authorization": f"Bearer {key}",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": MODERN,
            "Mcp-Method": "tools/call",
            "Mcp-Name": "a",
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        answer = await http.post("http://127.0.0.1:8090/mcp", json=body, headers=headers)
        return dict(json.loads(answer.text.rpartition("data: ")[2]))

    async def work() -> None:
        transport = httpx.ASGITransport(app)
        async with server.session_manager.run(), httpx.AsyncClient(transport=transport) as http:
            state = (await call(http, "one"))["result"]["requestState"]
            given = {"name": {"action": "accept", "content": {"name": "Ada"}}}
            refused = await call(http, "two", requestState=state, inputResponses=given)
            assert refused["error"]["message"] == "Invalid or expired requestState"
            goes_on = await call(http, "one", requestState=state, inputResponses=given)
            assert list(goes_on["result"]["inputRequests"]) == ["colour"]

    running(work())


# ---- A model to fetch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("answer", [{}, "decline", None])
def test_a_model_is_fetched_when_the_person_agrees_or_cannot_be_asked(
    mode: str, answer: Any, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_fetch, "find_model", lambda name: None)  # here it is in the cache nevertheless
    asked, callback = answering(answer)
    said: list[Any] = []

    async def hear(message: Any) -> None:
        said.append(message.data)

    async def work() -> Any:
        models = ServedModels(ModelNames("smollm2", "heedful-decider", "minilm"))
        options: dict[str, Any] = {} if answer is None else {"elicitation_callback": callback}
        options |= {} if mode == "legacy" else {"logging_callback": hear, "log_level": "info"}
        async with Client(heedful_server(models, Roots([])), mode=mode, **options) as client:
            result = await client.call_tool("cost", {"text": "Why?"})
        await models.close()
        return result

    result = running(work())
    shown = "smollm2 (98.4 MB)"
    if answer is not None:
        assert asked == [
            f"heedful needs the model {shown}, which is not on this machine yet. Fetch it now, and keep it?"
        ]
    if answer == "decline":
        assert text_of(result) == (
            f"{shown} is needed, and the user does not want it fetched. To fetch it: heedful pull smollm2."
        )
        assert said == []
    else:
        assert result.structured_content["prompt_tokens"] == 2
        assert said == ([] if mode == "legacy" else [f"fetching {shown}; the call takes longer this once"])
