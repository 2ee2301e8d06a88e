"""Measured figures: what ships, what is measured here and kept, and what somebody who chooses a policy is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.cache.policy_text import parse_policy, policy_name
from heedful.cost import quality
from heedful.cost.quality import (
    MEAN_KLD_BOUND,
    Measurement,
    NeedleScore,
    PassageLoss,
    measured_policies,
    measured_quality,
    model_key,
    quality_warning,
    save_measurement,
)
from heedful.request import CachePolicy

LOSS = PassageLoss(0.01, 0.005, 0.1, 0.4, 0.002, 0.97, 0.0, 500, "a text")
NEEDLES = NeedleScore(0.8, 0.9, 0.85, 1.0, 40, {"single": 1.0, "multi": 0.6}, {"512": 0.8})
Q4 = parse_policy("kv=q4")


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was measured here, and two models' figures ship."""
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    loss = {**vars(LOSS), "mean_kld": 0.5}
    shipped = {
        "files": {"w.gguf 5": "first"},
        "models": {"first": {"kv=q4": {"passage": loss, "needles": None}}, "second": {}},
    }
    monkeypatch.setattr(quality, "_shipped", lambda: shipped)
    return tmp_path / "data"


def test_what_was_measured_is_found_again_under_any_spelling_of_the_policy() -> None:
    save_measurement("second", parse_policy("kv=v:q4/k:q8,precise=128"), Measurement(LOSS, NEEDLES))
    found = measured_quality("second", parse_policy("kv=k:q8/v:q4"))
    assert found == quality.Quality(0.01, 0.1, 0.002, 0.8, "a text")
    assert measured_quality("second", parse_policy("kv=k:q8/v:q4,precise=0")) is None
    assert measured_quality("first", parse_policy("kv=k:q8/v:q4")) is None


def test_all_figures_survive_the_file() -> None:
    save_measurement("other", Q4, Measurement(LOSS, NEEDLES))
    assert measured_policies("other") == {"kv=q4": Measurement(LOSS, NEEDLES)}


def test_what_was_measured_here_comes_before_what_ships() -> None:
    shipped = measured_quality("first", Q4)
    assert shipped is not None
    assert shipped.mean_kld == 0.5
    save_measurement("first", Q4, Measurement(LOSS))
    assert measured_quality("first", Q4) == Measurement(LOSS).quality
    save_measurement("first", parse_policy("kv=q8"), Measurement(LOSS))
    assert list(measured_policies("first")) == ["kv=q4", "kv=q8"]
    assert measured_policies("first")["kv=q4"].passage.mean_kld == 0.01


def test_needles_stay_when_only_the_text_is_measured_again() -> None:
    save_measurement("m", Q4, Measurement(LOSS, NEEDLES))
    save_measurement("m", Q4, Measurement(replace(LOSS, mean_kld=0.02)))
    assert measured_policies("m") == {"kv=q4": Measurement(replace(LOSS, mean_kld=0.02), NEEDLES)}


def test_a_file_is_known_by_its_name_and_size(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(bytes(5))
    assert model_key(str(tmp_path / "w.gguf")) == "first"  # the alias's own file, wherever it lies
    (tmp_path / "w.gguf").write_bytes(bytes(6))
    assert model_key(str(tmp_path / "w.gguf")) == "w.gguf 6"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(bytes(30))
    (tmp_path / "folder" / "notes.txt").write_bytes(bytes(100))
    assert model_key(str(tmp_path / "folder")) == "folder 30"
    assert model_key("hf:org/name") == "hf:org/name"
    assert model_key("no/such/file.gguf") == "no/such/file.gguf"


def test_an_alias_is_the_alias_whatever_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_key("first") == "first"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"model": "m", "policy": "kv=q4"}', b"\xff\xfe", b"[" * 10**5]
)
def test_files_that_are_not_ours_are_passed_over(content: bytes) -> None:
    path = save_measurement("m", Q4, Measurement(LOSS))
    path.write_bytes(content)
    assert measured_quality("m", Q4) is None
    assert measured_policies("m") == {}
    save_measurement("m", Q4, Measurement(LOSS))
    assert measured_quality("m", Q4) is not None


def test_a_file_of_another_model_in_its_place_is_passed_over() -> None:
    path = save_measurement("m", Q4, Measurement(LOSS))
    path.write_text(path.read_text().replace('"m"', '"another"'))
    assert measured_quality("m", Q4) is None
    assert measured_policies("m") == {}


def test_models_and_policies_with_awkward_names_have_files_of_their_own(data_folder: Path) -> None:
    names = ["hf:a/b", "hf:a-b", "../up", "x" * 300, "é", "."]
    for i, name in enumerate(names):
        save_measurement(name, Q4, Measurement(replace(LOSS, tokens=i)))
    assert [measured_policies(name)["kv=q4"].passage.tokens for name in names] == list(range(len(names)))
    assert all(data_folder / "quality" in path.parents for path in data_folder.parent.rglob("*.json"))


def test_writing_that_fails_keeps_the_old_file_and_leaves_nothing(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_measurement("m", Q4, Measurement(LOSS))

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_measurement("m", Q4, Measurement(replace(LOSS, mean_kld=9.0)))
    assert list(path.parent.iterdir()) == [path]
    assert measured_policies("m")["kv=q4"].passage == LOSS


def test_a_policy_that_loses_much_is_warned_of() -> None:
    assert quality_warning("first", Q4) == (
        "kv=q4 changes what first says: mean KLD 0.500 against exact attention, more than 0.05; heedful show first "
        "lists the policies that were measured"
    )
    save_measurement("first", Q4, Measurement(replace(LOSS, mean_kld=MEAN_KLD_BOUND)))
    assert quality_warning("first", Q4) is None


def test_a_policy_that_nobody_measured_is_said_to_be_so() -> None:
    assert quality_warning("my model.gguf", CachePolicy(kv_format="q4", precise=0)) == (
        "what kv=q4,precise=0 loses on my model.gguf is not measured: "
        "heedful eval policy -m 'my model.gguf' --policy kv=q4,precise=0"
    )


def test_nothing_is_said_where_nothing_was_chosen_or_nothing_changes() -> None:
    assert quality_warning("second", CachePolicy()) is None
    assert quality_warning("second", parse_policy("kv=f32")) is None
    assert measured_quality("second", parse_policy("kv=f32")) is None


def test_what_ships_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of policies as policy_name writes them, aliases and files as the package pins them."""
    from heedful.weights.sources import ALIASES

    monkeypatch.undo()
    shipped = json.loads(Path(quality.__file__).with_name("measured.json").read_text())
    for own, alias in shipped["files"].items():
        assert own == f"{ALIASES[alias].file} {ALIASES[alias].size_bytes}"
    for model, policies in shipped["models"].items():
        assert list(quality._shipped_of(model)) == list(policies)
        assert [policy_name(parse_policy(name)) for name in policies] == list(policies)
