"""Bodies that come compressed: gzip, and zstd as typesafe-sdk sends it from 1 KiB on. What they grow to is bounded."""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Protocol

from heedful.server.failures import HTTPFailure

ZSTD_MODULES = ("compression.zstd", "backports.zstd")
"""Python has it from 3.14 on."""
MOST_WINDOW_LOG = 24
"""Of a zstd frame: 16 MiB that decompressing it may take beside its output."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def decoded(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """`encoding`: the Content-Encoding header. Raises HTTPFailure: 415 for another one, 413 over `most_bytes`, 400 for
    what is none or is cut off."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    decompressor, malformed = _decompressor(encoding)
    try:
        found = decompressor.decompress(body, most_bytes + 1)
    except malformed:
        raise HTTPFailure(400, f"the body is not {encoding}") from None
    if len(found) > most_bytes:
        raise HTTPFailure(413, f"the body is over {most_bytes:,} bytes once it is decompressed")
    if not decompressor.eof or decompressor.unused_data:
        raise HTTPFailure(400, f"the body is not one whole {encoding} stream")
    return found


def _decompressor(encoding: str) -> tuple[_Decompressor, type[Exception]]:
    """And what it raises."""
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(wbits=31), zlib.error
    zstd = _zstd() if encoding == "zstd" else None
    if zstd is None:
        known = "gzip and zstd" if _zstd() is not None else "gzip (zstd needs the package backports.zstd here)"
        raise HTTPFailure(415, f"bodies that are {encoding:.40} are not read; {known} are")
    options = {zstd.DecompressionParameter.window_log_max: MOST_WINDOW_LOG}
    return zstd.ZstdDecompressor(options=options), zstd.ZstdError


def _zstd() -> Any:
    """The module, or None."""
    for name in ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None
