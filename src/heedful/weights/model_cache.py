"""The folder of fetched models; in each one `source.json`, `model/` with its files, and `terms/` where there are any.

A model appears by one rename of a finished, synced folder and goes by one rename; nothing half-written has a model's
name. Work in progress lives in `.pull-*` folders, locked while their process lives, swept by the next pull after its
death. It knows nothing of packages and hubs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from heedful.errors import DiskFull, SourceError, UnknownModel
from heedful.weights.progress import bytes_text
from heedful.weights.source_names import nearest_names

RECORD_FILE = "source.json"
MODEL_FOLDER = "model"
TERMS_FOLDER = "terms"
_WORK_PREFIX = ".pull-"
_FINISHED = "finished"


@dataclass(frozen=True)
class StoredFile:
    path: str
    """Relative to the model's `model/` folder, with `/` between its parts."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelRecord:
    """What `source.json` says of a fetched model."""

    name: str
    source: str
    licence: str | None
    revision: str | None
    """The hub's commit, where the source is a hub."""
    fetched: str
    """UTC, ISO 8601."""
    entry: str
    """The file to load, or "" for the whole folder."""
    files: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class CachedModel:
    record: ModelRecord
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / MODEL_FOLDER / self.record.entry

    @property
    def damaged_file(self) -> str | None:
        """The first file that is missing or has another size than when it was stored."""
        for file in self.record.files:
            path = self.folder / MODEL_FOLDER / file.path
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                return file.path
        return None


def cache_root() -> Path:
    """The folder of everything that heedful can fetch or make again: $HEEDFUL_CACHE, or the user's cache folder."""
    chosen = os.environ.get("HEEDFUL_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("heedful"))


def models_folder() -> Path:
    return cache_root() / "models"


def model_folder(name: str) -> Path:
    """Where the model called `name` lies or would lie. Names that are not plain words get a digest, so none collide."""
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        return models_folder() / name
    words = re.sub(r"[^A-Za-z0-9.]+", "-", name)[-80:].strip("-.")
    return models_folder() / f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def find_model(name: str) -> CachedModel | None:
    """The fetched model called `name`, its file sizes checked; None if there is none.

    Raises:
        SourceError: something else is in its place, or a file of it is not as it was stored.
    """
    folder = model_folder(name)
    if not folder.exists():
        return None
    record = _read_record(folder)
    if record is None or record.name != name:
        raise _not_a_model(name, folder)
    model = CachedModel(record, folder)
    if model.damaged_file is not None:
        raise SourceError(f"{folder / MODEL_FOLDER / model.damaged_file} is not as it was stored", _refetch(name))
    return model


def list_models() -> list[CachedModel]:
    """All fetched models by name, damaged ones too; whatever else lies in the cache folder is passed over."""
    cache = models_folder()
    with named_os_errors():
        folders = sorted(cache.iterdir()) if cache.is_dir() else []
    records = [(_read_record(folder), folder) for folder in folders if not folder.name.startswith(".")]
    models = [CachedModel(record, folder) for record, folder in records if record is not None]
    return [model for model in models if model.folder == model_folder(model.record.name)]


def fetched_model(name: str) -> CachedModel:
    """The fetched model called `name`, damaged or not.

    Raises:
        UnknownModel: none is called so.
        SourceError: what lies in its place is not a model of ours.
    """
    models = {model.record.name: model for model in list_models()}
    if name not in models:
        if model_folder(name).exists():
            raise _not_a_model(name, model_folder(name))
        raise UnknownModel(name, nearest_names(name, models), "`heedful models` lists what is fetched.")
    return models[name]


def remove_model(name: str) -> CachedModel:
    """Deletes the fetched model called `name` and returns what it was; raises as `fetched_model` does."""
    model = fetched_model(name)
    with work_folder() as work:
        os.rename(model.folder, work / "removed")
    return model


@contextmanager
def work_folder(needed_bytes: int | None = None) -> Iterator[Path]:
    """A folder in the cache for work in progress; it is deleted at the end, and what is finished has been renamed.

    What the file system refuses meanwhile becomes a named error.

    Raises:
        SourceError: the cache folder cannot be written to.
        DiskFull: there is no room in it; `needed_bytes` is what it says of the need.
    """
    cache = models_folder()
    with named_os_errors(needed_bytes):
        cache.mkdir(parents=True, exist_ok=True)
        _sweep_leftovers(cache)
        work, lock = _locked_folder(cache)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)


