"""Files under the allowed folders as resources: file:///home/me/notes/a.txt. Which may be read is files.py's."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from heedful.errors import BadParameter
from heedful.mcp.server.files import MAX_FILE_BYTES, Roots

if TYPE_CHECKING:
    from mcp_types import BlobResourceContents, Resource, ResourceTemplate, TextResourceContents

SCHEME = "file://"
TEMPLATE = "file:///{+path}"


class FileResources:
    """A ResourceSource."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots

    @cached_property
    def templates(self) -> Sequence[ResourceTemplate]:
        from mcp_types import ResourceTemplate

        return [
            ResourceTemplate(
                uri_template=TEMPLATE,
                name="file",
                title="A file here",
                description=f"Any file under {self._roots.shown}, text or not, up to {MAX_FILE_BYTES >> 20} MiB.",
            )
        ]

    def listed(self) -> Sequence[Resource]:
        from mcp_types import Resource

        return [
            Resource(uri=uri_of(path), name=path.name, description=str(path), mime_type=media_type(path))
            for path in self._roots.files()
        ]

    def read(self, uri: str) -> TextResourceContents | BlobResourceContents | None:
        from mcp_types import BlobResourceContents, TextResourceContents

        path = path_of(uri)
        if path is None:
            return None
        data = self._roots.read_bytes(path)
        media = media_type(PurePosixPath(path))
        text = _as_text(data)
        if text is None:
            blob = base64.b64encode(data).decode("ascii")
            return BlobResourceContents(uri=uri, mime_type=media or "application/octet-stream", blob=blob)
        return TextResourceContents(uri=uri, mime_type=media or "text/plain", text=text)

    def stamp(self, uri: str) -> Any:
        path = path_of(uri)
        return None if path is None else self._roots.stamp(path)

    def suggest(self, template: str, argument: str, typed: str) -> Sequence[str]:
        """Whole paths, without the slash that stands in the template, as {+path} takes them."""
        if (template, argument) != (TEMPLATE, "path"):
            return ()
        return [quote(name).removeprefix("/") for name in self._roots.names_like("/" + typed.removeprefix("/"))]


def uri_of(path: PurePosixPath) -> str:
    return SCHEME + quote(str(path))


def path_of(uri: str) -> str | None:
    """None for what is no file's address. Decoded once: what is `..` then is refused as such. Raises BadParameter."""
    if not uri.lower().startswith(SCHEME):
        return None
    host, slash, path = uri[len(SCHEME) :].partition("/")
    if host.lower() not in ("", "localhost") or not slash or "?" in path or "#" in path:
        raise BadParameter("uri", "is no address of a file here", f"Like this: {SCHEME}/folder/name.txt")
    try:
        return unquote_to_bytes("/" + path).decode("utf-8")
    except UnicodeDecodeError:
        raise BadParameter("uri", "is not UTF-8, once it is decoded") from None


def media_type(path: PurePosixPath) -> str | None:
    """By the name's ending; None for one that is not known."""
    return mimetypes.guess_type(path.name)[0]


def _as_text(data: bytes) -> str | None:
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
