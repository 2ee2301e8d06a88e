"""heedful as an MCP server, asked by the SDK's own client, in this process: what each tool answers, in both revisions
of the protocol, and what happens to whoever asks for something that cannot be done, or leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from mcp import Client, MCPError
from mcp_types import CallToolResult

from heedful.cost.formulas import Shape, generation_cost
from heedful.engine.embedder import load_embedder
from heedful.engine.llm import LLM
from heedful.mcp.server.app import RECEIPT_KEY, make_server
from heedful.mcp.server.call import Call, Done, ServerTool
from heedful.mcp.server.files import Roots
from heedful.mcp.server.models import ModelNames, ServedModels
from heedful.mcp.server.tools import heedful_tools
from heedful.testing import make_tiny_model

Running = Callable[[Coroutine[Any, Any, Any]], Any]
MODES = ("legacy", "2026-07-28")
LONG = 1900
TICKETS = ["I was charged twice", "It crashes at start"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_len=2048)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """The same model without any server."""
    return LLM(str(tiny), threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    (made / "notes.txt").write_text("A line about ships.\n" * 400, encoding="utf-8")
    (made / "short.txt").write_text("A line about ships.\n", encoding="utf-8")
    return made


@dataclass
class Served:
    client: Client
    models: ServedModels

    async def call(self, name: str, arguments: dict[str, Any], **more: Any) -> CallToolResult:
        return await self.client.call_tool(name, arguments, **more)


@asynccontextmanager
async def served(tiny: Path, folder: Path | None = None, mode: str = "2026-07-28") -> AsyncIterator[Served]:
    models = ServedModels(ModelNames(str(tiny), str(tiny), str(tiny), threads=1))
    server = make_server(heedful_tools(models, Roots([folder] if folder else [])))
    try:
        async with Client(server, mode=mode) as client:
            yield Served(client, models)
    finally:
        await models.close()


def text_of(result: CallToolResult) -> str:
    assert result.content[0].type == "text"
    return result.content[0].text


def structured(result: CallToolResult) -> dict[str, Any]:
    assert not result.is_error, result
    found = result.structured_content
    assert isinstance(found, dict)
    return found


def receipt_of(result: CallToolResult) -> dict[str, Any]:
    assert result.meta is not None
    return dict(result.meta[RECEIPT_KEY])


CALLS: dict[str, dict[str, Any]] = {
    "generate": {"prompt": "Say something.", "max_tokens": 8},
    "decide": {
        "state": "You charged me twice!",
        "questions": {"team": ["billing", "tech"], "urgent": "Is it urgent?", "mood": "calm | annoyed | furious"},
    },
    "classify": {"texts": TICKETS, "labels": {"billing": "money", "tech": "software"}},
    "embed": {"texts": [*TICKETS, "I was billed twice"]},
    "summarize": {"path": "notes.txt", "max_tokens": 16},
    "cost": {"prompt_tokens": 100, "output_tokens": 10},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_tool_answers_what_its_schema_says(tiny: Path, folder: Path, mode: str, running: Running) -> None:
    async def work() -> None:
        async with served(tiny, folder, mode) as here:
            assert here.client.protocol_version == ("2025-11-25" if mode == "legacy" else mode)
            tools = {tool.name: tool for tool in (await here.client.list_tools()).tools}
            assert set(tools) == set(CALLS)
            for name, arguments in CALLS.items():
                tool = tools[name]
                assert tool.output_schema is not None
                assert tool.annotations is not None
                jsonschema.Draft202012Validator.check_schema(tool.output_schema)
                jsonschema.validate(arguments, tool.input_schema)
                result = await here.call(name, arguments)
                jsonschema.validate(structured(result), tool.output_schema)
                assert (tool.annotations.read_only_hint, tool.annotations.open_world_hint) == (True, False)
                assert "Not " in str(tool.description) or "do not" in str(tool.description) or name == "cost"
                if name != "cost":
                    assert receipt_of(result)["visits"]["total"] > 0

    running(work())


def test_generated_text_is_the_models_own(tiny: Path, llm: LLM, running: Running) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
    direct = llm.chat(asked, max_tokens=24)

    async def work() -> CallToolResult:
        async with served(tiny) as here:
            return await here.call("generate", {"prompt": "Say something.", "system": "Be brief.", "max_tokens": 24})

    result = running(work())
    found = structured(result)
    assert (text_of(result), found["text"]) == (direct.text, direct.text)
    assert found["output_tokens"] == 24
    assert found["prompt_tokens"] == len(llm.encode_chat(asked)) == receipt_of(result)["prompt_tokens"]
    assert receipt_of(result)["visits"]["dense"] == direct.receipt.visits.dense


def test_an_answer_under_a_schema_is_a_value(tiny: Path, running: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }

    async def work() -> CallToolResult:
        async with served(tiny) as here:
            return await here.call("generate", {"prompt": "A number.", "json_schema": schema})

    result = running(work())
    jsonschema.validate(structured(result)["json"], schema)
    assert json.loads(text_of(result)) == structured(result)["json"]


def test_vectors_and_rankings_are_the_embedders(tiny: Path, running: Running) -> None:
    texts = [f"text number {number}" for number in range(20)]
    batch = load_embedder(str(tiny), threads=1).embed([*texts, "number 7"])

    async def work() -> tuple[CallToolResult, CallToolResult]:
        async with served(tiny) as here:
            ranked = await here.call("embed", {"texts": texts, "query": "number 7", "top": 3})
            return await here.call("embed", {"texts": texts}), ranked

    whole, ranked = running(work())
    np.testing.assert_allclose(structured(whole)["vectors"], batch.vectors[:20], atol=2e-4)
    assert receipt_of(whole)["prompt_tokens"] == sum(batch.token_counts[:20])
    similarities = batch.vectors[:20] @ batch.vectors[20]
    assert [row["index"] for row in structured(ranked)["ranking"]] == list(np.argsort(-similarities)[:3])


def test_costs_on_paper_and_so_far(tiny: Path, llm: LLM, running: Running) -> None:
    async def work() -> tuple[dict[str, Any], dict[str, Any]]:
        async with served(tiny) as here:
            first = structured(await here.call("cost", {"prompt_tokens": 300, "output_tokens": 20}))
            generated = await here.call("generate", {"prompt": "x", "max_tokens": 5})
            then = structured(await here.call("cost", {"text": "some words", "window": 64}))
            assert then["spent"]["generated"]["visits"] == receipt_of(generated)["visits"]["total"]
            return first, then

    first, then = running(work())
    on_paper = generation_cost(Shape.from_config(llm.config), 300, 20)
    assert (first["visits"], first["kv_bytes_read"]) == (on_paper.visits, on_paper.kv_bytes_read)
    assert (first["fits"], first["context"]) == (True, 2048)
    assert then["prompt_tokens"] == len(llm.tokenizer.encode("some words"))


def test_a_file_is_read_piece_by_piece(tiny: Path, folder: Path, llm: LLM, running: Running) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def note(done: float, total: float | None, message: str | None) -> None:
        reports.append((done, total, message))

    async def work() -> CallToolResult:
        async with served(tiny, folder) as here:
            return await here.call("summarize", CALLS["summarize"], progress_callback=note)

    found = structured(result := running(work()))
    text = (folder / "notes.txt").read_text()
    assert found["chars"] == len(text)
    assert found["tokens"] == sum(len(llm.tokenizer.encode(line, add_bos=False)) for line in text.splitlines(True))
    assert found["pieces"] > 1
    assert reports[0][:2] == (0, reports[-1][1])
    assert receipt_of(result)["prompt_tokens"] > found["tokens"], "all of it was read"
    assert all(quote in " ".join(text.split()) for quote in found["quotes"])


def test_without_a_folder_no_file_is_summarized(tiny: Path, running: Running) -> None:
    async def work() -> None:
        async with served(tiny) as here:
            assert "summarize" not in [tool.name for tool in (await here.client.list_tools()).tools]
            with pytest.raises(MCPError, match=r"Unknown tool: 'summarize'\. There are: generate, decide"):
                await here.call("summarize", {"path": "x"})

    running(work())


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("generate", {}, "'prompt' is a required property. It takes: generate(prompt: str"),
        ("generate", {"prompt": "a", "prmpt": 1}, "'prmpt' was unexpected"),
        ("generate", {"prompt": "a", "max_tokens": 0}, "max_tokens: 0 is less than the minimum of 1"),
        ("generate", {"prompt": "word " * 3000}, 'send "truncate": true'),
        ("generate", {"prompt": "a", "json_schema": {"type": "nothing"}}, "json_schema: cannot be honoured"),
        ("generate", {"prompt": "w" * (1 << 20) + "w"}, "prompt"),
        ("decide", {"state": "word " * 3000, "questions": {"q": "Is it?"}}, "Shorten it."),
        ("decide", {"state": "a", "questions": {}}, "questions"),
        ("decide", {"state": "a", "questions": {"q": {"type": "riddle"}}}, "riddle"),
        ("decide", {"state": "a", "questions": {"q": ["same", "same"]}}, "same"),
        ("classify", {"texts": [], "labels": ["a", "b"]}, "texts"),
        ("classify", {"texts": ["a"], "labels": ["only"]}, "labels"),
        ("embed", {"texts": ["word " * 3000], "truncate": False}, "tokens"),
        ("cost", {}, "prompt_tokens: or text must be given, and not both"),
        ("cost", {"prompt_tokens": 10, "kv": "q5"}, "kv"),
        ("cost", {"prompt_tokens": 10, "sinks": 4}, "sinks"),
    ],
)
def test_what_a_caller_does_wrong_is_told_and_can_be_mended(
    tiny: Path, name: str, arguments: dict[str, Any], said: str, running: Running
) -> None:
    async def work() -> None:
        async with served(tiny) as here:
            result = await here.call(name, arguments)
            assert result.is_error
            assert said in text_of(result)
            assert "\n" not in text_of(result)
            assert not (await here.call("generate", {"prompt": "a", "max_tokens": 2})).is_error

    running(work())


def test_a_prompt_that_is_too_long_is_cut_where_that_is_asked_for(tiny: Path, llm: LLM, running: Running) -> None:
    prompt = " ".join(f"w{number}" for number in range(3000))

    async def work() -> CallToolResult:
        async with served(tiny) as here:
            return await here.call("generate", {"prompt": prompt, "truncate": True, "max_tokens": 4})

    found = structured(running(work()))
    dropped = len(llm.tokenizer.encode(prompt, add_bos=False)) - found["prompt_tokens"]
    assert 0 < dropped < found["dropped_tokens"] < dropped + 100
    assert 2048 - 4 - 100 < found["prompt_tokens"] <= 2048 - 4


@pytest.mark.parametrize("mode", MODES)
def test_whoever_leaves_frees_the_pages_at_once(tiny: Path, mode: str, running: Running) -> None:
    """And hears before that how far it was."""
    heard = asyncio.Event()
    reports: list[float] = []

    async def note(done: float, total: float | None, message: str | None) -> None:
        reports.append(done)
        assert (total, message) == (LONG, f"{done:.0f} of at most {LONG} tokens")
        if len(reports) == 2:
            heard.set()

    async def work() -> None:
        async with served(tiny, mode=mode) as here:
            asked = {"prompt": "a", "max_tokens": LONG}
            leaving = asyncio.create_task(here.call("generate", asked, progress_callback=note))
            await asyncio.wait_for(heard.wait(), 10)
            service = here.models.running
            assert service is not None
            assert service.num_open == 1
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            async with asyncio.timeout(10):
                while not service.llm.ledger.requests:
                    await asyncio.sleep(0.001)
            assert service.num_open == service.llm.engine.scheduler.num_running == 0
            assert service.llm.ledger.output_tokens < LONG / 2
            assert reports == sorted(reports)
            assert structured(await here.call("generate", {"prompt": "a", "max_tokens": 2}))["output_tokens"] == 2

    running(work())


def test_many_at_a_time_share_the_steps(tiny: Path, llm: LLM, running: Running) -> None:
    prompts = [f"Number {number}" for number in range(6)]
    alone = [llm.chat([{"role": "user", "content": prompt}], max_tokens=12).text for prompt in prompts]

    async def work() -> list[str]:
        async with served(tiny) as here:
            calls = [here.call("generate", {"prompt": prompt, "max_tokens": 12}) for prompt in prompts]
            return [text_of(result) for result in await asyncio.gather(*calls)]

    assert running(work()) == alone


def test_a_bug_of_a_tool_is_told_without_its_words(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(arguments: dict[str, Any], call: Call) -> Done:
        raise KeyError("a secret of ours")

    tool = ServerTool("broken", "Broken", "Fails.", {"type": "object", "properties": {}}, None, broken)

    async def work() -> CallToolResult:
        async with Client(make_server([tool])) as client:
            return await client.call_tool("broken", {})

    result = running(work())
    assert result.is_error
    assert text_of(result).startswith("broken failed inside the server")
    assert "a secret of ours" in caplog.text
