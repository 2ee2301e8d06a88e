"""What the tests of Kev share: the recorded requests, and the two models they were recorded on, loaded once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from heedful.decide.kev import Kev
from heedful.decide.kev_input import KevInput, KevReader
from heedful.decide.question import questions_from_json
from heedful.engine.torch_kev import KevNetwork

GOLDEN = Path(__file__).parent.parent / "golden"
ATTENTION, HYBRID = FOLDERS = ("decisions/kev", "qwen3_5/kev")
SEVERAL = {ATTENTION: "three_types", HYBRID: "several_questions"}
"""Requests of more than one question."""
MOST_STATE = 384
"""What the recorded states were cut to, as in training; here nothing ever is."""


def requests_of(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / folder / "kev.json").read_text(encoding="utf-8"))["requests"]
    return found


CASES = [(folder, request) for folder in FOLDERS for request in requests_of(folder)]
IDS = [f"{folder}-{request['name']}" for folder, request in CASES]


def request_of(folder: str, name: str) -> dict[str, Any]:
    (found,) = [request for request in requests_of(folder) if request["name"] == name]
    return found


@cache
def kev_of(folder: str) -> Kev:
    return Kev.load(str(GOLDEN / folder / "adapter"), threads=1)


def network_of(kev: Kev) -> KevNetwork:
    return kev._network


def recorded_input(reader: KevReader, request: dict[str, Any]) -> KevInput:
    """With the state cut as the recorded one was."""
    read = reader.read(request["state"], questions_from_json(request["questions"]))
    return KevInput(read.state_ids[:MOST_STATE], read.branches)
