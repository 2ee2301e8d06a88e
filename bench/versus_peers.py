"""heedful and its peers in turn in one run: prefill and decode tokens/s at several contexts, and the ratios.

    python bench/versus_peers.py MODEL.gguf --llama PYTHON --ik PYTHON [--fill 64 512 2048 7000] [--policy kv=q8]

PYTHON are interpreters with llama-cpp-python and ik-llama-cpp-python installed (each peer script says how). A round
runs heedful, then each peer with flash attention on and off, per context. A figure is the median over the rounds; a
peer's is the better of its two settings' medians. A table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    args = _arguments()
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    idle_before = _idle_share()
    for _ in range(args.rounds):
        for fill in args.fill:
            for name, command in _commands(args, fill).items():
                runs.setdefault((name, fill), []).extend(_cases(command))
    rows = [_row(fill, runs, [name for name in ("llama", "ik") if getattr(args, name)]) for fill in args.fill]
    _print_table(rows)
    print(f"idle share of the processors before the run: {idle_before:.0%}")
    print(json.dumps({"model": args.model, "policy": args.policy, "rounds": args.rounds, "rows": rows}))


def _commands(args: argparse.Namespace, fill: int) -> dict[str, list[str]]:
    own = [sys.executable, str(HERE / "generate.py"), args.model, "--fill", str(fill)]
    own += ["--policy", args.policy]
    peers = {
        "llama": [args.llama, str(HERE / "peer_llama_cpp.py"), args.model, "--fill", str(fill)],
        "ik": [args.ik, str(HERE / "peer_ik_llama.py"), args.model, "--fill", str(fill)],
    }
    return {"heedful": own, **{name: command for name, command in peers.items() if getattr(args, name)}}


def _cases(command: list[str]) -> list[dict[str, Any]]:
    """The cases that a bench printed as JSON: ours in one object, the peers' one a line."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [case for line in lines for case in line.get("cases", [line]) if "decode_tok_s" in case]


def _row(fill: int, runs: dict[tuple[str, int], list[dict[str, Any]]], peers: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"context": fill}
    for what in ("prefill_tok_s", "decode_tok_s"):
        own = statistics.median(case[what] for case in runs["heedful", fill])
        best = {peer: _better_setting(runs[peer, fill], what) for peer in peers if runs[peer, fill]}
        row[what] = {"heedful": round(own, 1), **best, "ratio": round(own / max(best.values()), 2) if best else None}
    return row


def _better_setting(cases: list[dict[str, Any]], what: str) -> float:
    return max(
        statistics.median(c[what] for c in cases if c["flash"] == flash) for flash in {c["flash"] for c in cases}
    )


def _print_table(rows: list[dict[str, Any]]) -> None:
    for what in ("prefill_tok_s", "decode_tok_s"):
        names = [name for name in rows[0][what] if name != "ratio"]
        print(f"\n{what.removesuffix('_tok_s')} tokens/s")
        print(f"{'context':>8}" + "".join(f"{name:>10}" for name in names) + f"{'× better peer':>15}")
        for row in rows:
            figures = row[what]
            print(
                f"{row['context']:>8,}" + "".join(f"{figures[n]:>10.1f}" for n in names) + f"{figures['ratio']!s:>15}"
            )
    print()


def _idle_share() -> float:
    """Of all processors over one second; a bench on a busy machine says little."""
    from time import sleep

    def ticks() -> tuple[int, int]:
        fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return fields[3] + fields[4], sum(fields[:8])

    idle, total = ticks()
    sleep(1)
    idle_after, total_after = ticks()
    return (idle_after - idle) / max(1, total_after - total)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama", help="interpreter that has llama-cpp-python")
    parser.add_argument("--ik", help="interpreter that has ik-llama-cpp-python")
    parser.add_argument("--fill", type=int, nargs="+", default=[64, 512, 2048, 7000])
    parser.add_argument("--policy", default="kv=q8")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
