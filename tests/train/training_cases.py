"""A text with documents of many lengths, settings of a model so small that a step takes milliseconds, and a run that
kills itself: python training_cases.py FOLDER DATA step|fsync|remove NUMBER
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.train.settings import TrainSettings, changed

WORDS = "the cat sat on a mat and the dog ran to a big red house by the sea with one old man é".split()  # noqa: SIM905

SMALL: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.intermediate_size": 48,
    "model.context_len": 32,
    "model.windows": "SL",
    "model.window": 8,
    "data.vocab_size": 290,
    "optim.batch_tokens": 96,
    "optim.micro_batches": 2,
    "run.steps": 12,
    "run.threads": 1,
    "run.save_every": 4,
    "run.eval_every": 4,
    "run.eval_tokens": 64,
    "run.sample_every": 0,
}

LORA = {"lora.rank": 4, "lora.alpha": 8.0}


def quiet(line: str) -> None:
    pass


def write_documents(path: Path, count: int = 60) -> Path:
    """JSONL; a few epochs of twelve steps."""
    draw = random.Random(7)
    texts = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 30))) for _ in range(count)]
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
    return path


def small_settings(data: Path, **more: Any) -> TrainSettings:
    """`more`: section__key=value."""
    values = {name.replace("__", "."): value for name, value in more.items()}
    return changed(TrainSettings(), SMALL | {"data.files": [str(data)]} | values)


def _killing_at(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


def main(folder: str, data: str, what: str, number: str) -> None:
    from heedful.train import loop, trainer

    if what == "step":
        trainer.Trainer.step = _killing_at(int(number), trainer.Trainer.step)  # type: ignore[method-assign]
    elif what == "fsync":
        os.fsync = _killing_at(int(number), os.fsync)
    else:
        shutil.rmtree = _killing_at(int(number), shutil.rmtree)  # type: ignore[assignment]
    loop.begin(Path(folder), small_settings(Path(data), optim__optimizer="muon"), say=lambda line: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
