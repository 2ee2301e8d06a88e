"""Fits temperatures and judges: python -m recipes.decider.evaluate FOLDER RESULTS.json [--beside FOLDER …].

Beside the model stand what it must beat: the most frequent answer, the nearest option by the trunk's own sentence
embeddings, and a small chat model's likelihoods. Intervals are of the bootstrap over groups of like rows.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from recipes.decider.baselines import PATH, Guesses
from recipes.decider.data import BUILD
from recipes.decider.drawn import SHORT_DOMAINS
from recipes.decider.rows import HELD_OUT, TEST, VALIDATION, Row, read_rows

from heedful.decide.calibrate import Calibration, Reliability, fit, reliability, softmax
from heedful.decide.calibrate import Row as Labelled
from heedful.decide.laya import Laya
from heedful.decide.question import Choice

Logits = list[tuple[float, ...]]
RESAMPLES = 1000
THREADS = 1
"""Two that wait for each other are slower on busy cores."""
FEWEST_ALIKE = 20
"""A question that is asked so often has a most frequent answer of its own; rarer ones share their type's."""
REORDERED, REORDERINGS = 80, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="models of the comparison of losses")
    asked = parser.parse_args()
    began = perf_counter()
    results = judge(asked.folder)
    results["losses"] = {other.name: judge_loss(other) for other in asked.beside}
    results["seconds"] = round(perf_counter() - began)
    asked.results.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    print(summary(results))


def judge(folder: Path) -> dict[str, Any]:
    """Of one checkpoint, which gets its temperatures first."""
    decider = Laya.load(str(folder), threads=THREADS)
    validation = read_rows(BUILD / f"{VALIDATION}.jsonl")
    of_validation = logits_of(decider, validation)
    calibration = fit_temperatures(validation, of_validation)
    keep_temperatures(folder, calibration)
    parts = {part: read_rows(BUILD / f"{part}.jsonl") for part in (TEST, HELD_OUT)}
    found = {part: logits_of(decider, rows) for part, rows in parts.items()}
    results: dict[str, Any] = {
        "training": json.loads((folder / "train.json").read_text()),
        "temperatures": calibration.to_dict(),
        "validation": judged(validation, of_validation, calibration, {}),
        "reordering": reordering(decider, parts[TEST]),
    }
    guesses: Guesses = json.loads(PATH.read_text())
    for part, rows in parts.items():
        nearest = [guesses["embedding"][row.key] for row in rows]
        baselines = {"majority": most_frequent(rows), "embedding": nearest}
        results[part] = judged(rows, found[part], calibration, baselines)
        results[part]["likelihood"] = against_likelihood(rows, found[part], guesses["smollm2"])
    return results


def judge_loss(folder: Path) -> dict[str, Any]:
    """Of a model trained for the comparison of losses: the test rows of its own domains."""
    training = json.loads((folder / "train.json").read_text())
    decider = Laya.load(str(folder), threads=THREADS)
    validation, test = (
        [row for row in read_rows(BUILD / f"{part}.jsonl") if row.domain in SHORT_DOMAINS]
        for part in (VALIDATION, TEST)
    )
    calibration = fit_temperatures(validation, logits_of(decider, validation))
    return {"training": training, **judged(test, logits_of(decider, test), calibration, {})["all"]}


def logits_of(decider: Any, rows: Sequence[Row]) -> Logits:
    return [decider.logits(row.state, [row.typed()])[0] for row in rows]


def fit_temperatures(rows: Sequence[Row], logits: Logits) -> Calibration:
    return fit(Labelled(row.question["type"], z, row.label) for row, z in zip(rows, logits, strict=True))


def keep_temperatures(folder: Path, calibration: Calibration) -> None:
    """In the checkpoint's own config."""
    path = folder / "rl_agent_config.json"
    settings = json.loads(path.read_text())
    settings["temperature"] = [round(calibration.by_type.get(kind, 1.0), 4) for kind in ("choice", "score", "noul")]
    settings["temperature_by_options"] = {name: round(value, 4) for name, value in calibration.by_options.items()}
    path.write_text(f"{json.dumps(settings, indent=1)}\n", encoding="utf-8")


