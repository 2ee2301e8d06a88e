"""Prometheus metrics. Counters come from receipts, so they sum to what the answers said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from heedful.engine.answer import Completion
from heedful.engine.service import Observer, Service
from heedful.request import Request

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """One registry a server, never the process's own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._answers = self._counter("answers", "Answers by how they ended.", "finish")
        self._tokens = self._counter("tokens", "Tokens: of prompts, of those from a cache, of answers.", "kind")
        self._visits = self._counter("visits", "Token visits, and the dense ones they stand for.", "kind")
        self._saved = self._counter("visits_saved", "Visits that dense attention would have made, by saver.", "by")
        self._bytes = self._counter("read_bytes", "Bytes read.", "what")
        self._joules = self._counter("joules", "Energy of answers, by how it is known.", "source")
        self._prefix = self._counter("prefix_lookups", "Prompts that found a prefix, and that did not.", "result")
        self._routes = Counter(
            "heedful_routes",
            "Requests of the router by the target that answered, and whether it was chosen or stood in for another.",
            ["target", "by"],
            registry=self._registry,
        )
        self._decisions = self._counter("decisions", "Questions decided, by type.", "type")
        self._decision_visits = self._counter(
            "decision_visits", "Visits of decisions; a chat model's are among its visits too.", "kind"
        )
        names = ["model"]
        self._first_token = Histogram(
            "heedful_first_token_seconds",
            "From the request to the first token.",
            names,
            buckets=FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "heedful_step_seconds",
            "Between two tokens of those that decode: a step that brought tokens.",
            names,
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )
        self._batch = Histogram(
            "heedful_batch_sequences",
            "Sequences in a step.",
            names,
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self._registry,
        )
        self._requests = Counter(
            "heedful_http_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def routed(self, target: str, *, stood_in: bool) -> None:
        self._routes.labels(target, "stand-in" if stood_in else "choice").inc()

    def observer(self, model: str) -> Observer:
        return _ModelMetrics(self, model)

    def watch(self, services: Callable[[], Iterable[tuple[str, Service]]]) -> None:
        """Gauges of the services that run when somebody looks."""
        self._registry.register(_Gauges(services))

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"heedful_{name}", text, ["model", label], registry=self._registry)

    def stepped(self, model: str, seconds: float, new_tokens: int, num_sequences: int) -> None:
        timing = self._per_token.labels(model)
        for _ in range(new_tokens):
            timing.observe(seconds)
        self._batch.labels(model).observe(num_sequences)

    def decided(self, model: str, types: Iterable[str], receipt: Mapping[str, Any]) -> None:
        """`receipt`: as JSON; of a remote decider, it knows no visits."""
        for kind in types:
            self._decisions.labels(model, kind).inc()
        if receipt["visits"] is not None:
            _add(self._decision_visits, model, {kind: receipt["visits"][kind] for kind in ("total", "dense")})

    def finished(self, model: str, completion: Completion) -> None:
        receipt = completion.receipt
        self._answers.labels(model, completion.finish_reason).inc()
        kinds = {"prompt": receipt.prompt_tokens, "cached": receipt.cached_tokens, "output": receipt.output_tokens}
        _add(self._tokens, model, kinds)
        _add(self._visits, model, {"total": receipt.visits.total, "dense": receipt.visits.dense})
        saved = receipt.visits.saved
        _add(self._saved, model, {"window": saved.window, "pages": saved.pages, "prefix": saved.prefix})
        _add(self._bytes, model, {"kv": receipt.kv.bytes_read, "weights": receipt.weights.bytes_read})
        _add(self._joules, model, {receipt.energy.source: receipt.energy.joules})
        if receipt.prefix is not None:
            self._prefix.labels(model, "hit" if receipt.cached_tokens else "miss").inc()
        if receipt.output_tokens:
            self._first_token.labels(model).observe(receipt.seconds.first_token)


class _ModelMetrics:
    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model

    def opened(self) -> object:
        return None

    def stepped(self, seconds: float, new_tokens: int, num_sequences: int) -> None:
        self._metrics.stepped(self._model, seconds, new_tokens, num_sequences)

    def finished(self, completion: Completion, request: Request, opened: object) -> None:
        self._metrics.finished(self._model, completion)


class _Gauges(Collector):
    def __init__(self, services: Callable[[], Iterable[tuple[str, Service]]]) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        requests = GaugeMetricFamily("heedful_requests", "Open requests by state.", labels=["model", "state"])
        pages = GaugeMetricFamily(
            "heedful_kv_bytes", "Bytes of KV pages: in use, kept for reuse, and the budget.", labels=["model", "state"]
        )
        preempted = GaugeMetricFamily(
            "heedful_preemptions", "Sequences that had to give their pages back, so far.", labels=["model"]
        )
        for name, service in self._services():
            scheduler = service.llm.engine.scheduler
            requests.add_metric([name, "waiting"], scheduler.num_waiting)
            requests.add_metric([name, "running"], scheduler.num_running)
            pages.add_metric([name, "used"], scheduler.cache.taken_bytes)
            pages.add_metric([name, "resting"], scheduler.cache.resting_bytes)
            pages.add_metric([name, "budget"], scheduler.cache.budget_bytes)
            preempted.add_metric([name], scheduler.preemptions)
        return [requests, pages, preempted]


def _add(counter: Counter, model: str, amounts: dict[str, Any]) -> None:
    for kind, amount in amounts.items():
        counter.labels(model, kind).inc(amount)
