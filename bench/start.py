"""From nothing to the first token: whole processes of `heedful generate` and of ten lines of llama-cpp-python, in turn.

    python bench/start.py MODEL.gguf --llama PYTHON [--other PYTHON] [--rounds 25]

PYTHON: an interpreter with llama-cpp-python; --other: one with an earlier heedful. Medians after one warm round, and
ratios; then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter

TEN_LINES = """
import sys
from llama_cpp import Llama

llm = Llama(sys.argv[1], n_ctx=512, n_threads=2, verbose=False)
for part in llm("Once", max_tokens=1, temperature=0.0, stream=True):
    print(part["choices"][0]["text"], end="", flush=True)
"""


def main() -> None:
    args = _arguments()
    commands = {"heedful": _own(sys.executable, args.model)}
    if args.other:
        commands["other"] = _own(args.other, args.model)
    if args.llama:
        commands["llama"] = [args.llama, "-c", TEN_LINES, args.model]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds + 1):
        for name, command in commands.items():
            began = perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(perf_counter() - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:>8} {median * 1e3:6.0f} ms, heedful is {medians['heedful'] / median:.2f} times that")
    print(json.dumps({"model": args.model, "rounds": args.rounds, "median_seconds": medians}))


def _own(python: str, model: str) -> list[str]:
    return [python, "-m", "heedful", "generate", "-m", model, "--max-tokens", "1", "Once"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama")
    parser.add_argument("--other")
    parser.add_argument("--rounds", type=int, default=25)
    return parser.parse_args()


if __name__ == "__main__":
    main()