def put_in_cache(work: Path, record: ModelRecord, replace: bool) -> CachedModel:
    """Gives the files under `finished_folder(work)` their place in the cache, in one rename.

    If another process was first, its model stays and this one is dropped; `replace` puts away what was there before.
    """
    finished = finished_folder(work)
    write_synced(finished / RECORD_FILE, [json.dumps(asdict(record), indent=2).encode() + b"\n"])
    for folder in (finished, *(path for path in finished.rglob("*") if path.is_dir())):
        _sync_folder(folder)
    target = model_folder(record.name)
    if replace:
        with suppress(FileNotFoundError):
            os.rename(target, work / "replaced")
    try:
        os.rename(finished, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
    _sync_folder(target.parent)
    model = find_model(record.name)
    assert model is not None, f"{target} vanished"
    return model


def finished_folder(work: Path) -> Path:
    return work / _FINISHED


def write_synced(path: Path, chunks: Iterable[bytes]) -> None:
    """Appends `chunks` to the file and waits until the disk has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def require_room(needed_bytes: int) -> None:
    if _free_bytes() < needed_bytes:
        raise disk_full(needed_bytes)


def disk_full(needed_bytes: int | None) -> DiskFull:
    need = f"{bytes_text(needed_bytes)} are needed and" if needed_bytes else "it filled up;"
    return DiskFull(
        f"no room in {models_folder()}: {need} {bytes_text(_free_bytes())} are free",
        "Nothing was kept. Make room (`heedful models` lists what can go), or set HEEDFUL_CACHE to a folder elsewhere.",
    )


@contextmanager
def named_os_errors(needed_bytes: int | None = None) -> Iterator[None]:
    """Turns what the file system refuses in the cache folder into DiskFull or SourceError."""
    try:
        yield
    except BrokenPipeError:
        raise  # it is about our own output
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(needed_bytes) from error
        raise SourceError(
            f"cannot use the model cache {models_folder()}: {error}",
            "Give this user the right to write there, or set HEEDFUL_CACHE to another folder.",
        ) from error


def _free_bytes() -> int:
    folder = models_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _not_a_model(name: str, folder: Path) -> SourceError:
    return SourceError(f"{folder} is not a model that was fetched whole: no valid {RECORD_FILE}", _refetch(name))


def _refetch(name: str) -> str:
    return f"Fetch it again: heedful pull --force {name}"


def _read_record(folder: Path) -> ModelRecord | None:
    """None for whatever is not a record that this version wrote."""
    try:
        fields = json.loads((folder / RECORD_FILE).read_bytes())
        files = tuple(StoredFile(**file) for file in fields.pop("files"))
        record = ModelRecord(**fields, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    whole = isinstance(record.name, str) and isinstance(record.entry, str) and all(_is_whole(file) for file in files)
    return record if whole else None


def _is_whole(file: StoredFile) -> bool:
    return isinstance(file.path, str) and isinstance(file.size_bytes, int) and isinstance(file.sha256, str)


def _locked_folder(cache: Path) -> tuple[Path, int]:
    """A new work folder and the descriptor that holds its lock; a sweep that got in between makes it try again."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=cache))
        try:
            lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:
            pass  # a file system without locks: nothing is swept there either
        if work.exists():
            return work, lock
        os.close(lock)


def _sweep_leftovers(cache: Path) -> None:
    """Deletes the work folders whose process has died, for its lock died with it."""
    for work in cache.glob(f"{_WORK_PREFIX}*"):
        try:
            lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT)
        except OSError:
            continue  # gone meanwhile, or not ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)
        except OSError:
            pass  # its process is alive
        finally:
            os.close(lock)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
