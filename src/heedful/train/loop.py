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
from heedful.train.checkpoint import remove_unfinished
from heedful.train.report import StepLine, loss_plot, progress_line, short, training_flops
from heedful.train.run_files import RunFiles, begin_run, cut_metrics, open_run, other_version, read_metrics, with_steps
from heedful.train.settings import TrainSettings
from heedful.train.shape import dialled
from heedful.train.stop import StopOnSignal
from heedful.weights.run_folder import checkpoints, newest_checkpoint, step_of

if TYPE_CHECKING:
    from heedful.train.trainer import StepFacts, Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    folder: Path
    step: int
    stopped_by: int | None
    """The signal that ended the run before its last step."""


def begin(folder: Path, settings: TrainSettings, *, say: Say = print) -> Outcome:
    """A new run in `folder`. Raises as `begin_run` and Trainer.step do."""
    return _train(_trainer(begin_run(folder, complete(settings), say)), say)


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
    trainer = _trainer(run)
    found = newest_checkpoint(folder)
    for broken in checkpoints(folder):
        if found is None or step_of(broken) > step_of(found):
            say(f"{broken} is not whole: passed over")
    if found is not None:
        trainer.load(found)
    cut_metrics(folder, trainer.state.step)
    say(f"{folder} goes on after step {trainer.state.step:,}")
    return _train(trainer, say)


def _trainer(run: RunFiles) -> Trainer:
    from heedful.train.trainer import Trainer

    return Trainer(run)


def _train(trainer: Trainer, say: Say) -> Outcome:
    run = trainer.run
    with StopOnSignal() as stop, run.metrics.open("a", encoding="utf-8") as metrics:
        loop = _Loop(trainer, metrics, say)
        while trainer.state.step < run.settings.run.steps and stop.received is None:
            loop.step()
        loop.save_unless_saved()
    if trainer.state.step < run.settings.run.steps:
        say(f"stopped after step {trainer.state.step:,}; go on with: heedful train --resume --out {run.folder}")
        return Outcome(run.folder, trainer.state.step, stop.received)
    _say_the_end(run, trainer, say)
    return Outcome(run.folder, trainer.state.step, None)


def _say_the_end(run: RunFiles, trainer: Trainer, say: Say) -> None:
    losses = [row["loss"] for row in read_metrics(run.folder) if "loss" in row]
    if len(losses) > 1:
        say(loss_plot(losses))
    best = trainer.state.best_bits
    judged = "" if best is None else f"; best validation {best:.4f} bits a byte, at step {trainer.state.best_step:,}"
    say(f"{short(trainer.state.tokens)} tokens, {short(trainer.state.visits)} visits{judged}")
    say(f"run it: heedful generate -m {run.folder} 'Once'")


class _Loop:
    def __init__(self, trainer: Trainer, metrics: IO[str], say: Say) -> None:
        from heedful.train.peak import measure_peak_flops

        self._trainer, self._metrics, self._say = trainer, metrics, say
        self._run = trainer.settings.run
        self._peak_flops = measure_peak_flops()
        self._saved_step = trainer.state.step
        self._since_line: list[StepFacts] = []
        self._began = perf_counter()

    def step(self) -> None:
        facts = self._trainer.step()
        self._record(asdict(facts))
        self._since_line.append(facts)
        last = facts.step == self._run.steps
        if facts.step % self._run.log_every == 0 or last:
            self._say(self._line(facts))
        if self._trainer.run.data.validation_segments and self._is_due(self._run.eval_every, last):
            self._validate()
        if self._is_due(self._run.sample_every, last):
            self._sample()
        if self._is_due(self._run.save_every, last):
            self.save_unless_saved()

    def _is_due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self._trainer.state.step % every == 0)

    def save_unless_saved(self) -> None:
        if self._trainer.state.step != self._saved_step:
            self._metrics.flush()
            self._trainer.save()
            self._saved_step = self._trainer.state.step

    def _line(self, facts: StepFacts) -> str:
        tokens = sum(each.tokens for each in self._since_line)
        visits = sum(each.visits for each in self._since_line)
        seconds = max(perf_counter() - self._began, 1e-9)
        flops = training_flops(self._trainer.config, tokens, visits)
        state = self._trainer.state
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

    def _validate(self) -> None:
        began = perf_counter()
        bits, state = self._trainer.bits_per_byte(), self._trainer.state
        if state.best_bits is None or bits < state.best_bits:
            self._trainer.state = replace(state, best_bits=bits, best_step=state.step)
        self._record({"step": state.step, "bits_per_byte": bits})
        self._say(f"step {state.step:,}: validation {bits:.4f} bits a byte")
        self._began += perf_counter() - began  # the line's speed is that of steps

    def _sample(self) -> None:
        from heedful.train.network import generated

        began, run, state = perf_counter(), self._trainer.run, self._trainer.state
        prompt = [run.end_id, *run.tokenizer.encode(self._run.sample_prompt, add_bos=False)]
        ids = generated(
            self._trainer.shown, prompt, self._run.sample_tokens, run.end_id, seed=self._run.seed + state.step
        )
        text = run.tokenizer.decode(ids)
        self._record({"step": state.step, "sample": text})
        self._say(f"step {state.step:,} writes: {self._run.sample_prompt}{text}")
        self._began += perf_counter() - began

    def _record(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._metrics.flush()
