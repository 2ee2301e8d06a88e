"""From the bytes of a body to typed fields, and the answer back to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from heedful.server.compressed import decoded
from heedful.server.failures import HTTPFailure, invalid
from heedful.server.guard import BodyTooLarge

T = TypeVar("T")

JSON = dict[str, Any]


class HungUp(Exception):
    """The client has gone; there is nobody to answer."""


async def read_bytes(request: Request) -> bytes:
    """The body, decompressed. Raises HTTPFailure for one that is too big or not what its encoding says."""
    try:
        body = await request.body()
    except BodyTooLarge:
        raise HTTPFailure(413, "the body is too big") from None
    except ClientDisconnect:
        raise HungUp from None
    encoding = request.headers.get("content-encoding", "")
    return decoded(body, encoding, request.state.most_body_bytes)


async def read_body(request: Request, kind: type[T]) -> T:
    """Raises HTTPFailure for what is no JSON, of the wrong shape, too big or nested too deep."""
    body = await read_bytes(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except msgspec.DecodeError as error:
        raise HTTPFailure(400, f"the body is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise HTTPFailure(400, "the body is not UTF-8") from None
    except RecursionError:
        raise HTTPFailure(400, "the body is nested too deep") from None


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def until_hangup(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up before. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
