"""The prompts and resources that the conformance suite's scenarios ask for by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_types import (
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    PromptMessage,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)
from suite_tools import PIXEL, TOLD, resource

from heedful.mcp.server.call import Call
from heedful.mcp.server.prompts import PromptArgument, ServerPrompt, said
from heedful.mcp.server.questions import form

CONTEXT = form("What context should the prompt use?", {"context": {"type": "string"}}, ["context"])
WORDS = ("testing", "text", "paris")


def showing(name: str, *contents: ImageContent | EmbeddedResource | str) -> ServerPrompt:
    async def messages(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
        return [said(each) if isinstance(each, str) else PromptMessage(role="user", content=each) for each in contents]

    return ServerPrompt(name, name, TOLD, (), messages)


async def with_arguments(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
    return [said(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]


async def with_resource(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
    embedded = resource(given["resourceUri"], "text/plain", "Embedded resource content for testing.")
    return [PromptMessage(role="user", content=embedded), said("Please process the embedded resource above.")]


async def asking(given: Mapping[str, str], call: Call) -> Sequence[PromptMessage]:
    answers = await call.asker.ask({"user_context": CONTEXT})
    return [said(f"In this context: {answers['user_context'].content}")]


def suite_prompts() -> list[ServerPrompt]:
    image = ImageContent(type="image", data=PIXEL, mime_type="image/png")
    arguments = (
        PromptArgument("arg1", "The first.", True, lambda typed: [word for word in WORDS if word.startswith(typed)]),
        PromptArgument("arg2", "The second.", True),
    )
    uri = PromptArgument("resourceUri", "What is embedded.", True)
    return [
        showing("test_simple_prompt", "This is a simple prompt for testing."),
        showing("test_prompt_with_image", image, "Please analyze the image above."),
        ServerPrompt("test_prompt_with_arguments", "Arguments", TOLD, arguments, with_arguments),
        ServerPrompt("test_prompt_with_embedded_resource", "Resource", TOLD, (uri,), with_resource),
        ServerPrompt("test_input_required_result_prompt", "Question", TOLD, (), asking),
    ]


class SuiteResources:
    """A ResourceSource."""

    templates = (ResourceTemplate(uri_template="test://template/{id}/data", name="data", description=TOLD),)
    _texts: Mapping[str, str] = {
        "test://static-text": "This is the content of the static text resource.",
        "test://watched-resource": "This one could change.",
    }
    _binary = "test://static-binary"

    def listed(self) -> Sequence[Resource]:
        media = {**dict.fromkeys(self._texts, "text/plain"), self._binary: "image/png"}
        return [Resource(uri=uri, name=uri[7:], description=TOLD, mime_type=kind) for uri, kind in media.items()]

    def read(self, uri: str) -> TextResourceContents | BlobResourceContents | None:
        if uri in self._texts:
            return TextResourceContents(uri=uri, mime_type="text/plain", text=self._texts[uri])
        if uri == self._binary:
            return BlobResourceContents(uri=uri, mime_type="image/png", blob=PIXEL)
        found = re.fullmatch(r"test://template/([^/]+)/data", uri)
        if found is None:
            return None
        data = {"id": found[1], "templateTest": True, "data": f"Data for ID: {found[1]}"}
        return TextResourceContents(uri=uri, mime_type="application/json", text=json.dumps(data))

    def stamp(self, uri: str) -> Any:
        return self.read(uri) and 0

    def suggest(self, template: str, argument: str, typed: str) -> Sequence[str]:
        return ()
