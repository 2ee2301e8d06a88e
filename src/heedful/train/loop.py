"""The loop: steps, and between them lines, validation, samples and checkpoints.

    begin(Path("runs/first"), settings)       # to the end, or until Ctrl-C
    resume(Path("runs/first"))                # where its newest whole checkpoint stands, to the bit

What people read goes through `say`; every step is a row of metrics.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from heedful import __version__, hardware
from heedful.errors import FileFormatError
from heedful.train.chat_rows import Piece
from heedful.train.chat_store import as_plain_text, shown
from heedful.train.checkpoint import remove_unfinished
from heedful.train.html_report import write_report
from heedful.train.kinds import begin_any, learner_of, open_any
from heedful.train.processes import fitting, from_environment, grid
from heedful.train.report import StepLine, loss_plot, progress_line, short
from heedful.train.run_files import (
    METRICS,
    RunFiles,
    cut_metrics,
    other_version,
    read_metrics,
    read_settings,
    set_steps,
)
from heedful.train.settings import ParallelSettings, TrainSettings
from heedful.train.shape import dialled
from heedful.train.stop import StopOnSignal
from heedful.weights.run_folder import checkpoints, newest_checkpoint, step_of

if TYPE_CHECKING:
    from heedful.train.learner import Learner, StepFacts
    from heedful.train.team import Team

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    folder: Path
    step: int
    stopped_by: int | None
    """The signal that ended the run before its last step."""


def begin(
    folder: Path, settings: TrainSettings, *, say: Say = print, show: Callable[[list[Piece]], None] | None = None
) -> Outcome:
    """A new run in `folder`. `show`: gets a chat of the data, in pieces that are learned and that are context; None:
    it is said. Raises as `begin_any` and `Learner.step` do. Started by torchrun, its processes share the run; the first
    one alone tokenizes, says and writes.
    """
    settings = complete(settings)
    with _team(settings.parallel) as team:
        say = say if _is_first(team) else _nothing
        with _first_before_others(team):
            run = begin_any(folder, settings, say) if _is_first(team) else open_any(folder)
        if isinstance(run, RunFiles) and run.data.store.learned is not None and _is_first(team):
            _show_a_chat(run, say, show)
        learner = learner_of(run, team)
        learner.prepare(say)
        return _train(learner, say)


@contextmanager
def _team(settings: ParallelSettings) -> Iterator[Team | None]:
    """None: this process is alone."""
    processes = from_environment()
    grid(processes.size, settings)
    if processes.size == 1:
        yield None
        return
    from heedful.train.team import joined

    with joined(processes, settings) as team:
        yield team


def _nothing(line: str) -> None:
    pass


def _is_first(team: Team | None) -> bool:
    return team is None or team.is_first


def _first_before_others(team: Team | None) -> AbstractContextManager[None]:
    return nullcontext() if team is None else team.first_before_others()


def _show_a_chat(run: RunFiles, say: Say, show: Callable[[list[Piece]], None] | None) -> None:
    found = shown(run.data.store, run.tokenizer)
    if show is None:
        say(f"the first row; what is learned stands in [[ ]]:\n{as_plain_text(found)}")
    else:
        show(found)


def complete(settings: TrainSettings) -> TrainSettings:
    """With nothing left to the dial or the machine: a resumed run must have as many threads as before."""
    threads = settings.run.threads or hardware.detect().threads
    return dialled(replace(settings, run=replace(settings.run, threads=threads)))


def resume(
    folder: Path, *, steps: int | None = None, parallel: ParallelSettings | None = None, say: Say = print
) -> Outcome:
    """Go on after the newest whole checkpoint, from the start where there is none: to the weights and losses, bit for
    bit, of a run that was never stopped, where there are as many processes as before; with another number equal but for
    the order of sums. `steps`: another last step, with the schedule that belongs to it. `parallel`: how the processes
    share the model from now on.
    """
    size = from_environment().size
    wanted = parallel or fitting(size, read_settings(folder).parallel)
    with _team(wanted) as team:
        say = say if _is_first(team) else _nothing
        with _first_before_others(team):
            if _is_first(team):
                if steps is not None:
                    set_steps(folder, steps)
                remove_unfinished(folder)
            run = open_any(folder)
        if (other := other_version(folder)) is not None:
            say(f"{folder} was begun with heedful {other}: {__version__} may not go on with it to the bit")
        learner = learner_of(run, team)
        learner.prepare(say)
        found = _newest(folder, learner.team, say)
        if found is not None:
            learner.load(found)
        if _is_first(team):
            cut_metrics(folder, learner.state.step)
        say(f"{folder} goes on after step {learner.state.step:,}")
        return _train(learner, say)


def _newest(folder: Path, team: Team, say: Say) -> Path | None:
    """The newest whole checkpoint. The first process looks at all of every file; the others take its word."""
    found = newest_checkpoint(folder) if team.is_first else None
    step = team.of_first(-1 if found is None else step_of(found))
    for broken in checkpoints(folder):
        if step_of(broken) > step:
            say(f"{broken} is not whole: passed over")
    if step < 0:
        return None
    taken = next((each for each in checkpoints(folder) if step_of(each) == step), None)
    if taken is None:
        raise FileFormatError(f"{folder} has no checkpoint of step {step:,} here", "All machines must see one folder.")
    return taken


def _train(learner: Learner, say: Say) -> Outcome:
    folder, last_step, team = learner.folder, learner.settings.run.steps, learner.team
    rows = folder / METRICS if team.is_first else Path(os.devnull)
    with StopOnSignal() as stop, rows.open("a", encoding="utf-8") as metrics:
        loop, stopped_by = _Loop(learner, metrics, say), 0
        while learner.state.step < last_step and not (stopped_by := team.largest(stop.received or 0)):
            loop.step()
        loop.save_unless_saved()
    step = learner.state.step
    outcome = Outcome(folder, step, stopped_by if step < last_step else None)
    if not team.is_first:
        return outcome
    say(f"report: {write_report([folder]).resolve().as_uri()}")
    if step < last_step:
        say(f"stopped after step {step:,}; go on with: {team.processes.resume_command(str(folder))}")
    else:
        _say_the_end(learner, say)
    return outcome


def _say_the_end(learner: Learner, say: Say) -> None:
    losses = [row["loss"] for row in read_metrics(learner.folder) if "loss" in row]
    if len(losses) > 1:
        say(loss_plot(losses))
    state, judged = learner.state, ""
    if state.best_figure is not None:
        judged = f"; best validation {state.best_figure:.4f} {learner.best_by.unit}, at step {state.best_step:,}"
    say(f"{short(state.tokens)} tokens, {short(state.visits)} visits{judged}")
    say(f"run it: {learner.how_to_run()}")


class _Loop:
    def __init__(self, learner: Learner, metrics: IO[str], say: Say) -> None:
        from heedful.train.peak import measure_peak_flops

        self._learner, self._metrics, self._say = learner, metrics, say
        self._run = learner.settings.run
        self._peak_flops = learner.team.sum_over_all(measure_peak_flops())
        self._saved_step = learner.state.step
        self._since_line: list[StepFacts] = []
        self._began = perf_counter()

    def step(self) -> None:
        facts = self._learner.step()
        row = asdict(facts)
        self._record(row | row.pop("figures"))
        self._since_line.append(facts)
        last = facts.step == self._run.steps
        if facts.step % self._run.log_every == 0 or last:
            self._say(self._line(facts))
        if self._is_due(self._run.eval_every, last):
            self._judge()
        if self._is_due(self._run.sample_every, last):
            self._sample()
        if self._is_due(self._run.save_every, last):
            self.save_unless_saved()

    def _is_due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self._learner.state.step % every == 0)

    def save_unless_saved(self) -> None:
        if self._learner.state.step != self._saved_step:
            self._metrics.flush()
            self._learner.save()
            self._saved_step = self._learner.state.step

    def _line(self, facts: StepFacts) -> str:
        tokens = sum(each.tokens for each in self._since_line)
        visits = sum(each.visits for each in self._since_line)
        seconds = max(perf_counter() - self._began, 1e-9)
        flops = self._learner.training_flops(tokens, visits)
        state = self._learner.state
        line = StepLine(
            step=facts.step,
            steps=self._run.steps,
            loss=facts.loss,
            smoothed=state.smoothed / state.smoothed_weight,
            lr=facts.lr,
            grad_norm=facts.grad_norm,
            figures=facts.figures,
            tokens_per_second=tokens / seconds,
            peak_share=flops / seconds / self._peak_flops,
            visits=facts.visits,
            seconds_left=seconds / len(self._since_line) * (self._run.steps - facts.step),
        )
        self._record({"step": facts.step, "tokens_per_second": line.tokens_per_second, "peak_share": line.peak_share})
        self._since_line, self._began = [], perf_counter()
        return progress_line(line)

    def _judge(self) -> None:
        began = perf_counter()
        if figures := self._learner.judge():
            state, best_by = self._learner.state, self._learner.best_by
            value = figures[best_by.name]
            if best_by.is_better(value, state.best_figure):
                self._learner.state = replace(state, best_figure=value, best_step=state.step)
            direction = {"higher_is_better": True} if best_by.higher_is_better else {}
            self._record({"step": state.step, "judged_by": best_by.name, **direction, **figures})
            others = "".join(f" · {name} {figure:.4f}" for name, figure in figures.items() if name != best_by.name)
            self._say(f"step {state.step:,}: validation {value:.4f} {best_by.unit}{others}")
        self._began += perf_counter() - began  # the line's speed is that of steps

    def _sample(self) -> None:
        began, step = perf_counter(), self._learner.state.step
        for text in self._learner.sample():
            self._record({"step": step, "sample": text})
            self._say(f"step {step:,} writes: {text}")
        self._began += perf_counter() - began

    def _record(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._metrics.flush()
