"""Trains the head and the trunk's low-rank updates: python -m recipes.decider.train OUT [--loss rlcd|ce] [--steps N],
then the same with --cool.

Two processes share each batch, one thread each: on two busy cores that is three times as fast as two threads that wait
for each other, on two idle ones as fast. Everything is seeded; sums are taken in one order.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from recipes.decider.checkpoint import SEED, head_tensors, write, write_fresh
from recipes.decider.data import BUILD, SHARES
from recipes.decider.lora import add_updates, set_updates, update_tensors
from recipes.decider.losses import SIGMA_FIRST, SIGMA_LAST, cross_entropy, policy_loss
from recipes.decider.rows import TRAIN, Row, read_rows
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.utils.rnn import pad_sequence

from heedful.decide.calibrate import Calibration
from heedful.decide.laya_input import LayaPacker
from heedful.engine.torch_laya import make_laya, question_logits
from heedful.models.bert import Bert
from heedful.models.laya import LayaNetwork
from heedful.models.laya_config import QUESTION_TYPES, LayaSequence
from heedful.weights.load_laya import load_laya

PROCESSES = 2
BATCH = 8
STEPS, SCHEDULED = 5000, 8000
"""The rate is that of a longer run, which is stopped; then it is cooled."""
COOLING, COOLING_RATE = 800, 0.3
"""Steps with a new optimizer, from this share of the rate straight down to nothing."""
HEAD_RATE, UPDATE_RATE = 5e-4, 5e-4
WARM_UP = 0.03
WEIGHT_DECAY = 0.01
CLIP = 1.0
SAVE_EVERY = 1000
SCORE = QUESTION_TYPES.index("score")


@dataclass(frozen=True)
class Example:
    sequence: LayaSequence
    target: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    loss: str
    steps: int
    domains: tuple[str, ...]
    """() for all."""
    out: Path
    cools: bool
    """Goes on from what lies at `out`."""

    @property
    def rate(self) -> Callable[[int], float]:
        if self.cools:
            return lambda step: COOLING_RATE * (1 - step / self.steps)
        whole = SCHEDULED if self.steps == STEPS else self.steps
        return lambda step: rate_share(step, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loss", choices=("rlcd", "ce"), default="rlcd")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cool", action="store_true", help="the last steps, from the weights at OUT")
    parser.add_argument("--domains", nargs="*", default=[], help="train on these alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if not asked.cool:
        write_fresh(asked.out)
    with tempfile.TemporaryDirectory() as meeting:
        steps = asked.steps or (COOLING if asked.cool else STEPS)
        plan = Plan(asked.loss, steps, tuple(asked.domains), asked.out, asked.cool)
        spawn(_work, (f"file://{meeting}/point", plan), nprocs=PROCESSES)  # type: ignore[no-untyped-call]


def _work(rank: int, meeting: str, plan: Plan) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    loaded = load_laya(plan.out)
    network = make_laya(loaded.config, loaded.trunk, loaded.head, threads=1)
    trunk = network.trunk
    assert isinstance(trunk, Bert), trunk
    torch.manual_seed(SEED)
    add_updates(trunk)
    if plan.cools:
        set_updates(trunk, load_file(plan.out / "model.safetensors"))
    network.head.requires_grad_(True)
    network.train()
    packer = LayaPacker(loaded.tokenizer, loaded.marks, loaded.layout)
    rows = [row for row in read_rows(BUILD / f"{TRAIN}.jsonl") if row.domain in plan.domains or not plan.domains]
    before = json.loads((plan.out / "train.json").read_text()) if plan.cools else {"steps": 0, "seconds": 0}
    unread = islice(drawn(rows, SHARES), before["steps"] * BATCH, None)
    examples = (Example(packer.pack(row.typed(), packer.state(row.state)).sequence, row.target) for row in unread)

    def save() -> None:
        tensors = {**head_tensors(network.head, loaded), **update_tensors(trunk)}
        write(plan.out, tensors, Calibration())

    seconds = _fit(network, examples, rank, plan, save)
    if rank == 0:
        save()
        facts = {
            "loss": plan.loss,
            "domains": plan.domains,
            "rows": len(rows),
            "batch": BATCH,
            "steps": before["steps"] + plan.steps,
            "seconds": round(before["seconds"] + seconds),
        }
        (plan.out / "train.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def drawn(rows: Sequence[Row], shares: Mapping[str, int]) -> Iterator[Row]:
    """Rows for ever: a domain as often as its share says, its own rows in turn, each time in a new order."""
    rng, by_domain = random.Random(SEED), defaultdict(list)
    for row in rows:
        by_domain[row.domain].append(row)
    weights = [shares[domain] for domain in by_domain]
    waiting: dict[str, list[Row]] = {domain: [] for domain in by_domain}
    while True:
        (domain,) = rng.choices(list(by_domain), weights)
        if not waiting[domain]:
            waiting[domain] = rng.sample(by_domain[domain], len(by_domain[domain]))
        yield waiting[domain].pop()


def _fit(network: LayaNetwork, examples: Iterator[Example], rank: int, plan: Plan, save: Callable[[], None]) -> float:
    """Trains in place, and saves now and then; the seconds it took."""
    began = perf_counter()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in network.head.parameters() if p.requires_grad], "lr": HEAD_RATE},
            {"params": [p for p in network.trunk.parameters() if p.requires_grad], "lr": UPDATE_RATE},
        ],
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    steps = plan.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.rate)
    noise = torch.Generator().manual_seed(SEED + rank)
    tokens, running = 0, 0.0
    for step in range(steps):
        batch = sorted(islice(examples, BATCH), key=lambda one: len(one.sequence.ids))
        own = [one for at, one in enumerate(batch) if (at % 4 in (0, 3)) == (rank == 0)]  # about as long as the other's
        sigma = SIGMA_FIRST + (SIGMA_LAST - SIGMA_FIRST) * step / steps
        loss, plain = _losses(network, own, plan.loss, sigma, noise)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        _average(trained)
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        schedule.step()
        tokens += sum(len(one.sequence.ids) for one in batch)
        running += (plain.item() - running) / min(step + 1, 40)
        if rank == 0 and step % SAVE_EVERY == SAVE_EVERY - 1:
            save()
        if rank == 0 and step % 20 == 19:
            passed = perf_counter() - began
            left = passed / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps} loss {running:.3f} {tokens / passed:.0f} tokens/s, {left / 60:.1f} min left",
                flush=True,
            )
    return perf_counter() - began


def rate_share(step: int, steps: int) -> float:
    """Up to 1 over the first steps, then down to 0 as a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _losses(
    network: LayaNetwork, batch: list[Example], kind: str, sigma: float, noise: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What is trained on, and the cross-entropy, which is shown."""
    logits = question_logits(network, [one.sequence for one in batch])
    padded = pad_sequence(logits, batch_first=True)
    target = pad_sequence([torch.tensor(one.target) for one in batch], batch_first=True)
    mask = pad_sequence([torch.ones(len(one), dtype=torch.bool) for one in logits], batch_first=True)
    plain = cross_entropy(padded, target, mask)
    if kind == "ce":
        return plain, plain
    is_score = torch.tensor([one.sequence.type == SCORE for one in batch])
    return plain + policy_loss(padded, target, mask, is_score, sigma, noise), plain


def _average(parameters: list[nn.Parameter]) -> None:
    """Gradients over the processes, in one message."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    dist.all_reduce(flat)
    at = 0
    for parameter in parameters:
        assert parameter.grad is not None, parameter.shape
        parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter) / PROCESSES)
        at += parameter.numel()


if __name__ == "__main__":
    main()
