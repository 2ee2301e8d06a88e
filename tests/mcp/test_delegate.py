"""Calls by rules: on requests that were labelled before there were rules, and what makes them unsure."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heedful.mcp.catalogue.catalog import ListedTool, ServerListing, make_catalogue
from heedful.mcp.catalogue.select import ToolSelector
from heedful.mcp.delegation.delegate import Delegate, Plan, sure
from heedful.mcp.settings.config import config_from_json

RECIPE = Path(__file__).parents[2] / "recipes" / "delegation"
TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def labelled() -> ModuleType:
    sys.path.insert(0, str(RECIPE))
    try:
        import labelled
    finally:
        sys.path.remove(str(RECIPE))
    return labelled


def test_on_labelled_requests_rules_are_seldom_wrong(labelled: ModuleType) -> None:
    """By words alone; 60 of the 234 need no tool."""
    found = labelled.calls_by_rules(lambda text: -(-len(text) // 4))
    assert found.total() == 234
    assert found["rightly none"] == 60
    assert found["wrong"] <= 2
    assert found["right"] >= 24


def plans(request: str, *tools: tuple[str, str, dict[str, Any], bool | None], args: tuple[str, ...] = ()) -> list[Plan]:
    """`tools`: name, description, properties (all required), whether it says that it only reads."""
    listed = [
        ListedTool(
            name,
            description,
            {"type": "object", "properties": properties, "required": list(properties)},
            annotations=None if reads is None else {"readOnlyHint": reads},
        )
        for name, description, properties, reads in tools
    ]
    catalogue = make_catalogue([ServerListing("desk", listed)])
    config = config_from_json(
        {"mcpServers": {"desk": {"command": "-", "args": list(args), "x-heedful": {"trusted": True}}}}
    )
    selection = ToolSelector(catalogue, len).select(request)

    class Silent:
        async def call(self, tool: Any, arguments: Any) -> Any:
            raise AssertionError((tool.name, arguments))

    return asyncio.run(Delegate(Silent(), config).plans(request, catalogue, selection))[0]  # type: ignore[arg-type]


WEATHER = ("get_weather", "Tells the weather of a city.", {"timezone": {**TEXT, "description": "IANA time zone"}}, True)
COLOUR = ("paint_colour", "Tells the price of a colour.", {"colour": {**TEXT, "enum": ["red", "green"]}}, True)
READ = ("read_file", "Reads a file.", {"path": TEXT}, True)
ERASE = ("erase_file", "Erases a file.", {"path": TEXT}, False)
TWO = ("add_numbers", "Adds two numbers.", {"a": {"type": "number"}, "b": {"type": "number"}}, True)


@pytest.mark.parametrize(
    ("request_text", "tool", "arguments"),
    [
        ("What is the weather in Tokyo?", WEATHER, {"timezone": "Asia/Tokyo"}),
        ("What is the price of the colour green?", COLOUR, {"colour": "green"}),
        ("Read the file /a/b.txt", READ, {"path": "/a/b.txt"}),
        ("What is the sum of the numbers 3 and 4.5?", TWO, {"a": 3, "b": 4.5}),
    ],
)
def test_arguments_are_what_is_said(request_text: str, tool: Any, arguments: dict[str, Any]) -> None:
    plan = sure(plans(request_text, tool, ERASE))
    assert plan is not None
    assert (plan.tool.name, plan.arguments) == (tool[0], arguments)


@pytest.mark.parametrize(
    ("request_text", "tool", "why"),
    [
        ("What is the weather like?", WEATHER, "no place is said"),
        ("What is the weather in Tokyo and in Paris?", WEATHER, "which of two?"),
        ("What is the price of the colour blue?", COLOUR, "not one of its values"),
        ("What is the price of the colour?", COLOUR, "a value would be a guess"),
        ("Who painted the weather in Tokyo?", WEATHER, "a word is left over"),
        ("Erase the file /a/b.txt", READ, "an order to change something is no reading"),
        ("Add the numbers 3, 4 and 5", TWO, "a number too many"),
    ],
)
def test_else_it_is_left_to_the_model(request_text: str, tool: Any, why: str) -> None:
    assert sure(plans(request_text, tool)) is None, why


def test_what_changes_something_is_never_called_by_rule() -> None:
    assert plans("The file /a/b.txt: erase file?", ERASE) == []
    unsaid = ("delete_file", "Deletes a file.", {"path": TEXT}, None)
    assert plans("Which file does delete file take, /a/b.txt?", unsaid) == [], "it does not say that it only reads"


def test_paths_are_under_what_the_server_was_given(tmp_path: Path) -> None:
    plan = sure(plans("Read the file b.txt", READ, args=(str(tmp_path),)))
    assert plan is not None
    assert plan.arguments == {"path": str(tmp_path / "b.txt")}
    assert plans("Read the file", READ, args=(str(tmp_path),)) == [], "a folder is no file"
