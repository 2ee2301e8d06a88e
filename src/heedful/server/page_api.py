"""The page at `/`: a few static files, all from here, under a policy that lets the browser load nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_SIGN = "image/svg+xml"
_SCRIPTS = ("page", "api", "chat", "cost", "format", "history", "markdown", "settings", "view", "visits")

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", _STYLE),
    "/favicon.svg": ("favicon.svg", _SIGN),
    "/favicon.ico": ("favicon.svg", _SIGN),  # browsers ask for it where they were not told of the other
    **{f"/page/{name}.js": (f"{name}.js", _SCRIPT) for name in _SCRIPTS},
}
"""Path → file in the folder `page`, media type."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked about each time: a new version shows at once
}


@dataclass(frozen=True)
class PageFile:
    data: bytes
    media_type: str
    etag: str


async def page_file(request: Request) -> Response:
    file = read_file(request.scope["path"])
    headers = {**_HEADERS, "etag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)


@cache
def read_file(path: str) -> PageFile:
    name, media_type = FILES[path]
    data = (files("heedful.server") / "page" / name).read_bytes()
    return PageFile(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
