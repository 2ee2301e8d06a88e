"""The folder that is judged and shipped, of what was trained: python -m recipes.decider.checkpoint FOLDER RUN [RUN …].

Of the last run the newest checkpoint, its weights as float16; train.json says what all the runs were.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.numpy import load_file, save_file

from heedful.train.run_files import read_metrics, read_settings
from heedful.weights.run_folder import model_in

CONFIG = "rl_agent_config.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    asked = parser.parse_args()
    write_halves(model_in(asked.runs[-1]), asked.folder)
    (asked.folder / "train.json").write_text(json.dumps(facts_of(asked.runs)))


def write_halves(checkpoint: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: values.astype("float16") for name, values in tensors.items()}, folder / "model.safetensors")
    shutil.copyfile(checkpoint / CONFIG, folder / CONFIG)


def facts_of(runs: Sequence[Path]) -> dict[str, Any]:
    rows = [list(read_metrics(run)) for run in runs]
    steps = [[row for row in of_run if "loss" in row] for of_run in rows]
    speeds = [median(row["tokens_per_second"] for row in of_run if "tokens_per_second" in row) for of_run in rows]
    seconds = [sum(row["tokens"] for row in some) / speed for some, speed in zip(steps, speeds, strict=True)]
    last = read_settings(runs[-1]).decide
    return {"loss": last.loss, "batch": last.batch, "steps": sum(map(len, steps)), "seconds": round(sum(seconds))}


if __name__ == "__main__":
    main()
