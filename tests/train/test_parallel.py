"""Several processes train what one would: gradients, losses, weights; and go on with each other's runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel_cases import STEPS, before_last_checkpoint, settings_of
from safetensors.numpy import load_file
from training_cases import quiet, write_documents

from heedful.errors import BadParameter, UsageError
from heedful.models.decoder import Decoder
from heedful.train import __main__ as as_module
from heedful.train.layout import Layout
from heedful.train.loop import begin, complete, resume
from heedful.train.network import generated
from heedful.train.parallel import _require_division
from heedful.train.processes import Processes, fitting, from_environment, grid
from heedful.train.run_files import open_run, read_metrics
from heedful.train.settings import ParallelSettings
from heedful.train.shape import model_config
from heedful.train.shares import own_parts, shares
from heedful.train.trainer import Trainer
from heedful.weights.run_folder import newest_checkpoint


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of it, in alone/, and several."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "texts.jsonl")
    for kind in ("adamw", "muon", "updates"):
        begin(folder / "alone" / kind, settings_of(kind, folder), say=quiet)
    command = [sys.executable, str(Path(__file__).with_name("parallel_cases.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if name in row]


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert newest.name == f"step-{STEPS:08d}"
    return {f"{file.name} {k}": v for file in newest.glob("*.safetensors") for k, v in load_file(file).items()}


def require_close(folder: Path, alone: Path) -> None:
    """Sums in another order are all that differs."""
    ours, theirs = rows(folder, "loss"), rows(alone, "loss")
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for exact in ("tokens", "targets", "visits", "epoch", "lr"):
            assert one[exact] == other[exact]
    for one, other in zip(rows(folder, "bits_per_byte"), rows(alone, "bits_per_byte"), strict=True):
        assert one["bits_per_byte"] == pytest.approx(other["bits_per_byte"], rel=1e-5)
    assert rows(folder, "sample") == rows(alone, "sample")
    found, expected = tensors(folder), tensors(alone)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.shape == expected[name].shape
        assert np.allclose(values, expected[name], atol=2e-5, rtol=1e-3), name


def test_every_process_ended_as_it_should(runs: Path) -> None:
    ended = json.loads((runs / "ended.json").read_text())
    assert ended.pop("killed") == [0, -signal.SIGKILL]
    assert all(code == 0 for codes in ended.values() for code in codes), ended


@pytest.mark.parametrize(
    ("several", "alone"),
    [("data", "adamw"), ("grid", "muon"), ("updates", "updates"), ("widened", "adamw")],
)
def test_several_processes_train_what_one_does(several: str, alone: str, runs: Path) -> None:
    require_close(runs / several, runs / "alone" / alone)


def test_gradients_are_those_of_one_process(runs: Path) -> None:
    """Two data ranks times two tensor ranks; each holds at most half of anything."""
    run = open_run(runs / "alone" / "adamw")
    trainer = Trainer(run)
    loss = trainer.gradients(run.data.batch(3))
    found = np.load(runs / "gradients.npz")
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-6)
    names = {name for name, _ in trainer.decoder.named_parameters()}
    assert set(found.files) == names | {"loss"}
    for name, parameter in trainer.decoder.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert np.allclose(found[name], parameter.grad.numpy(), atol=1e-5 * scale), name


def test_as_many_processes_go_on_to_the_bit(runs: Path) -> None:
    """One of two got SIGTERM in step 3; both ended after it."""
    for rank in (0, 1):
        assert json.loads((runs / f"stopped-{rank}.json").read_text()) == [3, signal.SIGTERM]
    assert (runs / "stopped" / "checkpoints" / "step-00000003").is_dir()
    assert rows(runs / "stopped", "loss") == rows(runs / "data", "loss")
    ours, theirs = tensors(runs / "stopped"), tensors(runs / "data")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(values, theirs[name]) for name, values in ours.items())


@pytest.mark.parametrize(("several", "alone"), [("data", "adamw"), ("grid", "muon")])
def test_one_process_goes_on_with_what_several_began(several: str, alone: str, runs: Path, tmp_path: Path) -> None:
    folder = before_last_checkpoint(runs / several, tmp_path / "run")
    resume(folder, say=quiet)
    require_close(folder, runs / "alone" / alone)


def test_when_one_is_killed_the_others_say_so_and_end(runs: Path) -> None:
    said = (runs / "killed.txt").read_text()
    assert re.match(r"process 0 of 2 has lost the others, so it ends too \(.*by peer", said)
    assert "--resume" in said
    assert len(rows(runs / "killed", "loss")) == 3
    resume(runs / "killed", say=quiet)
    require_close(runs / "killed", runs / "alone" / "adamw")


# ---- who holds what, who does what


@pytest.mark.parametrize("data", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("shape", "tensor", "dim", "fused"),
    [
        ((12, 4), 1, None, ()),
        ((12, 4), 2, 0, (8, 2, 2)),
        ((3, 8), 4, 1, ()),
        ((2,), 2, None, ()),
        ((12,), 2, 0, (6, 6)),
    ],
)
def test_parts_make_the_whole(
    data: int, shape: tuple[int, ...], tensor: int, dim: int | None, fused: tuple[int, ...]
) -> None:
    layout = Layout(shape, data, tensor, dim, fused)
    whole = torch.arange(float(np.prod(shape))).view(shape)
    parts = [[layout.part(whole, d, t) for d in range(data)] for t in range(tensor if dim is not None else 1)]
    assert torch.equal(layout.joined(parts), whole)
    assert [tuple(part.shape) for part in parts[0]] == [layout.part_shape(d) for d in range(data)]
    assert sum(layout.part_size(d) for d in range(data)) * len(parts) == whole.numel()


def test_a_tensor_rank_has_whole_heads_of_q_k_and_v() -> None:
    rows_of = torch.arange(12.0).view(12, 1)
    layout = Layout((12, 1), 1, 2, 0, (8, 2, 2))
    assert layout.of_tensor_rank(rows_of, 1).flatten().tolist() == [4, 5, 6, 7, 9, 11]


def test_shares_are_even_and_lose_nothing() -> None:
    lengths = [40, 3, 3, 90, 17, 60, 60, 1, 8, 25, 31]
    found = shares(range(len(lengths)), lambda i: lengths[i] ** 2, 3)
    assert sorted(i for share in found for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] ** 2 for i in share) for share in found]
    assert max(loads) <= (4 / 3 - 1 / 9) * max(8100, sum(loads) / 3)
    assert shares([5], lambda item: item, 3) == [[5], [], []]


def test_every_rank_has_as_many_parts() -> None:
    def halves(items: Any) -> list[list[int]]:
        return [part for part in (list(items[::2]), list(items[1::2])) if part]

    by_rank = [own_parts([9, 5, 4], lambda item: item, halves, rank=rank, ranks=3) for rank in range(3)]
    assert by_rank == [[[9]], [[5]], [[4]]]
    by_rank = [own_parts([9, 5, 4], lambda item: item, halves, rank=rank, ranks=2) for rank in range(2)]
    assert by_rank == [[[9], []], [[5], [4]]]


# ---- what a user gets wrong


def test_a_grid_of_another_number_of_processes_is_refused() -> None:
    assert grid(8, ParallelSettings()) == (8, 1)
    assert grid(8, ParallelSettings(tensor=2)) == (4, 2)
    assert grid(8, ParallelSettings(data=2)) == (2, 4)
    for settings in (ParallelSettings(tensor=3), ParallelSettings(data=3), ParallelSettings(data=2, tensor=2)):
        with pytest.raises(BadParameter, match=r"parallel\..* 8 are there"):
            grid(8, settings)
    with pytest.raises(BadParameter, match="are 2 processes, 1 is there"):
        grid(1, ParallelSettings(tensor=2))
    assert fitting(3, ParallelSettings(data=2, tensor=2)) == ParallelSettings()
    assert fitting(4, ParallelSettings(data=1, tensor=2)) == ParallelSettings(tensor=2)


def test_tensor_ranks_share_heads_evenly_or_not_at_all() -> None:
    config = model_config(complete(settings_of("muon", Path("x"))).model, 290)
    _require_division(config, 2)
    with pytest.raises(BadParameter, match="3 tensor ranks cannot share 2 KV heads") as refused:
        _require_division(config, 3)
    assert refused.value.remedy.startswith("For this model it may be 1, 2;")


def test_what_torchrun_says_is_understood() -> None:
    assert from_environment({}) == Processes()
    facts = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    processes = from_environment(facts)
    assert processes == Processes(5, 8, 1, 4)
    expected = "torchrun --nnodes 2 --rdzv-backend … --nproc-per-node 4 -m heedful.train --resume --out runs/x"
    assert processes.resume_command("runs/x") == expected
    for wrong in ({"RANK": "8"}, {"RANK": "x"}, {"LOCAL_RANK": "4"}):
        with pytest.raises(UsageError, match="torchrun"):
            from_environment(facts | wrong)


def test_the_first_process_alone_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heedful.train", "--out", "x", "--set", "optim.nothing=1"])
    for rank, said in (("1", ""), ("0", "heedful: optim.nothing: there is no such setting")):
        monkeypatch.setitem(os.environ, "RANK", rank)
        assert as_module.main() == 2
        assert capfd.readouterr().err.startswith(said)
        assert (rank == "1") == (said == "")


def test_a_dry_run_is_for_one_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["heedful.train", "--data", "x", "--out", "x", "--dry-run"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert as_module.main() == 2
    assert "is for one process, 2 are there" in capfd.readouterr().err


def test_the_processes_take_the_token_that_they_agree_on() -> None:
    decoder = Decoder(model_config(complete(settings_of("muon", Path("x"))).model, 290))
    assert generated(decoder, [1], 4, {7}, agree=lambda token: 5) == [5, 5, 5, 5]
    assert generated(decoder, [1], 4, {5}, agree=lambda token: 5) == []
