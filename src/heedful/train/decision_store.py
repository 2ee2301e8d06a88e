"""Decisions on disk: a line of JSON a question, with its state and the share that each option should get, and where
each line begins. They become tokens when a step takes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from heedful.decide.calibrate import shares_of
from heedful.decide.labelled_rows import labelled_from_json
from heedful.decide.laya_input import LayaPacker, QuestionTooLong
from heedful.decide.question import Question, State, questions_from_json
from heedful.errors import BadParameter, FileFormatError
from heedful.models.laya_config import LayaSequence
from heedful.train.json_rows import json_rows
from heedful.train.order import Permutation, TrainingOrder, kept_apart
from heedful.weights.run_folder import sha256_of

OPTION = "--decisions"
_REMEDY = 'Every line is {"state": …, "questions": {"name": {…}}, "expected": {"name": …}}, as for heedful calibrate.'
_ROWS, _STARTS, _FACTS = "rows.jsonl", "starts.bin", "store.json"


@dataclass(frozen=True)
class DecisionRow:
    state: State
    question: Question
    target: tuple[float, ...]
    """What each option should get, in the order of `question.labels`; sums to 1."""


@dataclass(frozen=True)
class DecisionExample:
    """A row as the model reads it."""

    row: DecisionRow
    sequence: LayaSequence
    place: int = 0
    """In the order of training, over all epochs."""

    @property
    def length(self) -> int:
        return len(self.sequence.ids)


def as_example(row: DecisionRow, packer: LayaPacker, place: int = 0) -> DecisionExample:
    """Raises QuestionTooLong."""
    return DecisionExample(row, packer.pack(row.question, packer.state(row.state)).sequence, place)


@dataclass(frozen=True)
class DecisionFacts:
    documents: int
    """Questions."""
    tokens: int
    """With their states."""
    sha256: str
    """Of the rows."""


class DecisionStore(Sequence[DecisionRow]):
    def __init__(self, folder: Path, facts: DecisionFacts) -> None:
        self.facts = facts
        self._rows = np.memmap(folder / _ROWS, dtype=np.uint8, mode="r")
        self._starts = np.fromfile(folder / _STARTS, dtype="<i8")

    @classmethod
    def open(cls, folder: Path) -> DecisionStore:
        """Raises FileFormatError when the files are not what was written."""
        try:
            facts = DecisionFacts(**json.loads((folder / _FACTS).read_text(encoding="utf-8")))
            store = cls(folder, facts)
            is_whole = len(store._starts) == facts.documents + 1 and sha256_of(folder / _ROWS) == facts.sha256
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error
        if not is_whole:
            raise _damaged(folder, "its sha256 is another")
        return store

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> DecisionRow:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        found = json.loads(self._rows[self._starts[number] : self._starts[number + 1]].tobytes())
        return DecisionRow(found["state"], questions_from_json({"q": found["question"]})[0], tuple(found["target"]))


def _damaged(folder: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{folder} is not the data that was written ({what})", "Begin the run anew elsewhere.")


def decision_rows(paths: Sequence[Path]) -> Iterator[DecisionRow]:
    """A row a question. Raises BadParameter, with the place, for a line that is no labelled state."""
    for found, where in json_rows(paths, OPTION, _REMEDY):
        try:
            labelled = labelled_from_json(found)
        except BadParameter as error:
            raise BadParameter(OPTION, f"{where}: {error.message}", error.remedy or _REMEDY) from None
        for question, label in zip(labelled.questions, labelled.labels, strict=True):
            target = shares_of(label, len(question.labels))
            yield DecisionRow(labelled.state, question, tuple(target.tolist()))


def write_decisions(folder: Path, paths: Sequence[Path], packer: LayaPacker, name: str) -> str:
    """What it holds, in words. A question that is too long for the model is left out, and said.

    Raises BadParameter when none is left, and as `decision_rows` does.
    """
    folder.mkdir(parents=True)
    starts, tokens, too_long, digest = [0], 0, 0, hashlib.sha256()
    first_problem = ""
    with (folder / _ROWS).open("wb") as file:
        for row in decision_rows(paths):
            try:
                tokens += as_example(row, packer).length
            except QuestionTooLong as error:
                too_long += 1
                first_problem = first_problem or error.message
                continue
            kept = {"state": row.state, "question": row.question.to_dict(), "target": row.target}
            line = f"{json.dumps(kept)}\n".encode()
            file.write(line)
            digest.update(line)
            starts.append(starts[-1] + len(line))
    if len(starts) == 1:
        why = f"; {too_long:,} are too long: {first_problem}" if too_long else ""
        raise BadParameter(OPTION, f"there is no question to learn from{why}", _REMEDY)
    np.array(starts, dtype="<i8").tofile(folder / _STARTS)
    facts = DecisionFacts(len(starts) - 1, tokens, digest.hexdigest())
    (folder / _FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
    said = f"{name}: {facts.documents:,} questions, {tokens:,} tokens with their states"
    return said + (f"; {too_long:,} left out as too long, the first: {first_problem}" if too_long else "")


class DecisionData:
    """The order of training, and what is kept apart to judge by."""

    def __init__(
        self,
        store: DecisionStore,
        *,
        batch: int,
        seed: int,
        validation_share: float,
        validation: DecisionStore | None = None,
        shuffle: bool = True,
    ) -> None:
        kept = kept_apart(len(store), validation_share) if validation is None else 0
        if kept >= len(store):
            raise BadParameter(OPTION, f"{len(store)} questions cannot be shared", "Give more, or --validation.")
        self.store, self.batch_len = store, batch
        self._order = TrainingOrder(len(store), kept=kept, seed=seed, shuffle=shuffle)
        self.epoch_len = self._order.epoch_len
        others = [] if validation is None else [validation[at] for at in Permutation(len(validation), "validation")]
        self.validation = others or [store[number] for number in self._order.kept]

    def batch(self, cursor: int) -> list[int]:
        """Numbers of the rows that come after `cursor` others, over all epochs."""
        return [self._order[at] for at in range(cursor, cursor + self.batch_len)]
