"""A small world for the servers to tell of: a database, a git repository, files, a memory; and what is true in it,
found without any of the servers.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

ORDERS = [
    ("Ana", "tea", 14.5, "paid"),
    ("Bo", "coffee", 31.6, "open"),
    ("Ana", "sugar", 2.4, "paid"),
    ("Chen", "tea", 7.0, "sent"),
    ("Ana", "coffee", 63.2, "paid"),
    ("Dora", "sugar", 4.8, "open"),
    ("Bo", "tea", 10.5, "paid"),
]
PRODUCTS = [("tea", 3.5, 120), ("coffee", 7.9, 45), ("sugar", 1.2, 300)]
COMMITS = [
    ("Ana Weber", "2026-03-02T09:15:00+00:00", "start the shop", "shop.py"),
    ("Bo Lind", "2026-04-11T14:40:00+00:00", "prices in euros", "prices.py"),
    ("Ana Weber", "2026-05-20T08:05:00+00:00", "count what is in stock", "stock.py"),
    ("Chen Li", "2026-07-01T16:30:00+00:00", "fix the sugar price", "prices.py"),
]
FILES = {
    "todo.txt": "buy milk\ncall the plumber\nwater the plants\n",
    "notes.txt": "The meeting with the printers is on Thursday at ten. " * 7 + "\n",
    "reports/january.csv": "day,sum\n1,20\n2,35\n",
    "reports/february.csv": "day,sum\n1,18\n",
    "reports/march.csv": "day,sum\n1,44\n2,12\n3,9\n",
    "reports/old/2024.csv": "day,sum\n",
}
MEMORY = [
    {"type": "entity", "name": "Ana", "entityType": "person", "observations": ["plays chess", "lives in Graz"]},
    {"type": "entity", "name": "Bo", "entityType": "person", "observations": ["is allergic to nuts"]},
    {"type": "relation", "from": "Ana", "to": "Bo", "relationType": "works with"},
]


def make(folder: Path) -> None:
    """Everything, below `folder`."""
    for name, text in FILES.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "memory.json").write_text("\n".join(map(json.dumps, MEMORY)), encoding="utf-8")
    with sqlite3.connect(folder / "data.db") as database:
        database.execute(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, product TEXT, amount REAL, status TEXT)"
        )
        database.executemany("INSERT INTO orders (customer, product, amount, status) VALUES (?, ?, ?, ?)", ORDERS)
        database.execute("CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, price REAL, stock INTEGER)")
        database.executemany("INSERT INTO products (name, price, stock) VALUES (?, ?, ?)", PRODUCTS)
    database.close()
    repo = folder / "repo"
    git(repo.parent, "init", "--quiet", "--initial-branch", "main", str(repo))
    for author, date, message, name in COMMITS:
        (repo / name).write_text(f"# {message}\n", encoding="utf-8")
        git(repo, "add", name)
        git(repo, "commit", "--quiet", "-m", message, author=author, date=date)
    git(repo, "branch", "summer-sale")


def git(folder: Path, *arguments: str, author: str = "nobody", date: str = "") -> str:
    named = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", author), ("EMAIL", f"{author.split()[0].lower()}@example.org"), ("DATE", date))
        if value
    }
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, env={**os.environ, **named}
    )
    return done.stdout.strip()


def value(folder: Path, sql: str) -> Any:
    with sqlite3.connect(folder / "data.db") as database:
        return database.execute(sql).fetchone()[0]
