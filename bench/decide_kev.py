"""A Kev's time by the number of questions on one state: what the first costs, and what each further one adds.

    python bench/decide_kev.py [--state 400] [--question 40] [--questions 1 2 5 10] [--repeats 5] [--threads N]

Random weights in the shape of Qwen3-0.6B, but for a vocabulary of 20,000 (Qwen's has 151,936 rows in the embedding, of
which a decision reads one a token and no product is made). Median over the repeats, in which the cases take turns.
A table, and a JSON line last. The figures are for ratios within one run.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import torch

from heedful import hardware
from heedful.engine.torch_kev import KevNetwork
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.models.kev_head import PointerHead
from heedful.models.rope import Rope

OPTIONS = 4


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    network = _network(args.seed)
    state = _tokens(network, args.state)
    branches = [_tokens(network, args.question) for _ in range(max(args.questions))]
    _seconds(network, state, branches[:1])  # warm
    timed: dict[int, list[tuple[float, float]]] = {count: [] for count in args.questions}
    for _ in range(args.repeats):
        for count in args.questions:
            timed[count].append(_seconds(network, state, branches[:count]))
    whole = {count: median(state_s + branch_s for state_s, branch_s in of) for count, of in timed.items()}
    one = whole[1]
    cases = [
        {
            "questions": count,
            "seconds": round(seconds, 3),
            "state_seconds": round(median(state_s for state_s, _ in timed[count]), 3),
            "further_each_of_first": round((seconds - one) / (count - 1) / one, 4) if count > 1 else None,
            "all_in_full_of_this": round(count * one / seconds, 2),
        }
        for count, seconds in whole.items()
    ]
    result = {
        "bench": "decide_kev",
        "shape": "qwen3-0.6b, vocabulary 20,000",
        "threads": args.threads,
        "state_tokens": args.state,
        "question_tokens": args.question,
        "repeats": args.repeats,
        "cases": cases,
    }
    _print_table(result)
    print(json.dumps(result))


def _network(seed: int) -> KevNetwork:
    config = ModelConfig(
        family="qwen3",
        vocab_size=20_000,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        context_len=32_768,
        windows=(None,) * 28,
        rope=Rope(128, 1e6),
        norm_eps=1e-6,
        qk_norm=True,
    )
    torch.manual_seed(seed)
    decoder = Decoder(config).requires_grad_(False).eval()
    return KevNetwork(decoder, PointerHead(config.hidden_size, 256).requires_grad_(False).eval())


def _tokens(network: KevNetwork, count: int) -> list[int]:
    found: list[int] = torch.randint(network.decoder.config.vocab_size, (count,)).tolist()
    return found


def _seconds(network: KevNetwork, state: list[int], branches: list[list[int]]) -> tuple[float, float]:
    """(reading the state, answering)."""
    markers = [[len(branch) - 2 - 8 * option for option in range(OPTIONS)] for branch in branches]
    began = perf_counter()
    shared = network.read(state, room=len(branches[0]))
    read = perf_counter()
    network.logits(shared, branches, markers)
    return read - began, perf_counter() - read


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['shape']}, float32, {result['threads']} threads")
    print(f"state of {result['state_tokens']} tokens, questions of {result['question_tokens']}\n")
    print("questions  seconds  of them state  each further / first  rows in full / this")
    for case in result["cases"]:
        further = case["further_each_of_first"]
        print(
            f"{case['questions']:>9} {case['seconds']:>8.3f} {case['state_seconds']:>14.3f}"
            f" {'' if further is None else f'{further:.1%}':>21} {case['all_in_full_of_this']:>20.2f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=int, default=400)
    parser.add_argument("--question", type=int, default=40, help="tokens, at least 40")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 5, 10], help="the first must be 1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=hardware.detect().threads)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.questions[0] != 1 or args.question < 8 * OPTIONS:
        parser.error("--questions begins with 1, and a question has room for its options")
    return args


if __name__ == "__main__":
    main()
