"""OpenTelemetry spans that carry the receipt, where its API is installed and something collects.

Start the server under `opentelemetry-instrument`, or set up a tracer provider before it; without one nothing is
recorded. A `traceparent` header makes the span a child of the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from heedful.engine.answer import Completion
from heedful.engine.service import Observer, PassingOn
from heedful.request import Request


def has_opentelemetry() -> bool:
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def caller(headers: Mapping[str, str]) -> Iterator[None]:
    """Within it, spans belong to the trace that the headers name."""
    if "traceparent" not in headers or not has_opentelemetry():
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


class Traces(PassingOn):
    """Makes a span of every answer."""

    def __init__(self, observer: Observer) -> None:
        from opentelemetry import context, trace

        super().__init__(observer)
        self._current = context.get_current
        self._tracer = trace.get_tracer("heedful")

    def opened(self) -> object:
        """The caller's context; kept by the service until the answer has ended."""
        return self._current()

    def finished(self, completion: Completion, request: Request, opened: Any) -> None:
        super().finished(completion, request, opened)
        ended = time.time_ns()
        began = ended - int(completion.receipt.seconds.total * 1e9)
        span = self._tracer.start_span("heedful.answer", context=opened, start_time=began)
        span.set_attributes(attributes_of(completion))
        span.end(ended)


def attributes_of(completion: Completion) -> dict[str, Any]:
    """The receipt, flat, and the names that OpenTelemetry gives to generative models' tokens."""
    receipt = completion.receipt
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": receipt.model,
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.output_tokens,
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        **_flat("heedful", receipt.to_dict()),
    }


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: leaf for key, item in value.items() for name, leaf in _flat(f"{prefix}.{key}", item).items()}
    return {} if value is None else {prefix: value}
