"""Schemas of strangers: what they mean survives, what cannot be read costs one tool, nothing is fetched."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.mcp.schemas.normalise import BadSchema, normalised
from heedful.mcp.schemas.signature import brief_schema, signature, summary


def properties(**each: Any) -> dict[str, Any]:
    return {"type": "object", "properties": each}


def test_references_are_written_out_and_keep_what_stands_beside_them() -> None:
    color = {"title": "Color", "type": "string", "enum": ["red", "blue"], "description": "Which."}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"Color": color, "a/b~c": {"type": "integer"}, "Again": {"$ref": "#/$defs/Color"}},
        "title": "Arguments",
        **properties(
            color={"$ref": "#/$defs/Color"},
            other={"$ref": "#/$defs/Again", "description": "The other one.", "default": "red"},
            odd={"$ref": "#/$defs/a~1b~0c"},
            title={"type": "string", "title": "Title"},
        ),
        "required": ["color"],
    }
    assert normalised(schema) == {
        "type": "object",
        "properties": {
            "color": {"type": "string", "enum": ["red", "blue"], "description": "Which."},
            "other": {"type": "string", "enum": ["red", "blue"], "description": "The other one.", "default": "red"},
            "odd": {"type": "integer"},
            "title": {"type": "string"},
        },
        "required": ["color"],
    }


def test_or_null_is_left_out_where_leaving_out_is_allowed() -> None:
    text_or_null = {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None, "title": "T"}
    schema = {
        **properties(
            a={**text_or_null, "description": "A text."},
            b=text_or_null,
            c={"type": ["integer", "null"], "enum": [1, 2, None]},
            d={"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            e={"type": "string", "nullable": True},
        ),
        "required": ["b"],
    }
    found = normalised(schema)["properties"]
    assert found["a"] == {"type": "string", "maxLength": 5, "description": "A text."}
    assert found["b"] == {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}, "it must be given"
    assert found["c"] == {"type": "integer", "enum": [1, 2]}
    assert found["d"] == {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    assert found["e"] == {"type": "string"}


def test_a_recursive_schema_ends() -> None:
    node = {"type": "object", "description": "A node.", **properties(next={"$ref": "#/$defs/Node"})}
    found = normalised({**properties(root={"$ref": "#/$defs/Node"}), "$defs": {"Node": node}})
    inner = found["properties"]["root"]["properties"]["next"]
    assert inner == {"type": "object", "description": "A node."}
    jsonschema.Draft202012Validator.check_schema(found)
    whole = normalised({"type": "object", "properties": {"self": {"$ref": "#"}}})
    assert whole["properties"]["self"]["type"] == "object"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (None, "no object"),
        ({"type": "array"}, "is of type 'array', not object"),
        (properties(x={"$ref": "http://127.0.0.1:1/s.json"}), "points out of the schema|none is fetched"),
        (properties(x={"$ref": "file:///etc/passwd#/x"}), "none is fetched"),
        (properties(x={"$ref": "#/$defs/No"}), "points at nothing"),
        (properties(x={"$ref": 5}), "none is fetched"),
        (properties(x={"$dynamicRef": "#a"}), "is not read"),
        (properties(x={"type": "strnig"}), "no JSON schema at properties/x/type"),
        (properties(x={"enum": "a"}), "no JSON schema at properties/x/enum"),
        (properties(x="string"), "neither object nor boolean"),
        (properties(x={"pattern": "a" * 2000}), "more than 1,000 characters"),
        ({"type": "object", "properties": []}, "properties is no object"),
        (properties(x={"anyOf": {}}), "anyOf is no list"),
        (properties(x={"description": "a" * 70_000}), "has 70,0.. bytes"),
        (properties(**{f"x{i}": {} for i in range(1001)}), "more than 1,000 schemas"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(schema: Any, reason: str) -> None:
    with pytest.raises(BadSchema, match=reason):
        normalised(schema)


def test_depth_and_growth_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = properties(x=deep)
    with pytest.raises(BadSchema, match="more than 32 levels"):
        normalised(deep)
    endless: dict[str, Any] = {}
    for _ in range(5000):
        endless = {"properties": {"x": endless}}
    with pytest.raises(BadSchema, match=r"no JSON, or nested too deep|32 levels"):
        normalised(endless)
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(12)} | {"d12": {}}
    with pytest.raises(BadSchema, match="1,000 schemas"):
        normalised({**properties(x={"$ref": "#/$defs/d0"}), "$defs": doubling})


_LEAVES = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"enum": [1, "a"]}, {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, True]
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["a"]}, inner, inner),
        st.builds(lambda a: {"type": "array", "items": a}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=8,
)
_VALUES = st.recursive(
    st.sampled_from([1, "a", None, 2.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(_SCHEMAS, st.dictionaries(st.sampled_from("ab"), _VALUES, max_size=2))
def test_without_recursion_it_means_the_same(schema: Any, value: Any) -> None:
    """jsonschema, which follows references itself, judges both."""
    given_schema = {
        **properties(a=schema, b={"$ref": "#/$defs/B"}),
        "$defs": {"A": {"type": ["string", "integer"]}, "B": {"type": "array", "items": {"$ref": "#/$defs/A"}}},
    }
    found = normalised(given_schema)
    assert "$ref" not in str(found)
    before = jsonschema.Draft202012Validator(given_schema).is_valid(value)
    assert jsonschema.Draft202012Validator(found).is_valid(value) == before


def test_signatures() -> None:
    schema = normalised(
        {
            **properties(
                path={"type": "string"},
                mode={"enum": ["r", "w"], "default": "r"},
                edits={"type": "array", "items": {**properties(old={"type": "string"}), "required": ["old"]}},
                limit={"type": ["integer", "string"], "default": 5},
                more={"type": "object"},
                any={},
                fixed={"const": 1},
            ),
            "required": ["path", "edits"],
        }
    )
    assert signature("edit", "Edits a file.  Then\nmore text.", schema) == (
        'edit(path: str, mode?: "r"|"w" = "r", edits: [{old: str}], limit?: int|str = 5, more?: object, any?: any, '
        "fixed?: 1) - Edits a file."
    )
    assert signature("now", "", normalised({"type": "object"})) == "now()"


def test_summaries_end_at_a_word() -> None:
    assert summary("One two three four.", 12) == "One two…"
    assert summary("Reads e.g. a file. And more.") == "Reads e.g."
    assert summary("") == ""


def test_brief_schemas_keep_what_a_call_needs() -> None:
    schema = {
        **properties(a={"type": "string", "description": "First. " + "x" * 500, "minLength": 3, "enum": ["x"]}, b=True),
        "required": ["a"],
        "additionalProperties": False,
    }
    assert brief_schema(schema) == {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "string", "enum": ["x"], "description": "First."}, "b": True},
    }
