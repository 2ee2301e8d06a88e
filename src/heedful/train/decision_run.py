"""The folder of a run that learns decisions: as run_files.py has it, with questions as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from heedful.errors import FileFormatError
from heedful.train.base import Base
from heedful.train.decider_base import open_decider_base
from heedful.train.decision_store import DecisionData, DecisionStore, write_decisions
from heedful.train.run_files import DATA, base_of, read_settings, write_run
from heedful.train.settings import TrainSettings


@dataclass(frozen=True)
class DecisionRun:
    folder: Path
    settings: TrainSettings
    data: DecisionData
    base: Base


def begin_decision_run(folder: Path, settings: TrainSettings, say: Callable[[str], None]) -> DecisionRun:
    """Checks every question of the data against the base, and writes them into a new run's folder. Raises as
    `write_run`, `open_decider_base` and `write_decisions` do.
    """

    def write(aside: Path) -> Base:
        base, opened = open_decider_base(str(settings.model.base), settings)
        for name, paths in (("train", settings.data.decisions), ("validation", settings.data.validation)):
            if paths:
                say(write_decisions(aside / name, [Path(path) for path in paths], opened.packer, name))
        return base

    write_run(folder, settings, write)
    return open_decision_run(folder)


def open_decision_run(folder: Path) -> DecisionRun:
    """Raises UsageError when no run is there, FileFormatError when its files are damaged."""
    settings, base = read_settings(folder), base_of(folder)
    if base is None:
        raise FileFormatError(f"{folder} does not say which base it has", "Begin the run anew.")
    data = DecisionData(
        DecisionStore.open(folder / DATA / "train"),
        batch=settings.decide.batch,
        seed=settings.run.seed,
        validation_share=settings.data.validation_share,
        validation=DecisionStore.open(folder / DATA / "validation") if settings.data.validation else None,
        shuffle=settings.data.shuffle,
    )
    return DecisionRun(folder, settings, data, base)
