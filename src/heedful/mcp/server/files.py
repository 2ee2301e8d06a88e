"""Files that a caller may name, and no others: those under the roots that whoever started the server has named.

A path is walked from its root, folder by folder, each opened without following links, so that nothing that is swapped
meanwhile leads out; `..` and symbolic links are refused, wherever they would lead.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from heedful.errors import BadParameter

MAX_FILE_BYTES = 4 << 20
MAX_LISTED = 10_000
_IN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
"""Without waiting: a pipe in the place of a file would hold everybody up."""


class Roots:
    """`folders` are what they are at the start, links in their own paths followed then. Raises BadParameter for one
    that is no folder."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise BadParameter("--root", f"{folder} is no folder")
        self.folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))

    def __bool__(self) -> bool:
        return bool(self.folders)

    @property
    def shown(self) -> str:
        return ", ".join(map(str, self.folders))

    def read_text(self, name: str) -> str:
        """`name`: absolute and under a root, or relative to one. Raises BadParameter, which says nothing of what is
        elsewhere."""
        return _text(self.read_bytes(name), name)

    def read_bytes(self, name: str) -> bytes:
        """As `read_text`, of any file."""
        with self._opened(name) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise BadParameter(
                "path", f"{name[-200:]} has over {MAX_FILE_BYTES:,} bytes", "Split it, or name a smaller one."
            )
        return data

    def stamp(self, name: str) -> tuple[int, ...]:
        """Changes when the file does. Raises BadParameter, as `read_text`."""
        with self._opened(name) as file:
            found = os.fstat(file.fileno())
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def check(self, name: str) -> None:
        """That there is such a file. Raises BadParameter, as `read_text`."""
        self.stamp(name)

    def files(self) -> list[PurePosixPath]:
        """What is under the roots, sorted, at most MAX_LISTED; no links, and nothing whose name begins with a dot."""
        found: list[PurePosixPath] = []
        for root in self.folders:
            for path in _walked(root):
                if len(found) == MAX_LISTED:
                    return sorted(found)
                found.append(path)
        return sorted(dict.fromkeys(found))

    def names_like(self, typed: str) -> list[str]:
        """Names of files as a caller may give them: those that begin with what was typed first, then those that have
        it somewhere. With a slash before it they are whole paths, else paths from their root on."""
        paths = self.files()
        whole = typed.startswith("/")
        names = [str(path if whole else path.relative_to(self._root_of(path))) for path in paths]
        begin = [name for name in names if name.startswith(typed)]
        return begin + [name for name in names if typed.lower() in name.lower() and not name.startswith(typed)]

    def _root_of(self, path: PurePosixPath) -> Path:
        return next(root for root in self.folders if path.is_relative_to(root))

    def _opened(self, name: str) -> BinaryIO:
        """In the first root that has it."""
        path = _checked(name)
        for root in self.folders:
            if path.is_absolute() and not path.is_relative_to(root):
                continue
            relative = path.relative_to(root) if path.is_absolute() else path
            try:
                return _opened_under(root, relative.parts)
            except FileNotFoundError:
                continue
        if path.is_absolute() and not any(map(path.is_relative_to, self.folders)):
            raise BadParameter("path", "is under none of the allowed folders", f"They are: {self.shown}.")
        raise BadParameter("path", f"there is no {str(path)[:200]}", f"Folders that are looked into: {self.shown}.")


def _walked(root: Path) -> Iterator[PurePosixPath]:
    with suppress(FileNotFoundError):  # the root itself may be gone by now
        for folder, inner, names, opened in os.fwalk(root):
            inner[:] = sorted(filter(_is_shown, inner))
            for name in sorted(filter(_is_shown, names)):
                with suppress(OSError):  # it was there a moment ago
                    if stat.S_ISREG(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                        yield PurePosixPath(folder, name)


def _is_shown(name: str) -> bool:
    """Hidden names are not, nor those that are no UTF-8 text."""
    return not name.startswith(".") and not any("\ud800" <= character <= "\udfff" for character in name)


def _checked(name: str) -> PurePosixPath:
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise BadParameter("path", "is no path")
    path = PurePosixPath(name)
    if ".." in path.parts:
        raise BadParameter("path", "has .. in it, which is not followed", "Name the file from its folder on.")
    return path


def _opened_under(root: Path, parts: Sequence[str]) -> BinaryIO:
    """Raises FileNotFoundError, and BadParameter for what is there and not to be read."""
    if not parts:
        raise BadParameter("path", "is a folder", "Name a file in it.")
    shown = "/".join(parts)[:200]
    opened = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _IN_FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        file = os.open(parts[-1], _FILE, dir_fd=opened)
    except FileNotFoundError:
        raise
    except OSError as error:
        # ELOOP, and ENOTDIR on the way, are what a link is refused with; where it leads is nobody's business
        raise BadParameter("path", f"{shown} cannot be opened: {_why(error)}") from None
    finally:
        os.close(opened)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadParameter("path", f"{shown} is no regular file")
    return open(file, "rb")


def _why(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, and none is followed"
    if error.errno == errno.ENOTDIR:
        return "a part of its path is no folder, or a symbolic link, and none is followed"
    return str(error.strerror)


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start:,}"
        raise BadParameter("path", f"{name[:200]} is not UTF-8 text ({where})", "Convert it first.") from None
    if "\0" in text:
        raise BadParameter("path", f"{name[:200]} is no text: it holds zero bytes")
    if not text.strip():
        raise BadParameter("path", f"{name[:200]} is empty")
    return text
