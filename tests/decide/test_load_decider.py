"""From names to deciders: which kind a folder is, which options mean something to it, whose calibration it takes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful.decide import Choice, Jev, Likelihood, Noul, Score, load
from heedful.decide.calibrate import Calibration
from heedful.decide.calibration_file import kept_path, write_calibration
from heedful.decide.decider import HasLogits
from heedful.decide.identity import decider_sha256
from heedful.decide.load import default_decider, find_decider, kind_of, load_decider
from heedful.errors import BadParameter, SourceError, UnknownModel
from heedful.testing import make_tiny_model


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("chat"))


FILES: dict[str, dict[str, Any]] = {
    "laya": {"rl_agent_config.json": {}, "config.json": {"model_type": "laya"}},
    "kev": {"adapter_config.json": {}, "head.pt": {}},
    "gliclass": {"config.json": {"model_type": "GLiClass"}},
    "classifier": {"config.json": {"model_type": "modernbert"}},
    "likelihood": {"config.json": {"model_type": "qwen3"}},
}


@pytest.mark.parametrize("kind", FILES)
def test_a_kind_is_known_by_its_files(kind: str, tmp_path: Path) -> None:
    for name, content in FILES[kind].items():
        (tmp_path / name).write_text(json.dumps(content))
    assert kind_of(tmp_path) == kind
    found = find_decider(str(tmp_path))
    assert (found.kind, found.path, found.name) == (kind, tmp_path, str(tmp_path))


def test_a_file_is_a_chat_model_and_an_empty_folder_none(chat: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert find_decider(str(tmp_path / "x.gguf")).kind == "likelihood"
    assert find_decider(str(chat / "model.safetensors")).path == chat
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"config\.json does not exist"):
        find_decider(str(tmp_path / "empty"))
    with pytest.raises(UnknownModel):
        find_decider("nobody")


def test_a_chat_model_with_its_options(chat: Path) -> None:
    calibration = Calibration({"choice": 2.0})
    decider = load_decider(str(chat), orders=3, threads=1, calibration=calibration)
    assert isinstance(decider, Likelihood)
    assert (decider.orders, decider.calibration, decider.name) == (3, calibration, str(chat))


GOLDEN = Path(__file__).parent.parent / "golden" / "decisions"
ABOUT = [
    Choice("team", ["billing", "returns", "other"]),
    Score("anger", ["calm", "angry"]),
    Noul("refund", "a refund?"),
]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("laya/sequential", "Laya"), ("kev/adapter", "Kev"), ("gliclass/deberta_simple", "GLiClass"), ("", "Likelihood")],
)
def test_every_kind_gives_answers_at_the_calibration_it_is_loaded_with(folder: str, name: str, chat: Path) -> None:
    path = str(GOLDEN / folder) if folder else str(chat)
    decider = load_decider(path, threads=1, calibration=Calibration(dict.fromkeys(["choice", "score", "noul"], 2.0)))
    assert type(decider).__name__ == name
    assert isinstance(decider, HasLogits)
    assert decider.calibration.temperature("noul", 2) == 2.0
    answers = decider.decide("money", ABOUT).to_dict()
    assert answers["model"] == decider.name == path
    logits = decider.logits("money", ABOUT)
    assert [len(of) for of in logits] == [3, 2, 2]
    for question, of in zip(ABOUT, logits, strict=True):
        shares = np.exp((np.array(of) - max(of)) / 2.0)
        shares /= shares.sum()
        found = answers["answers"][question.name]
        probabilities = [1 - found["noul"], found["noul"]] if "noul" in found else list(found["probabilities"].values())
        assert probabilities == pytest.approx(shares.tolist(), abs=1e-5)


def test_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TYPESAFE_API_KEY", "k")
    for name in ("jev", "http://127.0.0.1:1", "https://x.example/base"):
        assert isinstance(load_decider(name), Jev)
        assert isinstance(load_decider(name, calibration="none"), Jev)


@pytest.mark.parametrize(
    ("name", "options", "field", "words"),
    [
        ("jev", {"orders": 2}, "orders", "means nothing to jev, a System One server"),
        ("jev", {"threads": 2}, "threads", "a System One server, which runs elsewhere"),
        ("jev", {"truncate": True}, "truncate", "means nothing to jev, a System One server"),
        ("http://x", {"calibration": Calibration()}, "calibration", "it sends probabilities"),
        ("http://x", {"calibration": "some.json"}, "calibration", "it sends probabilities"),
        ("kev", {"orders": 1}, "orders", "a Kev adapter"),
        ("gliclass", {"orders": 1}, "orders", "a GLiClass model"),
        ("classifier", {"orders": 1}, "orders", "a sequence classifier"),
        ("likelihood", {"truncate": True}, "truncate", "a chat model"),
        ("likelihood", {"base": "smollm2"}, "base", "a chat model"),
    ],
)
def test_options_that_mean_nothing(name: str, options: dict[str, Any], field: str, words: str, tmp_path: Path) -> None:
    for file, content in FILES.get(name, {}).items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(BadParameter) as refused:
        load_decider(str(tmp_path) if name in FILES else name, **options)
    assert refused.value.field == field
    assert words in refused.value.message


def test_without_a_name_the_built_in_decider_decides_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "BUILT_IN_FOLDER", tmp_path)
    assert default_decider() == "smollm2"
    with pytest.raises(SourceError, match="comes without heedful-decider"):
        find_decider("heedful-decider")
    (tmp_path / "rl_agent_config.json").write_text("{}")
    assert default_decider() == "heedful-decider"
    found = find_decider("heedful-decider")
    assert (found.kind, found.path) == ("laya", tmp_path)


def test_without_pytorch_the_default_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels run the built-in decider; a plain installation without them has its files and cannot."""
    monkeypatch.setattr(load, "BUILT_IN_FOLDER", tmp_path)
    (tmp_path / "rl_agent_config.json").write_text("{}")
    find_spec = importlib.util.find_spec
    missing = ["torch", "heedful._native"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    assert default_decider() == "smollm2"
    missing.remove("heedful._native")
    if find_spec("heedful._native"):
        assert default_decider() == "heedful-decider"


def test_a_decider_takes_the_calibration_that_was_kept_for_it(chat: Path, tmp_path: Path) -> None:
    def temperature(**options: Any) -> float:
        decider = load_decider(str(chat), **options)
        assert isinstance(decider, Likelihood)
        return decider.calibration.temperature("choice", 2)

    assert temperature() == 1.0
    plain, averaged = (find_decider(str(chat)).sha256(orders) for orders in (1, 3))
    write_calibration(kept_path(plain), Calibration({"choice": 2.0}, {}, plain), {})
    write_calibration(kept_path(averaged), Calibration({"choice": 3.0}, {}, averaged), {})
    write_calibration(tmp_path / "any.json", Calibration({"choice": 4.0}), {})
    assert [temperature(), temperature(orders=1), temperature(orders=3), temperature(orders=2)] == [2, 2, 3, 1]
    assert [temperature(calibration=None), temperature(calibration="none")] == [1, 1]
    assert temperature(calibration=tmp_path / "any.json") == 4  # names no model: for any
    assert temperature(calibration=str(kept_path(averaged)), orders=3) == 3
    with pytest.raises(BadParameter, match="belongs to another decider"):
        temperature(calibration=kept_path(averaged))
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(BadParameter, match="belongs to another decider"):
        load_decider(str(other), calibration=kept_path(plain))
    assert isinstance(load_decider(str(other)), Likelihood)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"temperature": 3}'])
