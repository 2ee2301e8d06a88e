"""The decoder that a run trains, and how a checkpoint keeps it: fresh weights, a base with all its weights, or low-rank
updates beside a base (low_rank.py). What it learns from, and how it is judged, is a learner's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from heedful.models.config import ModelConfig
from heedful.train import checkpoint as files
from heedful.train.base import reopened
from heedful.train.checkpoint import Arrays
from heedful.train.report import training_flops
from heedful.train.run_files import RunFiles
from heedful.train.shape import hf_config, model_config
from heedful.weights import names
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.tensor import forget_pages

if TYPE_CHECKING:
    from heedful.models.decoder import Decoder


class TrainedModel(Protocol):
    decoder: Decoder
    config: ModelConfig
    weights_file: str
    stored_exactly: bool
    """Whether what is read of a checkpoint's model is what was written, to the bit."""

    @property
    def matrices(self) -> Mapping[str, list[int]]:
        """Those that Muon may have: by name the rows of each that is fused in one."""

    def weights(self) -> Arrays: ...
    def place(self, stored: Path) -> None: ...
    def documents(self) -> dict[str, bytes]: ...
    def training_flops(self, tokens: int, visits: int) -> int: ...

    @property
    def frozen_weights(self) -> int:
        """How many are not trained."""

    @property
    def frozen_bytes(self) -> int:
        """Of these, as they lie in memory."""


def trained_model(run: RunFiles) -> TrainedModel:
    """What the run's settings ask for, as it is before the first step."""
    if run.base is None:
        return FreshModel(run)
    if run.settings.lora.rank == 0:
        return WholeBase(run)
    from heedful.train.low_rank import UpdatedBase

    return UpdatedBase(run)


class FreshModel:
    weights_file = files.MODEL
    stored_exactly = True
    frozen_weights = frozen_bytes = 0

    def __init__(self, run: RunFiles) -> None:
        from heedful.train.network import fresh_decoder

        self.config = model_config(run.settings.model, run.tokenizer.vocab_size)
        self.decoder = fresh_decoder(self.config, run.settings.run.seed)
        self._run = run

    @property
    def matrices(self) -> Mapping[str, list[int]]:
        from heedful.train.network import matrix_parts

        return dict(matrix_parts(self.decoder))

    def weights(self) -> Arrays:
        from heedful.train.network import hf_tensors

        return hf_tensors(self.decoder)

    def place(self, stored: Path) -> None:
        from heedful.train.network import place

        place(self.decoder, names.from_hf(read_safetensors(stored), self.config))

    def documents(self) -> dict[str, bytes]:
        end_id = self._run.end_id
        documents = {
            "config.json": hf_config(self.config, end_id),
            "generation_config.json": {"bos_token_id": end_id, "eos_token_id": end_id},
        }
        as_json = {name: f"{json.dumps(value, indent=1)}\n".encode() for name, value in documents.items()}
        return as_json | self._run.model_files()

    def training_flops(self, tokens: int, visits: int) -> int:
        return training_flops(self.config, tokens, visits)


class WholeBase:
    """All weights of a base, in float32."""

    weights_file = files.MODEL
    frozen_weights = frozen_bytes = 0

    def __init__(self, run: RunFiles) -> None:
        from heedful.models.decoder import Decoder
        from heedful.train.network import place

        assert run.base is not None, run.folder
        loaded = reopened(run.base)
        self.config = loaded.config
        self.stored_exactly = loaded.config.family != "gemma3"  # its norms are stored as weight - 1
        self.decoder = Decoder(self.config)
        place(self.decoder, loaded.weights)
        forget_pages(loaded.weights.values())
        self._run = run

    @property
    def matrices(self) -> Mapping[str, list[int]]:
        from heedful.train.network import matrix_parts

        return dict(matrix_parts(self.decoder))

    def weights(self) -> Arrays:
        from heedful.train.network import hf_arrays

        return hf_arrays(self.decoder)

    def place(self, stored: Path) -> None:
        from heedful.train.network import place

        place(self.decoder, names.from_hf(read_safetensors(stored), self.config))

    def documents(self) -> dict[str, bytes]:
        return self._run.model_files()

    def training_flops(self, tokens: int, visits: int) -> int:
        return training_flops(self.config, tokens, visits)
