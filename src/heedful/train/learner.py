"""What the loop drives: a learner. It makes steps, judges itself, writes a sample, saves, and stands where it stood.

A kind of training gives the parts that are its own (`pass_batch`, `judge`, `sample`, `weights`, `place`, `documents`);
what all kinds share is here once: the guard against what is no number, clipping, the rate, the optimizer, the average
of the weights, and what a checkpoint holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heedful.errors import FileFormatError, TrainingDiverged
from heedful.train import checkpoint as files
from heedful.train.checkpoint import Arrays, TrainingState
from heedful.train.fast import keep_freed_memory
from heedful.train.optim import Optimizer
from heedful.train.schedule import rate_share
from heedful.train.settings import TrainSettings, told
from heedful.weights.names import WeightsToPlace
from heedful.weights.safetensors_file import read_safetensors

SMOOTHING = 0.95


@dataclass(frozen=True)
class StepFacts:
    """Of one step; `loss` is the mean over `targets`, in nats, before the update."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    targets: int
    visits: int
    """Of the forward pass, exact."""
    epoch: int
    figures: dict[str, float] = field(default_factory=dict)
    """Further ones that the kind of training has, by name."""


@dataclass(frozen=True)
class BatchFacts:
    """Of a batch whose gradients are there."""

    loss: float
    tokens: int
    """That passed the model."""
    targets: int
    """That the loss is the mean of."""
    visits: int
    epoch: int
    cursor: int
    """Where the next batch begins."""
    described: str
    """Which batch it was, for a message."""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ahead:
    """What a batch would be."""

    tokens: int
    visits: int
    dense: int
    """Visits of the same tokens where all that fits into a context sees all."""
    cursor: int
    """Where the next one begins."""


@dataclass(frozen=True)
class LearnerSize:
    matrix_weights: int
    """That every token passes."""
    frozen_weights: int
    """That are not trained."""
    frozen_bytes: int
    """Of these, as they lie in memory."""
    epoch_len: int
    """What `TrainingState.cursor` has gone through after an epoch."""
    muon_weights: int = 0
    """Of those that are trained, how many have one number of state less."""


@dataclass(frozen=True)
class BestBy:
    """Which of the figures of `judge` the best checkpoint is chosen by."""

    name: str
    unit: str
    """What follows the number in a line."""
    higher_is_better: bool = False

    def is_better(self, value: float, than: float | None) -> bool:
        return than is None or (value > than if self.higher_is_better else value < than)


