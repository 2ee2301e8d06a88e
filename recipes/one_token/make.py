"""Writes docs/one_token.md: one real token of SmolLM2 on its way through the model, with the numbers of that run.

    python -m recipes.one_token.make

A test recomputes the numbers and compares, and looks whether each line of code that the page points to still stands
there: when code has moved, run this again.
"""

from __future__ import annotations

from pathlib import Path

from recipes.one_token.follow import follow
from recipes.one_token.words import page_text

PAGE = Path(__file__).parents[2] / "docs" / "one_token.md"


def main() -> None:
    PAGE.write_text(page_text(follow()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
