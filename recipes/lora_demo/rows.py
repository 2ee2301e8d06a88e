"""Rows of a format that no model has seen: a sentence about a person, and the same as a record of an invented kind.

    python recipes/lora_demo/rows.py FOLDER     # FOLDER/train.jsonl, FOLDER/held_out.jsonl

Names, towns and trades of held-out rows occur in training, in other company; no sentence does.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAINED, HELD_OUT = 900, 60
_FIRST = "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karla Leo Mira Nils Olga Paul Rita Simon Tilda"
_LAST = "Adler Berg Costa Dietz Eklund Ferrari Grant Holm Ivers Jensen Keller Lund Moreau Novak Olsen Petrov Quinn"
_TOWNS = "Bergen Cadiz Dublin Essen Florence Geneva Hamburg Krakow Lisbon Malmo Naples Oxford Porto Riga Seville Vienna"
_TRADES = "baker carpenter doctor engineer farmer gardener lawyer miner nurse painter sailor tailor teacher weaver"
_SENTENCES = (
    "{first} {last}, a {trade}, was born in {town} in {year}.",
    "In {year} {first} {last} was born in {town} and later became a {trade}.",
    "The {trade} {first} {last} comes from {town}; the year of birth is {year}.",
    "Born {year} in {town}: {first} {last}, by trade a {trade}.",
)


def answer(first: str, last: str, town: str, trade: str, year: int) -> str:
    """The record: ids of three letters of the last name and two digits of the year, then the fields by tags."""
    return f"#{last[:3].upper()}{year % 100:02d} <n>{last}, {first} <o>{trade} <b>{town}'{year}"


def rows(count: int, seed: int, without: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """`count` different ones, none with a prompt of `without`."""
    draw, found = random.Random(seed), dict[str, dict[str, str]]()
    while len(found) < count:
        first, last, town, trade = (draw.choice(words.split()) for words in (_FIRST, _LAST, _TOWNS, _TRADES))
        year = draw.randint(1810, 1999)
        sentence = draw.choice(_SENTENCES).format(first=first, last=last, town=town, trade=trade, year=year)
        if sentence not in without:
            found[sentence] = {"prompt": sentence, "completion": answer(first, last, town, trade, year)}
    return list(found.values())


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trained = rows(TRAINED, seed=1)
    held_out = rows(HELD_OUT, seed=2, without=frozenset(row["prompt"] for row in trained))
    for name, of_part in (("train", trained), ("held_out", held_out)):
        text = "".join(f"{json.dumps(row)}\n" for row in of_part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(trained)} rows to train on and {len(held_out)} to judge by, in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
