"""Linear layers of a PyTorch model, computed by the native products on packed weights: faster, and less exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful.kernels.packed import PackedProducts, can_pack
from heedful.models.layers import Linear


class PackedLinear(nn.Module):
    """x (…, C) → (…, R). For inference: no gradient passes it."""

    def __init__(self, linear: nn.Linear, products: PackedProducts, panel_format: str) -> None:
        super().__init__()
        self._products = products
        self._matrix = products.pack(linear.weight.detach().numpy(), panel_format)
        self._bias = None if linear.bias is None else linear.bias.detach().numpy().copy()
        self.num_bytes = self._matrix.panels.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._matrix.cols).contiguous()
        y = torch.from_numpy(self._products.multiply(self._matrix, rows.numpy(), self._bias))
        return y.view(*x.shape[:-1], self._matrix.rows)


def pack_linears(model: nn.Module, panel_format: str | None, *, threads: int) -> int:
    """Puts a PackedLinear in the place of every models.layers.Linear that the format can hold → bytes saved.

    None leaves all as it is.
    """
    if panel_format is None:
        return 0
    products = PackedProducts(threads)
    saved = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Linear) and can_pack(*child.weight.shape):
                packed = PackedLinear(child, products, panel_format)
                setattr(parent, name, packed)
                saved += 4 * child.weight.numel() - packed.num_bytes
    return saved
