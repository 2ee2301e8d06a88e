"""One step after another: batch, gradients, update; and what a checkpoint holds of it. The loop is loop.py's."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.errors import FileFormatError, TrainingDiverged
from heedful.kernels.text_attention import PackedCausalAttend
from heedful.models.decoder import Decoder
from heedful.train import checkpoint as files
from heedful.train.batches import Batch, Segment, arrays, in_parts, visits
from heedful.train.checkpoint import TrainingState
from heedful.train.fast import fuse_norms, keep_freed_memory
from heedful.train.loss import summed_loss
from heedful.train.network import fresh_decoder, hf_tensors, place, recompute_in_backward
from heedful.train.optim import Optimizer
from heedful.train.run_files import RunFiles
from heedful.train.schedule import rate_share
from heedful.train.settings import told
from heedful.train.shape import hf_config, model_config
from heedful.train.token_store import TokenStore
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors

SMOOTHING = 0.95


@dataclass(frozen=True)
class StepFacts:
    """Of one step; `loss` in nats a token, before the update."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    visits: int
    """Of the forward pass, exact."""
    epoch: int


class Trainer:
    """Sets PyTorch's thread count, and how freed memory is kept, for the whole process."""

    def __init__(self, run: RunFiles) -> None:
        assert run.settings.run.threads is not None, run.settings.run
        torch.set_num_threads(run.settings.run.threads)
        keep_freed_memory()
        self.run, self.settings = run, run.settings
        self.config = model_config(run.settings.model, run.tokenizer.vocab_size)
        self.decoder = fresh_decoder(self.config, run.settings.run.seed)
        self._average = copy.deepcopy(self.decoder) if run.settings.optim.ema else None
        fuse_norms(self.decoder)
        if run.settings.optim.checkpoint_activations:
            recompute_in_backward(self.decoder)
        self.optimizer = Optimizer(self.decoder, run.settings.optim)
        self.state = TrainingState()

    @property
    def shown(self) -> Decoder:
        """What is judged and saved to be run: the average of the weights, where one is kept."""
        return self.decoder if self._average is None else self._average

    # ---- steps

    def step(self) -> StepFacts:
        """Raises TrainingDiverged, the weights still as they were, when loss or gradients are no numbers."""
        optim, done = self.settings.optim, self.state
        batch = self.run.data.batch(done.cursor)
        loss = self.gradients(batch)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.decoder.parameters() if p.grad is not None]))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingDiverged(done.step, loss, norm, self._named(batch))
        if optim.clip and norm > optim.clip:
            torch.nn.utils.clip_grads_with_norm_(self.decoder.parameters(), optim.clip, torch.tensor(norm))
        lr = optim.lr * rate_share(done.step, self.settings.run.steps, optim)
        self.optimizer.step(lr)
        if self._average is not None:
            self._take_into(self._average)
        seen = visits(batch.segments, self.config)
        self.state = replace(
            done,
            step=done.step + 1,
            cursor=batch.cursor,
            tokens=done.tokens + batch.tokens,
            visits=done.visits + seen,
            smoothed=SMOOTHING * done.smoothed + loss,
            smoothed_weight=SMOOTHING * done.smoothed_weight + 1,
        )
        epoch = done.cursor // self.run.data.epoch_segments
        return StepFacts(done.step + 1, loss, lr, norm, batch.tokens, seen, epoch)

    def _take_into(self, average: Decoder) -> None:
        """Young averages forget faster, or the first weights would stay for long."""
        decay = min(self.settings.optim.ema, (1 + self.state.step) / (10 + self.state.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(self.decoder.parameters()), 1 - decay)

    def gradients(self, batch: Batch) -> float:
        """Leaves the gradients of the batch's mean loss, and returns that loss. However many parts it is cut into, each
        token counts the same.
        """
        total = 0.0
        for part in in_parts(batch.segments, self.settings.optim.micro_batches):
            loss = self._summed_loss(self.decoder, self.run.data.store, part) / batch.tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _summed_loss(self, decoder: Decoder, store: TokenStore, segments: list[Segment]) -> Tensor:
        part = arrays(store, segments)
        ids, positions, targets = (torch.from_numpy(ints) for ints in (part.token_ids, part.positions, part.targets))
        hidden = decoder(ids, positions, PackedCausalAttend(part.lengths))
        return summed_loss(decoder, hidden, targets, chunk=self.settings.optim.loss_chunk)

    def _named(self, batch: Batch) -> str:
        numbers = sorted({segment.document for segment in batch.segments})
        shown = ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")
        return f"segments {self.state.cursor:,} to {batch.cursor - 1:,} of the order, from the documents {shown}"

    # ---- judging

    def bits_per_byte(self) -> float:
        """Of the validation text, as far as `run.eval_tokens` go: Σ −log2 p over all targets, per true byte of them."""
        data, limit = self.run.data, told(self.settings.optim.batch_tokens)
        chosen, tokens = [], 0
        for segment in data.validation_segments:
            if tokens >= self.settings.run.eval_tokens:
                break
            chosen.append(segment)
            tokens += segment.length
        nats, num_bytes = 0.0, 0
        with torch.no_grad():
            for part in in_parts(chosen, -(-tokens // limit) * self.settings.optim.micro_batches):
                nats += float(self._summed_loss(self.shown, data.validation_store, part))
                num_bytes += int(self._token_bytes[arrays(data.validation_store, part).targets].sum())
        return nats / math.log(2) / num_bytes

    @cached_property
    def _token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each token stands for; control tokens stand for none."""
        tokenizer = self.run.tokenizer
        lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
        return np.array([0 if i in tokenizer.special_ids else n for i, n in enumerate(lengths)], dtype=np.int64)

    # ---- checkpoints

    def save(self) -> Path:
        averaged = {} if self._average is None else {files.TRAINED: hf_tensors(self.decoder)}
        state = {name: value.numpy() for name, value in self.optimizer.state().items()}
        end_id = self.run.end_id
        documents = {
            "config.json": hf_config(self.config, end_id),
            "generation_config.json": {"bos_token_id": end_id, "eos_token_id": end_id},
        }
        return files.write_checkpoint(
            self.run.folder,
            self.state,
            {files.MODEL: hf_tensors(self.shown), files.OPTIMIZER: state, **averaged},
            {name: f"{json.dumps(value, indent=1)}\n".encode() for name, value in documents.items()}
            | self.run.tokenizer_files(),
            self.settings.run.keep,
        )

    def load(self, folder: Path) -> None:
        """Stand where a checkpoint stood. Raises FileFormatError, UnsupportedModel for one that is not this run's."""
        place(self.shown, names.from_hf(read_safetensors(folder / files.MODEL), self.config))
        if self._average is not None:
            place(self.decoder, names.from_hf(read_safetensors(folder / files.TRAINED), self.config))
        stored = read_safetensors(folder / files.OPTIMIZER)
        try:
            self.optimizer.load({name: torch.from_numpy(value.to_float32()) for name, value in stored.items()})
        except KeyError as error:
            raise FileFormatError(f"{folder} has a state for {error}, which this model lacks", "") from None
        self.state = files.read_state(folder)
