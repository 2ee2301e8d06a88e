"""What a run would take, before it begins: parameters, memory, FLOPs, visits, hours. Counts are exact; time and peak
memory are measured on two steps of the real data.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING

from heedful import hardware
from heedful.errors import BadParameter
from heedful.train.kinds import begin_any, learner_of
from heedful.train.report import duration, short
from heedful.train.settings import TrainSettings, told
from heedful.weights.progress import bytes_text

if TYPE_CHECKING:
    from heedful.train.learner import Ahead, Learner

_COUNTED_STEPS = 200


@dataclass(frozen=True)
class Estimate:
    parameters: int
    trained_parameters: int
    matrix_weights: int
    """Of the layers and the head: those that every token passes."""
    state_bytes: int
    """What is trained, its gradients and the optimizer's state in float32."""
    frozen_bytes: int
    """Of a base beside which low-rank updates are trained, as its file has it."""
    peak_bytes: int
    """Measured, of the whole process."""
    tokens: int
    epochs: float
    step_visits: float
    """Mean of a step."""
    dense_visits: float
    """Of the same tokens where all that could sees all."""
    step_flops: float
    step_seconds: float
    steps: int


def estimate(settings: TrainSettings) -> Estimate:
    """Of complete settings; nothing stays on disk. Raises BadParameter when weights alone do not fit in memory."""
    with TemporaryDirectory() as folder:
        learner = learner_of(begin_any(Path(folder) / "run", settings, lambda line: None))
        size, trained = learner.size, sum(parameter.numel() for parameter in learner.trained)
        state_bytes = _state_bytes(trained, size.muon_weights, settings)
        _require_room(state_bytes)
        learner.prepare(lambda line: None, steps=2)
        learner.step()
        began = perf_counter()
        learner.step()
        seconds = perf_counter() - began
        steps = settings.run.steps
        batches = list(islice(_batches(learner), min(steps, _COUNTED_STEPS)))
        mean_tokens = sum(batch.tokens for batch in batches) / len(batches)
        mean_visits = sum(batch.visits for batch in batches) / len(batches)
        return Estimate(
            parameters=trained + size.frozen_weights,
            trained_parameters=trained,
            matrix_weights=size.matrix_weights,
            state_bytes=state_bytes,
            frozen_bytes=size.frozen_bytes,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            tokens=round(mean_tokens * steps),
            epochs=batches[-1].cursor / len(batches) * steps / size.epoch_len,
            step_visits=mean_visits,
            dense_visits=sum(batch.dense for batch in batches) / len(batches),
            step_flops=learner.training_flops(round(mean_tokens), round(mean_visits)),
            step_seconds=seconds,
            steps=steps,
        )


def _batches(learner: Learner) -> Iterator[Ahead]:
    cursor = 0
    while True:
        batch = learner.ahead(cursor)
        yield batch
        cursor = batch.cursor


def _state_bytes(parameters: int, muons: int, settings: TrainSettings) -> int:
    """AdamW keeps two numbers a weight, Muon one; gradients and an average of the weights one each."""
    copies = 5 if settings.optim.ema else 4
    return 4 * (copies * parameters - muons)


def _require_room(state_bytes: int) -> None:
    free = hardware.detect().free_memory_bytes
    if free and state_bytes > free:
        raise BadParameter(
            "model.size",
            f"weights, gradients and the optimizer take {bytes_text(state_bytes)}, {bytes_text(free)} are free",
            "Take a smaller model.",
        )


def in_words(found: Estimate, settings: TrainSettings) -> str:
    batch, dense = f"{settings.decide.batch} questions", "if options saw each other"
    if not settings.data.decisions:
        batch, dense = f"{told(settings.optim.batch_tokens):,} tokens at most", "in full contexts"
    share = found.step_visits / found.dense_visits
    of_base = f"{bytes_text(found.frozen_bytes)} for the base as its file has it; " if found.frozen_bytes else ""
    trained = f"; {found.trained_parameters:,} are trained" if found.frozen_bytes else ""
    rows = [
        ("parameters", f"{found.parameters:,}, of which {found.matrix_weights:,} are passed by every token{trained}"),
        ("memory", f"{bytes_text(found.state_bytes)} for weights, gradients and optimizer; {of_base}"
                   f"{bytes_text(found.peak_bytes)} at most with everything, measured"),
        ("a step", f"{batch}, {short(found.step_flops)}FLOP, "
                   f"{found.step_seconds:.2f} s measured"),
        ("visits", f"{short(found.step_visits)} a step, {share:.0%} of {short(found.dense_visits)} {dense}"),
        ("the run", f"{found.steps:,} steps, {short(found.tokens)} tokens, {found.epochs:.1f} epochs, "
                    f"{short(found.step_visits * found.steps)} visits, {short(found.step_flops * found.steps)}FLOP"),
        ("time", f"about {duration(found.step_seconds * found.steps)}, at {settings.run.threads} "
                 f"{'thread' if settings.run.threads == 1 else 'threads'}"),
    ]  # fmt: skip
    return "\n".join(f"{name:<11} {text}" for name, text in rows)
