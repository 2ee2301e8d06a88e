"""The load of bench/routing.py: seeded questions of eight kinds, each with a check and the right answer."""

from __future__ import annotations

import random
from typing import Any

from routing_tools import SHELF

from heedful.router.outcomes import Row, row_from_json

MOST_ROWS = 240
"""Of which no two are alike."""
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Russia": "Moscow", "Norway": "Oslo", "Austria": "Vienna", "Portugal": "Lisbon", "Peru": "Lima",
    "Cuba": "Havana", "Kenya": "Nairobi", "Poland": "Warsaw", "Sweden": "Stockholm", "Ireland": "Dublin",
    "Hungary": "Budapest", "Thailand": "Bangkok", "Turkey": "Ankara", "Finland": "Helsinki", "Denmark": "Copenhagen",
}  # fmt: skip
PRAISE = (
    "I loved every minute of it",
    "what a wonderful time",
    "it made me very happy",
    "great value, I would go again",
)
BLAME = ("I hated it", "a complete waste of money", "it was cold and awful", "I regret every cent")
THINGS = ("film", "concert", "restaurant", "book", "hotel", "museum", "bakery", "ferry")
TALK = ("hi", "hello", "thanks", "thank you", "good morning", "bye")
NAMES = ("Ana", "Ben", "Chloe", "David", "Emma", "Farid", "Greta", "Hugo")

Made = tuple[str, dict[str, Any], str]
"""(prompt, check, the right answer)"""


def load(count: int, seed: int = 7) -> tuple[list[Row], dict[str, str]]:
    """Rows, and prompt → the answer that is right."""
    assert count <= MOST_ROWS, (count, MOST_ROWS)
    draw = random.Random(seed)
    made: dict[str, tuple[str, dict[str, Any], str]] = {}
    while len(made) < count:
        kind = list(KINDS)[len(made) % len(KINDS)]
        prompt, check, answer = KINDS[kind](draw)
        while prompt in made:
            prompt, check, answer = KINDS[kind](draw)
        made[prompt] = (answer, check, kind.rstrip("2"))
    rows = [row_from_json({"prompt": text, "check": check, "kind": kind}) for text, (_, check, kind) in made.items()]
    return rows, {text: answer for text, (answer, _, _) in made.items()}


def _sentiment(draw: random.Random) -> Made:
    is_good = draw.random() < 0.5
    said = draw.choice(PRAISE if is_good else BLAME)
    word, other = ("positive", "negative") if is_good else ("negative", "positive")
    text = f"Is this review of a {draw.choice(THINGS)} positive or negative? {said}"
    return text, {"regex": rf"^(?!.*\b{other}\b).*\b{word}\b"}, f"It is {word}."


def _capital(draw: random.Random) -> Made:
    country = draw.choice(list(CAPITALS))
    ask = draw.choice(["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."])
    return ask.format(country), {"regex": rf"\b{CAPITALS[country]}\b"}, f"It is {CAPITALS[country]}."


def _sum(draw: random.Random) -> Made:
    a, b = draw.randrange(2, 90), draw.randrange(2, 90)
    sign, value = draw.choice([("+", a + b), ("-", a - b), ("*", a * b)])
    return f"What is {a} {sign} {b}?", {"number": value}, f"It is {value}."


def _story(draw: random.Random) -> Made:
    """Arithmetic that no pattern of the policy finds."""
    a, b = draw.randrange(20, 90), draw.randrange(2, 20)
    does, value = draw.choice([("finds {} more", a + b), ("gives {} away", a - b)])
    text = f"{draw.choice(NAMES)} has {a} shells and {does.format(b)}. How many shells are left in the end?"
    return text, {"number": value}, f"There are {value}."


def _logic(draw: random.Random) -> Made:
    a, b, c = draw.sample(["blips", "dorks", "wugs", "zorps", "plims", "taks"], 3)
    is_true = draw.random() < 0.5
    last = f"Are all {a} {c}?" if is_true else f"Are all {c} certainly {a}?"
    word = "yes" if is_true else "no"
    text = f"All {a} are {b}. All {b} are {c}. {last} Answer yes or no."
    return text, {"regex": rf"^\W*{word}\b|\b{word}\W*$"}, f"{word.capitalize()}."


def _stock(draw: random.Random) -> Made:
    return _shelf(draw, ["How many packets of {} do you have?", "How many packets of {} are left?"])


def _stock_otherwise(draw: random.Random) -> Made:
    """In words that no pattern of the policy finds."""
    return _shelf(draw, ["How much {} is in stock?", "What is left of the {} in the shop?", "Is there any {} left?"])


def _shelf(draw: random.Random, asks: list[str]) -> Made:
    item = draw.choice(list(SHELF))
    return draw.choice(asks).format(item), {"number": SHELF[item]}, f"There are {SHELF[item]}."


def _talk(draw: random.Random) -> Made:
    text = f"{draw.choice(TALK)}{draw.choice([',', ''])} {draw.choice(NAMES)}{draw.choice('!.')}"
    return text, {"regex": r"\w"}, "Hello! How can I help?"


KINDS = {
    "reviews": _sentiment,
    "capitals": _capital,
    "sums": _sum,
    "stock": _stock,
    "logic": _logic,
    "reviews2": _sentiment,
    "capitals2": _capital,
    "sums in a story": _story,
    "stock in other words": _stock_otherwise,
    "stock in other words2": _stock_otherwise,
    "small talk": _talk,
}
"""In turn. A 2 at the end: again."""
