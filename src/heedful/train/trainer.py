"""A decoder that learns text: what of a learner is its own. Steps, averages and checkpoints are learner.py's."""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.kernels.text_attention import PackedCausalAttend
from heedful.train.batches import Batch, Segment, arrays, in_parts, visits
from heedful.train.checkpoint import Arrays
from heedful.train.fast import fuse_norms
from heedful.train.learner import BatchFacts, BestBy, Learner, prepare_process
from heedful.train.loss import summed_loss
from heedful.train.network import fresh_decoder, generated, hf_tensors, matrix_parts, place, recompute_in_backward
from heedful.train.optim import Optimizer
from heedful.train.report import training_flops
from heedful.train.run_files import RunFiles
from heedful.train.settings import told
from heedful.train.shape import hf_config, model_config
from heedful.train.token_store import TokenStore
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors


class Trainer(Learner):
    """Sets PyTorch's thread count, and how freed memory is kept, for the whole process."""

    best_by = BestBy("bits_per_byte", "bits a byte")

    def __init__(self, run: RunFiles) -> None:
        prepare_process(told(run.settings.run.threads))
        self.run = run
        self.config = model_config(run.settings.model, run.tokenizer.vocab_size)
        self.decoder = fresh_decoder(self.config, run.settings.run.seed)
        fuse_norms(self.decoder)
        if run.settings.optim.checkpoint_activations:
            recompute_in_backward(self.decoder)
        matrices = dict(matrix_parts(self.decoder))
        super().__init__(run.folder, run.settings, self.decoder, Optimizer(self.decoder, run.settings.optim, matrices))

    # ---- steps

    def pass_batch(self) -> BatchFacts:
        done, data = self.state, self.run.data
        batch = data.batch(done.cursor)
        return BatchFacts(
            loss=self.gradients(batch),
            tokens=batch.tokens,
            targets=batch.tokens,
            visits=visits(batch.segments, self.config),
            epoch=done.cursor // data.epoch_segments,
            cursor=batch.cursor,
            described=self._described(batch),
        )

    def gradients(self, batch: Batch) -> float:
        """Leaves the gradients of the batch's mean loss, and returns that loss. However many parts it is cut into, each
        token counts the same.
        """
        total = 0.0
        for part in in_parts(batch.segments, self.settings.optim.micro_batches):
            loss = self._summed_loss(self.run.data.store, part) / batch.tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _summed_loss(self, store: TokenStore, segments: list[Segment]) -> Tensor:
        part = arrays(store, segments)
        ids, positions, targets = (torch.from_numpy(ints) for ints in (part.token_ids, part.positions, part.targets))
        hidden = self.decoder(ids, positions, PackedCausalAttend(part.lengths))
        return summed_loss(self.decoder, hidden, targets, chunk=self.settings.optim.loss_chunk)

    def _described(self, batch: Batch) -> str:
        numbers = sorted({segment.document for segment in batch.segments})
        shown = ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")
        return f"segments {self.state.cursor:,} to {batch.cursor - 1:,} of the order, from the documents {shown}"

    def training_flops(self, tokens: int, visits: int) -> int:
        return training_flops(self.config, tokens, visits)

    # ---- judging

    def judge(self) -> dict[str, float]:
        return {"bits_per_byte": self.bits_per_byte()} if self.run.data.validation_segments else {}

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
        with torch.no_grad(), self.averaged():
            for part in in_parts(chosen, -(-tokens // limit) * self.settings.optim.micro_batches):
                nats += float(self._summed_loss(data.validation_store, part))
                num_bytes += int(self._token_bytes[arrays(data.validation_store, part).targets].sum())
        return nats / math.log(2) / num_bytes

    @cached_property
    def _token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each token stands for; control tokens stand for none."""
        tokenizer = self.run.tokenizer
        lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
        return np.array([0 if i in tokenizer.special_ids else n for i, n in enumerate(lengths)], dtype=np.int64)

    def sample(self) -> list[str]:
        run, settings = self.run, self.settings.run
        prompt = [run.end_id, *run.tokenizer.encode(settings.sample_prompt, add_bos=False)]
        with self.averaged():
            ids = generated(
                self.decoder, prompt, settings.sample_tokens, run.end_id, seed=settings.seed + self.state.step
            )
        return [settings.sample_prompt + run.tokenizer.decode(ids)]

    def how_to_run(self) -> str:
        return f"heedful generate -m {self.folder} 'Once'"

    # ---- checkpoints

    def weights(self) -> Arrays:
        return hf_tensors(self.decoder)

    def place(self, stored: Path) -> None:
        place(self.decoder, names.from_hf(read_safetensors(stored), self.config))

    def documents(self) -> dict[str, bytes]:
        end_id = self.run.end_id
        documents = {
            "config.json": hf_config(self.config, end_id),
            "generation_config.json": {"bos_token_id": end_id, "eos_token_id": end_id},
        }
        as_json = {name: f"{json.dumps(value, indent=1)}\n".encode() for name, value in documents.items()}
        return as_json | self.run.tokenizer_files()
