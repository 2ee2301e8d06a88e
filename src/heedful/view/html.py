"""A view as one HTML file that needs nothing else: style, script and data are in it, and it may load nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

_ALSO_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Inside of JSON strings, where alone they can stand: no text in the data can end the script element."""


def view_page(view: dict[str, Any]) -> str:
    """`view`: what `record.make_view` made."""
    parts = {
        "policy": content_policy(),
        "title": escape(f"{view['model']}: where the visits went"),
        "style": _part("page.css"),
        "data": embedded_json(view),
        "script": _part("page.js"),
    }
    page = _part("page.html")
    pieces = [page]
    for name, text in parts.items():  # in the order of the page, each once: nothing in a text is taken for a place
        before, place, after = pieces.pop().partition(f"%{name}%")
        assert place, name
        pieces += [before, text, after]
    return "".join(pieces)


def content_policy() -> str:
    """What the page may do, as a header or a meta element says it: run its own script, wear its own style."""
    script, style = (_digest(_part(name)) for name in ("page.js", "page.css"))
    return f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"


def embedded_json(value: Any) -> str:
    """JSON that can stand in a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "".join(_ALSO_ESCAPED.get(c, c) for c in text) if any(c in text for c in _ALSO_ESCAPED) else text


@cache
def _part(name: str) -> str:
    return files("heedful.view").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
