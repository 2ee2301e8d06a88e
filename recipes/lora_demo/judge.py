"""How many held-out rows the engine answers to the letter, with the adapter that was trained and without it.

python recipes/lora_demo/judge.py RUN HELD_OUT.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from heedful import LLM

NEEDED = 0.9
MAX_TOKENS = 60


def exact(llm: LLM, rows: list[dict[str, str]], adapter: str | None) -> int:
    found = 0
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        text = llm.chat(messages, max_tokens=MAX_TOKENS, temperature=0, adapter=adapter).text
        if found == 0 or text != row["completion"]:
            print(f"{'as it should be' if text == row['completion'] else 'otherwise'}: {text!r:.120}", file=sys.stderr)
        found += text == row["completion"]
    return found


def main(run: str, held_out: Path) -> int:
    rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    llm = LLM("smollm2", adapters={"trained": run})
    before = exact(llm, rows[:5], None)
    after = exact(llm, rows, "trained")
    print(f"exact answers to held-out rows: {after} of {len(rows)}; without the adapter {before} of 5")
    return 0 if after >= NEEDED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
