"""Coherence of deciders: JevBench's laws that probabilities must keep whatever the question is about.

    python bench/jevbench.py smollm2 heedful-decider [--suite jevbench-mini] [--jevbench COMMAND]

`heedful serve` answers, on a free port; `jevbench eval` asks. It is a package of its own (pip install jevbench, best in
an environment of its own), and no dependency of heedful: --jevbench says where its command is. The suite "examples" is
one case of 50 relations; "jevbench-mini" sends 1,248 requests. Scores are percent, of relations held within 0.05; they
say nothing of answers being right: a decider for which all options are always alike scores high.
A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from serve import Server

DIMENSIONS = ("REP", "BAT", "MEA", "LOG", "CHO")


def main() -> None:
    args = _arguments()
    command = [sys.executable, "-m", "heedful", "serve", "--no-history"]
    for name in args.deciders:
        command += ["--decider", name]
    with Server([*command, "--port"]) as server:
        results = [_scores(server.url, name, args) for name in args.deciders]
    _print_table(results)
    print(json.dumps({"suite": args.suite, "deciders": results}))


def _scores(url: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        began = perf_counter()
        subprocess.run(
            [args.jevbench, "eval", "--url", f"{url}/v1/systemone", "--model", name, "--suite", args.suite,
             "--no-cache", "--out", str(out)],
            check=False, stdout=sys.stderr, cwd=folder,
        )  # fmt: skip
        seconds = perf_counter() - began
        report = json.loads(out.read_text(encoding="utf-8"))
    found = report["scores"]
    scores = {dimension: _percent(found["pillars"].get(dimension)) for dimension in DIMENSIONS}
    requests = report["result"]["requests"]
    overall = _percent(found["overall"])
    return {"decider": name, "overall": overall, **scores, "requests": requests, "seconds": round(seconds, 1)}


def _percent(share: float | None) -> float | None:
    """None where requests of the dimension were refused, as those that do not fit the decider are."""
    return None if share is None else round(100 * share, 1)


def _print_table(results: list[dict[str, Any]]) -> None:
    print(f"| {' | '.join(results[0])} |")
    print(f"|{'---|' * len(results[0])}")
    for row in results:
        print(f"| {' | '.join('–' if value is None else str(value) for value in row.values())} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deciders", nargs="+", help="as `heedful decide -m` takes them")
    parser.add_argument("--suite", default="examples")
    parser.add_argument("--jevbench", default=shutil.which("jevbench"), help="the command; default: on the path")
    args = parser.parse_args()
    if args.jevbench is None:
        parser.error("jevbench is not here: pip install jevbench, or --jevbench COMMAND")
    return args


if __name__ == "__main__":
    main()