class Learner(ABC):
    """`optimizer`: of what is trained; its `spread` is what of it this process holds, and how it comes together."""

    best_by: BestBy
    weights_file: str = files.MODEL
    """What a checkpoint calls the file of what is trained."""
    stored_exactly: bool = True
    """Whether `place` gives back what `weights` gave to the bit; where not, the checkpoint has another copy."""

    def __init__(self, folder: Path, settings: TrainSettings, optimizer: Optimizer) -> None:
        self.folder, self.settings, self.optimizer = folder, settings, optimizer
        self.spread, self.team = optimizer.spread, optimizer.spread.team
        self.state = TrainingState()
        self.trained = list(self.spread.held.values())
        self._average = [p.detach().clone() for p in self.trained] if settings.optim.ema else None

    def prepare(self, say: Callable[[str], None], steps: int | None = None) -> None:  # noqa: B027
        """What has to be known of the untrained model, before the first step and before `load`. `steps`: only what so
        many steps need, and nothing is kept. Most kinds need nothing.
        """

    # ---- what each kind of training does in its own way

    @abstractmethod
    def pass_batch(self) -> BatchFacts:
        """Leave the gradients of the mean loss of the batch at `state.cursor`; of several processes each those of its
        share. The facts are of the whole batch.
        """

    @abstractmethod
    def judge(self) -> dict[str, float]:
        """Figures by name, the one of `best_by` among them; none where nothing is kept apart to judge by."""

    @abstractmethod
    def sample(self) -> list[str]:
        """What the model answers now, some lines; a function of the weights and the step."""

    @abstractmethod
    def weights(self) -> Arrays:
        """What is trained, by the names that a checkpoint has; views, to be written at once."""

    def derived(self) -> dict[str, Arrays]:
        """Further files that a checkpoint needs to be run, made of the weights, where these alone are not a model."""
        return {}

    @abstractmethod
    def place(self, stored: Path) -> None:
        """Overwrite what is trained by a file of `weights`. Raises FileFormatError, UnsupportedModel."""

    @abstractmethod
    def documents(self) -> dict[str, bytes]:
        """Further files that a checkpoint needs to be run, by name."""

    @abstractmethod
    def ahead(self, cursor: int) -> Ahead:
        """Of the batch that would begin there."""

    @property
    @abstractmethod
    def size(self) -> LearnerSize: ...

    @abstractmethod
    def training_flops(self, tokens: int, visits: int) -> int:
        """Floating-point operations of a step's forward and backward pass."""

    @abstractmethod
    def how_to_run(self) -> str:
        """A command that tries what was trained."""

    # ---- steps

    def step(self) -> StepFacts:
        """Raises TrainingDiverged, the weights still as they were, when loss or gradients are no numbers."""
        done = self.state
        batch = self.pass_batch()
        self.spread.take_gradients()
        norm = self._guarded_norm(batch)
        lr = told(self.settings.optim.lr) * rate_share(done.step, self.settings.run.steps, self.settings.optim)
        self.optimizer.step(lr)
        self._take_into_average()
        self.state = replace(
            done,
            step=done.step + 1,
            cursor=batch.cursor,
            tokens=done.tokens + batch.tokens,
            visits=done.visits + batch.visits,
            smoothed=SMOOTHING * done.smoothed + batch.loss,
            smoothed_weight=SMOOTHING * done.smoothed_weight + 1,
        )
        return StepFacts(
            done.step + 1, batch.loss, lr, norm, batch.tokens, batch.targets, batch.visits, batch.epoch, batch.figures
        )

    def _guarded_norm(self, batch: BatchFacts) -> float:
        """Of all gradients together, before they are clipped."""
        clip = self.settings.optim.clip
        norm = self.spread.gradient_norm()
        if not (math.isfinite(batch.loss) and math.isfinite(norm)):
            raise TrainingDiverged(self.state.step, batch.loss, norm, batch.described)
        if clip and norm > clip:
            torch.nn.utils.clip_grads_with_norm_(self.trained, clip, torch.tensor(norm))
        return norm

    # ---- the average of the weights

    def _take_into_average(self) -> None:
        """Young averages forget faster, or the first weights would stay for long."""
        if self._average is None:
            return
        decay = min(self.settings.optim.ema, (1 + self.state.step) / (10 + self.state.step))
        with torch.no_grad():
            torch._foreach_lerp_(self._average, [p.detach() for p in self.trained], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the average of its weights, where one is kept: it is what is judged and saved."""
        if self._average is None:
            yield
            return
        self._exchange(self._average)
        try:
            yield
        finally:
            self._exchange(self._average)

    def _exchange(self, average: list[Tensor]) -> None:
        for place, parameter in enumerate(self.trained):
            if self.spread.is_whole:
                average[place], parameter.data = parameter.data, average[place]
            else:  # the parameters of the model share this memory
                before = parameter.detach().clone()
                parameter.data.copy_(average[place])
                average[place].copy_(before)

    # ---- checkpoints

    def save(self) -> None:
        """The first process writes; the others give what they hold."""
        with self.averaged(), self.spread.whole():
            tensors = {self.weights_file: self.weights(), **self.derived()} if self.team.is_first else {}
        if self._is_kept_twice:
            tensors[files.TRAINED] = {name: self.spread.gathered(name, each) for name, each in self.spread.held.items()}
        tensors[files.OPTIMIZER] = self.optimizer.stored()
        if self.team.is_first:
            files.write_checkpoint(self.folder, self.state, tensors, self.documents(), self.settings.run.keep)
            return
        for arrays in tensors.values():
            for values in arrays.values():
                np.asarray(values)

    def load(self, folder: Path) -> None:
        """Stand where a checkpoint stood. Raises FileFormatError, UnsupportedModel for one that is not this run's."""
        with self.averaged(), self.spread.to_be_placed():
            self.place(folder / self.weights_file)
        if self._is_kept_twice:
            self._place_trained(folder / files.TRAINED)
        stored = read_safetensors(folder / files.OPTIMIZER)
        try:
            self.optimizer.load({name: torch.from_numpy(value.to_float32()) for name, value in stored.items()})
        except KeyError as error:
            raise FileFormatError(f"{folder} has a state for {error}, which this model lacks", "") from None
        self.state = files.read_state(folder)

    @property
    def _is_kept_twice(self) -> bool:
        return self._average is not None or not self.stored_exactly

    def _place_trained(self, stored: Path) -> None:
        to_place = WeightsToPlace(read_safetensors(stored))
        with torch.no_grad():
            for name, held in self.spread.held.items():
                whole = to_place.take(name, self.spread.layouts[name].shape).to_float32()
                held.copy_(self.spread.own(name, torch.from_numpy(whole)))
        to_place.require_none_left()


def step_seed(seed: int, step: int) -> int:
    """Of what is drawn in a step."""
    digest = blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def prepare_process(threads: int) -> None:
    """PyTorch's thread count, and how freed memory is kept, for the whole process."""
    torch.set_num_threads(threads)
    keep_freed_memory()
