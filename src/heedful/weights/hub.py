"""Files from a model hub: what a repository has, which of it a model needs, and their download into one folder.

The hub's own client (extra `[hub]`) does the talking, in a child process; its settings hold, such as HF_ENDPOINT.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from heedful.errors import DownloadError, HashMismatch, HeedfulError, NetworkUnavailable, SourceError
from heedful.weights.child_process import Finished, run_watched
from heedful.weights.model_cache import StoredFile, disk_full, require_room, write_synced
from heedful.weights.progress import Transfer
from heedful.weights.source_names import HubRepo, is_safe_relative_path

_NEEDED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*/tokenizer.model",
    "*vocab.txt",
    "*merges.txt",
    "head.pt",  # Kev's, opened for tensors alone
)
_NOT_NEEDED = ("onnx/*", "openvino/*", "original/*", "consolidated*", "*/consolidated*")  # the same weights once more

_UNANSWERED = re.compile(
    r"\b(ConnectError|ConnectionError|ConnectTimeout|ReadTimeout|TimeoutException|ProxyError|OfflineModeIsEnabled"
    r"|NameResolutionError|Server Error)\b"
)


@dataclass(frozen=True)
class HubFile:
    path: str
    size_bytes: int
    sha256: str | None
    """Known for large files only."""


@dataclass(frozen=True)
class HubListing:
    commit: str
    licence: str | None
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def list_needed_files(source: HubRepo, work: Path) -> HubListing:
    """What has to be fetched for `source`.

    Raises:
        SourceError: no hub client, no such repository, revision or file, or nothing in it that can be loaded.
        NetworkUnavailable: the hub did not answer.
    """
    ended = _run_client(["list", source.repo, source.revision or ""], work)
    if ended.exit_code != 0:
        raise hub_failure(source, ended)
    # Warnings of the client may stand around its answer.
    answer = json.loads([line for line in ended.output.splitlines() if line.startswith('{"commit"')][-1])
    files = [HubFile(**file) for file in answer["files"]]
    wanted = set(needed_paths(source, [file.path for file in files]))
    return HubListing(answer["commit"], answer["licence"], tuple(file for file in files if file.path in wanted))


def needed_paths(source: HubRepo, paths: list[str]) -> list[str]:
    """The files among `paths` that the model of `source` is made of."""
    ggufs = [path for path in paths if path.endswith(".gguf")]
    if source.file:
        if source.file not in ggufs:
            raise SourceError(f"{source.repo} has no {source.file}", f"It has: {', '.join(ggufs) or 'no GGUF at all'}.")
        return [source.file]
    needed = [path for path in paths if _matches(path, _NEEDED) and not _matches(path, _NOT_NEEDED)]
    if not any(path.endswith(".safetensors") for path in needed):
        one = f"Name one of its files: hf:{source.repo}/{ggufs[0]}" if ggufs else "Ask its authors for safetensors."
        raise SourceError(f"{source.repo} has no safetensors; pickled weights are not loaded", one)
    return needed


def fetch_hub_files(
    source: HubRepo, listing: HubListing, destination: Path, work: Path, transfer: Transfer
) -> list[StoredFile]:
    """Downloads the listed files into `destination`, checked against the sizes and digests that the hub states."""
    for file in listing.files:
        if not is_safe_relative_path(file.path):
            raise DownloadError(f"{source.repo} has a file with an unsafe path: {file.path!r}", "Do not trust it.")
    require_room(listing.size_bytes)
    arguments = ["fetch", source.repo, listing.commit, str(destination), *(file.path for file in listing.files)]
    ended = _run_client(arguments, work, transfer)
    if ended.exit_code != 0:
        raise hub_failure(source, ended)
    shutil.rmtree(destination / ".cache", ignore_errors=True)  # the client's own notes
    transfer.now("checking")
    return [_stored(source, file, destination) for file in listing.files]


def hub_failure(source: HubRepo, ended: Finished) -> HeedfulError:
    """The error that fits the traceback that the client ended with."""
    said = ended.output
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [f"exit status {ended.exit_code}"]
    if re.search(r"\[Errno (28|122)\]", said):
        return disk_full(None)
    if "GatedRepoError" in said:
        return SourceError(
            f"{source.repo} is given only to those who agreed to its terms",
            "Agree on its page, then set HF_TOKEN to a token of that account.",
        )
    if "RevisionNotFoundError" in said:
        return SourceError(f"{source.repo} has no revision {source.revision!r}", "Leave it out for the newest one.")
    if re.search(r"RepositoryNotFoundError|\b40[134] Client Error", said):
        return SourceError(
            f"the hub has no model repository {source.repo}, or it is private",
            "Look at the spelling; for a private one set HF_TOKEN.",
        )
    if _UNANSWERED.search(said):
        return NetworkUnavailable(
            f"the hub did not answer for {source.repo}: {lines[-1]}",
            "Look at the connection and HF_ENDPOINT; or copy the model's files over and give their path.",
        )
    return DownloadError(f"{source.repo} did not arrive whole: {lines[-1]}", "Nothing was kept; try again.")


def _run_client(arguments: list[str], work: Path, transfer: Transfer | None = None) -> Finished:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SourceError("hf: sources need the hub's client", "Install it: pip install 'heedful[hub]'")
    return run_watched(
        [sys.executable, "-P", str(Path(__file__).with_name("hub_child.py")), *arguments],
        work,
        {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore"},
        transfer.received if transfer else lambda _: None,
    )


def _stored(source: HubRepo, file: HubFile, destination: Path) -> StoredFile:
    path = destination / file.path
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        raise DownloadError(f"{file.path} of {source.repo} did not arrive whole", "Nothing was kept; try again.")
    with open(path, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if file.sha256 and file.sha256 != digest:
        raise HashMismatch(f"{file.path} of {source.repo}", file.sha256, digest)
    write_synced(path, [])
    return StoredFile(file.path, file.size_bytes, digest)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
