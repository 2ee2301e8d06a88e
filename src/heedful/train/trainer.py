"""A decoder that learns text: what of a learner is its own. Steps, averages and checkpoints are learner.py's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.kernels.text_attention import PackedCausalAttend
from heedful.models.decoder import Decoder
from heedful.train.batches import IGNORED, AnyUnit, Batch, Segment, arrays, count_targets, in_parts, visits
from heedful.train.chat_store import chat_of
from heedful.train.checkpoint import Arrays
from heedful.train.choices import choice_figures, read_choices
from heedful.train.fast import fuse_layers
from heedful.train.learner import Ahead, BatchFacts, BestBy, Learner, LearnerSize, prepare_process, step_seed
from heedful.train.loss import summed_loss
from heedful.train.mixed import mix_products
from heedful.train.network import generated, recompute_in_backward
from heedful.train.optim import Optimizer
from heedful.train.run_files import RunFiles
from heedful.train.settings import told
from heedful.train.shares import own_parts
from heedful.train.spread import ALONE, Spread
from heedful.train.team import Team
from heedful.train.token_store import TokenStore
from heedful.train.trained_model import trained_model


class Trainer(Learner):
    """Learns text, and is judged in bits per byte. Sets PyTorch's thread count, and how freed memory is kept, for the
    whole process.
    """

    best_by = BestBy("bits_per_byte", "bits a byte")

    def __init__(self, run: RunFiles, team: Team = ALONE) -> None:
        prepare_process(max(1, told(run.settings.run.threads) // team.processes.local_size))
        self.run = run
        self.model = trained_model(run)
        self.config, self.decoder = self.model.config, self.model.decoder
        self.weights_file, self.stored_exactly = self.model.weights_file, self.model.stored_exactly
        self._choices = read_choices(run.settings.run.eval_choices, run.tokenizer, self.config.context_len)
        fuse_layers(self.decoder)
        if run.settings.optim.precision == "bf16":
            mix_products(self.decoder)
        if run.settings.optim.checkpoint_activations:
            recompute_in_backward(self.decoder)
        matrices = self.model.matrices
        optimizer = Optimizer(_spread(self.decoder, team), run.settings.optim, matrices)
        super().__init__(run.folder, run.settings, optimizer)

    # ---- steps

    def pass_batch(self) -> BatchFacts:
        batch = self._next_batch()
        return self._facts(batch, self.gradients(batch), count_targets(self.run.data.store, batch.segments))

    def _next_batch(self) -> Batch:
        self.decoder.train()
        torch.manual_seed(step_seed(self.settings.run.seed, self.state.step))  # of what dropout leaves out
        return self.run.data.batch(self.state.cursor)

    def _facts(self, batch: Batch, loss: float, targets: int) -> BatchFacts:
        return BatchFacts(
            loss=loss,
            tokens=batch.tokens,
            targets=targets,
            visits=visits(batch.segments, self.config),
            epoch=self.state.cursor // self.run.data.epoch_segments,
            cursor=batch.cursor,
            described=self._described(batch),
        )

    def gradients(self, batch: Batch) -> float:
        """Leaves the gradients of the batch's mean loss, and returns that loss. However many parts it is cut into, and
        however many processes share it, each target counts the same.
        """
        total, targets = 0.0, count_targets(self.run.data.store, batch.segments)
        for part in self._own_parts(batch.segments, self.settings.optim.micro_batches):
            loss = self._summed_loss(self.run.data.store, part) / targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return self.team.sum_over_data(total)[0]

    def _own_parts(self, units: Sequence[AnyUnit], parts: int) -> list[list[AnyUnit]]:
        def cost(unit: AnyUnit) -> int:
            return self.training_flops(unit.length, visits(unit.segments, self.config))

        return own_parts(
            units,
            cost,
            lambda mine: in_parts(mine, parts),
            rank=self.team.data_rank,
            ranks=self.team.data_size,
        )

    def _summed_loss(self, store: TokenStore, segments: list[Segment]) -> Tensor:
        part = arrays(store, segments)
        ids, positions, targets = (torch.from_numpy(ints) for ints in (part.token_ids, part.positions, part.targets))
        hidden = self.decoder(ids, positions, PackedCausalAttend(part.lengths))
        return summed_loss(self.decoder, hidden, targets, chunk=self.settings.optim.loss_chunk)

    def _described(self, batch: Batch) -> str:
        numbers = sorted({segment.document for segment in batch.segments})
        shown = ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")
        return f"segments {self.state.cursor:,} to {batch.cursor - 1:,} of the order, from the documents {shown}"

    def ahead(self, cursor: int) -> Ahead:
        """Dense: in full contexts, without document masks and windows."""
        batch, context = self.run.data.batch(cursor), self.config.context_len
        without_windows = replace(self.config, windows=(None,) * self.config.num_layers)
        full = visits([Segment(0, 0, context)], without_windows)
        return Ahead(batch.tokens, visits(batch.segments, self.config), full * batch.tokens // context, batch.cursor)

    @property
    def size(self) -> LearnerSize:
        return LearnerSize(
            matrix_weights=self.config.linear_weights + self.config.head_weights,
            frozen_weights=self.model.frozen_weights,
            frozen_bytes=self.model.frozen_bytes,
            epoch_len=self.run.data.epoch_segments,
            muon_weights=self.config.linear_weights if self.settings.optim.optimizer == "muon" else 0,
        )

    def training_flops(self, tokens: int, visits: int) -> int:
        return self.model.training_flops(tokens, visits)

    # ---- judging

    def judge(self) -> dict[str, float]:
        if not self.run.data.validation_segments:
            return {}
        return {"bits_per_byte": self.bits_per_byte(), **self._choice_figures()}

    def _choice_figures(self) -> dict[str, float]:
        """None where no questions are named."""
        if not self._choices.rows:
            return {}
        with self._as_shown():
            return choice_figures(self.decoder, self._choices)

    def bits_per_byte(self) -> float:
        """Of the validation text, as far as `run.eval_tokens` go: Σ −log2 p over all targets, per true byte of them."""
        nats, targets = self._validation_nats()
        return nats / math.log(2) / int(self._token_bytes[targets].sum())

    def _validation_nats(self) -> tuple[float, npt.NDArray[np.int64]]:
        """Σ −ln p over the targets, and the targets."""
        data, limit = self.run.data, told(self.settings.optim.batch_tokens)
        chosen, tokens = [], 0
        for segment in data.validation_segments:
            if tokens >= self.settings.run.eval_tokens:
                break
            chosen.append(segment)
            tokens += segment.length
        nats = 0.0
        with self._as_shown():
            for part in self._own_parts(chosen, -(-tokens // limit) * self.settings.optim.micro_batches):
                nats += float(self._summed_loss(data.validation_store, part))
        (nats,) = self.team.sum_over_data(nats)
        targets = arrays(data.validation_store, chosen).targets
        return nats, targets[targets != IGNORED]

    @contextmanager
    def _as_shown(self) -> Iterator[None]:
        """The model as it is judged and saved to be run, without gradients."""
        self.decoder.eval()
        with torch.no_grad(), self.averaged(), self.spread.at_hand():
            yield

    @cached_property
    def _token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each token stands for; control tokens stand for none."""
        tokenizer = self.run.tokenizer
        lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
        return np.array([0 if i in tokenizer.special_ids else n for i, n in enumerate(lengths)], dtype=np.int64)

    def sample(self) -> list[str]:
        run, settings = self.run, self.settings.run
        prompt = [run.end_id, *run.tokenizer.encode(settings.sample_prompt, add_bos=False)]
        with self._as_shown():
            ids = generated(
                self.decoder,
                prompt,
                settings.sample_tokens,
                {run.end_id},
                seed=settings.seed + self.state.step,
                agree=self.team.of_first,
            )
        return [settings.sample_prompt + run.tokenizer.decode(ids)]

    def how_to_run(self) -> str:
        return f"heedful generate -m {self.folder} 'Once'"

    # ---- checkpoints

    def weights(self) -> Arrays:
        return self.model.weights()

    def place(self, stored: Path) -> None:
        self.model.place(stored)

    def documents(self) -> dict[str, bytes]:
        return self.model.documents()


