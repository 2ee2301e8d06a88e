"""What a run would take, before it begins: parameters, memory, FLOPs, visits, hours. Counts are exact; time and peak
memory are measured on two steps of the real data.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from heedful import hardware
from heedful.errors import BadParameter
from heedful.models.config import ModelConfig
from heedful.train.batches import Batch, Segment, TrainingData, visits
from heedful.train.report import duration, short
from heedful.train.run_files import begin_run
from heedful.train.settings import TrainSettings, told
from heedful.weights.progress import bytes_text

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
    """Of the same tokens in full contexts, without document masks and windows."""
    step_flops: float
    step_seconds: float
    steps: int


def estimate(settings: TrainSettings) -> Estimate:
    """Of complete settings; nothing stays on disk. Raises BadParameter when weights alone do not fit in memory."""
    from heedful.train.loop import learner_of
    from heedful.train.trainer import Trainer

    with TemporaryDirectory() as folder:
        run = begin_run(Path(folder) / "run", settings, lambda line: None)
        trainer = learner_of(run)
        assert isinstance(trainer, Trainer), trainer
        trained = sum(parameter.numel() for parameter in trainer.trained)
        state_bytes = _state_bytes(trained, trainer.config, settings)
        _require_room(state_bytes)
        trainer.prepare(lambda line: None, steps=2)
        trainer.step()
        began = perf_counter()
        trainer.step()
        seconds = perf_counter() - began
        steps = settings.run.steps
        batches = list(islice(_batches(run.data), min(steps, _COUNTED_STEPS)))
        mean_tokens = sum(batch.tokens for batch in batches) / len(batches)
        mean_visits = sum(visits(batch.segments, trainer.config) for batch in batches) / len(batches)
        context = trainer.config.context_len
        without_windows = replace(trainer.config, windows=(None,) * trainer.config.num_layers)
        full = visits([Segment(0, 0, context)], without_windows) / context
        return Estimate(
            parameters=trained + trainer.model.frozen_weights,
            trained_parameters=trained,
            matrix_weights=trainer.config.linear_weights + trainer.config.head_weights,
            state_bytes=state_bytes,
            frozen_bytes=trainer.model.frozen_bytes,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            tokens=round(mean_tokens * steps),
            epochs=batches[-1].cursor / len(batches) * steps / run.data.epoch_segments,
            step_visits=mean_visits,
            dense_visits=mean_tokens * full,
            step_flops=trainer.training_flops(round(mean_tokens), round(mean_visits)),
            step_seconds=seconds,
            steps=steps,
        )


def _batches(data: TrainingData) -> Iterator[Batch]:
    cursor = 0
    while True:
        batch = data.batch(cursor)
        yield batch
        cursor = batch.cursor


def _state_bytes(parameters: int, config: ModelConfig, settings: TrainSettings) -> int:
    """AdamW keeps two numbers a weight, Muon one; gradients and an average of the weights one each."""
    muons = config.linear_weights if settings.optim.optimizer == "muon" else 0
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
    share = found.step_visits / found.dense_visits
    of_base = f"{bytes_text(found.frozen_bytes)} for the base as its file has it; " if found.frozen_bytes else ""
    trained = f"; {found.trained_parameters:,} are trained" if found.frozen_bytes else ""
    rows = [
        ("parameters", f"{found.parameters:,}, of which {found.matrix_weights:,} are passed by every token{trained}"),
        ("memory", f"{bytes_text(found.state_bytes)} for weights, gradients and optimizer; {of_base}"
                   f"{bytes_text(found.peak_bytes)} at most with everything, measured"),
        ("a step", f"{told(settings.optim.batch_tokens):,} tokens at most, {short(found.step_flops)}FLOP, "
                   f"{found.step_seconds:.2f} s measured"),
        ("visits", f"{short(found.step_visits)} a step, {share:.0%} of {short(found.dense_visits)} in full contexts"),
        ("the run", f"{found.steps:,} steps, {short(found.tokens)} tokens, {found.epochs:.1f} epochs, "
                    f"{short(found.step_visits * found.steps)} visits, {short(found.step_flops * found.steps)}FLOP"),
        ("time", f"about {duration(found.step_seconds * found.steps)}, at {settings.run.threads} "
                 f"{'thread' if settings.run.threads == 1 else 'threads'}"),
    ]  # fmt: skip
    return "\n".join(f"{name:<11} {text}" for name, text in rows)
