"""What routing saves on a mixed load whose answers can be checked, against always small and always big.

    python bench/routing.py [--rows 176] [--error 0.2] [--margin 0.05] [--schema-tools 60]

The load is generated (routing_load.py): arithmetic, logic, lookups, classification, small talk. Who may answer, the
cheapest first: tools over MCP (routing_tools.py: a shelf and a calculator, a process of their own), a decision
(heedful-decider), the small model (smollm2), and "big". Big is no model that knows the answers: it is a second server
of ours with smollm2, behind a script that knows them and makes the model write some thirty tokens of steps and the
answer, under a grammar. So its answers are scripted, and its cost is the real one of writing that much; that of a
bigger model would be higher.

Another baseline is the small model with the schemas of all tools before every question: these two, and those recorded
of MCP's reference servers, as many as its context takes. A call that it writes for one of the two is made, and the
result is its answer, at the cost of the call alone.

Some 60 % of the rows fit the thresholds, the others are measured on. Receipts give visits and joules (estimated unless
the processor counts them; of a tool nobody counts them, and they are taken for those of a core that is busy as long as
the call lasts). Seconds are wall time on a machine that may be busy. Caches: every request has a prefix to itself, but
for the baseline with schemas, whose schemas are computed once, before, and told apart. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter, sleep

from routing_load import KINDS, MOST_ROWS, load
from routing_tools import TOOLS, called

from heedful.cli.route_tables import baseline_text, print_report
from heedful.cost.energy import estimate_energy
from heedful.decide.labelled_rows import is_held_out
from heedful.decide.load import load_decider
from heedful.engine.embedder import load_embedder
from heedful.engine.llm import LLM
from heedful.router.calibrate import calibrate, replay
from heedful.router.choose import Choice, Thresholds
from heedful.router.curve import compared
from heedful.router.dispatch import limited_to
from heedful.router.outcomes import Labelled, Outcome, Row, label, outcome_of
from heedful.router.policy import McpSpec, Policy
from heedful.router.policy_file import load_policy
from heedful.router.signals import JSON, Asked
from heedful.router.target import Target, WholeAnswer, text_of_body
from heedful.server.app import make_app
from heedful.server.routing import asker
from heedful.server.settings import ServerSettings

CATALOGUE = Path(__file__).parent.parent / "tests" / "golden" / "mcp" / "catalogue.json"
TOOL_SERVER = Path(__file__).with_name("routing_tools.py")
BIG = "smollm2"
HELD_OUT = 0.4
WITH_SCHEMAS = "small with all schemas"
CALL_TOKENS = 40
"""That the baseline with schemas may write: a call of a tool takes some thirty."""
POLICY = """\
version: 1
targets:
  stock: {kind: mcp, config: servers.json, server: desk, tool: stock}
  calculate: {kind: mcp, config: servers.json, server: desk, tool: calculate,
              arguments: {expression: "{a} {sign} {b}"}, answer: "{calculate}"}
  labels: {kind: decider, model: heedful-decider, question: {positive: "likes it", negative: "dislikes it"}}
  small: {kind: local, model: smollm2, max_tokens: 24}
  big: {kind: openai, base_url: "BIG/v1", model: scripted, timeout_s: 300, retries: 0}
rules:
  - {match: '^(hi|hello|thanks|thank you|good morning|bye)\\b[ ,]*\\w*\\W*$', to: small, max_tokens: 16}
  - {match: '^what is (?P<a>[0-9]+) (?P<sign>[-+*]) (?P<b>[0-9]+)\\?$', to: calculate}
  - {match: 'how many packets of', to: stock}
decision:
  model: heedful-decider
  timeout_s: 30
  calibration: calibration.json
  questions:
    kind:
      sentiment: "asks whether a review is positive or negative"
      lookup: "asks for a well-known fact, such as a capital"
      stock: "asks how much of an item the shop has left"
      reasoning: "asks to calculate or to conclude"
routes:
  - {to: labels, when: kind == "sentiment", min_p: calibrated}
  - {to: stock, when: kind == "stock", min_p: calibrated}
  - {to: small, when: kind == "lookup", min_p: calibrated}
