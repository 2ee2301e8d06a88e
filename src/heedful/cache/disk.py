"""Pages on disk: what one process has computed, another one reads. One file a page, named by what it holds.

    tier = DiskTier(folder, fingerprint, max_bytes=2_000_000_000)
    tier.write(name, rows)       # copied and queued; a thread writes
    tier.read(name, rows)        # True: the rows are filled
    tier.close()                 # all that is queued is on disk

A file is written under another name, synced and renamed, and a reader checks its header and sha256: whatever is killed
at whatever moment, a page is read right or not at all. Several processes may share a folder; a file that has vanished
is a miss. The fingerprint stands for everything that decides a page's bytes besides its name: the model and the layout.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from heedful.cache.prefix import PageName
from heedful.errors import BadParameter

VERSION = 1
"""Of the file's form, and of what the bytes of a page mean in a layout of the same size."""
MAX_QUEUED_BYTES = 128 << 20
"""Pages that wait to be written; those that come when it is full are dropped, for the engine never waits."""
ABANDONED_SECONDS = 600
"""A file that is still being written after so long is left over from a process that died."""

_MAGIC = b"heedpage"
_HEAD = struct.Struct("<8sI32s32sI24sQ")  # magic, version, fingerprint, block, group, format, payload bytes
_DIGEST_BYTES = 32
_MOST_BUFFERS = 512  # of one system call; POSIX promises 1,024 where it says anything

log = logging.getLogger("heedful")


class DiskTier:
    """`max_bytes` bounds the whole folder, other models' pages included; the least recently used go first."""

    def __init__(
        self, directory: str | os.PathLike[str], fingerprint: str, max_bytes: int, *, max_queued: int = MAX_QUEUED_BYTES
    ) -> None:
        """`fingerprint`: a sha256 in hex. Raises BadParameter when the folder cannot be made or written to."""
        self.dropped_pages = 0
        """Not written because the queue was full."""
        self._fingerprint = bytes.fromhex(fingerprint)
        self._root = Path(directory)
        self._folder = self._root / fingerprint[:16]
        self._max_bytes = max_bytes
        self._max_queued = max_queued
        _make_folder(self._folder)
        self._queue: deque[tuple[Callable[[], None], int]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._stored_bytes = max_bytes  # not known yet: the first write looks
        self._temporary_names = itertools.count()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="heedful-prefix-writer", daemon=True)
        self._thread.start()

    def has(self, name: PageName) -> bool:
        return os.path.exists(self._path(name))

    def read(self, name: PageName, rows: list[memoryview]) -> bool:
        """Fill the rows. False, with anything in them, when the page is not there; a file that is bad is deleted."""
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                if self._is_read(file.fileno(), name, rows):
                    with suppress(OSError):  # another user's file
                        os.utime(file.fileno())
                    return True
            os.unlink(path)
        except OSError:
            pass
        return False

    def write(self, name: PageName, rows: list[memoryview]) -> None:
        """Queue a page, copied; drop it when too much waits."""
        size = sum(row.nbytes for row in rows)
        with self._changed:
            if self._is_closing or self._queued_bytes + size > self._max_queued:
                self.dropped_pages += not self._is_closing
                return
            payload = b"".join(rows)
            self._put(lambda: self._store(name, payload), size)

    def touch(self, names: list[PageName]) -> None:
        """They were used, the first one longest ago."""
        now = time.time_ns()
        with self._changed:
            if not self._is_closing:
                self._put(lambda: self._set_times(names, now), 0)

    def close(self) -> None:
        """Write all that is queued. What comes later is ignored; closing twice does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, task: Callable[[], None], size: int) -> None:
        self._queue.append((task, size))
        self._queued_bytes += size
        self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closing:
                    self._changed.wait()
                if not self._queue:
                    return
                task, size = self._queue.popleft()
            try:
                task()
            except OSError as error:  # a full disk, a folder that is gone: answers must come nevertheless
                self._warn(error)
            with self._changed:
                self._queued_bytes -= size

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("heedful: pages cannot be kept in %s: %s", self._root, error)
        self._warned = True

    def _store(self, name: PageName, payload: bytes) -> None:
        path = self._path(name)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{os.getpid()}-{id(self):x}-{next(self._temporary_names)}.part"
        try:
            with open(temporary, "xb") as file:
                file.write(self._head(name, len(payload)) + sha256(payload).digest())
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._stored_bytes += _HEAD.size + _DIGEST_BYTES + len(payload)
        if self._stored_bytes > self._max_bytes:
            self._shrink()

    def _set_times(self, names: list[PageName], now: int) -> None:
        for later, name in enumerate(names):
            with suppress(OSError):  # dropped, or gone
                os.utime(self._path(name), ns=(now + later, now + later))

    def _shrink(self) -> None:
        """Delete what was used longest ago until a sixteenth of the room is free, and what nobody writes any more."""
        files, abandoned = [], time.time() - ABANDONED_SECONDS
        for path in self._root.glob("*/*/*"):
            try:
                facts = path.stat()
            except OSError:
                continue
            if path.suffix == ".page":
                files.append((facts.st_mtime_ns, facts.st_size, path))
            elif path.suffix == ".part" and facts.st_mtime < abandoned:
                path.unlink(missing_ok=True)
        stored = sum(size for _, size, _ in files)
        if stored > self._max_bytes:
            stored -= _delete_oldest(files, stored - self._max_bytes + self._max_bytes // 16)
        # other processes write too: look again before all of the room that is left can have been filled
        self._stored_bytes = max(stored, self._max_bytes - self._max_bytes // 16)

    def _head(self, name: PageName, payload_bytes: int) -> bytes:
        form = name.format.encode()
        assert len(form) <= 24, form
        return _HEAD.pack(_MAGIC, VERSION, self._fingerprint, name.block, name.group, form, payload_bytes)

    def _is_read(self, descriptor: int, name: PageName, rows: list[memoryview]) -> bool:
        size = sum(row.nbytes for row in rows)
        head = bytearray(_HEAD.size + _DIGEST_BYTES)
        if os.fstat(descriptor).st_size != len(head) + size:
            return False
        buffers = [memoryview(head), *rows]
        for begin in range(0, len(buffers), _MOST_BUFFERS):
            part = buffers[begin : begin + _MOST_BUFFERS]
            if os.readv(descriptor, part) != sum(buffer.nbytes for buffer in part):
                return False
        return head == self._head(name, size) + _digest(rows)

    def _path(self, name: PageName) -> Path:
        block = name.block.hex()
        return self._folder / block[:2] / f"{block}-{name.group}-{name.format}.page"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(
            "prefix_cache", f"{folder} cannot be made: {error.strerror}", "Name a folder that this user may write to."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadParameter("prefix_cache", f"{folder} cannot be written to", "Name another folder.")


def _digest(rows: Iterable[memoryview]) -> bytes:
    digest = sha256()
    for row in rows:
        digest.update(row)
    return digest.digest()


def _delete_oldest(files: list[tuple[int, int, Path]], wanted: int) -> int:
    """(time, bytes, path): returns the bytes of what is gone, at least `wanted` where there are so many."""
    gone = 0
    for _, size, path in sorted(files):
        if gone >= wanted:
            break
        path.unlink(missing_ok=True)
        gone += size
    return gone
