"""Errors as the APIs show them: which status, which words. Nothing that a caller sends ends in a 5xx."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec
from starlette.responses import Response

from heedful.decide.question_issues import Issue
from heedful.decide.remote import RemoteFailed
from heedful.errors import (
    BadParameter,
    CacheFull,
    ContextOverflow,
    EngineStopped,
    HeedfulError,
    LicenceNotAccepted,
    NetworkUnavailable,
    QueueFull,
    TargetFailed,
    UnknownModel,
    UnsupportedModel,
    UsageError,
)

log = logging.getLogger("heedful.server")

RETRY_AFTER_SECONDS = 2
SYSTEM_ONE = "/v1/systemone"
TOO_MANY_TOKENS = "max_tokens_exceeded"
"""System One's word for it."""
_PATH = re.compile(r" - at `([^`]*)`$")


class HTTPFailure(HeedfulError):
    """A request that ends with this status; `field` names what in it was wrong, or `issues` all that was."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        issues: tuple[Issue, ...] = (),
    ) -> None:
        self.status = status
        self.field = field
        self.code = code
        self.issues = issues
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    status: int
    kind: str
    """OpenAI's `type`."""
    message: str
    field: str | None = None
    code: str | None = None
    issues: tuple[Issue, ...] = ()
    retry_after: float | None = None
    """Seconds, where whoever failed asked to wait."""


def failure_of(error: Exception) -> Failure:
    """What a caller is told of it. An error that is none of ours is logged and told without its words."""
    if isinstance(error, HTTPFailure):
        text = _naming(error.message, error.field)
        return Failure(error.status, _kind(error.status), text, error.field, error.code, error.issues)
    if not isinstance(error, HeedfulError):
        log.error("a request failed", exc_info=error)
        return Failure(500, "server_error", "the server failed; its log says where")
    status, code = _status(error)
    field = error.field if isinstance(error, BadParameter) else None
    remedy = error.remedy
    if isinstance(error, ContextOverflow):
        field, remedy = "messages", 'Shorten it, or send "heedful": {"truncate": true}, which cuts its oldest part'
    text = ". ".join(part.rstrip(".") for part in (error.message, remedy) if part) + "."
    retry_after = error.retry_after if isinstance(error, TargetFailed) else None
    return Failure(status, _kind(status), text, field, code, retry_after=retry_after)


def _naming(message: str, field: str | None) -> str:
    """Clients show the message alone: it has to say which field it is about."""
    named = (field or "").partition(".")[0]
    return f"{field}: {message}" if field and named not in message else message


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Failures inside of it name fields as an API does that calls them differently: {our name: theirs}."""
    try:
        yield
    except HeedfulError as error:
        failure = failure_of(error)
        theirs = names.get(failure.field or "")
        if theirs is None:
            raise
        ours = f"{failure.field}: "
        text = failure.message
        text = f"{theirs}: {text.removeprefix(ours)}" if text.startswith(ours) else text
        raise HTTPFailure(failure.status, text, field=theirs, code=failure.code) from error


def _status(error: HeedfulError) -> tuple[int, str | None]:
    if isinstance(error, TargetFailed):
        return error.status, "target_failed"
    if isinstance(error, ContextOverflow):
        return 400, "context_length_exceeded"
    if isinstance(error, UsageError):
        return 400, None
    if isinstance(error, UnknownModel):
        return 404, "model_not_found"
    if isinstance(error, QueueFull):
        return 429, "queue_full"
    if isinstance(error, EngineStopped):
        return 503, "shutting_down"
    if isinstance(error, RemoteFailed | NetworkUnavailable):
        return 503, "remote_failed"
    if isinstance(error, CacheFull | UnsupportedModel | LicenceNotAccepted):
        return 400, None
    return 500, None


def _kind(status: int) -> str:
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )


def openai_body(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.field,
            "code": failure.code,
        }
    }


def anthropic_body(failure: Failure) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(failure.status, "invalid_request_error")
    where = f"{failure.field}: " if failure.field and not failure.message.startswith(failure.field) else ""
    return {"type": "error", "error": {"type": kind, "message": where + failure.message}}


def system_one_body(failure: Failure) -> dict[str, Any]:
    if failure.issues:
        issues = [{"loc": ["body", *issue.loc], "msg": issue.msg, "type": issue.type} for issue in failure.issues]
        return {"detail": issues}
    kinds = {400: "api_usage_error", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    kinds |= {415: "unsupported_media_type", 503: "overloaded"}
    kind = failure.code if failure.code == TOO_MANY_TOKENS else kinds.get(failure.status, failure.kind)
    return {"detail": {"error_type": kind, "message": failure.message}}


def is_system_one(path: str) -> bool:
    """Whether answers there have that API's shape."""
    return path == SYSTEM_ONE or path.startswith(f"{SYSTEM_ONE}/")


def body_of(failure: Failure, path: str) -> dict[str, Any]:
    if is_system_one(path):
        return system_one_body(failure)
    return anthropic_body(failure) if path.startswith("/v1/messages") else openai_body(failure)


def response_of(failure: Failure, path: str) -> Response:
    wait = RETRY_AFTER_SECONDS if failure.retry_after is None else ceil(failure.retry_after)
    headers = {"retry-after": str(wait)} if failure.status in (429, 503) else {}
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(body_of(failure, path))
    return Response(body, failure.status, headers, media_type="application/json")


def invalid(error: msgspec.ValidationError) -> HTTPFailure:
    """A body of the wrong shape: the field's name is what msgspec says it is."""
    text = str(error)
    path = _PATH.search(text)
    field = path.group(1).removeprefix("$").removeprefix(".") if path else None
    if field is None and (missing := re.search(r"missing required field `([^`]*)`", text)):
        field = missing.group(1)
    return HTTPFailure(400, _PATH.sub("", text), field=field or None)
