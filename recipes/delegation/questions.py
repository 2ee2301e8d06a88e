"""The questions, each with what a right answer holds, computed without the servers: by zoneinfo, sqlite3, the git
command, the file system.

`first`: written while the rules were; `further`: written when they were done, and asked once, after which the rules
were mended; `last`: written after that, and asked once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from world import git, value

MOST_CHARS = 400
"""Longer than this nothing is an answer to any of them."""


@dataclass(frozen=True)
class Asked:
    question: str
    right: Callable[[str], bool]


def holds(*parts: object, never: tuple[str, ...] = ()) -> Callable[[str], bool]:
    """All of these, as whole words or numbers, and none of those."""

    def check(answer: str) -> bool:
        return (
            len(answer) <= MOST_CHARS
            and all(_has(answer, str(part)) for part in parts)
            and not any(_has(answer, part) for part in never)
        )

    return check


def _has(answer: str, part: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(part)}(?!\w|\.\d)", answer, re.IGNORECASE) is not None


def now_in(zone: str) -> Callable[[str], bool]:
    """The time there, of the last ten minutes."""

    def check(answer: str) -> bool:
        now = datetime.now(ZoneInfo(zone))
        times = {(now - timedelta(minutes=back)).strftime("%H:%M") for back in range(11)}
        return any(holds(time)(answer) for time in times)

    return check


def converted(time: str, source: str, target: str) -> str:
    hour, minute = map(int, time.split(":"))
    there = datetime.now(ZoneInfo(source)).replace(hour=hour, minute=minute)
    return there.astimezone(ZoneInfo(target)).strftime("%H:%M")


def first(folder: Path) -> list[Asked]:
    repo, files = folder / "repo", folder / "files"
    branches = git(repo, "branch", "--format=%(refname:short)").split()
    return [
        Asked("What time is it in Tokyo?", now_in("Asia/Tokyo")),
        Asked("How many rows has table orders?", holds(value(folder, "SELECT COUNT(*) FROM orders"))),
        Asked(
            "If it is 9:30 in London, what time is it in New York?",
            holds(converted("09:30", "Europe/London", "America/New_York")),
        ),
        Asked("Which tables are in the database?", holds("orders", "products")),
        Asked("What is the highest amount in table orders?", holds(value(folder, "SELECT MAX(amount) FROM orders"))),
        Asked("How many orders are paid?", holds(value(folder, "SELECT COUNT(*) FROM orders WHERE status = 'paid'"))),
        Asked(
            "Who made the last commit in the repository?",
            holds(git(repo, "log", "-1", "--format=%an"), never=("Ana Weber", "Bo Lind")),
        ),
        Asked("Which branches does the git repository have?", holds(*branches)),
        Asked(
            "How many files are in the folder reports?",
            holds(sum((files / "reports" / name).is_file() for name in os.listdir(files / "reports"))),
        ),
        Asked(
            "What does the file todo.txt say?", holds(*(files / "todo.txt").read_text(encoding="utf-8").splitlines())
        ),
        Asked("How big is the file notes.txt?", holds((files / "notes.txt").stat().st_size)),
        Asked("What is the sum of 1834 and 977?", holds(1834 + 977)),
    ]


def further(folder: Path) -> list[Asked]:
    repo, files = folder / "repo", folder / "files"
    branches = git(repo, "branch", "--format=%(refname:short)").split()
    first_commit = git(repo, "log", "--reverse", "--format=%s").splitlines()[0]
    day = git(repo, "log", "--grep=prices in euros", "--format=%as")
    return [
        Asked("What time is it right now in Nairobi?", now_in("Africa/Nairobi")),
        Asked(
            "My flight leaves Berlin at 18:05. What time is that in Singapore?",
            holds(converted("18:05", "Europe/Berlin", "Asia/Singapore")),
        ),
        Asked(
            "What is the average price of our products?", holds(f"{value(folder, 'SELECT AVG(price) FROM products'):g}")
        ),
        Asked(
            "Which customer placed order number 6?", holds(value(folder, "SELECT customer FROM orders WHERE id = 6"))
        ),
        Asked("How many products do we have in the database?", holds(value(folder, "SELECT COUNT(*) FROM products"))),
        Asked("What was the first commit about?", holds(first_commit)),
        Asked("How many branches are there in the repo?", holds(len(branches))),
        Asked("When was the commit about prices in euros made?", holds(day)),
        Asked(
            "How many words are in notes.txt?", holds(len((files / "notes.txt").read_text(encoding="utf-8").split()))
        ),
        Asked("List everything that is in the reports folder.", holds(*os.listdir(files / "reports"))),
        Asked("Does Bo have any allergies?", holds("nuts")),
        Asked("What is 250.5 plus 49.5?", holds(300)),
    ]


def last(folder: Path) -> list[Asked]:
    repo, files = folder / "repo", folder / "files"
    open_sum = value(folder, "SELECT SUM(amount) FROM orders WHERE status = 'open'")
    return [
        Asked("What is the time in Toronto?", now_in("America/Toronto")),
        Asked(
            "At 7 pm in Sydney, what is the time in Rome?", holds(converted("19:00", "Australia/Sydney", "Europe/Rome"))
        ),
        Asked(
            "How much stock of coffee is there?",
            holds(value(folder, "SELECT stock FROM products WHERE name = 'coffee'")),
        ),
        Asked("What is the total amount of the orders that are open?", holds(f"{open_sum:g}")),
        Asked(
            "Which product has the largest stock?",
            holds(value(folder, "SELECT name FROM products ORDER BY stock DESC")),
        ),
        Asked("Who ordered coffee?", holds("Ana", "Bo", never=("Chen", "Dora"))),
        Asked("What is the message of the newest commit?", holds(git(repo, "log", "-1", "--format=%s"))),
        Asked(
            "Is there a branch called summer-sale?",
            lambda answer: holds("yes")(answer) or holds("summer-sale", never=("no", "not"))(answer),
        ),
        Asked("How large is january.csv in bytes?", holds((files / "reports" / "january.csv").stat().st_size)),
        Asked("Which files are in the folder old?", holds(*os.listdir(files / "reports" / "old"))),
        Asked("What do you remember about the person called Bo?", holds("nuts")),
        Asked("How much do 19 and 23.5 make together?", holds(42.5)),
    ]
