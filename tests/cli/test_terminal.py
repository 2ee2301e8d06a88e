"""The terminal while an answer streams, and afterwards: as it was, whatever happened."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful
from heedful.cli.terminal import LiveTerminal, Screen, StatusLine, fills_its_row

SET_REGION = re.compile(r"\x1b\[(\d+;\d+)?r")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Window:
    """A terminal that notes what is written, and has a size."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.out = io.StringIO()
        self.clock = Clock()
        self.size = os.terminal_size((columns, lines))
        self.status = StatusLine(self.out, lambda: self.size, self.clock)

    @property
    def written(self) -> str:
        return self.out.getvalue()

    @property
    def regions(self) -> list[str | None]:
        """The scroll regions that were set; None is the whole screen."""
        return [match[1] for match in SET_REGION.finditer(self.written)]

    def show(self, text: str) -> str:
        """What showing it writes, once the time for it has come."""
        self.clock.now += 10
        before = len(self.written)
        self.status.show(text)
        return self.written[before:]


@pytest.fixture
def keyboard() -> Iterator[int]:
    ours, theirs = pty.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def echoes(keyboard: int) -> bool:
    return bool(termios.tcgetattr(keyboard)[3] & termios.ECHO)


def test_the_last_row_is_kept_out_of_the_scrolling() -> None:
    window = Window(lines=24)
    window.status.open()
    assert window.regions == ["1;23"]
    assert "\x1b[24;1H" in window.show("12 tok/s")
    window.status.close()
    assert window.regions == ["1;23", None]


def test_every_sequence_leaves_the_cursor_where_it_was() -> None:
    """Setting a region sends the cursor home, and the status is written elsewhere: each is between save and restore."""
    window = Window()
    window.status.open()
    window.show("a")
    window.status.close()
    outside = re.sub(r"\x1b7.*?\x1b8", "", window.written)
    assert outside == "\x1bD\x1b[A\x1b[J"  # a row down, scrolling, and up again; in the end what is below is erased


def test_the_status_is_cut_to_the_width() -> None:
    window = Window(columns=30)
    window.status.open()
    shown = window.show("0123456789" * 5)
    assert "0123456789" * 2 + "012345678" in shown
    assert "0123456789" * 3 not in shown


def test_it_refreshes_ten_times_a_second_at_most() -> None:
    window = Window()
    window.status.open()
    shown = []
    for tick in range(100):
        window.clock.now = 100 + tick / 100
        before = len(window.written)
        window.status.show(f"<{tick}>")
        shown += [tick] if len(window.written) > before else []
    assert shown[0] == 0
    assert 9 <= len(shown) <= 10


@pytest.mark.parametrize(
    ("line", "fills"),
    [
        ("", False),
        ("1234567", False),
        ("12345678", True),
        ("123456789", False),
        ("12345678" * 3, True),
        ("日本日本", True),
        ("1日本日", False),
        ("1日本日本", False),  # the last one did not fit: a cell stays empty
        ("1日本日本123456", True),
        ("1日本日本1234", False),
        ("1234567e\u0301", True),
        ("\t", False),
        ("\t1", True),
    ],
)
def test_where_a_terminal_of_eight_columns_is_about_to_wrap(line: str, fills: bool) -> None:
    assert fills_its_row(line, 8) == fills


def test_it_does_not_refresh_where_the_text_is_about_to_wrap() -> None:
    """tmux, for one, would write the next character over the last one."""
    window = Window(columns=30)
    window.status.open()
    assert window.show("a") != ""
    before = window.written
    window.clock.now += 10
    window.status.show("b", "x" * 60)
    assert window.written == before
    window.status.show("b", "x" * 61)
    assert window.written != before


def test_the_screen_knows_the_line_that_it_is_in() -> None:
    screen = Screen(io.StringIO(), io.StringIO(), is_terminal=True, is_styled=False)
    lines = []
    for text in ("a", "b\rc", "d\ne\nf", "g", "\n"):
        screen.text(text)
        lines.append(screen.open_line)
    assert lines == ["a", "abc", "f", "fg", ""]


def test_a_resize_moves_it() -> None:
    window = Window(lines=24)
    window.status.open()
    window.show("a")
    window.size = os.terminal_size((100, 40))
    assert "\x1b[40;1H" in window.show("b")
    assert window.regions == ["1;23", None, "1;39"]
    window.status.close()
    assert window.regions[-1] is None