def _spread(decoder: Decoder, team: Team) -> Spread:
    if team is ALONE:
        return Spread(decoder)
    from heedful.train.parallel import spread_over

    return spread_over(team, decoder)


class ChatTrainer(Trainer):
    """Learns what assistants say, and is judged by the loss of a token of it."""

    best_by = BestBy("loss_per_target", "nats a target")

    def judge(self) -> dict[str, float]:
        if not self.run.data.validation_segments:
            return {}
        nats, targets = self._validation_nats()
        return {"loss_per_target": nats / len(targets), **self._choice_figures()}

    def sample(self) -> list[str]:
        """The likeliest answer to the first prompt that is kept apart, or to the first there is."""
        run, data = self.run, self.run.data
        number = data.validation_segments[0].document if data.validation_segments else 0
        chat = chat_of(data.validation_store if data.validation_segments else data.store, number)
        prompt = chat.token_ids[: chat.learned.index(True)]
        with self._as_shown():
            ids = generated(
                self.decoder,
                prompt,
                self.settings.run.sample_tokens,
                run.tokenizer.eos_ids,
                agree=self.team.of_first,
            )
        asked, answer = (run.tokenizer.decode(part, skip_special=False, continues=True) for part in (prompt, ids))
        return [f"{asked}{answer}"]

    def how_to_run(self) -> str:
        return f"heedful chat -m {self.folder}"
