"""Stands between heedful and an MCP server's process, so that nothing of the server outlives heedful.

    python -I -S guard.py LIFE_FD COMMAND ARG…

LIFE_FD is the reading end of a pipe whose other end only heedful holds: when it closes, in whatever way heedful ended,
the server and all that it has started are told to end, and killed 0.5 s later. The same happens to what a server leaves
behind when it ends itself. Runs alone, without heedful's package and without site-packages: it starts in about 20 ms.
On Linux it becomes the parent of orphans below it, so that even processes in sessions of their own are found.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

GRACE_S = 0.5
NOT_STARTED = 127
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IS_LINUX = sys.platform == "linux"


def main(life: int, command: list[str]) -> int:
    """Returns the server's exit status as a shell reports it."""
    os.set_inheritable(life, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    libc = ctypes.CDLL(None) if _IS_LINUX else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = os.fork()
    if server == 0:
        _become(command, libc)
    for ended in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ended, signal.SIG_IGN)  # they come to the whole group; the server decides
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the server alone holds its pipes
    os.dup2(nothing, 1)
    status = None
    while status is None:
        readable, _, _ = select.select([life, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            status = _reaped().get(server)
        if life in readable and status is None:
            status = _end_server(server)
    _end_rest()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _become(command: list[str], libc: ctypes.CDLL | None) -> None:
    """In the child: be the server."""
    try:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(each, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _reaped() -> dict[int, int]:
    """Children that have ended → their status."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found[pid] = status
    return found


def _end_server(server: int) -> int:
    """Tells the group to end, waits, kills the server; its status."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        status = _reaped().get(server)
        if status is not None:
            return status
        time.sleep(0.01)
    os.kill(server, signal.SIGKILL)
    return os.waitpid(server, 0)[1]


def _end_rest() -> None:
    """Kills what the server has left behind; what is below a killed process comes to us and is killed next."""
    if not _IS_LINUX:
        os.killpg(0, signal.SIGTERM)
        return
    for _ in range(1000):
        rest = _children()
        if not rest:
            return
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = file.read().rpartition(b")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
