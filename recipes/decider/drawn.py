"""Lays down the order in which rows are trained on, since some domains are worth more than others:
python -m recipes.decider.drawn. Makes build/decider/drawn/{first,cool,again,short,validation}.jsonl, as heedful train
reads them.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from recipes.decider.data import BUILD, SHARES
from recipes.decider.rows import TRAIN, VALIDATION, Row, read_rows

SEED, AGAIN_SEED = 7, 8
BATCH = 8
STEPS, COOLING_STEPS, AGAIN_STEPS, SHORT_STEPS = 5000, 800, 5000, 100
SHORT_DOMAINS = ("topics", "intents")
"""What the two losses are compared on."""


def main() -> None:
    rows = read_rows(BUILD / f"{TRAIN}.jsonl")
    order = drawn(rows, SHARES)
    of_short = drawn([row for row in rows if row.domain in SHORT_DOMAINS], SHARES)
    write_labelled("first", islice(order, STEPS * BATCH))
    write_labelled("cool", islice(order, COOLING_STEPS * BATCH))
    write_labelled("again", islice(drawn(rows, SHARES, AGAIN_SEED), AGAIN_STEPS * BATCH))
    write_labelled("short", islice(of_short, SHORT_STEPS * BATCH))
    write_labelled("validation", read_rows(BUILD / f"{VALIDATION}.jsonl"))


def drawn(rows: Sequence[Row], shares: Mapping[str, int], seed: int = SEED) -> Iterator[Row]:
    """Rows for ever: a domain as often as its share says, its own rows in turn, each time in a new order."""
    rng, by_domain = random.Random(seed), defaultdict(list)
    for row in rows:
        by_domain[row.domain].append(row)
    weights = [shares[domain] for domain in by_domain]
    waiting: dict[str, list[Row]] = {domain: [] for domain in by_domain}
    while True:
        (domain,) = rng.choices(list(by_domain), weights)
        if not waiting[domain]:
            waiting[domain] = rng.sample(by_domain[domain], len(by_domain[domain]))
        yield waiting[domain].pop()


def write_labelled(name: str, rows: Iterable[Row]) -> None:
    path = BUILD / "drawn" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(labelled(row))}\n" for row in rows), encoding="utf-8")


def labelled(row: Row) -> dict[str, object]:
    shares = dict(zip(row.typed().labels, row.target, strict=True))
    return {"state": row.state, "questions": {"q": row.question}, "expected": {"q": shares}}


if __name__ == "__main__":
    main()
