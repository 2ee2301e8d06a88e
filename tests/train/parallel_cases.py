"""The runs of several processes that test_parallel.py looks at, one after another: python parallel_cases.py FOLDER

FOLDER has texts.jsonl and what one process has trained on it (`alone/adamw`, `alone/muon`, `alone/updates`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_cases import quiet, small_settings

import heedful.train.parallel  # noqa: F401  once, before processes part
from heedful.errors import ProcessLost
from heedful.train import peak
from heedful.train.learner import Learner
from heedful.train.loop import Outcome, begin, resume
from heedful.train.processes import from_environment
from heedful.train.run_files import open_run
from heedful.train.settings import ModelSettings, ParallelSettings, TrainSettings
from heedful.train.team import joined
from heedful.train.trainer import Trainer

STEPS = 4


def settings_of(kind: str, folder: Path, **more: Any) -> TrainSettings:
    """Of one process and of many. Every checkpoint stays."""
    common = {"run__steps": STEPS, "run__save_every": 2, "run__keep": STEPS, "run__eval_every": 2}
    common |= {"run__sample_every": STEPS, "run__sample_tokens": 3, "optim__micro_batches": 1}
    kinds: dict[str, dict[str, Any]] = {
        "adamw": {"optim__ema": 0.9, "optim__micro_batches": 2, "optim__checkpoint_activations": True},
        "muon": {"optim__optimizer": "muon"},
        "updates": {"model__base": str(folder / "alone" / "adamw"), "lora__rank": 2, "optim__lr": 0.01},
    }
    settings = small_settings(folder / "texts.jsonl", **(common | kinds[kind] | more))
    if kind != "updates":
        return settings
    of_base = ModelSettings(base=settings.model.base, context_len=settings.model.context_len)
    return replace(settings, model=of_base, data=replace(settings.data, vocab_size=None))


def before_last_checkpoint(run: Path, copy: Path) -> Path:
    """A run as it was two steps before its end."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    return copy


def in_processes(size: int, work: Callable[[], Any]) -> list[int]:
    """Runs it as torchrun would start it; returns how each process has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_rank(rank: int) -> None:
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in facts.items()} | {"MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        peak.measure_peak_flops = lambda: 1e9
        work()

    started = [multiprocessing.get_context("fork").Process(target=as_rank, args=(rank,)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
        assert process.exitcode is not None, "it hangs"
    return [process.exitcode or 0 for process in started]


def at_step(number: int, rank: int, do: Callable[[], Any]) -> None:
    """One of the processes does it before that step."""
    step = Learner.step

    def watched(learner: Learner) -> Any:
        if learner.state.step + 1 == number and from_environment().rank == rank:
            do()
        return step(learner)

    Learner.step = watched  # type: ignore[method-assign]


def stopped(folder: Path) -> None:
    at_step(3, 1, lambda: signal.raise_signal(signal.SIGTERM))
    outcome: Outcome = begin(folder / "stopped", settings_of("adamw", folder), say=quiet)
    (folder / f"stopped-{from_environment().rank}.json").write_text(json.dumps([outcome.step, outcome.stopped_by]))


def killed(folder: Path) -> None:
    at_step(4, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        begin(folder / "killed", settings_of("adamw", folder), say=quiet)
    except ProcessLost as error:
        (folder / "killed.txt").write_text(str(error))


def gradients(folder: Path) -> None:
    with joined(from_environment(), ParallelSettings(data=2, tensor=2)) as team:
        run = open_run(folder / "alone" / "adamw")
        trainer = Trainer(run, team)
        loss = trainer.gradients(run.data.batch(3))
        trainer.spread.take_gradients()
        held = trainer.spread.held
        found = {name: np.asarray(trainer.spread.gathered(name, each.grad)) for name, each in held.items()}  # type: ignore[arg-type]
        assert all(each.numel() <= layout_size(trainer, name) // 2 for name, each in held.items())
        if team.is_first:
            np.savez(folder / "gradients.npz", loss=loss, **found)


def layout_size(trainer: Trainer, name: str) -> int:
    return int(np.prod(trainer.spread.layouts[name].shape))


def main(folder: Path) -> None:
    alone = folder / "alone"
    two_tensor = ParallelSettings(tensor=2)
    runs: dict[str, tuple[int, Callable[[], Any]]] = {
        "data": (2, lambda: begin(folder / "data", settings_of("adamw", folder), say=quiet)),
        "stopped": (2, lambda: stopped(folder)),
        "resumed": (2, lambda: resume(folder / "stopped", say=quiet)),
        "grid": (4, lambda: begin(folder / "grid", settings_of("muon", folder, parallel__tensor=2), say=quiet)),
        "widened": (2, lambda: resume(folder / "widened", parallel=two_tensor, say=quiet)),
        "updates": (2, lambda: begin(folder / "updates", settings_of("updates", folder), say=quiet)),
        "gradients": (4, lambda: gradients(folder)),
        "killed": (2, lambda: killed(folder)),
    }
    before_last_checkpoint(alone / "adamw", folder / "widened")
    ended = {name: in_processes(size, work) for name, (size, work) in runs.items()}
    (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