default: big
fallbacks: {big: small, stock: big, calculate: big}
"""
STEPS = (
    "Let me think step by step. First I note what is given and what is asked. Then I put the parts together and check "
    "that the result agrees with them."
)


@dataclass(frozen=True)
class Eager:
    """The small model with schemas."""

    rows: list[Labelled]
    """The held-out ones, with its outcome."""
    tools: int
    """Before each question."""
    schemas: Outcome
    """Of a first question, with everything to compute."""


def main() -> None:
    args = _arguments()
    rows, answers = load(args.rows)
    with tempfile.TemporaryDirectory() as folder, _server(BIG) as model_url, _solver(model_url, answers) as big_url:
        path = Path(folder) / "policy.yaml"
        path.write_text(POLICY.replace("BIG", big_url), encoding="utf-8")
        _approve_tools(Path(folder))
        policy = load_policy(path)
        held = [is_held_out(row.asked.text, HELD_OUT) for row in rows]
        labelled, eager = asyncio.run(_asked(policy, rows, held, _schemas(args.schema_tools)))
    fitting = [one for one, is_held in zip(labelled, held, strict=True) if not is_held]
    held_out = [one for one, is_held in zip(labelled, held, strict=True) if is_held]
    report = calibrate(fitting, held_out, policy, error=args.error, margin=args.margin)
    print_report(report, labelled)
    chosen = Thresholds({name: one.threshold for name, one in report.routes.items()})
    choices = replay(held_out, policy, chosen)
    points, comparisons = compared(eager.rows, choices, policy, [WITH_SCHEMAS], margin=args.margin)
    point, against = points[f"always {WITH_SCHEMAS}"], comparisons[f"always {WITH_SCHEMAS}"]
    print(f"\nalways {WITH_SCHEMAS}, {eager.tools} tools: {baseline_text(point, against)}")
    print(f"computing the schemas, once: {json.dumps(eager.schemas.cost)}")
    kinds = {"all": _by_kind(labelled), "held_out": _by_kind(eager.rows), "routed": _routed_by_kind(held_out, choices)}
    print(f"\nright by kind, all rows: {json.dumps(kinds['all'])}")
    print(f"right by kind, held out: {json.dumps(kinds['held_out'])}")
    print(f"routed by kind, held out: {json.dumps(kinds['routed'])}")
    figures = {"rows": len(rows), "error": args.error, "margin": args.margin, "by_kind": kinds}
    shown = {"point": asdict(point), "comparison": asdict(against), "tools": eager.tools, "once": asdict(eager.schemas)}
    print(json.dumps({**figures, **report.to_dict(), WITH_SCHEMAS: shown}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=176)
    parser.add_argument("--error", type=float, default=0.2)
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--schema-tools", type=int, default=60, help="at most; fewer where the context is too short")
    args = parser.parse_args()
    if not len(KINDS) <= args.rows <= MOST_ROWS:
        parser.error(f"--rows is from {len(KINDS)} to {MOST_ROWS}")
    return args


def _approve_tools(folder: Path) -> None:
    """In a data folder of this run's own, as a user would."""
    os.environ["HEEDFUL_DATA"] = str(folder / "data")
    desk = {"command": sys.executable, "args": ["-S", str(TOOL_SERVER)], "x-heedful": {"allow": ["*"]}}
    config = folder / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"desk": desk}}), encoding="utf-8")
    command = [sys.executable, "-m", "heedful", "mcp", "approve", "--yes", "--config", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _schemas(count: int) -> list[JSON]:
    recorded = [tool for server in json.loads(CATALOGUE.read_text(encoding="utf-8")) for tool in server["tools"]]
    all_of_them = [(t["name"], t["description"], t["inputSchema"]) for t in TOOLS]
    all_of_them += [(t["name"], t.get("description") or "", t["input_schema"]) for t in recorded]
    return [
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
        for name, description, schema in all_of_them[:count]
    ]


async def _asked(
    policy: Policy, rows: Sequence[Row], held: Sequence[bool], tools: list[JSON]
) -> tuple[list[Labelled], Eager]:
    """(every row with every target's outcome, what the small model with schemas makes of the held-out ones)"""
    assert policy.decision is not None
    still = replace(policy, decision=replace(policy.decision, calibration=None))
    settings = ServerSettings(models=policy.local_models, most_models_loaded=4, idle_unload_seconds=None)
    app = make_app(settings, LLM, load_embedder, load_decider, still)
    async with app.router.lifespan_context(app):
        state = app.state.heedful
        told = _progress("every target", len(rows))
        labelled = await label(rows, still, state.router.targets, asker(still, state), progress=told)
        labelled = [_with_tool_joules(one, policy) for one in labelled]
        held_out = [one for one, is_held in zip(labelled, held, strict=True) if is_held]
        return labelled, await _eager(state.router.targets["small"], held_out, tools)


def _with_tool_joules(one: Labelled, policy: Policy) -> Labelled:
    """Of a core that is busy as long as the call lasts."""
    outcomes = dict(one.outcomes)
    for name, outcome in one.outcomes.items():
        if isinstance(policy.targets[name], McpSpec):
            joules = estimate_energy(outcome.cost["seconds"] or 0.0, 0).joules
            outcomes[name] = replace(outcome, cost={**outcome.cost, "joules": joules})
    return replace(one, outcomes=outcomes)


async def _eager(small: Target, held_out: Sequence[Labelled], tools: list[JSON]) -> Eager:
    calling = _Calling(small)

    async def outcome(one: Labelled) -> Outcome:
        asked = limited_to(one.row.asked, CALL_TOKENS)
        asked = replace(asked, salt="schemas", tools=tools, body={**asked.body, "tools": tools})
        return await outcome_of(calling, asked, one.row.check)

    schemas = await outcome(held_out[0])
    while schemas.failure:  # too long for the context
        tools = tools[:-1]
        assert tools, schemas.failure
        schemas = await outcome(held_out[0])
    print(f"{len(tools)} schemas computed, {schemas.cost['seconds']:.0f} s", file=sys.stderr, flush=True)
    told, rows = _progress("small with all schemas", len(held_out)), []
    for one in held_out:
        rows.append(replace(one, outcomes={**one.outcomes, WITH_SCHEMAS: await outcome(one)}))
        told(1)
    return Eager(rows, len(tools), schemas)


class _Calling:
    """A target whose answer, where it is a call of one of our tools, is what the tool gives."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self.name, self.books_itself = inner.name, inner.books_itself

    async def open(self, asked: Asked, held: AsyncExitStack) -> WholeAnswer:
        body = await (await self._inner.open(asked, held)).whole()
        calls = body["choices"][0]["message"].get("tool_calls") or []
        if calls:
            text = text_of_body(body) + "".join(_called(call["function"]) for call in calls)
            body["choices"][0]["message"]["content"] = text
        return WholeAnswer(body)

    async def aclose(self) -> None:
        """The target is not its own."""


def _called(function: JSON) -> str:
    try:
        return json.dumps(called(function["name"], json.loads(function["arguments"])))
    except (ValueError, TypeError, KeyError):
        return ""


def _progress(what: str, count: int) -> Callable[[int], None]:
    began, done = perf_counter(), 0

    def told(rows: int) -> None:
        nonlocal done
        done += rows
        if done % 5 == 0 or done == count:
            print(f"{what}: {done} of {count} rows, {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    return told


def _by_kind(labelled: Sequence[Labelled]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(one.row.kind for one in labelled):
        mine = [one for one in labelled if one.row.kind == kind]
        found[kind] = {
            name: f"{sum(one.outcomes[name].is_right for one in mine)} of {len(mine)}" for name in mine[0].outcomes
        }
    return found


def _routed_by_kind(rows: Sequence[Labelled], choices: Sequence[Choice]) -> dict[str, dict[str, str]]:
    """Kind → target → right of those that went there."""
    found: dict[str, dict[str, str]] = {}
    pairs = list(zip(rows, choices, strict=True))
    for kind, target in dict.fromkeys((one.row.kind, choice.target) for one, choice in pairs):
        mine = [one.outcomes[target].is_right for one, c in pairs if (one.row.kind, c.target) == (kind, target)]
        found.setdefault(kind, {})[target] = f"{sum(mine)} of {len(mine)}"
    return found


@contextmanager
def _server(model: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "heedful", "serve", "-m", model, "--no-history", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                sleep(0.2)
        try:
            yield url
        finally:
            process.terminate()


@contextmanager
def _solver(model_url: str, answers: dict[str, str]) -> Iterator[str]:
    """The script: it knows the answers, and has the model write them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked = body["messages"][-1]["content"]
            answer = f"{STEPS} {answers[asked]}"
            form = {"type": "choice", "choice": [answer]}
            wanted = {"messages": body["messages"], "max_tokens": 200, "temperature": 0, "response_format": form}
            request = urllib.request.Request(
                f"{model_url}/v1/chat/completions", json.dumps(wanted).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                written = json.load(reply)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
            data = json.dumps({"id": "scripted", "model": "scripted", "choices": [choice], "usage": written["usage"]})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