def test_files_that_are_no_calibration(chat: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(BadParameter) as refused:
        load_decider(str(chat), calibration=tmp_path / "c.json")
    assert refused.value.field == "calibration"
    with pytest.raises(BadParameter, match="cannot be read"):
        load_decider(str(chat), calibration=tmp_path / "nowhere.json")


def test_identity_is_of_the_files_that_are_read_and_how(tmp_path: Path) -> None:
    here, there = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b")
    first = decider_sha256("likelihood", here)
    assert decider_sha256("likelihood", there) == first  # where it lies makes no difference
    (here / "README.md").write_text("a card")
    assert decider_sha256("likelihood", here) == first
    assert decider_sha256("classifier", here) != first
    assert decider_sha256("likelihood", here, orders=2) != first
    config = (here / "config.json").read_text()
    (here / "config.json").write_text(config + " ")
    assert decider_sha256("likelihood", here) != first  # although its digest was kept
    (here / "config.json").write_text(config)
    assert decider_sha256("likelihood", here) == first
    (here / "config.json").rename(here / "settings.json")
    assert decider_sha256("likelihood", here) != first


def test_a_folder_of_calibrations_that_cannot_be_read_is_named(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_DATA", "/" + "too-long" * 40)
    with pytest.raises(BadParameter, match=r"too-long.*cannot be read: File name too long"):
        load_decider(str(chat))
    assert load_decider(str(chat), calibration="none").name == str(chat)


def test_digests_are_kept_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    first = decider_sha256("likelihood", folder)
    kept = sorted((tmp_path / "cache" / "digests").iterdir())
    assert len(kept) == 4
    for file in kept:
        file.write_text("torn")
    assert decider_sha256("likelihood", folder) == first
    for file in kept:
        file.write_text("0" * 64)
    assert decider_sha256("likelihood", folder) != first  # so it was not read again
