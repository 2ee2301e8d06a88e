"""A Kev's folder: where its base may lie, and what it says when something in it is missing, damaged or hostile."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kev_cases import ATTENTION, GOLDEN, kev_of
from safetensors.torch import load_file, save_file

from heedful.decide.kev import Kev
from heedful.decide.load import find_decider, load_decider
from heedful.decide.question import Noul
from heedful.errors import FileFormatError, HeedfulError, SourceError, UnsupportedModel
from heedful.testing import make_tiny_model
from heedful.weights.hub import needed_paths
from heedful.weights.source_names import HubRepo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole Kev beside its base, to be broken."""
    return shutil.copytree(GOLDEN / "decisions" / "kev", tmp_path / "kev") / "adapter"


def load_small(folder: Path, base: str | None = None) -> Kev:
    return Kev.load(str(folder), base=base, threads=1)


def test_the_base_may_lie_inside_or_be_given(folder: Path, tmp_path: Path) -> None:
    outside = shutil.move(folder.parent / "base", tmp_path / "elsewhere")
    question = [Noul("q", "Is it?")]
    expected = kev_of(ATTENTION).logits("state", question)
    assert load_small(folder, str(outside)).logits("state", question) == expected
    shutil.move(outside, folder / "base")
    (folder / "tokenizer.json").unlink()  # the base's own will do
    (folder / "training_config.json").unlink()
    assert load_small(folder).logits("state", question) == expected


def test_a_calibration_is_of_the_adapter_on_its_base(folder: Path, tmp_path: Path) -> None:
    beside = find_decider(str(folder)).sha256()
    outside = Path(shutil.move(folder.parent / "base", tmp_path / "elsewhere"))
    assert find_decider(str(folder), str(outside)).sha256() == beside
    assert isinstance(load_decider(str(folder), base=str(outside), threads=1), Kev)
    card = json.loads((outside / "config.json").read_text())
    (outside / "config.json").write_text(json.dumps({**card, "rope_theta": 1.0}))
    assert find_decider(str(folder), str(outside)).sha256() != beside


def test_a_head_in_safetensors_will_do(folder: Path) -> None:
    (folder / "head.pt").unlink()
    training = json.loads((folder / "training_config.json").read_text())
    (folder / "training_config.json").write_text(json.dumps({**training, "temperature": 2.35}))
    question = [Noul("q", "Is it?")]
    found = load_small(folder).decide("state", question).to_dict()
    assert found["answers"] == kev_of(ATTENTION).decide("state", question).to_dict()["answers"]


def test_a_base_that_is_nowhere_is_named(folder: Path) -> None:
    shutil.rmtree(folder.parent / "base")
    with pytest.raises(SourceError, match="names no repository") as refused:
        load_small(folder)
    assert "base=" in refused.value.remedy


@pytest.mark.parametrize(("revision", "at"), [("ab" * 20, "@" + "ab" * 20), ("0" * 40, ""), (None, "")])
def test_the_hub_is_asked_for_the_revision_it_was_trained_on(
    folder: Path, revision: str | None, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder.parent / "base")
    change_json(folder / "adapter_config.json", base_model_name_or_path="org/some-base")
    change_json(folder / "training_config.json", base_revision=revision)
    asked: list[str] = []

    def fetch(name: str, **_: Any) -> None:
        asked.append(name)
        raise SourceError("not here", "")

    monkeypatch.setattr("heedful.weights.kev_files.load", fetch)
    with pytest.raises(SourceError, match="not here"):
        load_small(folder)
    assert asked == [f"hf:org/some-base{at}"]


