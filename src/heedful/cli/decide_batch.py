"""`heedful decide --batch`: many states, a JSON line of answers for each. A file of answers is gone on with where it
ends: what it holds is not asked again, except for what failed and for a line that was torn off.

An answer's line says what was asked (`asked`, a digest), so that answers to other rows are never taken for these.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from heedful.cli.json_rows import json_lines, json_value
from heedful.cli.progress_bar import progress_bar
from heedful.errors import BadParameter, HeedfulError

if TYPE_CHECKING:
    from heedful.decide.decider import DecisionModel
    from heedful.decide.question import Question

IN, OUT = "--batch", "--out"
_BEGIN = b'{"id": '
"""Of every line that is written."""
RowId = str | int


@dataclass
class Batch:
    """How far a batch is."""

    decider: DecisionModel
    questions: tuple[Question, ...]
    """For rows that have none."""
    settings: Mapping[str, Any]
    """What an answer depends on beside its row."""
    there: Mapping[RowId, str] = field(default_factory=dict)
    """Id → digest of rows whose answers the file holds."""
    lines: dict[RowId, int] = field(default_factory=dict)
    """Id → line of the rows so far."""
    answered: int = 0
    failed: int = 0
    were_there: int = 0
    prompt_tokens: int = 0

    def tally(self) -> str:
        there = f", {self.were_there:,} were there already" if self.were_there else ""
        return f"{self.answered:,} answered, {self.failed:,} failed{there} · {self.prompt_tokens:,} tokens in"

    def line(self, number: int, text: bytes) -> dict[str, Any] | None:
        """What goes out for a row; None where its answers are there. Raises BadParameter where those are to another."""
        from heedful.decide.question import check_state

        name: RowId = number
        try:
            row = _row(text)
            name = _id(row, number)
            self._take_id(name, number)
            questions = _questions(row) or self.questions
            check_state(row.get("state"))
            asked = self._digest(row["state"], questions)
            if name in self.there:
                self._require_same(name, asked, number)
                self.were_there += 1
                return None
            answers = self.decider.decide(row["state"], questions)
        except _OtherAnswers:
            raise
        except HeedfulError as error:
            self.failed += 1
            return {"id": name, "error": {"type": type(error).__name__, "message": error.message}}
        self.answered += 1
        self.prompt_tokens += answers.receipt.prompt_tokens
        return {"id": name, **answers.to_dict(), "receipt": answers.receipt.to_dict(), "asked": asked}

    def _take_id(self, name: RowId, number: int) -> None:
        if name in self.lines:
            raise BadParameter("id", f"{name!r:.60} is that of line {self.lines[name]:,} too")
        self.lines[name] = number

    def _digest(self, state: Any, questions: tuple[Question, ...]) -> str:
        asked = [state, {question.name: question.to_dict() for question in questions}, self.settings]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def _require_same(self, name: RowId, asked: str, number: int) -> None:
        if self.there[name] != asked:
            raise _OtherAnswers(
                OUT,
                f"its answer {name!r:.60} is not to line {number:,} of these rows, or was asked in another way",
                "Give another file, or the rows, questions, decider and options of before.",
            )


class _OtherAnswers(BadParameter):
    pass


def decide_batch(
    rows: Path,
    out: Path | None,
    questions: tuple[Question, ...],
    load: Callable[[], DecisionModel],
    settings: Mapping[str, Any],
) -> int:
    """Asks every row's questions, or `questions` where it has none; gives the exit status: 1 where a row failed.

    out: where answers go, default stdout. Raises BadParameter where `out` holds other answers than of these rows,
    KeyboardInterrupt when somebody stops it; what was written stays.
    """
    if out is not None and os.path.exists(rows) and os.path.exists(out) and os.path.samefile(rows, out):
        raise BadParameter(OUT, f"{out} holds the rows themselves", "Give another file.")
    total = None if str(rows) == "-" else sum(1 for _ in json_lines(rows, IN))
    with _answers_file(out) as (file, there):
        decider = load()
        calibration = getattr(decider, "calibration", None)
        how = {**settings, "calibration": calibration and calibration.to_dict()}
        batch = Batch(decider, questions, how, there)
        try:
            with progress_bar("deciding", total) as progress:
                for number, text in json_lines(rows, IN):
                    if (line := batch.line(number, text)) is not None:
                        file.write(_encoded(line))
                        file.flush()
                    progress(1)
        except KeyboardInterrupt:
            print(f"heedful: stopped; {batch.tally()}", file=sys.stderr)
            if out is not None:
                print(f"  The same command goes on where {out} ends.", file=sys.stderr)
            raise
    print(batch.tally(), file=sys.stderr)
    return 1 if batch.failed else 0


def _row(text: bytes) -> Mapping[str, Any]:
    row = json_value(text)
    if not isinstance(row, Mapping):
        raise BadParameter("row", 'must be a JSON object with "state"')
    return row


def _id(row: Mapping[str, Any], number: int) -> RowId:
    """The row's own, or the number of its line."""
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BadParameter("id", f"must be text or a whole number, not {name!r:.60}")
    return name


