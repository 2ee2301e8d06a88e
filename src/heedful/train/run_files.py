"""The folder of a run: run.json (its settings, and which base it has; written last, so that a run is there or not),
data/ (tokenizer, token arrays, and of a base the other files of a model's folder), metrics.jsonl and checkpoints/.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heedful import __version__, hardware
from heedful.errors import BadParameter, FileFormatError, UsageError
from heedful.text.tokenizer import Tokenizer
from heedful.train.base import Base, base_from_facts, open_base
from heedful.train.batches import TrainingData
from heedful.train.chat_store import CHATML, write_chat_store
from heedful.train.checkpoint import sync_folder, write_aside
from heedful.train.corpus import END, NUM_BYTES, SPECIAL_TOKENS, documents, write_tokenizer
from heedful.train.preference_store import write_preference_store
from heedful.train.settings import TrainSettings, by_name, changed, told
from heedful.train.token_store import TokenStore, write_store
from heedful.weights.export import hf_documents
from heedful.weights.load import LoadedModel

RUN, DATA, METRICS = "run.json", "data", "metrics.jsonl"


@dataclass(frozen=True)
class RunFiles:
    folder: Path
    settings: TrainSettings
    tokenizer: Tokenizer
    end_id: int
    """Between documents, and before a sample's prompt."""
    data: TrainingData
    base: Base | None = None

    def model_files(self) -> dict[str, bytes]:
        """Those that make weights a model's folder: of fresh weights the tokenizer's, of a base all but the weights."""
        return {file.name: file.read_bytes() for file in sorted((self.folder / DATA).iterdir()) if file.is_file()}


def begin_run(folder: Path, settings: TrainSettings, say: Callable[[str], None]) -> RunFiles:
    """Tokenizes the data of dialled settings into a new run's folder.

    Raises BadParameter for data that cannot be read; for a base as `open_base` does, and as `write_run` does.
    """
    if not (settings.data.files or settings.data.chat or settings.data.preferences):
        raise BadParameter(
            "--data",
            "is missing",
            "Name a text file or a *.jsonl of texts; or, with --base, --chat, --preferences or --decisions.",
        )

    def write(aside: Path) -> Base | None:
        base = None
        if settings.model.base is None:
            _write_tokenizer(aside, settings)
        else:
            base, loaded = open_base(settings.model.base)
            write_base_files(aside, loaded, settings)
        _tokenize(aside, settings, say)
        return base

    write_run(folder, settings, write)
    return open_run(folder)


def write_run(folder: Path, settings: TrainSettings, write: Callable[[Path], Base | None]) -> None:
    """A new run's folder with run.json and what `write` makes in a folder of data, which knows the base.

    Raises UsageError when a run, or something else, is there already, and as `write` does: then nothing is left.
    """
    _require_free(folder)
    aside = folder / f".data.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        base = write(aside)
        os.rename(aside, folder / DATA)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it was there before, with leftovers
            folder.rmdir()
        raise
    sync_folder(folder)
    facts = {
        "heedful": __version__,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "base": None if base is None else asdict(base),
        "settings": settings.as_dict(),
    }
    write_aside(folder / RUN, (json.dumps(facts, indent=1) + "\n").encode())


def _machine() -> dict[str, Any]:
    """Where the run begins, for its report."""
    found = hardware.detect()
    return {"processor": found.cpu, "threads": found.threads, "memory_bytes": found.memory_bytes}


def _require_free(folder: Path) -> None:
    """A run that was cut off before its run.json was there is cleared away."""
    if (folder / RUN).exists():
        raise UsageError(f"{folder} is a run already", f"Go on with it: heedful train --resume --out {folder}")
    if folder.exists() and not folder.is_dir():
        raise BadParameter("--out", f"{folder} is no folder")
    found = list(folder.iterdir()) if folder.exists() else []
    foreign = [entry.name for entry in found if entry.name != DATA and not entry.name.startswith(".data.")]
    if foreign:
        raise BadParameter("--out", f"{folder} holds other things: {', '.join(foreign[:3])}", "Name a new folder.")
    for entry in found:
        shutil.rmtree(entry)


def _write_tokenizer(folder: Path, settings: TrainSettings) -> None:
    is_bytes = settings.data.tokenizer == "bytes"
    asked = NUM_BYTES + len(SPECIAL_TOKENS) if is_bytes else told(settings.data.vocab_size)
    texts = () if is_bytes else documents(map(Path, settings.data.files))
    write_tokenizer(folder, texts, asked)


