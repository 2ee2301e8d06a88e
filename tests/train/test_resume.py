"""A run that is killed and resumed ends with the weights and losses of one that was not, to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from training_cases import quiet, small_settings, write_documents

from heedful.errors import BadParameter, FileFormatError, TrainingDiverged, UsageError
from heedful.train.loop import Outcome, begin, resume
from heedful.train.run_files import open_run, read_metrics
from heedful.train.trainer import Trainer
from heedful.weights.run_folder import checkpoints, is_whole, model_in, newest_checkpoint

STEPS = 12


def losses(folder: Path) -> list[tuple[int, float, float, int]]:
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return [(row["step"], row["loss"], row["grad_norm"], row["visits"]) for row in rows]


def final_files(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and the optimizer's state after the last step."""
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert newest.name == f"step-{STEPS:08d}"
    return {
        f"{file.name} {name}": values
        for file in newest.glob("*.safetensors")
        for name, values in load_file(file).items()
    }


def require_equal(folder: Path, other: Path) -> None:
    assert losses(folder) == losses(other)
    ours, theirs = final_files(folder), final_files(other)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert np.array_equal(values, theirs[name]), name
    states = [
        json.loads((f / "checkpoints" / f"step-{STEPS:08d}" / "training.json").read_text()) for f in (folder, other)
    ]
    assert states[0] == states[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    outcome = begin(folder, small_settings(data, optim__optimizer="muon"), say=quiet)
    assert (outcome.step, outcome.stopped_by) == (STEPS, None)
    return folder


def test_the_run_goes_over_more_than_one_epoch_in_packed_batches(unbroken: Path) -> None:
    run = open_run(unbroken)
    batch = run.data.batch(0)
    assert len({segment.length for segment in batch.segments}) > 3, "documents of many lengths share a batch"
    middle = Trainer(run)
    middle.load(unbroken / "checkpoints" / "step-00000008")
    assert middle.state.cursor % run.data.epoch_segments > 0, "a checkpoint in the middle of an epoch"
    assert list(read_metrics(unbroken))[-1]["step"] == STEPS


SYNCS_BEFORE_SAVING = 3
SYNCS_OF_A_SAVE = 10


@pytest.mark.parametrize(
    ("what", "number", "found"),
    [
        ("step", 7, "step-00000004"),  # between two checkpoints
        ("fsync", SYNCS_BEFORE_SAVING + SYNCS_OF_A_SAVE + 2, "step-00000004"),  # two files of the second are there
        ("fsync", SYNCS_BEFORE_SAVING + 2 * SYNCS_OF_A_SAVE, "step-00000008"),  # renamed, not yet synced
    ],
)
def test_kill_9_and_resume(what: str, number: int, found: str, data: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(Path(__file__).with_name("training_cases.py")), str(folder), str(data)]
    done = subprocess.run([*command, what, str(number)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert model_in(folder).name == found
    resume(folder, say=quiet)
    require_equal(folder, unbroken)
    assert not list((folder / "checkpoints").glob(".*")), "what the kill left is cleared away"


def test_what_ends_before_the_first_checkpoint_begins_again(data: Path, unbroken: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        interrupted(tmp_path / "run", data, 3, fail, optim__optimizer="muon")
    assert len(losses(tmp_path / "run")) == 2
    assert newest_checkpoint(tmp_path / "run") is None
    resume(tmp_path / "run", say=quiet)
    require_equal(tmp_path / "run", unbroken)


def interrupted(folder: Path, data: Path, at: int, stop: Callable[[], None], **more: Any) -> Outcome:
    """`stop` is called while step `at` runs."""

    original = Trainer.step

    def step(trainer: Trainer) -> Any:
        if trainer.state.step + 1 == at:
            stop()
        return original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        return begin(folder, small_settings(data, **more), say=quiet)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(
    number: signal.Signals, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    outcome = interrupted(tmp_path / "run", data, 6, lambda: signal.raise_signal(number), optim__optimizer="muon")
    assert (outcome.step, outcome.stopped_by) == (6, number)
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-00000006"
    resume(tmp_path / "run", say=quiet)
    require_equal(tmp_path / "run", unbroken)


def test_with_an_average_of_the_weights(data: Path, tmp_path: Path) -> None:
    more = {"optim__ema": 0.9, "optim__checkpoint_activations": True}
    begin(tmp_path / "whole", small_settings(data, **more), say=quiet)
    interrupted(tmp_path / "run", data, 6, lambda: signal.raise_signal(signal.SIGTERM), **more)
    resume(tmp_path / "run", say=quiet)
    require_equal(tmp_path / "run", tmp_path / "whole")
    files = final_files(tmp_path / "run")
    assert not np.array_equal(files["model.safetensors model.norm.weight"], files["trained.safetensors norm.weight"])


def test_a_damaged_checkpoint_is_passed_over(data: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, small_settings(data, optim__optimizer="muon"), say=quiet)
    last = folder / "checkpoints" / "step-00000012"
    with (last / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert not is_whole(last)
    assert model_in(folder).name == "step-00000008"
    said: list[str] = []
    resume(folder, say=said.append)
    assert f"{last} is not whole: passed over" in said
    require_equal(folder, unbroken)


def test_the_newest_and_the_best_stay(data: Path, tmp_path: Path) -> None:
    # nothing is learned, so the first judgement stays the best
    settings = small_settings(data, run__save_every=2, run__eval_every=4, run__keep=2, optim__lr=0.0)
    begin(tmp_path / "run", settings, say=quiet)
    assert [f.name for f in checkpoints(tmp_path / "run")] == [f"step-{step:08d}" for step in (4, 10, 12)]


def test_more_steps_go_on_from_the_end(data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", small_settings(data, run__steps=4), say=quiet)
    assert resume(tmp_path / "run", steps=6, say=quiet).step == 6
    assert [row[0] for row in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert open_run(tmp_path / "run").settings.run.steps == 6


def test_no_numbers_stop_the_run_before_a_checkpoint_and_name_the_batch(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    original = Trainer.gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer,
            "gradients",
            lambda trainer, batch: original(trainer, batch) * (float("nan") if trainer.state.step == 7 else 1.0),
        )
        with pytest.raises(
            TrainingDiverged, match=r"after 7 steps loss is nan .* segments \d+ to \d+ .* documents \d+,"
        ):
            begin(folder, small_settings(data), say=quiet)
    assert newest_checkpoint(folder) == folder / "checkpoints" / "step-00000004"
    assert [row[0] for row in losses(folder)] == [1, 2, 3, 4, 5, 6, 7]


def test_another_version_of_heedful_is_said(data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", small_settings(data, run__steps=1), say=quiet)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts | {"heedful": "0.0.1"}))
    said: list[str] = []
    resume(tmp_path / "run", say=said.append)
    assert re.search(r"was begun with heedful 0\.0\.1: .* may not go on with it to the bit", said[0])


def test_what_is_no_run_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no training run"):
        resume(tmp_path, say=quiet)
    begin(tmp_path / "run", small_settings(data, run__steps=1), say=quiet)
    with pytest.raises(UsageError, match="is a run already") as refused:
        begin(tmp_path / "run", small_settings(data), say=quiet)
    assert "--resume" in refused.value.remedy
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"run\.json cannot be read"):
        resume(tmp_path / "run", say=quiet)


def test_a_folder_is_taken_that_holds_leftovers_and_nothing_else(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / ".data.123" / "train").mkdir(parents=True)  # killed while it tokenized
    (folder / "data").mkdir()  # and before run.json was there
    begin(folder, small_settings(data, run__steps=1), say=quiet)
    expected = ["checkpoints", "data", "metrics.jsonl", "report.html", "run.json"]
    assert sorted(each.name for each in folder.iterdir()) == expected
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("x")
    with pytest.raises(BadParameter, match=r"holds other things: letter\.txt"):
        begin(tmp_path / "other", small_settings(data), say=quiet)
    with pytest.raises(BadParameter, match="is no folder"):
        begin(tmp_path / "other" / "letter.txt", small_settings(data), say=quiet)
    assert (tmp_path / "other" / "letter.txt").read_text() == "x"


def test_data_that_changed_is_refused(data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", small_settings(data, run__steps=1), say=quiet)
    tokens = tmp_path / "run" / "data" / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(FileFormatError, match="sha256 is another"):
        resume(tmp_path / "run", say=quiet)
