"""What routing saves on a mixed load whose answers can be checked, against always small and always big.

    python bench/routing.py [--rows 90] [--error 0.2] [--margin 0.05] [--schema-tools 12]

The load is generated: arithmetic, logic, lookups, classification, small talk. Targets, the cheapest first: a decision
(heedful-decider), the small model (smollm2), and "big". Big is not a model that knows the answers: it is a second
server of ours with smollm2, behind a script that knows them and makes the model write some thirty tokens of steps and
the answer, under a grammar. So its answers are scripted, and its cost is the real one of writing that much; that of a
bigger model would be higher. Another baseline is the small model with the schemas of tools before every question, from
a list recorded of MCP's reference servers.

Some 60 % of the rows fit the thresholds, the others are measured on. Receipts give visits and joules (estimated unless
the processor counts them); seconds are wall time on a machine that may be busy. Caches: every request has a prefix to
itself, but for the baseline with schemas, whose schemas are computed once. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any

from heedful.cli.route_tables import baseline_text, print_report
from heedful.decide.labelled_rows import is_held_out
from heedful.decide.load import load_decider
from heedful.engine.embedder import load_embedder
from heedful.engine.llm import LLM
from heedful.router.calibrate import calibrate, replay
from heedful.router.choose import Thresholds
from heedful.router.curve import compared
from heedful.router.dispatch import limited_to
from heedful.router.outcomes import Labelled, Row, label, outcome_of, row_from_json
from heedful.router.policy import Policy
from heedful.router.policy_file import load_policy
from heedful.server.app import make_app
from heedful.server.routing import asker
from heedful.server.settings import ServerSettings

CATALOGUE = Path(__file__).parent.parent / "tests" / "golden" / "mcp" / "catalogue.json"
BIG = "smollm2"
HELD_OUT = 0.4
WITH_SCHEMAS = "small with schemas"
POLICY = """\
version: 1
targets:
  labels: {kind: decider, model: heedful-decider, question: {positive: "likes it", negative: "dislikes it"}}
  small: {kind: local, model: smollm2, max_tokens: 24}
  big: {kind: openai, base_url: "BIG/v1", model: scripted, timeout_s: 300, retries: 0}
rules:
  - {match: '^(hi|hello|thanks|thank you|good morning|bye)\\W*$', to: small, max_tokens: 16}
decision:
  model: heedful-decider
  timeout_s: 30
  calibration: calibration.json
  questions:
    kind:
      sentiment: "asks whether a review is positive or negative"
      lookup: "asks for a well-known fact, such as a capital"
      reasoning: "asks to calculate or to conclude"
routes:
  - {to: labels, when: kind == "sentiment", min_p: calibrated}
  - {to: small, when: kind == "lookup", min_p: calibrated}
