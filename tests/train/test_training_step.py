"""Loss, attention, optimizers and schedules against PyTorch's own or a second formula; a step in parts is the step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_cases import small_settings, write_documents

from heedful.kernels.attention import DenseAttend
from heedful.kernels.text_attention import PackedCausalAttend
from heedful.models.config import ModelConfig
from heedful.models.decoder import Decoder
from heedful.train.batches import IGNORED, Batch, arrays
from heedful.train.fast import fuse_layers
from heedful.train.loop import begin, complete
from heedful.train.loss import summed_loss
from heedful.train.network import fresh_decoder, hf_tensors, matrix_parts
from heedful.train.optim import Optimizer, orthogonalized
from heedful.train.run_files import RunFiles, open_run
from heedful.train.schedule import rate_share
from heedful.train.settings import OptimSettings
from heedful.train.shape import model_config
from heedful.train.trainer import Trainer


def small_config(softcap: float | None = None) -> ModelConfig:
    return replace(model_config(complete(small_settings(Path("x"))).model, 290), logit_softcap=softcap)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    folder = tmp_path_factory.mktemp("runs")
    settings = small_settings(write_documents(folder / "texts.jsonl"), run__steps=1)
    begin(folder / "run", settings, say=lambda line: None)
    return open_run(folder / "run")


# ---- loss


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_loss_and_gradients_equal_the_dense_ones(chunk: int, softcap: float | None) -> None:
    decoder = fresh_decoder(small_config(softcap), 0)
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(1)).mul_(3).requires_grad_()
    targets = torch.randint(0, 290, (20,), generator=torch.Generator().manual_seed(2))
    targets[[3, 4, 19]] = IGNORED
    (summed_loss(decoder, hidden, targets, chunk=chunk) / 17).backward()
    ours = (hidden.grad, decoder.head.weight.grad)
    hidden.grad, decoder.head.weight.grad = None, None
    dense = F.cross_entropy(decoder.logits(hidden), targets, ignore_index=IGNORED)
    dense.backward()
    with torch.no_grad():
        assert summed_loss(decoder, hidden, targets, chunk=chunk) / 17 == pytest.approx(float(dense), rel=1e-6)
    for made, expected in zip(ours, (hidden.grad, decoder.head.weight.grad), strict=True):
        assert made is not None
        assert expected is not None
        assert torch.allclose(made, expected, atol=1e-7, rtol=1e-4)


# ---- attention


@pytest.mark.parametrize("window", [None, 8, 1])
def test_packed_attention_and_its_gradients_equal_the_dense_ones(window: int | None) -> None:
    lengths = [3, 5, 5, 20, 1, 300]
    draw = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths), 4, 8), (sum(lengths), 2, 8), (sum(lengths), 2, 8))
    inputs = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    weight = torch.randn(sum(lengths), 4, 8, generator=draw)
    found: list[list[Tensor]] = []
    for attend in (PackedCausalAttend(lengths), DenseAttend(lengths)):
        out = attend(0, *inputs, window=window, scale=0.3, softcap=None)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)])
    for ours, dense in zip(*found, strict=True):
        assert torch.allclose(ours, dense, atol=2e-5)


def test_a_document_does_not_depend_on_what_it_is_packed_with(run: RunFiles) -> None:
    decoder = fresh_decoder(small_config(), 0)
    segments = list(run.data.batch(0).segments)
    packed = arrays(run.data.store, segments)
    tensors = [torch.from_numpy(ints) for ints in (packed.token_ids, packed.positions)]
    together = decoder(*tensors, PackedCausalAttend(packed.lengths)).split(packed.lengths)
    for segment, rows in zip(segments, together, strict=True):
        alone = arrays(run.data.store, [segment])
        hidden = decoder(
            torch.from_numpy(alone.token_ids), torch.from_numpy(alone.positions), PackedCausalAttend(alone.lengths)
        )
        assert torch.allclose(rows, hidden, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_fused_layers_and_their_gradients_equal_the_plain_ones(qk_norm: bool) -> None:
    config = replace(small_config(), qk_norm=qk_norm)
    lengths = [7, 1, 4]
    positions = torch.cat([torch.arange(length) for length in lengths])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 290, positions.shape, generator=draw)
    grad = torch.randn(len(ids), config.hidden_size, generator=draw, dtype=torch.float64)
    found = []
    for fuse in (lambda decoder: None, fuse_layers):
        decoder = fresh_decoder(config, 0).double()
        fuse(decoder)
        hidden = decoder(ids, positions, PackedCausalAttend(lengths))
        hidden.backward(grad)
        found.append([hidden.detach(), *(parameter.grad for parameter in decoder.parameters())])
    for plain, fused in zip(*found, strict=True):
        assert torch.allclose(plain, fused, atol=1e-9, rtol=1e-9)


# ---- a step


def gradients(run: RunFiles, batch: Batch, **optim: int | bool) -> tuple[float, list[Tensor]]:
    trainer = Trainer(replace(run, settings=replace(run.settings, optim=replace(run.settings.optim, **optim))))
    loss = trainer.gradients(batch)
    return loss, [parameter.grad for parameter in trainer.decoder.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("changes", [{"micro_batches": 8}, {"micro_batches": 3}, {"checkpoint_activations": True}])
def test_in_parts_or_recomputed_the_gradients_are_the_same(run: RunFiles, changes: dict[str, int | bool]) -> None:
    batch = run.data.batch(5)
    loss, whole = gradients(run, batch, micro_batches=1)
    other_loss, parts = gradients(run, batch, **changes)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert len(whole) == len(parts) > 10
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_the_loss_is_the_mean_over_all_tokens(run: RunFiles) -> None:
    """By the definition: every segment alone, its logits, the mean of −ln p over all of them together."""
    trainer = Trainer(run)
    batch = run.data.batch(0)
    nats, tokens = torch.zeros(()), 0
    for segment in batch.segments:
        part = arrays(run.data.store, [segment])
        ids = torch.from_numpy(part.token_ids)
        hidden = trainer.decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)]))
        nats += F.cross_entropy(
            trainer.decoder.logits(hidden), torch.from_numpy(part.targets), reduction="sum"
        ).detach()
        tokens += len(ids)
    assert trainer.gradients(batch) == pytest.approx(float(nats) / tokens, rel=1e-5)


def test_bits_per_byte_count_true_bytes(run: RunFiles) -> None:
    trainer = Trainer(run)
    bits, num_bytes = 0.0, 0
    segments = run.data.validation_segments
    for segment in segments:
        part = arrays(run.data.store, [segment])
        ids = torch.from_numpy(part.token_ids)
        hidden = trainer.decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)]))
        logprobs = trainer.decoder.logits(hidden).log_softmax(-1).detach()
        bits -= float(logprobs.gather(1, torch.from_numpy(part.targets)[:, None]).sum()) / math.log(2)
        text = run.tokenizer.decode(part.targets.tolist())
        assert "\ufffd" not in text
        num_bytes += len(text.encode())
    assert 0 < sum(s.length for s in segments) <= run.settings.run.eval_tokens
    assert trainer.bits_per_byte() == pytest.approx(bits / num_bytes, rel=1e-5)


# ---- weights


def test_fresh_weights_have_the_stated_scales_and_a_loss_of_chance() -> None:
    config = model_config(complete(small_settings(Path("x"), model__hidden_size=256, model__layers=8)).model, 2000)
    decoder = fresh_decoder(config, 0)
    parameters = dict(decoder.named_parameters())
    std = {name: float(p.detach().std()) for name, p in parameters.items() if p.dim() == 2}
    assert std["embed.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["layers.3.attn.qkv.weight"] == pytest.approx(256**-0.5, rel=0.05)
    assert std["layers.3.attn.out.weight"] == pytest.approx(256**-0.5 / 4, rel=0.05)
    assert std["layers.7.mlp.down.weight"] == pytest.approx(48**-0.5 / 4, rel=0.05)
    assert all(bool((p == 1).all()) for p in parameters.values() if p.dim() == 1)
    ids = torch.arange(0, 2000, 21)
    logits = decoder.logits(decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)])))
    assert float(F.cross_entropy(logits.detach(), ids.roll(1))) == pytest.approx(math.log(2000), abs=0.15)
    again = fresh_decoder(config, 0)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_every_weight_has_a_hugging_face_name() -> None:
    for tied in (True, False):
        decoder = Decoder(replace(small_config(), tied_head=tied))
        named = hf_tensors(decoder)
        assert sum(values.size for values in named.values()) == sum(p.numel() for p in decoder.parameters())
        assert ("lm_head.weight" in named) is not tied
        assert named["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)


# ---- optimizers


def one_update(settings: OptimSettings, gradients: dict[str, Tensor]) -> tuple[Decoder, Decoder]:
    before, decoder = fresh_decoder(small_config(), 0), fresh_decoder(small_config(), 0)
    optimizer = Optimizer(decoder, settings, dict(matrix_parts(decoder)))
    for name, parameter in decoder.named_parameters():
        parameter.grad = gradients[name].clone()
    optimizer.step(settings.lr)
    assert all(parameter.grad is None for parameter in decoder.parameters())
    return before, decoder


def random_gradients() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(p.shape, generator=draw) for name, p in fresh_decoder(small_config(), 0).named_parameters()
    }


def test_adamw_moves_by_its_rate_and_decays_matrices_alone() -> None:
    settings = OptimSettings(lr=0.01, weight_decay=0.5)
    gradients = random_gradients()
    before, after = one_update(settings, gradients)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        kept = 1 - 0.01 * 0.5 if old.dim() == 2 else 1.0
        # the first step's moments cancel but for eps
        expected = old * kept - 0.01 * gradients[name].sign()
        assert torch.allclose(new, expected, atol=1e-5), name


def test_muon_turns_each_of_the_fused_matrices() -> None:
    settings = OptimSettings(optimizer="muon", lr=0.01, weight_decay=0.5, momentum=0.9)
    gradients = random_gradients()
    before, after = one_update(settings, gradients)
    old, new = ({name: p.detach() for name, p in decoder.named_parameters()} for decoder in (before, after))
    fused = dict(matrix_parts(before))
    assert fused["layers.0.attn.qkv.weight"] == [32, 16, 16]
    assert fused["layers.1.mlp.up.weight"] == [48, 48]
    assert "embed.weight" not in fused
    for name, rows in fused.items():
        update = (old[name] * (1 - 0.01 * 0.5) - new[name]) / 0.01
        for part, gradient in zip(update.split(rows), gradients[name].split(rows), strict=True):
            u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
            scale = 0.2 * max(part.shape) ** 0.5
            singular = torch.linalg.svdvals(part) / scale
            assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.25, name
            # in the gradient's own directions
            along = (u.T @ part @ vt.T / scale).diagonal()
            assert float(along.min()) > 0.6
    embed = old["embed.weight"] * (1 - 0.01 * 0.5) - 0.01 * gradients["embed.weight"].sign()
    assert torch.allclose(new["embed.weight"], embed, atol=1e-5), "the rest is AdamW's"


def test_muon_has_nesterov_momentum() -> None:
    decoder, gradients = fresh_decoder(small_config(), 0), random_gradients()
    settings = OptimSettings(optimizer="muon", momentum=0.75)
    optimizer = Optimizer(decoder, settings, dict(matrix_parts(decoder)))
    name = "layers.0.mlp.down.weight"
    for sign in (1.0, -1.0):
        for other, parameter in decoder.named_parameters():
            parameter.grad = sign * gradients[other]
        optimizer.step(0.0)
    momentum = 0.75 * 0.25 * gradients[name] - 0.25 * gradients[name]
    assert torch.allclose(optimizer.state()[f"momentum/{name}"], momentum, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (3, 16, 16)])
def test_orthogonalizing_agrees_with_torch_s_own_muon(shape: tuple[int, ...]) -> None:
    """Its Newton-Schulz runs in bfloat16, so it is close and not equal."""
    from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = orthogonalized(x)
    for made, one in zip(ours.reshape(-1, *shape[-2:]), x.reshape(-1, *shape[-2:]), strict=True):
        theirs = newton_schulz(one, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        assert (made - theirs).norm() / theirs.norm() < 0.03


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loaded_state_goes_on_alike(optimizer: str) -> None:
    settings = OptimSettings(optimizer=optimizer)  # type: ignore[arg-type]
    gradients, decoders = random_gradients(), [fresh_decoder(small_config(), 0) for _ in range(2)]
    first, second = (Optimizer(decoder, settings, dict(matrix_parts(decoder))) for decoder in decoders)

    def step(optimizer: Optimizer, decoder: Decoder) -> None:
        for name, parameter in decoder.named_parameters():
            parameter.grad = gradients[name].clone()
        optimizer.step(0.01)

    step(first, decoders[0])
    decoders[1].load_state_dict(decoders[0].state_dict())
    second.load(first.state())
    for optimizer_, decoder in zip((first, second), decoders, strict=True):
        step(optimizer_, decoder)
    assert all(torch.equal(a, b) for a, b in zip(decoders[0].parameters(), decoders[1].parameters(), strict=True))
    with pytest.raises(KeyError, match=r"layers\.9"):
        second.load({"momentum/layers.9.attn.qkv.weight": torch.zeros(1)})


# ---- schedules


def test_wsd_warms_up_stays_and_falls() -> None:
    optim = OptimSettings(warmup=0.1, decay=0.3, min_lr=0.0)
    shares = [rate_share(step, 100, optim) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10:70] == [1.0] * 60
    assert shares[70:] == pytest.approx([left / 31 for left in range(30, 0, -1)])


def test_cosine_falls_to_the_least_rate() -> None:
    optim = OptimSettings(schedule="cosine", warmup=0.0, min_lr=0.1)
    assert rate_share(0, 100, optim) == 1.0
    assert rate_share(50, 100, optim) == pytest.approx(0.55)
    assert rate_share(25, 100, optim) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate_share(99, 100, optim) == pytest.approx(0.1, abs=1e-3)
    assert all(rate_share(s, 100, optim) > rate_share(s + 1, 100, optim) for s in range(99))
