"""The loop: steps, and between them lines, validation, samples and checkpoints.

    begin(Path("runs/first"), settings)       # to the end, or until Ctrl-C
    resume(Path("runs/first"))                # where its newest whole checkpoint stands, to the bit

What people read goes through `say`; every step is a row of metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from heedful import __version__, hardware
from heedful.train.chat_rows import Piece
from heedful.train.chat_store import as_plain_text, shown
from heedful.train.checkpoint import remove_unfinished
from heedful.train.html_report import write_report
from heedful.train.report import StepLine, loss_plot, progress_line, short
from heedful.train.run_files import (
    METRICS,
    RunFiles,
    begin_run,
    cut_metrics,
    open_run,
    other_version,
    read_metrics,
    with_steps,
)
from heedful.train.settings import TrainSettings
from heedful.train.shape import dialled
from heedful.train.stop import StopOnSignal
from heedful.weights.run_folder import checkpoints, newest_checkpoint, step_of

if TYPE_CHECKING:
    from heedful.train.learner import Learner, StepFacts

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
    it is said. Raises as `begin_run` and `Learner.step` do.
    """
    run = begin_run(folder, complete(settings), say)
    if run.data.store.learned is not None:
        found = shown(run.data.store, run.tokenizer)
        if show is None:
            say(f"the first row; what is learned stands in [[ ]]:\n{as_plain_text(found)}")
        else:
            show(found)
    return _train(learner_of(run), say)


def complete(settings: TrainSettings) -> TrainSettings:
    """With nothing left to the dial or the machine: a resumed run must have as many threads as before."""
    threads = settings.run.threads or hardware.detect().threads
    return dialled(replace(settings, run=replace(settings.run, threads=threads)))


def resume(folder: Path, *, steps: int | None = None, say: Say = print) -> Outcome:
    """Go on after the newest whole checkpoint, from the start where there is none: to the weights and losses, bit for
    bit, of a run that was never stopped. `steps`: another last step, with the schedule that belongs to it.
    """
    run = open_run(folder)
    if (other := other_version(folder)) is not None:
        say(f"{folder} was begun with heedful {other}: {__version__} may not go on with it to the bit")
    if steps is not None:
        run = with_steps(run, steps)
    remove_unfinished(folder)
    learner = learner_of(run)
    found = newest_checkpoint(folder)
    for broken in checkpoints(folder):
        if found is None or step_of(broken) > step_of(found):
            say(f"{broken} is not whole: passed over")
    if found is not None:
        learner.load(found)
    cut_metrics(folder, learner.state.step)
    say(f"{folder} goes on after step {learner.state.step:,}")
    return _train(learner, say)


def learner_of(run: RunFiles) -> Learner:
    """What its settings ask for. Here a new kind of training joins."""
    from heedful.train.trainer import ChatTrainer, Trainer

    return ChatTrainer(run) if run.settings.data.chat else Trainer(run)


def _train(learner: Learner, say: Say) -> Outcome:
    folder, last_step = learner.folder, learner.settings.run.steps
    with StopOnSignal() as stop, (folder / METRICS).open("a", encoding="utf-8") as metrics:
        loop = _Loop(learner, metrics, say)
        while learner.state.step < last_step and stop.received is None:
            loop.step()
        loop.save_unless_saved()
    say(f"report: {write_report([folder]).resolve().as_uri()}")
    step = learner.state.step
    if step < last_step:
        say(f"stopped after step {step:,}; go on with: heedful train --resume --out {folder}")
        return Outcome(folder, step, stop.received)
    _say_the_end(learner, say)
    return Outcome(folder, step, None)


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
        self._peak_flops = measure_peak_flops()
        self._saved_step = learner.state.step
        self._since_line: list[StepFacts] = []
        self._began = perf_counter()

    def step(self) -> None:
        facts = self._learner.step()
        self._record(asdict(facts))
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
