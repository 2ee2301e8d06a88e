"""Many requests of all kinds against `heedful serve`: does anything grow?

    python bench/soak.py [--requests 5000] [--clients 8]

Chats, completions, streams, forms, policies, hang-ups and mistakes in turn. After each tenth of them, when all is
quiet: resident memory, threads, descriptors and KV bytes in use of the server's process. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

from serve import WORDS, Server

KV = ("--kv-memory", "200MB")  # full soon: what is kept for later prompts would hide a leak
KINDS = ("chat", "chat", "stream", "stream", "form", "window", "budget", "hang_up", "mistake", "several")


def main() -> None:
    args = _arguments()
    with Server([sys.executable, "-m", "heedful", "serve", "-m", args.model, "--no-history", *KV, "--port"]) as server:
        asyncio.run(_some(server, args.requests // 20, args.clients, random.Random(0)))  # whatever is made once is made
        rows = [_holdings(server)]
        for part in range(10):
            asyncio.run(_some(server, args.requests // 10, args.clients, random.Random(part + 1)))
            rows.append(_holdings(server))
    print("requests   resident MB   threads   descriptors   KV bytes in use")
    for part, row in enumerate(rows):
        print(f"{part * args.requests // 10:8}   {row[0] / 1e6:11.1f}   {row[1]:7}   {row[2]:11}   {row[3]:15.0f}")
    print(json.dumps({"requests": args.requests, "holdings": rows}))


def _holdings(server: Server) -> tuple[int, int, int, float]:
    process = Path("/proc") / str(server.pid)
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    used = next(line for line in metrics.splitlines() if line.startswith("heedful_kv_bytes") and '"used"' in line)
    threads, descriptors = (len(os.listdir(process / what)) for what in ("task", "fd"))
    return resident, threads, descriptors, float(used.split()[-1])


async def _some(server: Server, count: int, clients: int, draw: random.Random) -> None:
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    seeds = [draw.random() for _ in kinds]

    async def client(first: int) -> None:
        for kind, seed in zip(kinds[first::clients], seeds[first::clients], strict=True):
            await _one(server, kind, random.Random(seed))

    await asyncio.gather(*(client(i) for i in range(clients)))
    await asyncio.sleep(0.5)


async def _one(server: Server, kind: str, draw: random.Random) -> None:
    text = " ".join(draw.choices(WORDS, k=draw.randrange(4, 60)))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.randrange(1, 24)}
    more: dict[str, dict[str, Any]] = {
        "stream": {"stream": True},
        "form": {"response_format": {"type": "regex", "regex": "[a-z]{3,8}( [a-z]{2,9}){0,3}"}},
        "window": {"heedful": {"window": 64, "sinks": 4}},
        "budget": {"heedful": {"budget": 256}},
        "hang_up": {"stream": True, "max_tokens": 500},
        "mistake": {"temperature": "warm"},
        "several": {"logprobs": True, "top_logprobs": 3, "n": 2},
    }
    data = json.dumps({**chat, **more.get(kind, {})}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if kind == "hang_up":
        await asyncio.sleep(draw.random() * 0.3)
    else:
        answer = await reader.read()
        expected = b"HTTP/1.1 400" if kind == "mistake" else b"HTTP/1.1 200"
        assert answer.startswith(expected), answer[:500]
    writer.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
