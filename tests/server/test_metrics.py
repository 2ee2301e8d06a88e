"""What Prometheus and OpenTelemetry are told is what the receipts said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import RunningServer, start_server

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def fresh(tiny_dir: Path, spans: InMemorySpanExporter) -> Iterator[RunningServer]:
    running = start_server(tiny_dir)
    yield running
    running.stop()


def samples(server: RunningServer) -> Samples:
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found.get((f"heedful_{name}", frozenset(labels.items())), 0.0)


def ask(server: RunningServer, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    answer.raise_for_status()
    receipt: dict[str, Any] = answer.json()["usage"]["heedful"]
    return receipt


def test_counters_sum_to_the_receipts(fresh: RunningServer) -> None:
    before = samples(fresh)
    prompt = "a long beginning that is said twice " * 8
    options: list[dict[str, Any]] = [{}, {}, {"heedful": {"window": 100, "sinks": 4}}]
    receipts = [ask(fresh, prompt, **option) for option in options]
    after = samples(fresh)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    tiny = {"model": "tiny"}
    assert grown("tokens_total", kind="prompt", **tiny) == sum(r["prompt_tokens"] for r in receipts)
    assert grown("tokens_total", kind="cached", **tiny) == sum(r["cached_tokens"] for r in receipts) > 0
    assert grown("tokens_total", kind="output", **tiny) == 60
    for kind in ("total", "dense"):
        assert grown("visits_total", kind=kind, **tiny) == sum(r["visits"][kind] for r in receipts)
    for saver in ("window", "prefix"):
        expected = sum(r["visits"]["saved"][saver] for r in receipts)
        assert grown("visits_saved_total", by=saver, **tiny) == expected > 0
    assert grown("read_bytes_total", what="kv", **tiny) == sum(r["kv"]["bytes_read"] for r in receipts)
    joules = sum(r["energy"]["joules"] for r in receipts)
    assert grown("joules_total", source=receipts[0]["energy"]["source"], **tiny) == pytest.approx(joules)
    assert grown("prefix_lookups_total", result="hit", **tiny) == 1
    assert grown("prefix_lookups_total", result="miss", **tiny) == 2
    assert grown("first_token_seconds_count", **tiny) == 3
    assert grown("step_seconds_count", **tiny) == 60
    assert grown("batch_sequences_sum", **tiny) == grown("batch_sequences_count", **tiny) == 60
    assert grown("answers_total", finish="length", **tiny) == 3
    assert grown("http_requests_total", path="/v1/completions", status="200") == 3


def test_gauges_say_what_is_held_now(fresh: RunningServer) -> None:
    ask(fresh, "some pages that stay for others " * 6)
    found = samples(fresh)
    cache = fresh.state.pool.find("tiny").llm.engine.scheduler.cache
    assert value(found, "kv_bytes", model="tiny", state="used") == 0
    assert value(found, "kv_bytes", model="tiny", state="resting") == cache.resting_bytes > 0
    assert value(found, "kv_bytes", model="tiny", state="budget") == cache.budget_bytes
    for state in ("running", "waiting"):
        assert value(found, "requests", model="tiny", state=state) == 0


def test_failures_are_counted_by_status(fresh: RunningServer) -> None:
    before = value(samples(fresh), "http_requests_total", path="/v1/completions", status="400")
    assert httpx.post(f"{fresh.url}/v1/completions", json={"prompt": 1}).status_code == 400
    assert value(samples(fresh), "http_requests_total", path="/v1/completions", status="400") == before + 1


def test_a_span_carries_the_receipt_into_the_callers_trace(fresh: RunningServer, spans: InMemorySpanExporter) -> None:
    spans.clear()
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    answer = httpx.post(
        f"{fresh.url}/v1/completions",
        json={"prompt": "hello", "max_tokens": 5, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
    )
    receipt = answer.json()["usage"]["heedful"]
    (span,) = spans.get_finished_spans()
    assert format(span.context.trace_id, "032x") == trace_id
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == parent_id
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["heedful.visits.total"] == receipt["visits"]["total"]
    assert attributes["heedful.energy.source"] == receipt["energy"]["source"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(receipt["seconds"]["total"], abs=1e-3)