default: big
fallbacks: {big: small}
"""
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Russia": "Moscow", "Norway": "Oslo", "Austria": "Vienna", "Portugal": "Lisbon", "Peru": "Lima",
    "Cuba": "Havana", "Kenya": "Nairobi", "Poland": "Warsaw", "Sweden": "Stockholm", "Ireland": "Dublin",
    "Hungary": "Budapest", "Thailand": "Bangkok", "Turkey": "Ankara", "Finland": "Helsinki", "Denmark": "Copenhagen",
}  # fmt: skip
PRAISE = ("I loved every minute of it", "what a wonderful film", "the food was delicious", "great value, it works")
BLAME = ("I hated it", "a complete waste of money", "the food was cold and awful", "it broke after a day")
THINGS = ("film", "phone", "restaurant", "book", "hotel", "lamp")
STEPS = (
    "Let me think step by step. First I note what is given and what is asked. Then I put the parts together and check "
    "that the result agrees with them."
)
TALK = ("hi", "hello!", "thanks", "thank you!", "good morning", "bye")


def main() -> None:
    args = _arguments()
    rows, answers = _load(args.rows)
    with tempfile.TemporaryDirectory() as folder, _server(BIG) as model_url, _solver(model_url, answers) as big_url:
        path = Path(folder) / "policy.yaml"
        path.write_text(POLICY.replace("BIG", big_url), encoding="utf-8")
        policy = load_policy(path)
        held = [is_held_out(row.asked.text, HELD_OUT) for row in rows]
        labelled, eager_rows = asyncio.run(_asked(policy, rows, held, _schemas(args.schema_tools)))
    fitting = [one for one, is_held in zip(labelled, held, strict=True) if not is_held]
    held_out = [one for one, is_held in zip(labelled, held, strict=True) if is_held]
    report = calibrate(fitting, held_out, policy, error=args.error, margin=args.margin)
    print_report(report, labelled)
    chosen = Thresholds({name: one.threshold for name, one in report.routes.items()})
    points, comparisons = compared(eager_rows, replay(held_out, policy, chosen), [WITH_SCHEMAS], margin=args.margin)
    point, against = points[f"always {WITH_SCHEMAS}"], comparisons[f"always {WITH_SCHEMAS}"]
    print(f"\nalways {WITH_SCHEMAS}, {args.schema_tools} tools: {baseline_text(point, against)}")
    print(f"\nright by kind (all rows): {json.dumps(_by_kind(labelled))}")
    figures = {"rows": len(rows), "error": args.error, "margin": args.margin, "by_kind": _by_kind(labelled)}
    eager = {"point": asdict(point), "comparison": asdict(against), "tools": args.schema_tools}
    print(json.dumps({**figures, **report.to_dict(), WITH_SCHEMAS: eager}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=90)
    parser.add_argument("--error", type=float, default=0.2)
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--schema-tools", type=int, default=12)
    return parser.parse_args()


def _load(count: int) -> tuple[list[Row], dict[str, str]]:
    """Rows, and prompt → the answer that the script gives."""
    draw = random.Random(7)
    made: dict[str, tuple[str, dict[str, Any], str]] = {}
    makers = (_sentiment, _lookup, _arithmetic, _sentiment, _lookup, _logic, _sentiment, _lookup, _talk)
    while len(made) < count:
        kind = makers[len(made) % len(makers)]
        prompt, check, answer = kind(draw)
        if prompt in made:
            prompt = f"{prompt} " if kind is _talk else prompt
        while prompt in made:
            prompt, check, answer = kind(draw)
            prompt += " " * draw.randrange(4) if kind is _talk else ""
        made[prompt] = (answer, check, kind.__name__.strip("_"))
    rows = [row_from_json({"prompt": text, "check": check, "kind": kind}) for text, (_, check, kind) in made.items()]
    return rows, {text: answer for text, (answer, _, _) in made.items()}


def _arithmetic(draw: random.Random) -> tuple[str, dict[str, Any], str]:
    a, b = draw.randrange(2, 90), draw.randrange(2, 90)
    sign, value = draw.choice([("+", a + b), ("-", a - b), ("*", a * b)])
    return f"What is {a} {sign} {b}?", {"number": value}, f"It is {value}."


def _logic(draw: random.Random) -> tuple[str, dict[str, Any], str]:
    a, b, c = draw.sample(["blips", "dorks", "wugs", "zorps", "plims", "taks"], 3)
    is_true = draw.random() < 0.5
    last = f"Are all {a} {c}?" if is_true else f"Are all {c} certainly {a}?"
    word = "yes" if is_true else "no"
    text = f"All {a} are {b}. All {b} are {c}. {last} Answer yes or no."
    return text, {"regex": rf"^\W*{word}\b|\b{word}\W*$"}, f"{word.capitalize()}."


def _lookup(draw: random.Random) -> tuple[str, dict[str, Any], str]:
    country = draw.choice(list(CAPITALS))
    ask = draw.choice(["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."])
    return ask.format(country), {"regex": rf"\b{CAPITALS[country]}\b"}, f"It is {CAPITALS[country]}."


def _sentiment(draw: random.Random) -> tuple[str, dict[str, Any], str]:
    is_good = draw.random() < 0.5
    said = draw.choice(PRAISE if is_good else BLAME)
    word, other = ("positive", "negative") if is_good else ("negative", "positive")
    text = f"Is this review of a {draw.choice(THINGS)} positive or negative? {said}"
    return text, {"regex": rf"^(?!.*\b{other}\b).*\b{word}\b"}, f"It is {word}."


def _talk(draw: random.Random) -> tuple[str, dict[str, Any], str]:
    return draw.choice(TALK), {"regex": r"\w"}, "Hello! How can I help?"


def _schemas(count: int) -> list[dict[str, Any]]:
    tools = [tool for server in json.loads(CATALOGUE.read_text(encoding="utf-8")) for tool in server["tools"]]
    return [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t.get("description") or "", "parameters": t["input_schema"]},
        }
        for t in tools[:count]
    ]


async def _asked(
    policy: Policy, rows: Sequence[Row], held: Sequence[bool], tools: list[dict[str, Any]]
) -> tuple[list[Labelled], list[Labelled]]:
    """(every row with every target's outcome, the held-out ones with that of the small model with schemas)"""
    assert policy.decision is not None
    still = replace(policy, decision=replace(policy.decision, calibration=None))
    settings = ServerSettings(models=policy.local_models, most_models_loaded=4, idle_unload_seconds=None)
    app = make_app(settings, LLM, load_embedder, load_decider, still)

    def told(count: int) -> None:
        print(".", end="", file=sys.stderr, flush=True)

    async with app.router.lifespan_context(app):
        state = app.state.heedful
        labelled = await label(rows, still, state.router.targets, asker(still, state), progress=told)
        small, eager = state.router.targets["small"], []
        for one, is_held in zip(labelled, held, strict=True):
            if is_held:
                asked = limited_to(one.row.asked, 24)
                asked = replace(asked, salt="schemas", tools=tools, body={**asked.body, "tools": tools})
                outcome = await outcome_of(small, asked, one.row.check)
                eager.append(replace(one, outcomes={**one.outcomes, WITH_SCHEMAS: outcome}))
                told(1)
        print(file=sys.stderr)
        return labelled, eager


def _by_kind(labelled: Sequence[Labelled]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(one.row.kind for one in labelled):
        mine = [one for one in labelled if one.row.kind == kind]
        found[kind] = {
            name: f"{sum(one.outcomes[name].is_right for one in mine)} of {len(mine)}" for name in mine[0].outcomes
        }
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
