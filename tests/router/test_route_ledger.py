"""What is spent is written once, whole, and only when the last receipt is there; a torn line is passed over."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from heedful.errors import BadParameter
from heedful.router.choose import Choice, Hop
from heedful.router.ledger import WASTED, Entry, RouteLedger, charged_to, read_ledger, spent_of
from heedful.router.ledger_sums import ledger_sums
from heedful.router.policy import LedgerSpec

RECEIPT = {
    "prompt_tokens": 10,
    "cached_tokens": 4,
    "output_tokens": 3,
    "visits": {"prefill": 100, "decode": 30, "total": 130, "dense": 150, "saved": {}},
    "kv": {"bytes_read": 5},
    "weights": {"bytes_read": 7},
    "flops": {"linear": 1, "attention": 2, "selection": 3},
    "seconds": {"total": 0.5},
    "energy": {"joules": 1.0, "low": 0.5, "high": 2.0},
    "guesses": {"made": 6, "right": 4},
}
REMOTE = {"prompt_tokens": 10, "cached_tokens": None, "output_tokens": 3, "visits": None, "seconds": {"total": 2.0}}


def test_a_receipt_in_parts() -> None:
    spent = spent_of("small", "answer", RECEIPT)
    assert spent.visits == {"prefill": 100, "decode": 30, "total": 130, "dense": 150}
    assert spent.positions == 10 - 4 + 2 + 2  # the prompt's, the outputs' but the last, wrong guesses
    assert (spent.flops, spent.bytes_read, spent.joules, spent.joules_high) == (6, 12, 1.0, 2.0)
    unknown = spent_of("big", "answer", REMOTE)
    assert (unknown.visits, unknown.positions, unknown.flops, unknown.bytes_read, unknown.joules) == (None,) * 5
    assert unknown.seconds == 2.0


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_a_line_waits_for_its_last_receipt(tmp_path: Path, fsync: str) -> None:
    ledger = RouteLedger(LedgerSpec(tmp_path / "deep" / "ledger.jsonl", fsync))
    entry = Entry(ledger, "id")
    with entry.charging("small") as small:
        assert charged_to.get() is small
        entry.opened()
    assert charged_to.get() is None
    entry.close(Choice("big", "default", hops=(Hop("small", "HTTP 500"),)), {"finish": "stop"})
    assert (tmp_path / "deep" / "ledger.jsonl").read_bytes() == b""
    small.phase = WASTED
    threading.Thread(target=lambda: entry.add(small, RECEIPT, was_opened=True)).start()
    deadline = threading.Event()
    for _ in range(500):
        if (tmp_path / "deep" / "ledger.jsonl").read_bytes():
            break
        deadline.wait(0.01)
    entry.close(Choice("big", "again"), {})
    ledger.close()
    (line,) = read_ledger(tmp_path / "deep" / "ledger.jsonl")
    assert (line["target"], line["finish"], line["hops"]) == (
        "big",
        "stop",
        [{"target": "small", "failure": "HTTP 500"}],
    )
    assert [(part["target"], part["phase"]) for part in line["spent"]] == [("small", "wasted")]
    assert oct((tmp_path / "deep" / "ledger.jsonl").stat().st_mode & 0o777) == "0o600"


def test_a_torn_line_is_passed_over_and_the_next_begins_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    spec = LedgerSpec(path, "always")
    for _ in range(2):
        ledger = RouteLedger(spec)
        Entry(ledger, "id").close(Choice("small", "rule 1"), {"finish": "stop"})
        ledger.close()
        with path.open("ab") as file:
            file.write(b'{"kind": "request", "targ')  # the machine stops here
    assert len(read_ledger(path)) == 2


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="cannot be written"):
        RouteLedger(LedgerSpec(tmp_path, "never"))
    with pytest.raises(BadParameter, match="cannot be read"):
        read_ledger(tmp_path / "none")
    (tmp_path / "odd").write_text("a\n[1]\n{}\n")
    with pytest.raises(BadParameter, match="holds no line"):
        read_ledger(tmp_path / "odd")


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    ledger = RouteLedger(LedgerSpec(tmp_path / "ledger.jsonl", "never"))

    def write() -> None:
        for _ in range(50):
            entry = Entry(ledger, os.urandom(4).hex())
            with entry.charging("small") as tab:
                entry.add(tab, RECEIPT)
            entry.close(Choice("small", "x" * 500), {"finish": "stop"})

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["id"] for line in lines}) == 400
    sums = ledger_sums(read_ledger(tmp_path / "ledger.jsonl"))
    assert (sums.requests, sums.spent["small"]["answer"].visits) == (400, 400 * 130)


def test_sums_and_what_stood_beside(tmp_path: Path) -> None:
    ledger = RouteLedger(LedgerSpec(tmp_path / "ledger.jsonl", "never"))
    for number in range(3):
        entry = Entry(ledger, f"r{number}")
        with entry.charging("small") as tab:
            entry.add(tab, RECEIPT)
        entry.close(Choice("small", "rule 1"), {"finish": "stop"})
        other = Entry(ledger, f"r{number}", "counterfactual")
        if number < 2:
            with other.charging("big", "counterfactual") as tab:
                other.add(tab, {**RECEIPT, "visits": {**RECEIPT["visits"], "total": 1130}})  # type: ignore[dict-item]
        other.close(Choice("big", "counterfactual"), {"finish": "stop" if number < 2 else "failed: TargetFailed"})
    ledger.close()
    sums = ledger_sums(read_ledger(tmp_path / "ledger.jsonl"))
    assert (sums.requests, sums.by_target, sums.hops) == (3, {"small": 3}, 0)
    assert sums.spent["big"]["counterfactual"].visits == 2 * 1130
    beside = sums.beside["big"]
    assert beside.pairs == 2
    assert beside.visits is not None
    assert beside.visits.mean == 1000