def test_a_terminal_that_is_too_small_has_none_until_it_grows() -> None:
    window = Window(lines=4)
    window.status.open()
    assert window.show("a") == ""
    window.size = os.terminal_size((80, 10))
    assert "\x1b[10;1H" in window.show("b")
    window.size = os.terminal_size((19, 10))
    window.show("c")
    assert window.regions == ["1;9", None]
    window.status.close()
    assert window.regions == ["1;9", None]


def test_ctrl_c_stops_the_answer_and_keys_are_not_echoed(keyboard: int) -> None:
    window = Window()
    terminal = LiveTerminal(window.status, keyboard)
    before = signal.getsignal(signal.SIGINT)
    assert echoes(keyboard)
    with terminal:
        assert not echoes(keyboard)
        assert not terminal.stopped
        signal.raise_signal(signal.SIGINT)
        assert terminal.stopped
    assert echoes(keyboard)
    assert signal.getsignal(signal.SIGINT) is before
    assert window.regions == ["1;23", None]
    with terminal:
        assert not terminal.stopped


def test_where_nobody_types_ctrl_c_ends_the_program(keyboard: int) -> None:
    window = Window()
    with pytest.raises(KeyboardInterrupt), LiveTerminal(window.status, None):
        signal.raise_signal(signal.SIGINT)
    assert window.regions == ["1;23", None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_kill_leaves_the_terminal_as_it_was(keyboard: int, number: signal.Signals) -> None:
    window = Window()
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, LiveTerminal(window.status, keyboard):
        signal.raise_signal(number)
    assert left.value.code == 128 + number
    assert echoes(keyboard)
    assert window.regions == ["1;23", None]
    assert signal.getsignal(number) is before


def test_an_error_leaves_the_terminal_as_it_was(keyboard: int) -> None:
    window = Window()
    with pytest.raises(ZeroDivisionError), LiveTerminal(window.status, keyboard):
        raise ZeroDivisionError
    assert echoes(keyboard)
    assert window.regions == ["1;23", None]


def test_a_status_line_that_cannot_open_leaves_the_terminal_as_it_was(keyboard: int) -> None:
    def no_size() -> os.terminal_size:
        raise OSError("gone")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="gone"), LiveTerminal(StatusLine(io.StringIO(), no_size), keyboard):
        raise AssertionError("not reached")
    assert echoes(keyboard)
    assert signal.getsignal(signal.SIGTERM) is before


SUSPENDED = """
import os, signal, sys
from test_terminal import Window, echoes
from heedful.cli.terminal import LiveTerminal
window, keyboard = Window(), int(sys.argv[1])
with LiveTerminal(window.status, keyboard):
    signal.raise_signal(signal.SIGTSTP)
    took_it_again = not echoes(keyboard) and window.regions == ["1;23", None, "1;23"]
sys.exit(0 if took_it_again else "it did not")
"""


def test_ctrl_z_hands_the_terminal_over_and_takes_it_again(keyboard: int) -> None:
    """A child, because it does stand still; we look at its terminal meanwhile, then let it go on."""
    folders = [str(Path(heedful.__file__).parents[1]), str(Path(__file__).parent)]
    child = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(keyboard)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        pass_fds=[keyboard],
        process_group=0,  # in an orphaned group, as CI may have it, Ctrl-Z would do nothing
    )
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    echoed_meanwhile = echoes(keyboard)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    assert child.wait() == 0
    assert echoed_meanwhile


def test_a_model_cannot_control_the_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), is_terminal=True, is_styled=True)
    screen.text("a\x1b[2Jb\r\n\tc\x07\x9b31m é\x7f")
    assert out.getvalue() == "a\ufffd[2Jb\n\tc\ufffd\ufffd31m é\ufffd"


def test_a_pipe_gets_the_answer_untouched_and_no_notes() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, is_terminal=False, is_styled=True)
    screen.text("a\x1bb")
    screen.note("about it")
    assert (out.getvalue(), err.getvalue()) == ("a\x1bb", "about it\n")


@pytest.mark.parametrize(("is_styled", "shown"), [(True, "\x1b[2mabout it\x1b[22m\n"), (False, "about it\n")])
def test_notes_are_dim_where_the_terminal_can(is_styled: bool, shown: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    Screen(out, err, is_terminal=True, is_styled=is_styled).note("about it")
    assert (out.getvalue(), err.getvalue()) == (shown, "")