def test_the_hub_is_asked_for_the_head_too() -> None:
    adapter = sorted(path.name for path in (GOLDEN / ATTENTION / "adapter").iterdir())
    assert needed_paths(HubRepo("org/kev"), [*adapter, "pytorch_model.pt", "README.md"]) == adapter


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_head(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = torch.load(folder / "head.pt", weights_only=True)
        torch.save({**found, **values}, folder / "head.pt")

    return change


def replace_head(data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "head.pt").write_bytes(data)


def compress_head(folder: Path) -> None:
    """torch itself would read it."""
    with zipfile.ZipFile(folder / "head.pt") as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(folder / "head.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)


def without(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


class RunsCode:
    """What a hostile pickle does: unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "ran"))


def tensors(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "decisions" / "kev" / "adapter" / "head.safetensors") | {
        name.replace("_", "."): tensor for name, tensor in changed.items()
    }


BROKEN: dict[str, tuple[Callable[[Path], Any], type[HeedfulError], str]] = {
    "no adapter's settings": (without("adapter_config.json"), SourceError, "adapter_config.json does not exist"),
    "no adapter": (without("adapter_model.safetensors"), FileFormatError, "adapter_model.safetensors"),
    "no head": (without("head.pt", "head.safetensors"), SourceError, "neither head.pt nor head.safetensors"),
    "an empty head": (replace_head(b""), FileFormatError, "no file of tensors"),
    "a torn head": (replace_head(b"PK\x03\x04" + bytes(99)), FileFormatError, "no file of tensors"),
    "a list for a head": (replace_head(pickle.dumps([1], 2)), FileFormatError, "head.pt"),
    "a head that grows in memory": (compress_head, FileFormatError, "more than its own size"),
    "no tensors": (change_head(head=None), FileFormatError, "no tensors under 'head'"),
    "numbers for tensors": (change_head(head={"q.weight": 1.0}), FileFormatError, "no tensors under 'head'"),
    "a tensor too many": (change_head(head=tensors(v_weight=torch.zeros(64, 64))), UnsupportedModel, "v.weight"),
    "a head too wide": (change_head(head=tensors(q_weight=torch.zeros(64, 65))), UnsupportedModel, r"\(64, 64\) is"),
    "two widths": (change_head(head=tensors(k_bias=torch.zeros(63))), UnsupportedModel, r"k\.bias has shape \(63,\)"),
    "no width": (change_head(head=tensors(q_bias=torch.zeros(0))), UnsupportedModel, r"has shape"),
    "no numbers": (change_head(head=tensors(k_bias=torch.full((64,), torch.nan))), FileFormatError, "no number"),
    "options apart": (change_head(option_isolation=True), UnsupportedModel, "option_isolation"),
    "own embeddings": (change_head(special_embeddings=True), UnsupportedModel, "special_embeddings"),
    "temperature 0": (change_head(temperature=0.0), UnsupportedModel, "temperature 0"),
    "a temperature beyond any float": (change_head(temperature=10**400), UnsupportedModel, "temperature 1000"),
    "a word for a temperature": (change_head(temperature="hot"), UnsupportedModel, "temperature 'hot'"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_says_what_is_wrong(folder: Path, how: str) -> None:
    spoil, kind, problem = BROKEN[how]
    spoil(folder)
    with pytest.raises(kind, match=problem):
        load_small(folder)


def test_code_in_a_head_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"head": tensors(), "temperature": RunsCode(trace)}, folder / "head.pt")
    with pytest.raises(FileFormatError, match="no file of tensors and plain values"):
        load_small(folder)
    assert not trace.exists()


def test_settings_beside_a_plain_head_are_heeded(folder: Path) -> None:
    (folder / "head.pt").unlink()
    change_json(folder / "training_config.json", args={"option_isolation": 1})
    with pytest.raises(UnsupportedModel, match="option_isolation"):
        load_small(folder)


def test_a_base_of_another_size_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="the base embeds 259"):
        load_small(folder, str(make_tiny_model(folder / "tiny")))


def test_a_tokenizer_beyond_the_bases_embedding_is_refused(folder: Path) -> None:
    base = folder.parent / "base"
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:400].clone()
    save_file(weights, base / "model.safetensors")
    change_json(base / "config.json", vocab_size=400)
    with pytest.raises(UnsupportedModel, match="the tokenizer has 411 tokens, the base embeds 400"):
        load_small(folder)
