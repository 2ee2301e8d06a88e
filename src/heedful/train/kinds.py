"""Which kind of training the settings of a run ask for. Here a new kind joins: how its data are written when it begins,
how its folder is opened, and who learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.train.decision_run import DecisionRun, begin_decision_run, open_decision_run
from heedful.train.run_files import RunFiles, begin_run, open_run, read_settings
from heedful.train.settings import TrainSettings

if TYPE_CHECKING:
    from heedful.train.learner import Learner
    from heedful.train.team import Team

AnyRun = RunFiles | DecisionRun


def begin_any(folder: Path, settings: TrainSettings, say: Callable[[str], None]) -> AnyRun:
    """Raises as `begin_run` and `begin_decision_run` do."""
    begin = begin_decision_run if settings.data.decisions else begin_run
    return begin(folder, settings, say)


def open_any(folder: Path) -> AnyRun:
    """Raises as `open_run` does."""
    return open_decision_run(folder) if read_settings(folder).data.decisions else open_run(folder)


def learner_of(run: AnyRun, team: Team | None = None) -> Learner:
    from heedful.train.spread import ALONE

    if isinstance(run, DecisionRun):
        from heedful.train.decision_trainer import DecisionTrainer

        return DecisionTrainer(run, team or ALONE)
    from heedful.train.preference_trainer import PreferenceTrainer
    from heedful.train.trainer import ChatTrainer, Trainer

    data = run.settings.data
    kind = PreferenceTrainer if data.preferences else ChatTrainer if data.chat else Trainer
    return kind(run, team or ALONE)
