"""Kev's logits with PyTorch: the base with its adapter merged, and the pointer head. Weights in float32."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.engine.torch_branches import AnyDecoder, SharedState, read_state, run_branches
from heedful.engine.torch_runner import build_model
from heedful.errors import FileFormatError, SourceError, UnsupportedModel
from heedful.models.kev_head import PointerHead
from heedful.weights.kev_files import LoadedKev
from heedful.weights.quantize import Floats
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.tensor import brief

HEAD_NAMES = ("head.pt", "head.safetensors")
_TENSORS = ("q.weight", "q.bias", "k.weight", "k.bias")
_NOT_RUN = ("option_isolation", "special_embeddings")


class KevNetwork:
    """Threads take turns, each holding `turn`: a shared state holds one branch at a time."""

    def __init__(self, decoder: AnyDecoder, head: PointerHead, temperature: float = 1.0) -> None:
        self.decoder = decoder
        self.head = head
        self.turn = Lock()
        self.temperature = temperature
        """What logits are divided by, as it was fitted for this checkpoint."""

    @property
    def head_weights(self) -> int:
        """Of each of the head's two matrices."""
        return self.head.q.weight.numel()

    def read(self, state_ids: Sequence[int], *, room: int = 0) -> SharedState:
        """`room`: for how long a branch memory is to be there already."""
        return read_state(self.decoder, state_ids, room=room)

    @torch.inference_mode()
    def logits(
        self, state: SharedState, branches: Sequence[Sequence[int]], markers: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Of each branch one number an option, before any temperature; all in one pass. `markers`: where in the branch
        each option ends.
        """
        hidden = run_branches(self.decoder, state, branches)
        ends = zip(hidden, markers, strict=True)
        return [self.head(of_branch[-1], of_branch[list(at)]).tolist() for of_branch, at in ends]


def make_kev(loaded: LoadedKev, *, threads: int) -> KevNetwork:
    """Sets PyTorch's thread count for the whole process. Raises SourceError, FileFormatError or UnsupportedModel for
    files that are missing, damaged, or of another kind.
    """
    torch.set_num_threads(threads)
    settings, tensors = _read_head(loaded.path, loaded.training)
    for name in _NOT_RUN:
        if settings.get(name):
            raise UnsupportedModel(f"this Kev was trained with {name}, which is not run here", "Releases are not.")
    head = _build_head(tensors, loaded.base.config.hidden_size)
    decoder = build_model(loaded.base.config, loaded.base.weights)
    loaded.lora.merge_into((name, slot.numpy()) for name, slot in decoder.weight_slots())
    return KevNetwork(decoder, head, _temperature(settings))


def _read_head(folder: Path, training: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Floats]]:
    """(settings, tensors), of head.pt where it is there, else of head.safetensors and training_config.json."""
    pickled, plain = (folder / name for name in HEAD_NAMES)
    if pickled.exists():
        settings = _unpickled(pickled)
        tensors = settings.get("head")
        if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
            raise FileFormatError(f"{pickled}: holds no tensors under 'head'", "Fetch the file again.")
        return settings, {name: tensor.float().numpy() for name, tensor in tensors.items()}
    if not plain.exists():
        raise SourceError(f"{folder} has neither {' nor '.join(HEAD_NAMES)}", "Fetch the missing file.")
    arguments = training.get("args")
    settings = {**(arguments if isinstance(arguments, dict) else {}), **training}
    return settings, {name: tensor.to_float32() for name, tensor in read_safetensors(plain).items()}


def _unpickled(path: Path) -> dict[str, Any]:
    """Tensors and plain values alone: code in the file is refused, not run."""
    try:
        _require_uncompressed(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a stranger's file: the reader has no list of what it may raise
        what = str(error).strip().partition("\n")[0]
        raise FileFormatError(
            f"{path}: is no file of tensors and plain values ({type(error).__name__}: {what:.200})",
            "If you trust its makers, ask them for head.safetensors.",
        ) from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path}: holds {type(found).__name__}, not a dict", "Fetch the file again.")
    return found


def _require_uncompressed(path: Path) -> None:
    """As torch writes it: a compressed file of a megabyte could fill a gigabyte of memory."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > path.stat().st_size:
                raise ValueError("it holds more than its own size")


def _build_head(tensors: Mapping[str, Floats], hidden_size: int) -> PointerHead:
    if set(tensors) != set(_TENSORS):
        raise UnsupportedModel(f"the head's tensors are {brief(sorted(map(str, tensors)))}", f"Needed: {_TENSORS}.")
    width = tensors["q.bias"].size
    shapes = {name: (width, hidden_size) if name.endswith("weight") else (width,) for name in _TENSORS}
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape or width == 0:
            raise UnsupportedModel(
                f"the head's {name} has shape {found.shape}, {shape} is needed", "Head and base do not belong together."
            )
        if not np.isfinite(found).all():
            raise FileFormatError(f"the head's {name} holds what is no number", "Fetch the file again.")
    head = PointerHead(hidden_size, width).requires_grad_(False).eval()
    head.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    return head


def _temperature(settings: Mapping[str, Any]) -> float:
    found = settings.get("temperature", 1.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= 1e9:
        raise UnsupportedModel(f"{HEAD_NAMES[0]} has temperature {brief(found)}", "It must be a positive number.")
    return float(found)
