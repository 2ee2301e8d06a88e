"""Makes docs/delegation.md: three times twelve questions to smollm2 with the tools of eight MCP servers and without,
as transcripts of `heedful chat` with its receipts, each answer judged.

    python recipes/delegation/make.py [--show] [--first]

Needs the `test` and `mcp` extras, git, and the servers that tests/mcp/real_servers.py fetches from PyPI and npm once.
--show prints instead of writing the page; --first asks the first twelve only, and prints: the page wants all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "mcp"), str(Path(__file__).parent)]

import questions  # noqa: E402
import world  # noqa: E402
from labelled import calls_by_rules  # noqa: E402
from real_servers import installed  # noqa: E402

from heedful.engine.embedder import load_embedder  # noqa: E402

CHAT = ["chat", "-m", "smollm2", "--no-history", "--temperature", "0", "--max-tokens", "60", "--receipts"]
PARTED = "a new conversation"
READING = ["list_tables", "describe_table", "read_query"]


@dataclass(frozen=True)
class Answer:
    asked: questions.Asked
    text: str
    notes: tuple[str, ...]
    """Calls before it, receipts behind it."""
    is_right: bool


def config(folder: Path) -> Path:
    """All eight servers; those that say which of their tools only read are believed, of sqlite three are named."""
    entries = installed(None).entries(folder)  # type: ignore[arg-type]  # its own cache folder is there
    entries["filesystem"]["args"][-1] = str(folder / "files")
    entries["memory"]["env"]["MEMORY_FILE_PATH"] = str(folder / "memory.json")
    for name, entry in entries.items():
        entry["x-heedful"] = {"allow": READING} if name == "sqlite" else {"trusted": True}
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": entries}), encoding="utf-8")
    return path


def heedful(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Output and notes in the order in which they came."""
    done = subprocess.run(
        [sys.executable, "-m", "heedful", *arguments],
        input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1200, check=False,
        env={**os.environ, "HEEDFUL_DATA": str(folder / "data"), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def asked(folder: Path, rows: Sequence[questions.Asked], servers: Path | None) -> list[Answer]:
    """One chat, started afresh (/new) before each question."""
    tools = [] if servers is None else ["--mcp", str(servers)]
    said = heedful(folder, *CHAT, *tools, stdin="\n/new\n".join(row.question for row in rows) + "\n")
    parts = re.split(rf"^{PARTED}\n", said, flags=re.MULTILINE)
    assert len(parts) == len(rows), said
    return [_answer(row, part.replace(str(folder), "/shop")) for row, part in zip(rows, parts, strict=True)]


def _answer(row: questions.Asked, part: str) -> Answer:
    lines = [line for line in part.splitlines() if line.strip()]
    notes = [line for line in lines if line[:2] in ("→ ", "← ") or " visits of " in line or line.startswith("cut ")]
    text = "\n".join(line for line in lines if line not in notes)
    return Answer(row, text, tuple(notes), row.right(text))


def transcript(answers: Sequence[Answer]) -> str:
    """As it stood on the terminal, with a mark for each answer."""
    told = []
    for each in answers:
        calls = [note for note in each.notes if note[:2] in ("→ ", "← ")]
        receipts = [note for note in each.notes if note not in calls]
        mark = "right" if each.is_right else "WRONG"
        told.append(
            "\n".join(
                [f"> {each.asked.question}", *calls, each.text, *(f"  {line}" for line in receipts), f"  [{mark}]"]
            )
        )
    return "```text\n" + "\n\n".join(told) + "\n```"


def score(answers: Sequence[Answer]) -> str:
    return f"{sum(each.is_right for each in answers)} of {len(answers)}"


def page(sets: Sequence[tuple[str, list[Answer], list[Answer]]]) -> str:
    template = (Path(__file__).parent / "page.md").read_text(encoding="utf-8")
    for name, with_tools, without in sets:
        for key, told in (
            ("with_score", score(with_tools)), ("without_score", score(without)),
            ("with", transcript(with_tools)), ("without", transcript(without)),
        ):  # fmt: skip
            template = template.replace(f"{{{name}_{key}}}", told)
    found = calls_by_rules(lambda text: -(-len(text) // 4), load_embedder("minilm"))
    for key, number in (("called", found["right"] + found["wrong"]), ("wrong", found["wrong"])):
        template = template.replace(f"{{rules_{key}}}", str(number))
    return template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        world.make(folder)
        servers = config(folder)
        heedful(folder, "mcp", "approve", "--yes", "--config", str(servers))
        sets = []
        for name in ("first",) if options.first else ("first", "further", "last"):
            rows = getattr(questions, name)(folder)
            sets.append((name, asked(folder, rows, servers), asked(folder, rows, None)))
            print(f"{name}: {score(sets[-1][1])} with tools, {score(sets[-1][2])} without", file=sys.stderr)
    if options.show or options.first:
        for _, with_tools, without in sets:
            print(transcript(with_tools), transcript(without), sep="\n\n")
        return
    (ROOT / "docs" / "delegation.md").write_text(page(sets), encoding="utf-8")


if __name__ == "__main__":
    main()
