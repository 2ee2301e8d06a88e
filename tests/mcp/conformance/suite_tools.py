"""The tools that the conformance suite's scenarios call by name, as records of heedful's own server core."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from mcp import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    EmbeddedResource,
    ImageContent,
    InputRequest,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)

from heedful.errors import UsageError
from heedful.mcp.server.call import Call, Done, ServerTool
from heedful.mcp.server.questions import form

TOLD = "Of the conformance suite."
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
SILENCE = base64.b64encode(
    b"RIFF&\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\x02\0\0\0\0\0"
).decode()
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
STRANGE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def resource(uri: str, media_type: str, text: str) -> EmbeddedResource:
    inner = TextResourceContents(uri=uri, mime_type=media_type, text=text)
    return EmbeddedResource(type="resource", resource=inner)


def saying(name: str, *content: Any, parameters: dict[str, Any] = NOTHING) -> ServerTool:
    async def run(arguments: dict[str, Any], call: Call) -> CallToolResult:
        return CallToolResult(content=list(content))

    return ServerTool(name, name, TOLD, parameters, None, run)


async def fail(arguments: dict[str, Any], call: Call) -> Done:
    raise UsageError("This tool intentionally returns an error for testing")


async def take_time(arguments: dict[str, Any], call: Call) -> Done:
    for percent in (0, 50, 100):
        await call.report(percent, 100, f"{percent} of 100")
        await asyncio.sleep(0.15)  # reports that come sooner are left out
    return Done({}, "It took its time.")


async def want_sampling(arguments: dict[str, Any], call: Call) -> Done:
    wanted: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
    raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "This tool needs a client that samples", wanted)


async def say_much(arguments: dict[str, Any], call: Call) -> Done:
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await call.log(line)
        await asyncio.sleep(0.05)
    return Done({}, "It has said what it does.")


def sampling(prompt: str, max_tokens: int = 100) -> InputRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))


TEXT: dict[str, Any] = {"type": "string"}
NAME = form("What is your name?", {"name": TEXT}, ["name"])
CONFIRM = form("Please confirm", {"ok": {"type": "boolean"}}, ["ok"])
CAPITAL = sampling("What is the capital of France?")
ROOTS = ListRootsRequest()
DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
PLAIN = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{number}", "title": f"{word} Option"} for number, word in enumerate(("First", "Second"), 1)]
ENUMS = {
    "untitledSingle": {"type": "string", "enum": PLAIN},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": PLAIN}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}


def asking(name: str, *rounds: dict[str, InputRequest], parameters: dict[str, Any] = NOTHING) -> ServerTool:
    """Asks these questions, round by round, and says what was answered."""

    async def run(arguments: dict[str, Any], call: Call) -> Done:
        said = []
        for questions in rounds:
            answers = await call.asker.ask(questions)
            said += [f"{key}: {answer.model_dump_json(exclude_none=True)}" for key, answer in answers.items()]
        return Done({}, "\n".join(["state-ok" if call.asker.is_continued else "no state", *said]))

    return ServerTool(name, name, TOLD, parameters, None, run)


async def ask_what_can_be_asked(arguments: dict[str, Any], call: Call) -> Done:
    questions: dict[str, InputRequest] = {}
    if call.asker.can_ask("elicitation"):
        questions["user_name"] = NAME
    if call.asker.can_ask("sampling"):
        questions["capital_question"] = CAPITAL
    answers = await call.asker.ask(questions)
    return Done({}, f"answered: {', '.join(answers)}")


async def sample(arguments: dict[str, Any], call: Call) -> Done:
    answers = await call.asker.ask({"prompt": sampling(arguments["prompt"])})
    return Done({}, f"LLM response: {answers['prompt'].content.text}")


async def elicit(arguments: dict[str, Any], call: Call) -> Done:
    wanted = {"username": {**TEXT, "description": "User's response"}, "email": {**TEXT, "description": "Their address"}}
    answers = await call.asker.ask({"person": form(arguments["message"], wanted, ["username", "email"])})
    return Done({}, f"User response: {answers['person'].model_dump_json(exclude_none=True)}")


def given(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: TEXT}, "required": [name]}


def asking_tools() -> list[ServerTool]:
    greeting = sampling("Generate a greeting", 50)
    every = {"user_name": NAME, "greeting": greeting, "client_roots": ROOTS}
    color = form("Step 2: What is your favorite color?", {"color": TEXT}, ["color"])
    start = "test_input_required_result"
    return [
        asking(f"{start}_elicitation", {"user_name": NAME}),
        asking(f"{start}_sampling", {"capital_question": CAPITAL}),
        asking(f"{start}_list_roots", {"client_roots": ROOTS}),
        asking(f"{start}_request_state", {"confirm": CONFIRM}),
        asking(f"{start}_tampered_state", {"confirm": CONFIRM}),
        asking(f"{start}_multiple_inputs", every),
        asking(f"{start}_multi_round", {"step1": NAME}, {"step2": color}),
        asking("test_elicitation_sep1034_defaults", {"form": form("Who are you?", DEFAULTS)}),
        asking("test_elicitation_sep1330_enums", {"form": form("Choose", ENUMS)}),
        ServerTool(f"{start}_capabilities", "Capabilities", TOLD, NOTHING, None, ask_what_can_be_asked),
        ServerTool("test_sampling", "Sampling", TOLD, given("prompt"), None, sample),
        ServerTool("test_elicitation", "Elicitation", TOLD, given("message"), None, elicit),
    ]


def suite_tools() -> list[ServerTool]:
    text = TextContent(type="text", text="This is a simple text response for testing.")
    image = ImageContent(type="image", data=PIXEL, mime_type="image/png")
    audio = AudioContent(type="audio", data=SILENCE, mime_type="audio/wav")
    embedded = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    mixed = resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
    head = TextContent(type="text", text="Multiple content types test:")
    return [
        saying("test_simple_text", text),
        saying("test_image_content", image),
        saying("test_audio_content", audio),
        saying("test_embedded_resource", embedded),
        saying("test_multiple_content_types", head, image, mixed),
        saying("test_logging_tool", text),
        saying("test_streaming_elicitation", text),
        saying("json_schema_2020_12_tool", text, parameters=STRANGE),
        ServerTool("test_error_handling", "Error", TOLD, NOTHING, None, fail),
        ServerTool("test_tool_with_progress", "Progress", TOLD, NOTHING, None, take_time),
        ServerTool("test_tool_with_logging", "Logging", TOLD, NOTHING, None, say_much),
        *asking_tools(),
        ServerTool("test_missing_capability", "Capability", TOLD, NOTHING, None, want_sampling),
    ]
