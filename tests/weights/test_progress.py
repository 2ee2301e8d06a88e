"""What is shown while a download runs, with and without a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from heedful.weights.progress import bytes_text, no_progress, show_progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (28_376, "28.4 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (98_362_432, "98.4 MB"),
        (1_500_000_000, "1.5 GB"),
        (2_300_000_000_000, "2300.0 GB"),
    ],
)
def test_bytes_are_written_in_decimal_units(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_without_a_terminal_there_is_one_line_before_and_one_after(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("toy", 92_871_040) as transfer:
        assert capsys.readouterr() == ("", "fetching toy (92.9 MB)\n")
        transfer.received(1)
        transfer.now("unpacking")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fetched toy in \d+ s\n", err)


def test_a_failure_gets_no_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), show_progress("toy", None):
        raise ZeroDivisionError
    assert capsys.readouterr() == ("", "fetching toy\n")


def test_silence_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with no_progress("toy", 5) as transfer:
        transfer.received(1)
        transfer.now("unpacking")
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(expected_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with show_progress("toy", expected_bytes) as transfer:
        for received in (1_000_000, 400_000, 9_000_000):
            transfer.received(received)
        transfer.now("unpacking")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_terminal_gets_a_bar_that_never_passes_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(4_000_000, monkeypatch)
    assert "fetching toy" in shown
    assert "unpacking toy" in shown
    assert "4.0/4.0 MB" in shown
    assert "9.0" not in shown


def test_a_terminal_gets_the_bytes_where_the_end_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(None, monkeypatch)
    assert "9.0 MB" in shown
    assert "━" not in shown
