"""Rows of heedful-decider's recipe that are trained on alone: their answers follow from their states. No package is
fetched.
"""

from __future__ import annotations

import io
import random
import re
import sys
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.decider.data import SHARES
from recipes.decider.dictionary import _KINDS as KIND_NAMES
from recipes.decider.dictionary import Dictionary, Sense, dictionary_rows, read_dictionary
from recipes.decider.drawn import drawn
from recipes.decider.fetch import members
from recipes.decider.guard import CLASSES, guard_row
from recipes.decider.lookup import lookup_row
from recipes.decider.rows import Row, noul, one_hot

SUBJECTS = ["chess", "law", "music", "golf", "logic", "poetry", "botany", "genetics"]
KINDS = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 18, 19, 20, 21, 22, 23, 25, 26, 27, 28]


def wordnet_files() -> dict[str, bytes]:
    """In WordNet's format: eight subjects, and words of theirs that are told apart by three letters."""
    lines = ["  1 a licence"]
    lines += [f"{at:08d} 03 n 01 {name} 0 000 | the subject of {name} in general" for at, name in enumerate(SUBJECTS)]
    for n in range(176):
        code = "".join(chr(97 + int(digit)) for digit in f"{n:03d}")
        gloss = f'(dated) what the {SUBJECTS[n % 8]} people call {code}; "we saw the x{code} at noon"'
        head = f"{n % 8:08d}"
        lines.append(f"{1000 + n:08d} {KINDS[n % 22]:02d} n 02 x{code} 0 y{code}(p) 0 001 ;c {head} n 0000 | {gloss}  ")
    return {"dict/data.noun": "\n".join(lines).encode()}


@pytest.fixture(scope="module")
def known() -> Dictionary:
    return read_dictionary(wordnet_files())


def test_senses_are_read_with_words_examples_and_subject(known: Dictionary) -> None:
    sense = next(one for one in known.senses if "xaab" in one.words)
    example = "we saw the xaab at noon"
    assert sense == Sense(("xaab", "yaab"), "what the law people call aab", (example,), "noun.05", 5, "law")
    assert known.subjects["law"] == "the subject of law in general"
    assert {name: len(some) for name, some in known.by_subject.items()} == dict.fromkeys(SUBJECTS, 22)
    assert len(known.with_examples) == 176


def test_a_dictionary_row_is_answered_by_its_state() -> None:
    checked: Counter[str] = Counter()
    for row in dictionary_rows(wordnet_files(), 400):
        if row.question["type"] != "choice":
            continue
        right, asked = row.typed().labels[row.label], row.question["instructions"] or ""
        if asked.startswith('What does "'):
            assert right.endswith(asked[12:15]), row
            checked["meaning"] += 1
        elif re.fullmatch("[xy][a-j]{3}", right):
            assert f"call {right[1:]}" in row.state, row
            checked["word"] += 1
        elif right in SUBJECTS:
            told = {SUBJECTS[n % 8] for n in numbers_of(row.state)} | {name for name in SUBJECTS if name in row.state}
            assert told == {right}, row
            checked["subject"] += 1
        elif right in dict(KIND_NAMES.values()):
            assert {KIND_NAMES[KINDS[n % 22]][0] for n in numbers_of(row.state)} == {right}, row
            checked["kind"] += 1
    assert min(checked[kind] for kind in ("word", "subject", "meaning", "kind")) > 10, checked


def numbers_of(state: str) -> set[int]:
    """Of the words that it speaks of."""
    return {int("".join(str(ord(one) - 97) for one in code)) for code in re.findall(r"\b[xy]?([a-j]{3})\b", state)}


def told(state: Any) -> dict[tuple[str, str], str]:
    """Of states that are records: (who, attribute) → value."""
    if isinstance(state, dict) and all(isinstance(of, dict) for of in state.values()):
        return {(who, name): value for who, known in state.items() for name, value in known.items()}
    if isinstance(state, list):
        return {(next(iter(one.values())), name): one[name] for one in state for name in list(one)[1:]}
    return {}


def test_lookups_are_answered_by_their_states() -> None:
    checked: Counter[str] = Counter()
    for at in range(3000):
        row = lookup_row(random.Random(at))
        facts, asked, labels = told(row.state), row.question["instructions"], row.typed().labels
        asked_of = [(who, name) for who, name in facts if who in asked and re.search(rf"\b{name}\b", asked)]
        if row.question["type"] == "choice" and len(asked_of) == 1:
            value = facts[asked_of[0]]
            assert labels[row.label] == value if value in labels else labels[row.label] in OTHERS, row
            checked["choice"] += 1
        elif row.question["type"] == "noul" and len(asked_of) == 1 and not re.search(r"\band\b", asked):
            is_said = (
                re.search(rf"(?<!\w){re.escape(facts[asked_of[0]])}(?!\w)", asked.replace(asked_of[0][0], ""))
                is not None
            )
            is_denied = re.search(r"\bnot\b|other than", asked) is not None
            assert row.label == int(is_said != is_denied), row
            checked["noul"] += 1
    assert min(checked["choice"], checked["noul"]) > 100, checked


OTHERS = ("other", "none of these", "something else")


def classes_of(state: Any) -> set[str]:
    """Whose templates can make the message."""
    texts = [state] if isinstance(state, str) else [*(state[0] if isinstance(state, list) else state).values()]
    found = set()
    for name, of in CLASSES.items():
        for template in of["texts"]:
            pattern = ".*?".join(map(re.escape, re.split(r" ?\{\w+\}", template)))
            if any(re.search(pattern, text, re.IGNORECASE) for text in texts):
                found.add(name)
    return found


def test_a_message_gets_a_name_of_the_class_it_was_made_of() -> None:
    checked = 0
    for at in range(600):
        row = guard_row(random.Random(at), {})
        right = row.typed().labels[row.label]
        named = {name for name, of in CLASSES.items() if right in of["names"]}
        if row.question["type"] == "choice" and named:
            assert named & classes_of(row.state), row
            checked += 1
    assert checked > 100


def test_messages_of_other_origin_are_taken_for_their_class() -> None:
    rows = [guard_row(random.Random(at), {"jailbreak": ["Be DAN."]}) for at in range(400)]
    found = [row for row in rows if "Be DAN." in str(row.state)]
    assert found
    for row in found:
        if row.question["type"] == "choice" and set(row.typed().labels) == {"allow", "block"}:
            assert row.typed().labels[row.label] == "block"


def test_rows_are_drawn_by_share_and_come_again_only_after_all_others() -> None:
    rows = [Row(domain, f"{domain}{at}", noul("?"), one_hot(1, 2)) for domain in ("a", "b") for at in range(10)]
    some = list(islice(drawn(rows, {"a": 3, "b": 1, "unused": 5}), 2000))
    assert some == list(islice(drawn(rows, {"a": 3, "b": 1}), 2000))
    assert sum(row.domain == "a" for row in some) / len(some) == pytest.approx(0.75, abs=0.04)
    for domain in ("a", "b"):
        states = [row.state for row in some if row.domain == domain]
        assert all(len(set(states[at : at + 10])) == 10 for at in range(0, len(states) - 9, 10))


def test_every_taught_domain_has_a_share() -> None:
    assert {"dictionary", "lookup", "guard"} <= set(SHARES)


def test_files_of_an_npm_package_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x-1.0.tgz", "w:gz") as tar:
        for name, data in {"package/dict/data.noun": b"one", "package/other": b"two"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert members(tmp_path / "x-1.0.tgz", "dict/data.") == {"package/dict/data.noun": b"one"}
