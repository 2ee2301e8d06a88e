"""Our training step against transformers' Llama in a plain AdamW loop: python bench/train.py [--steps N] [--threads N]

Two cases, both with 6 layers, width 384, 6 query and 2 KV heads, 8,192 tokens, float32, AdamW, clipping:
- full: 8 × 512 tokens a step;
- packed: documents of 128 tokens on average in 4 × 1,024, against the same plain loop with a T² mask (block-diagonal,
  as packing with PyTorch's attention has it).
The sides are processes of their own (memory that one keeps must not help the other) and take turns, step by step, on
the same weights and tokens; medians are compared. The losses of both are printed: they agree up to rounding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from heedful.kernels.text_attention import PackedCausalAttend
from heedful.models.config import ModelConfig
from heedful.train.fast import fuse_layers, keep_freed_memory
from heedful.train.loss import summed_loss
from heedful.train.network import fresh_decoder, hf_tensors
from heedful.train.optim import Optimizer
from heedful.train.settings import OptimSettings, TrainSettings, changed
from heedful.train.shape import dialled, hf_config, model_config

LR, CLIP = 1e-3, 1.0
WARM_UP = 2
SHAPE = {
    "model.layers": 6,
    "model.hidden_size": 384,
    "model.heads": 6,
    "model.kv_heads": 2,
    "model.qk_norm": False,
    "data.vocab_size": 8192,
}


@dataclass(frozen=True)
class Case:
    name: str
    context_len: int
    rows: list[list[int]]
    """Lengths of the documents in each row of a batch."""


def cases() -> list[Case]:
    draw = np.random.default_rng(0)
    return [Case("full", 512, [[512]] * 8), Case("packed", 1024, [_short_documents(draw) for _ in range(4)])]


def _short_documents(draw: np.random.Generator) -> list[int]:
    """Lengths of 128 on average that fill a row of 1,024."""
    cuts = np.sort(draw.choice(np.arange(1, 1024), size=7, replace=False))
    return np.diff([0, *cuts, 1024]).tolist()


Step = Callable[[Tensor, Tensor], float]
"""token ids and targets int64 (T,) → loss."""


def our_step(config: ModelConfig, case: Case) -> Step:
    keep_freed_memory()
    decoder = fresh_decoder(config, 0)
    fuse_layers(decoder)
    optimizer = Optimizer(decoder, OptimSettings(lr=LR))
    lengths = [length for row in case.rows for length in row]
    order = np.argsort(lengths, kind="stable")  # as in_parts lays them
    starts = np.cumsum([0, *lengths])
    places = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order]))
    ordered = [lengths[i] for i in order]
    positions = torch.cat([torch.arange(length) for length in ordered])

    def step(ids: Tensor, targets: Tensor) -> float:
        hidden = decoder(ids[places], positions, PackedCausalAttend(ordered))
        loss = summed_loss(decoder, hidden, targets[places], chunk=1024) / len(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)
        optimizer.step(LR)
        return float(loss.detach())

    return step


def plain_step(config: ModelConfig, case: Case) -> Step:
    """What one writes with transformers: its model, its loss, torch's AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**hf_config(config, 0), attn_implementation="sdpa"))
    ours = {name: torch.from_numpy(values.copy()) for name, values in hf_tensors(fresh_decoder(config, 0)).items()}
    missing = model.load_state_dict(ours, strict=False)
    assert not missing.unexpected_keys, missing
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    model.train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    shape = (len(case.rows), case.context_len)
    positions, mask = _positions_and_mask(case)

    def step(ids: Tensor, targets: Tensor) -> float:
        inputs = {"input_ids": ids.view(shape)}
        if mask is not None:
            inputs |= {"position_ids": positions, "attention_mask": mask}
        logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _positions_and_mask(case: Case) -> tuple[Tensor, Tensor | None]:
    """position_ids (B, T) and bool (B, 1, T, T); None where every row is one document."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in case.rows])
    if all(len(row) == 1 for row in case.rows):
        return positions, None
    masks = []
    for row in case.rows:
        document = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        masks.append(
            (document[:, None] == document) & torch.ones(len(document), len(document), dtype=torch.bool).tril()
        )
    return positions, torch.stack(masks)[:, None]


def work(side: str, case: Case, threads: int, pipe: Connection) -> None:
    """Answers a number with the loss and the seconds of a step on the tokens that it stands for, until None comes."""
    torch.set_num_threads(threads)
    settings = dialled(changed(TrainSettings(), SHAPE | {"model.context_len": case.context_len}))
    config = model_config(settings.model, 8192)
    step = our_step(config, case) if side == "heedful" else plain_step(config, case)
    while (number := pipe.recv()) is not None:
        ids = _tokens(number, len(case.rows) * case.context_len + 1)
        began = perf_counter()
        loss = step(ids[:-1], ids[1:])
        pipe.send((loss, perf_counter() - began))


def _tokens(number: int, count: int) -> Tensor:
    """Skewed, so that there is something to learn."""
    draw = torch.Generator().manual_seed(number)
    return (torch.rand(count, generator=draw) ** 4 * 8192).long()


def compare(case: Case, steps: int, threads: int) -> dict[str, float | str]:
    tokens = len(case.rows) * case.context_len
    context = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {name: [] for name in ("heedful", "transformers")}
    losses: dict[str, list[float]] = {name: [] for name in seconds}
    pipes = {}
    for name in seconds:
        pipes[name], theirs = context.Pipe()
        context.Process(target=work, args=(name, case, threads, theirs), daemon=True).start()
    for number in range(steps + WARM_UP):
        for name, pipe in pipes.items():
            pipe.send(number)
            loss, taken = pipe.recv()
            losses[name].append(loss)
            seconds[name].append(taken)
    for pipe in pipes.values():
        pipe.send(None)
    speeds = {name: tokens / median(values[WARM_UP:]) for name, values in seconds.items()}
    return {
        "case": case.name,
        "heedful_tok_s": speeds["heedful"],
        "transformers_tok_s": speeds["transformers"],
        "ratio": speeds["heedful"] / speeds["transformers"],
        "first_loss_difference": abs(losses["heedful"][0] - losses["transformers"][0]),
        "heedful_last_loss": losses["heedful"][-1],
        "transformers_last_loss": losses["transformers"][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=("full", "packed"))
    asked = parser.parse_args()
    results = [compare(case, asked.steps, asked.threads) for case in cases() if asked.case in (None, case.name)]
    print(f"{'case':<8} {'heedful tok/s':>14} {'transformers':>13} {'ratio':>6}  last losses")
    for row in results:
        print(
            f"{row['case']:<8} {row['heedful_tok_s']:>14,.0f} {row['transformers_tok_s']:>13,.0f} {row['ratio']:>6.2f}"
            f"  {row['heedful_last_loss']:.4f} {row['transformers_last_loss']:.4f}"
        )
    print(json.dumps({"threads": asked.threads, "steps": asked.steps, "cases": results}))


if __name__ == "__main__":
    main()
