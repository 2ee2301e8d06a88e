"""What the model must beat, whatever it is: python -m recipes.decider.baselines [--likelihood N].

The option nearest to the state by the trunk's own sentence embeddings, for every judged row; and a small chat model's
likelihoods for about N of them, evenly of the domains. build/decider/baselines.json: row's key → answer's index.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from recipes.decider.data import BUILD
from recipes.decider.rows import HELD_OUT, TEST, Row, read_rows

from heedful.decide.laya_input import option_texts
from heedful.decide.likelihood import Likelihood
from heedful.decide.question import Noul, Question, json_text
from heedful.engine.embedder import load_embedder
from heedful.engine.llm import LLM

PATH = BUILD / "baselines.json"
THREADS = 2
AT_ONCE = 64
Guesses = dict[str, dict[str, int]]
"""Baseline → row's key → index of its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--likelihood", type=int, default=200)
    asked = parser.parse_args()
    parts = [read_rows(BUILD / f"{part}.jsonl") for part in (TEST, HELD_OUT)]
    guesses: Guesses = {"embedding": nearest_options([row for rows in parts for row in rows])}
    guesses["smollm2"] = {
        key: index for rows in parts for key, index in likeliest(first_of_each(rows, asked.likelihood // 2)).items()
    }
    PATH.write_text(json.dumps(guesses))


def nearest_options(rows: Sequence[Row]) -> dict[str, int]:
    """Of yes and no, each put after the question, the nearer one."""
    texts = {row.key: [json_text(row.state), *_shown(row.typed())] for row in rows}
    vectors = _vectors(sorted({text for some in texts.values() for text in some}, key=len))
    return {
        key: int(np.argmax(np.stack([vectors[option] for option in options]) @ vectors[state]))
        for key, (state, *options) in texts.items()
    }


def _shown(question: Question) -> list[str]:
    if isinstance(question, Noul):
        return [f"{question.instructions} {answer}" for answer in ("No", "Yes")]
    return option_texts(question)


def _vectors(texts: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
    embedder = load_embedder("minilm", threads=THREADS)
    found: dict[str, npt.NDArray[np.float32]] = {}
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        found.update(zip(some, embedder.embed(some, truncate=True).vectors, strict=True))
    return found


def likeliest(rows: Sequence[Row]) -> dict[str, int]:
    decider = Likelihood(LLM("smollm2", threads=THREADS))
    return {row.key: int(np.argmax(decider.logits(row.state, [row.typed()])[0])) for row in rows}


def first_of_each(rows: Sequence[Row], count: int) -> list[Row]:
    """About `count` rows, as many of each domain."""
    by_domain: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_domain[row.domain].append(row)
    return [row for some in by_domain.values() for row in some[: -(-count // len(by_domain))]]


if __name__ == "__main__":
    main()
