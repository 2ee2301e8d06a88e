"""Products in bfloat16 against exact products of the rounded factors; what of a run is not touched by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_cases import LORA, SMALL, quiet, small_settings, write_documents

from heedful.errors import BadParameter
from heedful.train.fast import fuse_layers
from heedful.train.loop import begin
from heedful.train.mixed import mix_products, product
from heedful.train.network import fresh_decoder
from heedful.train.run_files import open_run
from heedful.train.settings import TrainSettings, changed
from heedful.train.trainer import Trainer

ROUNDING = 2.0**-8
"""Of what bfloat16 stores, relative to it."""


def test_a_product_and_its_gradients_are_those_of_rounded_factors() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=draw, requires_grad=True) for shape in ((21, 48), (33, 48)))
    grad = torch.randn(21, 33, generator=draw)
    y = product(x, weight)
    found = [y, *torch.autograd.grad(y, (x, weight), grad)]
    low_x, low_weight, low_grad = (each.detach().bfloat16().double() for each in (x, weight, grad))
    exact = [low_x @ low_weight.T, low_grad @ low_weight, low_grad.T @ low_x]
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        error = (ours.detach().double() - right).abs() / right.abs().max()
        assert float(error.max()) < ROUNDING
        assert float(error.max()) > 0, "float32 would be exact here to seven digits"


def test_a_layer_is_mixed_where_gradients_are_made_and_plain_where_it_is_judged() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 33)), torch.randn(21, 48)
    plain = F.linear(x, model[0].weight, model[0].bias)
    mix_products(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain)
    mixed = model(x)
    assert not torch.equal(mixed, plain)
    assert torch.allclose(mixed, plain, atol=0.02)
    mixed.sum().backward()
    assert model[0].bias.grad is not None
    assert torch.equal(model[0].bias.grad, torch.full((33,), 21.0)), "no product, no rounding"


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "low_rank"])
def test_gradients_of_a_step_are_near_those_in_float32(lora: bool, tmp_path: Path) -> None:
    documents, base = write_documents(tmp_path / "texts.jsonl"), tmp_path / "base"
    whole = small_settings(documents, model__windows="L", run__steps=1)
    begin(base, whole, say=quiet)
    Trainer(open_run(base)).save()
    small = {name: value for name, value in SMALL.items() if not name.startswith(("model.", "data."))}
    updates = changed(TrainSettings(), small | LORA | {"model.base": str(base), "data.files": [str(documents)]})
    gradients = {}
    for precision in ("f32", "bf16"):
        settings = changed(updates if lora else whole, {"optim.precision": precision})
        begin(tmp_path / precision, settings, say=quiet)
        trainer = Trainer(open_run(tmp_path / precision))
        trainer.pass_batch()
        gradients[precision] = torch.cat([each.grad.flatten() for each in trainer.trained if each.grad is not None])
    apart = (gradients["bf16"] - gradients["f32"]).norm() / gradients["f32"].norm()
    assert 0 < float(apart) < 0.03


def test_layers_in_fewer_passes_stay_so_under_it() -> None:
    from test_training_step import small_config

    decoder = fresh_decoder(small_config(), 0)
    fuse_layers(decoder)
    fused = decoder.layers[0].mlp.forward
    mix_products(decoder)
    assert decoder.layers[0].mlp.forward is fused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data__files": [], "data__preferences": ["x"], "model__base": "smollm2"}, "must be f32 for preferences"),
        ({"parallel__tensor": 2}, "must be f32 where layers are cut"),
        ({"optim__precision": "f16"}, "Known: f32, bf16"),
    ],
)
def test_where_it_cannot_be(more: dict[str, object], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        small_settings(Path("x"), **{"optim__precision": "bf16", **more})
