"""What `heedful plan` foretells of one and of two replicas, against what they do: servers behind the router, real load.

    python bench/plan_versus_measured.py [--requests 60] [--context 600] [--shared 384] [--prefixes 4] [--output 48]

For one and for two replicas, calibration first, by itself: as many `heedful bench --save` of a thread at once, for what
shares a machine shares its memory. Then as many `heedful serve` of a thread each behind `heedful serve --router`: the
same seeded Poisson arrivals as in the simulation, at `--load` of what the plan says they can take; and all requests at
once. A table, and a JSON line last. It wants a quiet machine with two cores: what else runs there, the router and this
client too, is in the measured column alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from serve import WORDS, Server

from heedful.cost.shapes import KNOWN
from heedful.plan.capacity import POLICIES, CountsAt, Replica, plan
from heedful.plan.simulate import COOL_SHARE, WARM_SHARE, Fleet, simulate
from heedful.plan.speed import measured_speed
from heedful.plan.workload import Workload, first_turns

MODEL = "smollm2"
POLICY = "version: 1\ndefault: all\ntargets:\n  all: {{kind: openai, model: {model}, endpoints: {urls}}}\n"
AT_ONCE = 1e9


def main() -> None:
    args = _arguments()
    shape = KNOWN[MODEL].shape()
    rows = []
    for replicas in (1, 2):
        speed = measured_speed(_calibrated(replicas), shape)
        with ExitStack() as held:
            url = _fleet(replicas, held)
            workload = _as_it_is(url, args)
            most = (
                replicas
                / plan("q8", POLICIES["q8"], shape, workload, speed, Replica(8 << 30, 10**8)).seconds_per_request
            )
            for name, rate in (("poisson", args.load * most), ("at once", AT_ONCE)):
                seed = args.seed + len(rows)
                foretold = simulate(
                    workload, Fleet(replicas, 80_000), speed, _counts(shape, workload), requests=args.requests,
                    per_second=rate, seed=seed,
                )  # fmt: skip
                measured = asyncio.run(_load(url, workload, args, rate, seed))
                for what in ("first_token_mean", "total_mean", "tokens_per_second", "cached_share"):
                    told = _facts(foretold.to_dict(), args)[what]
                    rows.append(
                        {"replicas": replicas, "load": name, "what": what, "plan": told, "measured": measured[what]}
                    )
    _print(rows)
    print(json.dumps({"rows": rows, "speed": speed.source}))


def _calibrated(replicas: int) -> dict[str, Any]:
    """What one measures while the others do."""
    contexts = [f"--context={n}" for n in (64, 512, 1024, 2048)]
    batches = [f"--batch={n}" for n in (1, 2, 4, 8, 16, 32)]
    command = [sys.executable, "-m", "heedful", "bench", MODEL, "--threads", "1", *contexts, *batches]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(replicas)]
        running = [subprocess.Popen([*command, "--save", str(file)], stdout=subprocess.DEVNULL) for file in files]
        assert [process.wait() for process in running] == [0] * replicas
        found: dict[str, Any] = json.loads(files[0].read_text())
        return found


def _fleet(replicas: int, held: ExitStack) -> str:
    serve = [sys.executable, "-m", "heedful", "serve", "--no-history"]
    servers = [held.enter_context(Server([*serve, "-m", MODEL, "--threads", "1", "--port"])) for _ in range(replicas)]
    file = Path(held.enter_context(tempfile.TemporaryDirectory())) / "policy.yaml"
    file.write_text(POLICY.format(model=MODEL, urls=json.dumps([f"{server.url}/v1" for server in servers])))
    for server in servers:  # what is made once is made
        asyncio.run(_ask(server.url, {"model": MODEL, **_body("Hello", "there", 4)}))
    return held.enter_context(Server([*serve, "--router", str(file), "--port"])).url


def _as_it_is(url: str, args: argparse.Namespace) -> Workload:
    """With the lengths that the model's own tokenizer makes of such prompts."""
    draw = random.Random(0)
    lengths = []
    for shared in (True, False):
        prefix = _words(args.shared, random.Random(10**6)) if shared else ""
        body = _body(prefix, _words(args.context - args.shared, draw), 1)
        lengths.append(asyncio.run(_ask(url, {"model": "auto", **body}))["usage"]["prompt_tokens"])
    return Workload(1, 1, lengths[0], args.output, 1, lengths[0] - lengths[1], args.prefixes)


async def _load(url: str, workload: Workload, args: argparse.Namespace, rate: float, seed: int) -> dict[str, float]:
    turns = list(first_turns(workload, args.requests, rate, random.Random(seed)))
    words = random.Random(seed + 1)
    bodies = [
        _body(
            _words(args.shared, random.Random(1000 * seed + asked.prefix)),
            _words(args.context - args.shared, words),
            args.output,
        )
        for _, asked in turns
    ]
    began = perf_counter()

    async def one(at: float, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, at - (perf_counter() - began)))
        return {"arrived": at, **await _ask(url, {"model": "auto", **body})}

    answers = await asyncio.gather(*(one(at, body) for (at, _), body in zip(turns, bodies, strict=True)))
    over = perf_counter() - began - turns[0][0]
    measured = [answer for answer in answers if WARM_SHARE <= answer["arrived"] / turns[-1][0] <= 1 - COOL_SHARE]
    prompts = sum(answer["usage"]["prompt_tokens"] for answer in measured)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in measured)
    return {
        "first_token_mean": sum(answer["first"] for answer in measured) / len(measured),
        "total_mean": sum(answer["total"] for answer in measured) / len(measured),
        "tokens_per_second": args.requests * args.output / over,
        "cached_share": cached / prompts,
    }


def _facts(found: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    return {**found, "tokens_per_second": args.requests * args.output / found["over_s"]}


def _counts(shape: Any, workload: Workload) -> CountsAt:
    return CountsAt(shape, POLICIES["q8"], workload.context + workload.output)


def _words(count: int, draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=max(count, 0)))


def _body(prefix: str, text: str, output: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": output, "temperature": 0, "ignore_eos": True}


async def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Over a plain socket: seconds to the first text and to the end, and the usage."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    began = perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    first, usage, told = 0.0, None, 0
    async for line in reader:
        if line.startswith(b'data: {"error') or (line.startswith(b"HTTP/1.1 ") and b" 200 " not in line):
            raise RuntimeError((line + await reader.read())[:500])
        told += line.startswith(b"data: {")
        if told == 2 and not first:  # the first one has the role alone
            first = perf_counter() - began
        if b'"usage":{' in line:
            usage = json.loads(line.removeprefix(b"data: "))["usage"]
    writer.close()
    assert usage is not None, "an answer without usage"
    return {"first": first, "total": perf_counter() - began, "usage": usage}


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'replicas':>8}  {'load':<8} {'':<20} {'plan':>9} {'measured':>9}  {'off by':>7}")
    for row in rows:
        off = row["plan"] / row["measured"] - 1 if row["measured"] else 0.0
        numbers = f"{row['plan']:>9.3f} {row['measured']:>9.3f}  {off:>+7.1%}"
        print(f"{row['replicas']:>8}  {row['load']:<8} {row['what']:<20} {numbers}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--shared", type=int, default=384)
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--load", type=float, default=0.5, help="of what the plan says that the replicas can take")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