def judged(
    rows: Sequence[Row], logits: Logits, calibration: Calibration, guesses: dict[str, list[int]]
) -> dict[str, Any]:
    """Of all rows together and of each domain: accuracy and calibration, and the baselines' accuracy beside them."""
    by_domain: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        by_domain[row.domain].append(at)
    shares = [
        softmax(z, calibration.temperature(row.question["type"], len(z))) for row, z in zip(rows, logits, strict=True)
    ]
    right = np.array([int(np.argmax(p)) == row.label for row, p in zip(rows, shares, strict=True)])
    guessed = {
        name: np.array([g == row.label for row, g in zip(rows, of, strict=True)]) for name, of in guesses.items()
    }

    def of(indices: list[int]) -> dict[str, Any]:
        some = [rows[at] for at in indices]
        found = short(reliability([shares[at].tolist() for at in indices], [row.label for row in some]))
        found["interval"] = interval(some, right[indices].astype(float))
        for name, correct in guessed.items():
            found[name] = round(float(correct[indices].mean()), 4)
            found[f"above_{name}"] = interval(some, right[indices].astype(float) - correct[indices])
        return found

    everything = of(list(range(len(rows))))
    return {"all": everything, "domains": {name: of(indices) for name, indices in by_domain.items()}}


def short(found: Reliability) -> dict[str, Any]:
    numbers = {"accuracy": found.accuracy, "ece": found.ece, "nll": found.nll, "brier": found.brier}
    return {"rows": found.rows, **{name: round(value, 4) for name, value in numbers.items()}}


def interval(rows: Sequence[Row], values: np.ndarray) -> list[float]:
    """95 % of the mean, by drawing groups of like rows anew."""
    groups: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        groups[row.group or str(at)].append(at)
    sums = np.array([[values[members].sum(), len(members)] for members in groups.values()])
    draws = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    drawn = sums[draws].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return [round(float(low), 4), round(float(high), 4)]


def most_frequent(rows: Sequence[Row]) -> list[int]:
    """Of each row's labels the one that is right most often among these very rows: a guess that knows their answers."""
    alike = Counter((row.domain, row.question["type"], row.question["instructions"]) for row in rows)

    def kind(row: Row) -> tuple[str, ...]:
        full = (row.domain, row.question["type"], row.question["instructions"])
        return full if alike[full] >= FEWEST_ALIKE else full[:2]

    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[kind(row)][row.typed().labels[row.label]] += 1
    return [max(range(len(row.target)), key=lambda at: counts[kind(row)][row.typed().labels[at]]) for row in rows]


def against_likelihood(rows: Sequence[Row], logits: Logits, guesses: dict[str, int]) -> dict[str, Any]:
    """Accuracy of smollm2's likelihoods on the rows that it was asked, and of the model on the same."""
    some = [at for at, row in enumerate(rows) if row.key in guesses]
    drawn = [rows[at] for at in some]
    ours = np.array([int(np.argmax(logits[at])) == rows[at].label for at in some])
    theirs = np.array([guesses[row.key] == row.label for row in drawn])
    by = {}
    for domain in dict.fromkeys(row.domain for row in drawn):
        inside = [row.domain == domain for row in drawn]
        by[domain] = [round(float(values[inside].mean()), 4) for values in (ours, theirs)]
    return {
        "rows": len(some),
        "ours": round(float(ours.mean()), 4),
        "smollm2": round(float(theirs.mean()), 4),
        "above": interval(drawn, ours.astype(float) - theirs),
        "ours_and_smollm2_by_domain": by,
    }


def reordering(decider: Laya, rows: Sequence[Row]) -> dict[str, Any]:
    """Choices asked again with their options in other orders: how many answers change, and the largest change."""
    rng, flips, asked, largest = random.Random(0), 0, 0, 0.0
    choices = [row for row in rows if row.question["type"] == "choice"]
    choices = choices[:: max(1, len(choices) // REORDERED)]
    for row in choices:
        question = row.typed()
        assert isinstance(question, Choice), question
        first = dict(zip(question.labels, decider.logits(row.state, [question])[0], strict=True))
        for _ in range(REORDERINGS):
            names = rng.sample(question.labels, len(question.labels))
            again = replace(question, options={name: question.described()[name] for name in names})
            second = dict(zip(names, decider.logits(row.state, [again])[0], strict=True))
            asked += 1
            flips += max(first, key=first.__getitem__) != max(second, key=second.__getitem__)
            largest = max(largest, *(abs(first[name] - second[name]) for name in names))
    return {"questions": len(choices), "asked": asked, "flips": flips, "largest_logit_change": largest}


def summary(results: dict[str, Any]) -> str:
    lines = []
    for part in (TEST, HELD_OUT):
        for name, found in [*results[part]["domains"].items(), ("all", results[part]["all"])]:
            shown = " ".join(
                f"{key}={found[key]}"
                for key in ("rows", "accuracy", "ece", "majority", "embedding", "above_majority", "above_embedding")
                if key in found
            )
            lines.append(f"{part:9} {name:20} {shown}")
    return "\n".join([*lines, str(results["reordering"])])


if __name__ == "__main__":
    main()