def write_base_files(folder: Path, loaded: LoadedModel, settings: TrainSettings) -> None:
    """A model's folder without its weights, with the template that its chats are to have."""
    for name, content in hf_documents(loaded, "f32").items():
        (folder / name).write_bytes(content)
    if settings.data.template is not None:
        (folder / "chat_template.jinja").write_bytes(read_template(Path(settings.data.template)))
    elif loaded.tokenizer.chat_template is None and {"<|im_start|>", "<|im_end|>"} <= loaded.tokenizer.control_texts:
        (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")


def read_template(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadParameter("data.template", f"{path} cannot be read: {error.strerror}") from error


def _tokenize(folder: Path, settings: TrainSettings, say: Callable[[str], None]) -> None:
    """Into the stores `train` and, where files are named for it, `validation`."""
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    files = settings.data.preferences or settings.data.chat or settings.data.files
    for name, paths in (("train", files), ("validation", settings.data.validation)):
        if not paths:
            continue
        of_part = [Path(path) for path in paths]
        if settings.data.preferences or settings.data.chat:
            write = write_preference_store if settings.data.preferences else write_chat_store
            say(write(folder / name, of_part, tokenizer, told(settings.model.context_len), name))
        else:
            facts = write_store(folder / name, documents(of_part), tokenizer, _end_of(tokenizer)).facts
            say(
                f"{name}: {facts.documents:,} {'document' if facts.documents == 1 else 'documents'}, "
                f"{facts.text_bytes:,} bytes, {facts.tokens:,} tokens of {tokenizer.vocab_size:,}"
            )


def _end_of(tokenizer: Tokenizer) -> int:
    """Between documents: what ends a text, not what ends an answer, where a model has both."""
    end_id = tokenizer.id_of(END)
    if end_id is None:
        end_id = min(tokenizer.eos_ids, default=tokenizer.bos_id)
    if end_id is None:
        raise BadParameter("--base", "has no token that ends a text", "Take another base.")
    return end_id


def open_run(folder: Path) -> RunFiles:
    """Raises UsageError when no run is there, FileFormatError when its files are damaged."""
    settings = read_settings(folder)
    tokenizer = Tokenizer.from_file(folder / DATA / "tokenizer.json")
    data = TrainingData(
        TokenStore.open(folder / DATA / "train"),
        context_len=told(settings.model.context_len),
        batch_tokens=told(settings.optim.batch_tokens),
        seed=settings.run.seed,
        validation_share=settings.data.validation_share,
        validation=TokenStore.open(folder / DATA / "validation") if settings.data.validation else None,
        shuffle=settings.data.shuffle,
    )
    return RunFiles(folder, settings, tokenizer, _end_of(tokenizer), data, base_of(folder))


def base_of(folder: Path) -> Base | None:
    """Which base the run has. Raises as `open_run` does."""
    facts = read_facts(folder).get("base")
    return None if facts is None else base_from_facts(facts)


def set_steps(folder: Path, steps: int) -> None:
    """Give the run another end: the schedule is that of the new number from now on. Raises as `read_settings`."""
    settings = read_settings(folder)
    settings = replace(settings, run=replace(settings.run, steps=steps))
    facts = read_facts(folder) | {"settings": settings.as_dict()}
    write_aside(folder / RUN, (json.dumps(facts, indent=1) + "\n").encode())


def other_version(folder: Path) -> str | None:
    """The heedful that began the run, where it is not this one."""
    begun_with = str(read_facts(folder).get("heedful"))
    return None if begun_with == __version__ else begun_with


def read_settings(folder: Path) -> TrainSettings:
    facts = read_facts(folder)
    try:
        return changed(TrainSettings(), by_name(facts["settings"]))
    except (KeyError, AttributeError, BadParameter) as error:
        raise FileFormatError(f"{folder / RUN} has no usable settings ({error})", "Begin the run anew.") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """What run.json says. Raises UsageError when no run is there, FileFormatError for a damaged file."""
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} is no training run", "Begin one: heedful train --data FILE --out FOLDER") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{folder / RUN} cannot be read: {error}", "Begin the run anew.") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{folder / RUN} holds no JSON object", "Begin the run anew.")
    return found


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a kill has cut is left out."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise FileFormatError(f"line {number:,} of {folder / METRICS} is no JSON", "") from error


def cut_metrics(folder: Path, step: int) -> None:
    """Forget what came after `step`: it will come again."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    write_aside(folder / METRICS, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
