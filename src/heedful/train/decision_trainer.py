"""An encoder that learns to decide: what of a learner is its own. The losses are decision_loss.py's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heedful.decide.calibrate import reliability, softmax
from heedful.decide.laya_cost import laya_visits
from heedful.decide.question import json_text
from heedful.engine.torch_laya import question_logits
from heedful.errors import BadParameter
from heedful.models.laya_config import QUESTION_TYPES
from heedful.train.batches import in_parts
from heedful.train.checkpoint import Arrays
from heedful.train.decider_base import reopened_decider_base
from heedful.train.decision_loss import (
    SAMPLES,
    SIGMA_FIRST,
    SIGMA_LAST,
    Asked,
    asked,
    cross_entropies,
    policy_losses,
    sampled,
)
from heedful.train.decision_run import DecisionRun
from heedful.train.decision_store import DecisionExample, DecisionRow, as_example
from heedful.train.learner import Ahead, BatchFacts, BestBy, Learner, LearnerSize, prepare_process, step_seed
from heedful.train.mixed import mix_products
from heedful.train.network import recompute_in_backward
from heedful.train.optim import Optimizer
from heedful.train.settings import told
from heedful.train.shares import own_parts
from heedful.train.spread import ALONE, Spread
from heedful.train.team import Team
from heedful.train.trained_decider import TrainedDecider

_SCORE = QUESTION_TYPES.index("score")
_SHOWN, _SHOWN_CHARACTERS = 3, 160


class DecisionTrainer(Learner):
    """Judged by the cross-entropy of questions that are kept apart, with accuracy and ECE beside it. Sets PyTorch's
    thread count, and how freed memory is kept, for the whole process.
    """

    best_by = BestBy("loss_per_question", "nats a question")

    def __init__(self, run: DecisionRun, team: Team = ALONE) -> None:
        if team.tensor_size > 1:
            raise BadParameter("parallel.tensor", "an encoder is not cut", "Use all processes as data ranks.")
        prepare_process(max(1, told(run.settings.run.threads) // team.processes.local_size))
        self.run = run
        base = reopened_decider_base(run.base, run.settings)
        self.packer = base.packer
        self.model = TrainedDecider(base, run.settings)
        self.config, self.network = self.model.config, self.model.network
        self.weights_file = self.model.weights_file
        if run.settings.optim.precision == "bf16":
            mix_products(self.network)
        if run.settings.optim.checkpoint_activations:
            recompute_in_backward(self.network.trunk)
        super().__init__(run.folder, run.settings, Optimizer(Spread(self.network, team), run.settings.optim))

    # ---- steps

    def pass_batch(self) -> BatchFacts:
        self.network.train()
        torch.manual_seed(step_seed(self.settings.run.seed, self.state.step))  # of what dropout leaves out
        cursor = self.state.cursor
        numbers = self.run.data.batch(cursor)
        examples = self.examples(cursor)
        return BatchFacts(
            loss=self.gradients(examples),
            tokens=sum(example.length for example in examples),
            targets=len(examples),
            visits=self.visits(examples),
            epoch=cursor // self.run.data.epoch_len,
            cursor=cursor + len(examples),
            described=f"questions {cursor:,} to {cursor + len(examples) - 1:,} of the order, which are "
            f"{', '.join(map(str, numbers[:12]))}{', …' if len(numbers) > 12 else ''} of the data",
        )

    def examples(self, cursor: int) -> list[DecisionExample]:
        """Of the batch that begins after `cursor` questions."""
        store = self.run.data.store
        return [as_example(store[n], self.packer, cursor + at) for at, n in enumerate(self.run.data.batch(cursor))]

    def gradients(self, examples: Sequence[DecisionExample]) -> float:
        """Leaves the gradients of the mean loss of a question, and returns that loss, however many parts it is cut into
        and however many processes share it.
        """
        total = 0.0
        for part in self._own_parts(examples, self.settings.optim.micro_batches):
            loss = self._summed_loss(part) / len(examples)
            if part:
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        for each in self.trained:  # of a process without a share
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        return self.team.sum_over_data(total)[0]

    def _own_parts(self, examples: Sequence[DecisionExample], parts: int) -> list[list[DecisionExample]]:
        return own_parts(
            examples,
            lambda example: self.training_flops(example.length, self.visits([example])),
            lambda mine: in_parts(mine, parts),
            rank=self.team.data_rank,
            ranks=self.team.data_size,
        )

    def _summed_loss(self, examples: Sequence[DecisionExample]) -> Tensor:
        """Without any it still takes part in what all processes have to know."""
        questions = self._asked(examples) if examples else None
        losses = torch.zeros(0) if questions is None else cross_entropies(questions)
        if self.settings.decide.loss == "rlcd":
            losses = losses + self._policy_losses(questions, examples)
        return losses.sum()

    def _asked(self, examples: Sequence[DecisionExample]) -> Asked:
        return asked(
            question_logits(self.network, [example.sequence for example in examples]),
            [example.row.target for example in examples],
            [example.sequence.type == _SCORE for example in examples],
        )

    def _policy_losses(self, questions: Asked | None, examples: Sequence[DecisionExample]) -> Tensor:
        sigma = SIGMA_FIRST + (SIGMA_LAST - SIGMA_FIRST) * self.state.step / self.settings.run.steps
        copies = None if questions is None else sampled(questions, [self._noise(each) for each in examples], sigma)
        earned = torch.zeros(0) if copies is None else copies.rewards.double()
        count, total, squares = self.team.sum_over_data(
            earned.numel(), float(earned.sum()), float(earned.square().sum())
        )
        if questions is None or copies is None:
            return earned
        deviation = (max(0.0, squares - total**2 / count) / (count - 1)) ** 0.5
        return policy_losses(questions, copies, deviation, sigma)

    def _noise(self, example: DecisionExample) -> Tensor:
        """Standard normal (SAMPLES, options), a function of the seed and of the question's place."""
        draw = torch.Generator().manual_seed(step_seed(self.settings.run.seed, example.place))
        return torch.randn((SAMPLES, len(example.row.target)), generator=draw)

    # ---- counts

    def visits(self, examples: Sequence[DecisionExample]) -> int:
        trunk, head = laya_visits(self.config, [example.sequence for example in examples])
        return trunk.total + head.total

    def ahead(self, cursor: int) -> Ahead:
        """Dense: all tokens of a question see each other."""
        examples = self.examples(cursor)
        trunk, head = laya_visits(
            self.config, [replace(each.sequence, positions=None, options=None) for each in examples]
        )
        return Ahead(
            sum(example.length for example in examples),
            self.visits(examples),
            trunk.dense + head.dense,
            cursor + len(examples),
        )

    @property
    def size(self) -> LearnerSize:
        frozen = [each for each in self.network.parameters() if not each.requires_grad]
        return LearnerSize(
            matrix_weights=self.config.trunk.linear_weights + self.config.head.linear_weights,
            frozen_weights=sum(each.numel() for each in frozen),
            frozen_bytes=sum(each.nbytes for each in frozen),
            epoch_len=self.run.data.epoch_len,
        )

    def training_flops(self, tokens: int, visits: int) -> int:
        """What passes a frozen matrix has no gradient of the matrix: a third less. A visit is taken to be of the mean
        width of a head in trunk and head.
        """
        parts = (self.config.trunk, self.config.head)
        weights = sum(part.linear_weights for part in parts)
        frozen = self.config.trunk.linear_weights if self.settings.lora.rank else 0
        updates = sum(each.numel() for each in self.trained) - (self.model.head_weights if frozen else 0)
        width = sum(part.num_layers * part.hidden_size for part in parts)
        heads = sum(part.num_layers * part.num_heads for part in parts)
        of_matrices = (6 * weights - 2 * frozen + (6 * updates if frozen else 0)) * tokens
        return of_matrices + 12 * width * visits // heads

    # ---- judging

    def judge(self) -> dict[str, float]:
        rows, tokens, examples = self.run.data.validation, 0, []
        for row in rows:
            if tokens >= self.settings.run.eval_tokens:
                break
            examples.append(as_example(row, self.packer))
            tokens += examples[-1].length
        if not examples:
            return {}
        found = reliability(self._probabilities(examples), [example.row.target for example in examples])
        return {"loss_per_question": found.nll, "accuracy": found.accuracy, "ece": found.ece, "brier": found.brier}

    def _probabilities(self, examples: Sequence[DecisionExample]) -> list[list[float]]:
        """Before any temperature; of several processes each computes its share."""
        batch, ranks = self.settings.decide.batch, self.team.data_size
        found = [[0.0] * len(example.row.target) for example in examples]
        order = sorted(range(len(examples)), key=lambda at: examples[at].length)[self.team.data_rank :: ranks]
        with self._as_shown():
            for begin in range(0, len(order), batch):
                some = order[begin : begin + batch]
                logits = question_logits(self.network, [examples[at].sequence for at in some])
                for at, each in zip(some, logits, strict=True):
                    found[at] = softmax(each.tolist()).tolist()
        flat = iter(self.team.sum_over_data(*(share for shares in found for share in shares)))
        return [[next(flat) for _ in shares] for shares in found]

    @contextmanager
    def _as_shown(self) -> Iterator[None]:
        """The network as it is judged and saved to be run, without gradients."""
        self.network.eval()
        with torch.no_grad(), self.averaged():
            yield

    def sample(self) -> list[str]:
        """What it thinks of the first questions that are kept apart, or of the first there are."""
        rows = self.run.data.validation[:_SHOWN] or [self.run.data.store[0]]
        found = self._probabilities([as_example(row, self.packer) for row in rows])
        return [_in_words(row, shares) for row, shares in zip(rows, found, strict=True)]

    def how_to_run(self) -> str:
        return f"heedful decide -m {self.folder} --text '…' --noul '…'"

    # ---- checkpoints

    def weights(self) -> Arrays:
        return self.model.weights()

    def derived(self) -> dict[str, Arrays]:
        return self.model.derived()

    def place(self, stored: Path) -> None:
        self.model.place(stored)

    def documents(self) -> dict[str, bytes]:
        return self.model.documents()


def _in_words(row: DecisionRow, shares: Sequence[float]) -> str:
    """State and question, shortened, and the probability of the likeliest options; the wanted one in brackets."""
    state, asked_for = (_shortened(json_text(text)) for text in (row.state, row.question.instructions or ""))
    likeliest = sorted(range(len(shares)), key=lambda at: -shares[at])[:_SHOWN]
    wanted = max(range(len(shares)), key=row.target.__getitem__)
    said = [f"{row.question.labels[at]} {shares[at]:.2f}" for at in likeliest]
    return f"{state} · {asked_for} {', '.join(said)} [{row.question.labels[wanted]}]"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
