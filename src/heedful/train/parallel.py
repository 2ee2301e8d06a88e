"""Spreads a model over processes, from outside: the model's files do not know of it.

Whole models that are trained are cut by FSDP2 over the data ranks, layer by layer, so that a process holds its share
of weights, gradients and the optimizer's state; their wide matrices by tensor parallelism before that. A few trained
weights beside a frozen base are held by every process, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from heedful.errors import BadParameter
from heedful.models.config import ModelConfig
from heedful.models.decoder import Attention, Decoder
from heedful.train.layout import Layout
from heedful.train.network import matrix_parts
from heedful.train.spread import Spread
from heedful.train.team import Team

_STYLES: dict[str, type[ParallelStyle]] = {
    "attn.qkv": ColwiseParallel,
    "attn.out": RowwiseParallel,
    "mlp.up": ColwiseParallel,
    "mlp.down": RowwiseParallel,
}


def spread_over(team: Team, decoder: Decoder) -> Spread:
    """Changes the decoder: call it last. Raises BadParameter for tensor ranks that do not divide it."""
    if team.mesh is None:
        return Spread(decoder, team)
    if not all(parameter.requires_grad for parameter in decoder.parameters()):
        if team.tensor_size > 1:
            raise BadParameter("parallel.tensor", "a frozen base is not cut", "Use all processes as data ranks.")
        return Spread(decoder, team)
    layouts = _layouts(decoder, team)
    if team.tensor_size > 1:
        _cut_matrices(decoder, team, layouts)
    mesh = team.mesh["data"]
    for block in decoder.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # the head's weights are used after the forward pass has ended
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # sums, not means: a loss is divided by the tokens of all
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Spread(decoder, team, layouts)


def _layouts(decoder: Decoder, team: Team) -> dict[str, Layout]:
    rows = dict(matrix_parts(decoder))
    found = {}
    for name, parameter in decoder.named_parameters():
        layer, _, kind = name.rpartition(".")
        style = _STYLES.get(".".join(layer.split(".")[-2:])) if name.startswith("layers.") else None
        tensor_dim: int | None = None
        fused: tuple[int, ...] = ()
        if team.tensor_size > 1 and style is ColwiseParallel:
            tensor_dim, fused = 0, tuple(rows[f"{layer}.weight"])
        elif team.tensor_size > 1 and style is RowwiseParallel and kind == "weight":
            tensor_dim = 1
        found[name] = Layout(tuple(parameter.shape), team.data_size, team.tensor_size, tensor_dim, fused)
    return found


def _cut_matrices(decoder: Decoder, team: Team, layouts: Mapping[str, Layout]) -> None:
    """q, k, v, gate and up by rows, out and down by columns; a rank has whole heads."""
    assert team.mesh is not None
    size = team.tensor_size
    _require_division(decoder.config, size)
    with torch.no_grad():  # tensor ranks get neighbouring rows, which then have to be those of their heads
        for name, parameter in decoder.named_parameters():
            layout = layouts[name]
            if layout.tensor_dim == 0:
                parameter.copy_(torch.cat([layout.of_tensor_rank(parameter, rank) for rank in range(size)]))
    for block in decoder.layers:
        attention = block.attn
        assert isinstance(attention, Attention), attention
        attention.heads //= size
        attention.kv_heads //= size
        styles = {name: style() for name, style in _STYLES.items()}
        parallelize_module(block, team.mesh["tensor"], styles, src_data_rank=None)
        for name in _STYLES:
            linear = block.get_submodule(name)
            assert isinstance(linear, nn.Linear), name
            linear.forward = partial(_linear, linear)  # type: ignore[method-assign]  # without layers.Linear's row groups of a single token


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def _require_division(config: ModelConfig, size: int) -> None:
    numbers = {
        "KV heads": config.num_kv_heads,
        "heads": config.num_heads,
        "channels of the MLP": config.intermediate_size,
    }
    possible = [n for n in range(1, config.num_kv_heads + 1) if all(count % n == 0 for count in numbers.values())]
    for what, count in numbers.items():
        if count % size:
            raise BadParameter(
                "parallel.tensor",
                f"{size} tensor ranks cannot share {count} {what}",
                f"For this model it may be {', '.join(map(str, possible))}; the other processes are data ranks.",
            )
