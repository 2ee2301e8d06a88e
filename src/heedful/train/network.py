"""The model that is trained: heedful's own decoder with fresh weights, its weights by the names of a checkpoint, and
what it writes when every token is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heedful.engine.torch_embed import Trunk
from heedful.kernels.text_attention import PackedCausalAttend
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.weights.names import Weights, WeightsToPlace, hf_name
from heedful.weights.out_tensor import to_hf
from heedful.weights.tensor import StoredTensor, fold

EMBEDDING_STD = 0.02


def fresh_decoder(config: ModelConfig, seed: int) -> Decoder:
    """float32, on this machine. Matrices keep the scale of what passes them; those that write to the residual stream
    are smaller by √(2 · layers), so that its variance does not grow with depth (GPT-2); norms begin at 1.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    shrink = (2 * config.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() != 2:
                continue
            std = EMBEDDING_STD
            if name.startswith("layers."):
                std = parameter.shape[1] ** -0.5 * (shrink if name.endswith(("out.weight", "down.weight")) else 1.0)
            parameter.normal_(0.0, std, generator=generator)
    return decoder


def recompute_in_backward(decoder: Decoder | Trunk) -> None:
    """Keep of each layer its input alone; what it made is computed again when gradients need it."""
    for block in decoder.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def hf_tensors(decoder: Decoder) -> dict[str, npt.NDArray[np.float32]]:
    """Every weight under its Hugging Face name; views, to be written at once."""
    return {hf_name(name): slot.detach().numpy() for name, slot in decoder.weight_slots()}


def hf_arrays(decoder: Decoder) -> dict[str, npt.NDArray[np.float32]]:
    """Every weight as its family's Hugging Face files have it; views where nothing has to be joined or changed."""
    slots = {name: slot.detach().numpy() for name, slot in decoder.weight_slots()}
    stored = {name: _stored(name, values) for name, values in slots.items()}
    return {
        tensor.name: tensor.values()
        if len(tensor.parts) > 1 or tensor.added
        else tensor.parts[0].blocks.view(np.float32).reshape(tensor.shape)
        for tensor in to_hf(stored, decoder.config, "F32")
    }


def _stored(name: str, values: npt.NDArray[np.float32]) -> StoredTensor:
    rows, columns = fold(values.shape)
    return StoredTensor(name, "F32", values.shape, values.reshape(rows, columns).view(np.uint8))


def place(decoder: Decoder, weights: Weights) -> None:
    """Overwrite the decoder's weights. Raises UnsupportedModel when one is missing, extra or misshapen."""
    to_place = WeightsToPlace(weights)
    with torch.no_grad():
        for name, slot in decoder.weight_slots():
            slot.copy_(torch.from_numpy(to_place.take(name, tuple(slot.shape)).to_float32()))
    to_place.require_none_left()


def generated(
    decoder: Decoder,
    prompt_ids: list[int],
    max_tokens: int,
    end_ids: Collection[int],
    *,
    seed: int | None = None,
    agree: Callable[[int], int] = int,
) -> list[int]:
    """New ids, every step computed in full, without any cache; the likeliest ones, or with a seed sampled ones. Ends
    before one of `end_ids`, or where the context is full. `agree`: which token to take, of those that the processes
    which compute this together have.
    """
    ids = list(prompt_ids)
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(min(max_tokens, decoder.config.context_len - len(ids))):
            token = agree(_next_token(last_logits(decoder, ids), draw))
            if token in end_ids:
                break
            ids.append(token)
    return ids[len(prompt_ids) :]


def last_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """(vocab,) after the last of `ids`."""
    hidden = decoder(torch.tensor(ids), torch.arange(len(ids)), PackedCausalAttend([len(ids)]))
    return decoder.logits(hidden[-1:])[0]


def _next_token(logits: Tensor, draw: torch.Generator | None) -> int:
    if draw is None:
        return int(logits.argmax())
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=draw))


def matrix_parts(decoder: Decoder) -> Iterator[tuple[str, list[int]]]:
    """Matrices of the layers with the rows of each matrix that is fused in them: (q, k, v), (gate, up)."""
    config = decoder.config
    qkv = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for name, parameter in decoder.named_parameters():
        if name.startswith("layers.") and parameter.dim() == 2:
            rows = parameter.shape[0]
            if name.endswith("attn.qkv.weight"):
                yield name, qkv
            else:
                yield name, [rows // 2] * 2 if name.endswith("mlp.up.weight") else [rows]