def _questions(row: Mapping[str, Any]) -> tuple[Question, ...]:
    from heedful.decide.question import questions_from_json

    return questions_from_json(row["questions"]) if "questions" in row else ()


def _encoded(line: Mapping[str, Any]) -> bytes:
    """Half of a surrogate pair becomes \\udXXX, which is how JSON writes it."""
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


@contextmanager
def _answers_file(out: Path | None) -> Iterator[tuple[BinaryIO, dict[RowId, str]]]:
    """Where lines are added, and id → digest of the answers that it holds."""
    if out is None:
        yield sys.stdout.buffer, {}
        return
    if os.path.exists(out) and not os.path.isfile(out):
        raise BadParameter(OUT, f"{out} is no regular file", "Give another one.")
    try:
        file, there = _opened(Path(os.path.realpath(out)))
    except OSError as error:
        raise BadParameter(OUT, f"{out} cannot be written: {error.strerror}") from error
    with file:
        yield file, there


def _opened(out: Path) -> tuple[BinaryIO, dict[RowId, str]]:
    """Open to nobody else, without what failed and without a torn line."""
    file = _locked(out)
    try:
        there, has_failed, end = _read_answers(file, out)
        if has_failed:
            _rewrite(file, out)
            file.close()
            file = _locked(out)
        else:
            file.truncate(end)
    except BaseException:
        file.close()
        raise
    return file, there


def _locked(out: Path) -> BinaryIO:
    file = out.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _being_written(out) from None
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(out)):  # replaced between opening and locking it
        file.close()
        raise _being_written(out)
    return file


def _being_written(out: Path) -> BadParameter:
    return BadParameter(OUT, f"another batch is writing {out}", "Wait for it, or give another file.")


def _read_answers(file: BinaryIO, out: Path) -> tuple[dict[RowId, str], bool, int]:
    """(id → digest of what was answered, whether a row failed, where the last whole line ends)"""
    there: dict[RowId, str] = {}
    has_failed, end = False, 0
    file.seek(0)
    for number, text in enumerate(file, start=1):
        line = _answer_line(text)
        if not text.endswith(b"\n") and (line is not None or _is_torn(text)):
            break
        end += len(text)
        if line is None:
            raise BadParameter(OUT, f"line {number:,} of {out} is no answer of a batch", "Give another file.")
        if "error" in line:
            has_failed = True
        else:
            there[line["id"]] = line["asked"]
    return there, has_failed, end


def _answer_line(text: bytes) -> dict[str, Any] | None:
    """None for what no batch has written."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("id"), str | int):
        return None
    is_ours = set(line) == {"id", "error"} or {"answers", "receipt", "asked"} <= set(line)
    return line if is_ours else None


def _is_torn(text: bytes) -> bool:
    """Whether this is the beginning of a line of ours, and not somebody's file that ends without a line break."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text.startswith(_BEGIN) or _BEGIN.startswith(text)
    return False


def _rewrite(file: BinaryIO, out: Path) -> None:
    """Whole answers only, in one rename."""
    file.seek(0)
    handle, draft = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name[:40]}-")
    try:
        with open(handle, "wb") as kept:
            for text in file:
                if text.endswith(b"\n") and "error" not in (_answer_line(text) or {}):
                    kept.write(text)
            kept.flush()
            os.fsync(kept.fileno())
        os.chmod(draft, os.fstat(file.fileno()).st_mode & 0o777)
        os.replace(draft, out)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
