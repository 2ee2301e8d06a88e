"""Ingress and replica without Ray between them: what is passed on, what is said of a lost replica, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from heedful.deploy.engine_replica import EngineReplica
from heedful.deploy.forwarded import Forwarded, Head, forwarded
from heedful.deploy.ingress import Ask, Ingress, ReplicaLost
from heedful.deploy.launch import Deployed, read_app, start
from heedful.deploy.settings import Autoscaling, DeploySettings, settings_from_args
from heedful.engine.llm import LLM
from heedful.errors import BadParameter, EngineStopped, HeedfulError
from heedful.router.affinity import Work
from heedful.testing import make_tiny_model

ROOT = Path(__file__).parents[2]
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def call(ask: Ask, path: str, method: str = "POST", **more: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(Ingress(ask))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


def scripted(*answers: list[Head | bytes | Exception]) -> tuple[Ask, list[Forwarded]]:
    """Each call gets the next of the answers."""
    asked: list[Forwarded] = []

    async def ask(one: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        asked.append(one)
        for piece in answers[len(asked) - 1]:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    return ask, asked


def test_a_request_and_its_answer_go_through_whole() -> None:
    ask, asked = scripted([Head(201, ((b"x-a", b"b"),), "r"), b"one ", b"two"])
    answer = call(ask, "/v1/anything?q=1", content=b"\x00body", headers={"x-c": "d"})
    assert (answer.status_code, answer.headers["x-a"], answer.content) == (201, "b", b"one two")
    assert (asked[0].method, asked[0].path, asked[0].query, asked[0].body) == (
        "POST",
        "/v1/anything",
        b"q=1",
        b"\x00body",
    )
    assert (b"x-c", b"d") in asked[0].headers
    assert asked[0].work == Work(0)


@pytest.mark.parametrize("begun", [[], [Head(200, STREAM, "dead")]], ids=["nothing", "its head"])
def test_before_the_first_byte_another_one_answers(begun: list[Any]) -> None:
    ask, asked = scripted([*begun, ReplicaLost("died")], [Head(200, (), "alive"), b"fine"])
    answer = call(ask, "/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.text, len(asked)) == (200, "fine", 2)


def test_three_are_enough() -> None:
    ask, asked = scripted(*([ReplicaLost("died")] for _ in range(3)))
    answer = call(ask, "/v1/chat/completions", json=CHAT)
    assert (answer.status_code, len(asked)) == (502, 3)
    assert answer.json()["error"]["message"] == "no replica could answer: died"
    ask, asked = scripted([ReplicaLost("too many requests wait", 429, is_final=True)])
    answer = call(ask, "/v1/messages", json=CHAT)
    assert (answer.status_code, len(asked)) == (429, 1)
    assert answer.json()["type"] == "error", "in the words of that API"
    assert "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("path", "begins"), [("/v1/chat/completions", "data: "), ("/v1/messages", "event: error\ndata: ")]
)
def test_a_stream_that_breaks_off_says_so(path: str, begins: str) -> None:
    ask, _ = scripted([Head(200, STREAM, "r7"), b"data: {}\n\n", ReplicaLost("died")])
    answer = call(ask, path, json=CHAT)
    assert answer.status_code == 200
    said = answer.text.removeprefix("data: {}\n\n")
    assert said.startswith(begins)
    error = json.loads(said.removeprefix(begins))["error"]
    assert error["message"] == "the replica that was answering (r7) is lost. Ask again: another one answers."


def test_a_body_that_breaks_off_is_no_answer() -> None:
    ask, _ = scripted([Head(200, ((b"content-type", b"application/json"),), "r"), b'{"a":', ReplicaLost("died")])
    with pytest.raises(ConnectionError):
        call(ask, "/v1/chat/completions", json=CHAT)


def test_metrics_are_of_all_replicas() -> None:
    texts = {"a": b'# TYPE n counter\nn_total{m="x"} 2.0\n', "b": b'# TYPE n counter\nn_total{m="x"} 3.0\n'}
    asked: list[Forwarded] = []

    async def ask(one: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        asked.append(one)
        name = next((name for name in texts if name not in one.unlike), "a")
        yield Head(200, ((b"content-type", b"text/plain"), (b"content-length", b"7")), name)
        yield texts[name]

    answer = call(ask, "/metrics", "GET")
    (family,) = text_string_to_metric_families(answer.text)
    found = {sample.labels["replica"]: sample.value for sample in family.samples if sample.name == "n_total"}
    assert found == {"a": 2.0, "b": 3.0}
    assert [len(one.unlike) for one in asked] == [0, 1, 2]


def test_what_the_router_is_told() -> None:
    first, second = "beginning " * 100, "another " * 100

    def of(text: str, question: str, key: str = "k") -> Forwarded:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 9}).encode()
        return forwarded("POST", "/v1/chat/completions", b"", ((b"Authorization", key.encode()),), body)

    one, same, other, foreign = of(first, "q"), of(first, "another"), of(second, "q"), of(first, "q", "other key")
    assert one.blocks[:3] == same.blocks[:3]
    assert len(one.blocks) >= 3
    assert not set(one.blocks) & set(other.blocks)
    assert not set(one.blocks) & set(foreign.blocks), "replicas keep callers apart"
    assert (one.work.prompt, one.work.output) == (pytest.approx(1000 / 4, rel=0.15), 9)
    for odd in (
        b"",
        b"[1]",
        b"{",
        b'{"messages": 3}',
        b'{"prompt": [[1, 2], null]}',
        b'{"max_tokens": "x", "prompt": "a"}',
    ):
        forwarded("POST", "/v1/completions", b"", (), odd)


def replica_of(tiny: Path, use: Callable[[EngineReplica], Any], **more: Any) -> Any:
    async def run() -> Any:
        replica = EngineReplica(DeploySettings(models=(str(tiny),), drain_s=2.0, **more), "r1")
        with pytest.raises(EngineStopped):
            replica.check_health()
        await replica.start()
        replica.check_health()
        try:
            return await use(replica)
        finally:
            await replica.close()

    return asyncio.run(run())


def test_a_replica_is_the_server(tiny: Path) -> None:
    async def use(replica: EngineReplica) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(Ingress(replica.forward))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            whole = await client.post("/v1/chat/completions", json=CHAT)
            stream = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            return whole, stream, await client.get("/v1/nothing")

    whole, stream, nothing = replica_of(tiny, use)
    expected = LLM(str(tiny), threads=1).chat(CHAT["messages"], max_tokens=6, temperature=0)
    assert whole.json()["choices"][0]["message"]["content"] == expected.text
    assert whole.json()["usage"]["heedful"]["visits"]["total"] == expected.receipt.visits.total
    assert whole.headers["x-heedful-replica"] == "r1"
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in stream.text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text
    assert nothing.status_code == 404


def test_hanging_up_frees_the_pages(tiny: Path) -> None:
    async def use(replica: EngineReplica) -> None:
        body = json.dumps({**CHAT, "max_tokens": 10**6, "ignore_eos": True, "stream": True, "heedful": {"window": 64}})
        asked = forwarded("POST", "/v1/chat/completions", b"", ((b"host", b"localhost"),), body.encode())
        async with aclosing(replica.forward(asked)) as pieces:
            head = await anext(pieces)
            assert isinstance(head, Head)
            assert head.status == 200
            await anext(pieces)
        pool = replica.app.state.heedful.pool
        scheduler = pool.find(None).llm.engine.scheduler
        async with asyncio.timeout(20):
            while pool.num_open or scheduler.has_work:
                await asyncio.sleep(0.01)
        assert scheduler.cache.taken_bytes == 0

    replica_of(tiny, use)


def test_keys_are_the_replicas_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS_OF_TEST", "one, two")

    async def use(replica: EngineReplica) -> list[int]:
        transport = httpx.ASGITransport(Ingress(replica.forward))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = [("/v1/models", {}), ("/v1/models", {"x-api-key": "two"}), ("/metrics", {}), ("/health", {})]
            return [(await client.get(path, headers=headers)).status_code for path, headers in asked]

    assert replica_of(tiny, use, api_keys_env="KEYS_OF_TEST") == [401, 200, 401, 200]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "args.models: names no model"),
        ({"models": []}, "args.models: names no model"),
        ({"models": 3}, "args.models: must be a list of texts"),
        ({"models": ["m"], "replica": 2}, "args.replica: is no key that means something here"),
        ({"models": ["m"], "replicas": 0}, "args.replicas: must be 1 or more"),
        ({"models": ["m"], "replicas": "two"}, "args.replicas: must be a number, not 'two'"),
        ({"models": ["m"], "replicas": 2, "autoscaling": {}}, "does not go with replicas"),
        ({"models": ["m"], "autoscaling": {"least": 5, "most": 2}}, "a least of 5 and a most of 2"),
        ({"models": ["m"], "autoscaling": 3}, "must map names to values"),
        ({"models": ["m"], "routing": "luck"}, "must be one of affinity, power_of_two, random"),
        ({"models": ["m"], "kv": "q9"}, "q9"),
        ({"models": ["m"], "api_keys_env": "NO_SUCH_KEYS"}, "NO_SUCH_KEYS is not in the environment"),
    ],
)
def test_args_that_cannot_be_meant(args: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        settings_from_args(args)


def test_args() -> None:
    found = settings_from_args({"models": "m", "autoscaling": {"most": 9, "up_s": 0}, "window": 512, "sinks": 4})
    assert found == DeploySettings(models=("m",), autoscaling=Autoscaling(most=9, up_s=0), window=512, sinks=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML"),
        ("3", "a list of one under applications"),
        ("applications: [{import_path: 'x:y'}]", "has import_path 'x:y'"),
        ("applications: [{import_path: 'heedful.deploy.app:build', args: {models: [m], x: 1}}]", "args.x"),
        (
            "{applications: [{import_path: 'heedful.deploy.app:build', args: {models: [m]}}], http_options: {port: 0}}",
            "port",
        ),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(text)
    with pytest.raises(BadParameter, match=said):
        read_app(file)


@pytest.mark.parametrize(
    ("args", "said"),
    [({"replicas": 100_000}, "are 100,000 for 100,000 replicas"), ({"models": ["smolm2"]}, "smollm2")],
)
def test_what_this_machine_cannot_run_is_said_before_ray_starts(args: dict[str, Any], said: str) -> None:
    with pytest.raises(HeedfulError, match=said):
        start(Deployed("a", "/", {"models": ["smollm2"], **args}, "127.0.0.1", 8000))


def test_the_example_is_one() -> None:
    app = read_app(ROOT / "examples" / "deploy.yaml")
    assert app.url == "http://127.0.0.1:8080"
    assert settings_from_args(app.args).replicas == 2
