"""Throughput of `heedful serve` with concurrent clients, against one client, the engine alone and a peer's server.

    python bench/serve.py [--clients 8] [--prompt 256] [--output 64] [--rounds 3] [--peer-python … --peer-model GGUF]

Every client sends its own prompts, which have no beginning in common, one after the other; figures are output tokens a
second of all clients together, medians of the rounds. `engine` is the same work given to the engine in one process,
without HTTP. What HTTP costs is the processor time of the server's main thread, which does nothing else: a difference
of two speeds drowns in the noise. The peer is `python -m llama_cpp.server` of the package llama-cpp-python, which
answers one request at a time; --peer-url names another server that is running. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

WORDS = ("river", "stone", "light", "paper", "morning", "engine", "forest", "market", "winter", "garden", "island")


def main() -> None:
    args = _arguments()
    results: dict[str, Any] = {"clients": args.clients, "prompt": args.prompt, "output": args.output}
    prompts = _prompts(args)
    results["engine_one"] = _median(args.rounds, lambda i: _engine(args, prompts[i][:1]))
    results["engine"] = _median(args.rounds, lambda i: _engine(args, prompts[i]))
    with Server([sys.executable, "-m", "heedful", "serve", "-m", args.model, "--no-history", "--port"]) as server:
        cases = (("one", 1, False), ("all", args.clients, False), ("all_streaming", args.clients, True))
        for name, count, stream in cases:
            speeds, shares = [], []
            for _ in range(args.rounds):
                texts = prompts.pop()[:count]  # new ones, or the prefix cache would answer
                began, cpu_began = perf_counter(), server.http_cpu_seconds
                speeds.append(_load(server.url, texts, args, stream=stream))
                share = (server.http_cpu_seconds - cpu_began) / (perf_counter() - began) / len(os.sched_getaffinity(0))
                shares.append(share)
            results[name] = round(statistics.median(speeds), 1)
            results[f"{name}_http_share"] = round(statistics.median(shares), 4)
    if args.peer_url or args.peer_python:
        results["peer"] = _peer(args, prompts[0])
    _print_table(results)
    print(json.dumps(results))


def _prompts(args: argparse.Namespace) -> list[list[str]]:
    """For every round one text a client; about `--prompt` tokens each."""
    draw = random.Random(1)
    return [
        [" ".join([str(draw.randrange(10**6)), *draw.choices(WORDS, k=args.prompt - 8)]) for _ in range(args.clients)]
        for _ in range(8 * args.rounds)
    ]


def _median(rounds: int, run: Callable[[int], float]) -> float:
    return round(statistics.median(run(i) for i in range(rounds)), 1)


def _engine(args: argparse.Namespace, prompts: list[str]) -> float:
    """In a process of its own, which ends before the next one starts."""
    program = (
        "import json, sys; from time import perf_counter\n"
        "from heedful import LLM, SamplingParams; from heedful.request import Request\n"
        "model, prompts, output = json.load(sys.stdin)\n"
        "llm = LLM(model); engine = llm.engine; llm.generate('Hello', max_tokens=4)\n"
        "sampling = SamplingParams(max_tokens=output, ignore_eos=True)\n"
        "began = perf_counter()\n"
        "for text in prompts: engine.add(Request(tuple(llm.tokenizer.encode(text)), sampling))\n"
        "while engine.scheduler.has_work: engine.step()\n"
        "print(len(prompts) * output / (perf_counter() - began))\n"
    )
    given = json.dumps([args.model, prompts, args.output])
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, check=True)
    return float(done.stdout)


class Server:
    """A server process on a free port, ready when entered."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [*command, str(self._port)]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def http_cpu_seconds(self) -> float:
        """Processor time of the main thread, which does all of HTTP and nothing else."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).read()
                return self
            except OSError:
                assert self._process.poll() is None, "the server did not start"
                sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _load(url: str, prompts: list[str], args: argparse.Namespace, *, stream: bool) -> float:
    """Output tokens a second of one client a prompt, all at once."""

    async def run() -> float:
        began = perf_counter()
        tokens = await asyncio.gather(*(_post(url, text, args, stream=stream) for text in prompts))
        return sum(tokens) / (perf_counter() - began)

    return asyncio.run(run())


async def _post(url: str, prompt: str, args: argparse.Namespace, *, stream: bool) -> int:
    """One request over a plain socket: the client must cost little on the same two cores. Returns output tokens."""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": prompt, "max_tokens": args.output, "temperature": 0, "ignore_eos": True, "stream": stream}
    data = json.dumps({**body, "model": args.model, "logit_bias": {}}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    if stream:
        return answer.count(b"data: ") - 2  # the last event with a reason, and [DONE]; characters may hold tokens back
    usage = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["usage"]
    return int(usage["completion_tokens"])


def _peer(args: argparse.Namespace, prompts: list[str]) -> dict[str, float]:
    def measure(url: str) -> dict[str, float]:
        _load(url, prompts[:1], args, stream=False)
        return {
            "one": round(_load(url, prompts[1:2], args, stream=False), 1),
            "all": round(_load(url, prompts, args, stream=False), 1),
        }

    if args.peer_url:
        return measure(args.peer_url)
    command = [args.peer_python, "-m", "llama_cpp.server", "--model", args.peer_model, "--n_ctx", "4096"]
    with Server([*command, "--n_threads", "2", "--n_threads_batch", "2", "--port"]) as server:
        return measure(server.url)


def _print_table(results: dict[str, Any]) -> None:
    one, everyone = results["one"], results["all"]
    print(f"{results['clients']} clients, {results['prompt']} tokens in, {results['output']} out; output tokens/s")
    print(f"engine without HTTP, one      {results['engine_one']:8.1f}")
    print(f"engine without HTTP, all      {results['engine']:8.1f}")
    print(f"one client                    {one:8.1f}")
    print(f"all clients                   {everyone:8.1f}  {everyone / one:.2f} x one client")
    print(f"all clients, streaming        {results['all_streaming']:8.1f}")
    shares = 100 * results["all_http_share"], 100 * results["all_streaming_http_share"]
    print(f"HTTP's part of the processors {shares[0]:7.2f} %, streaming {shares[1]:.2f} %")
    if "peer" in results:
        peer = results["peer"]
        print(f"peer, one client              {peer['one']:8.1f}")
        print(f"peer, all clients             {peer['all']:8.1f}  heedful: {everyone / peer['all']:.2f} x")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="of an environment with llama-cpp-python[server]")
    parser.add_argument("--peer-model", help="GGUF file")
    parser.add_argument("--peer-url")
    return parser.parse_args()


if __name__ == "__main__":
    main()
