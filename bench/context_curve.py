"""Decode tokens/s against context for each KV format, as a table, an SVG plot and a JSON line last.

python bench/context_curve.py [MODEL] [--kv q8 f16] [--context 64 256 1024 2048 4096 7000] [--svg FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from heedful import LLM, CachePolicy
from heedful.engine.speed import measure_speed

WIDTH, HEIGHT, MARGIN = 640, 360, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def main() -> None:
    args = _arguments()
    curves: dict[str, list[tuple[int, float]]] = {}
    for kv in args.kv:
        engine = LLM(args.model, policy=CachePolicy(kv_format=kv)).engine
        curves[kv] = [(n, measure_speed(engine, n).decode_tok_s) for n in args.context]
    print(f"{'context':>8}" + "".join(f"{kv:>10}" for kv in curves))
    for i, context in enumerate(args.context):
        print(f"{context:>8,}" + "".join(f"{points[i][1]:>10.1f}" for points in curves.values()))
    if args.svg:
        args.svg.write_text(svg(curves), encoding="utf-8")
    print(json.dumps({"bench": "context_curve", "model": args.model, "decode_tok_s": curves}))


def svg(curves: dict[str, list[tuple[int, float]]], *, across: str = "context", up: str = "decode tokens/s") -> str:
    """Both axes linear, from zero; `across` and `up` name them."""
    most_context = max(x for points in curves.values() for x, _ in points)
    most_rate = max(y for points in curves.values() for _, y in points)

    def place(x: float, y: float) -> str:
        from_left = MARGIN + x / most_context * (WIDTH - 2 * MARGIN)
        return f"{from_left:.1f},{HEIGHT - MARGIN - y / most_rate * (HEIGHT - 2 * MARGIN):.1f}"

    lines = []
    for colour, (kv, points) in zip(COLOURS, curves.items(), strict=False):
        path = " ".join(place(x, y) for x, y in points)
        end_x, end_y = place(*points[-1]).split(",")
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{end_x}" y="{float(end_y) - 6:.1f}" fill="{colour}" text-anchor="end">{kv}</text>')
    axis = f"M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="{axis}" fill="none" stroke="black"/>',
            f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across} (to {most_context:,})</text>',
            f'<text x="{MARGIN}" y="{MARGIN - 12}">{up} (to {most_rate:.3g})</text>',
            *lines,
            "</svg>\n",
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--kv", nargs="+", default=["q8", "f16"])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 7000])
    parser.add_argument("--svg", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
