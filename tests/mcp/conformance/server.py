"""What the conformance suite asks: heedful's own server, its tools and beside them the ones that the suite's scenarios
call by name. All go through the same code. On the port that comes last, until it is ended.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from typing import Any

from mcp import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from heedful.errors import UsageError
from heedful.listening import listen
from heedful.mcp.server import make_server
from heedful.mcp.server_call import Call, Done, ServerTool
from heedful.mcp.server_files import Roots
from heedful.mcp.server_http import HttpSettings, serve_http
from heedful.mcp.server_models import ModelNames, ServedModels
from heedful.mcp.server_tools import heedful_tools

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

    return ServerTool(name, name, "Of the conformance suite.", parameters, None, run)


async def fail(arguments: dict[str, Any], call: Call) -> Done:
    raise UsageError("This tool intentionally returns an error for testing")


async def take_time(arguments: dict[str, Any], call: Call) -> Done:
    for percent in (0, 50, 100):
        await call.report(percent, 100, f"{percent} of 100")
        await asyncio.sleep(0.15)  # reports that come sooner are left out
    return Done({}, "It took its time.")


async def want_sampling(arguments: dict[str, Any], call: Call) -> Done:
    wanted = {"requiredCapabilities": {"sampling": {}}}
    raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "This tool needs a client that samples", wanted)


def suite_tools() -> list[ServerTool]:
    text = TextContent(type="text", text="This is a simple text response for testing.")
    image = ImageContent(type="image", data=PIXEL, mime_type="image/png")
    audio = AudioContent(type="audio", data=SILENCE, mime_type="audio/wav")
    embedded = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    mixed = resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
    head = TextContent(type="text", text="Multiple content types test:")
    told = "Of the conformance suite."
    return [
        saying("test_simple_text", text),
        saying("test_image_content", image),
        saying("test_audio_content", audio),
        saying("test_embedded_resource", embedded),
        saying("test_multiple_content_types", head, image, mixed),
        saying("test_logging_tool", text),
        saying("test_streaming_elicitation", text),
        saying("json_schema_2020_12_tool", text, parameters=STRANGE),
        ServerTool("test_error_handling", "Error", told, NOTHING, None, fail),
        ServerTool("test_tool_with_progress", "Progress", told, NOTHING, None, take_time),
        ServerTool("test_missing_capability", "Capability", told, NOTHING, None, want_sampling),
    ]


async def main(port: int) -> None:
    settings = HttpSettings(port=port)
    models = ServedModels(ModelNames("smollm2", "heedful-decider", "minilm"))
    server = make_server([*heedful_tools(models, Roots([])), *suite_tools()])
    await serve_http(server, settings, listen(settings.host, settings.port))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[-1])))
