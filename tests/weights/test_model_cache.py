"""The cache folder: what is listed, what is damaged, what is swept, and who wins a race."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.errors import DiskFull, SourceError, UnknownModel
from heedful.weights.model_cache import (
    MODEL_FOLDER,
    ModelRecord,
    StoredFile,
    cache_root,
    find_model,
    finished_folder,
    list_models,
    model_folder,
    models_folder,
    named_os_errors,
    put_in_cache,
    remove_model,
    require_room,
    work_folder,
    write_synced,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def store(name: str, content: bytes = b"GGUF", replace_old: bool = False) -> None:
    record = ModelRecord(
        name, "wheel:x", "MIT", None, "2026-01-01", "m.gguf", (StoredFile("m.gguf", len(content), "00"),)
    )
    with work_folder() as work:
        write_synced(finished_folder(work) / MODEL_FOLDER / "m.gguf", [content])
        put_in_cache(work, record, replace_old)


def test_a_stored_model_is_found_again_with_its_record(cache: Path) -> None:
    store("toy", b"GGUF1234")
    found = find_model("toy")
    assert found is not None
    assert found.path == cache / "toy" / "model" / "m.gguf"
    assert found.path.read_bytes() == b"GGUF1234"
    assert found.record.size_bytes == 8
    assert json.loads((cache / "toy" / "source.json").read_text())["files"] == [
        {"path": "m.gguf", "size_bytes": 8, "sha256": "00"}
    ]
    assert [path.name for path in cache.iterdir()] == ["toy"]


def test_nothing_is_found_in_a_cache_that_does_not_exist(cache: Path) -> None:
    assert find_model("toy") is None
    assert list_models() == []
    assert not cache.exists()


def test_the_folder_without_a_setting_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEEDFUL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_root() == tmp_path / "heedful"
    assert models_folder() == tmp_path / "heedful" / "models"


def test_names_get_folders_inside_the_cache_that_do_not_collide(cache: Path) -> None:
    names = [
        "toy",
        "hf:org/name",
        "hf:org-name",
        "hf:org/name@main",
        "wheel:a==1/x/..",
        "../evil",
        "",
        "a/b",
        "Toy",
        ".x",
    ]
    folders = [model_folder(name) for name in names]
    assert {folder.parent for folder in folders} == {cache}
    assert len({folder.name.lower() for folder in folders}) == len(names)
    assert not any(folder.name.startswith(".") for folder in folders)


def test_foreign_and_half_written_folders_are_passed_over(cache: Path) -> None:
    store("toy")
    (cache / "empty").mkdir()
    (cache / "plain-file").write_text("x")
    broken = [
        "",
        "{",
        "[]",
        "null",
        '{"files": 3}',
        '{"files": [{"path": 1}]}',
        "[" * 100_000,
        '{"name": "b", "files": []}',
    ]
    for number, text in enumerate(broken):
        (cache / f"broken{number}").mkdir()
        (cache / f"broken{number}" / "source.json").write_text(text)
    (cache / "binary").mkdir()
    (cache / "binary" / "source.json").write_bytes(b"\xff\xfe\x00")
    (cache / "folder-as-record" / "source.json").mkdir(parents=True)
    shutil.copytree(cache / "toy", cache / "copy-of-toy")  # no name leads to it
    shutil.copytree(cache / "toy", cache / ".pull-dead")
    assert [model.record.name for model in list_models()] == ["toy"]


def test_a_record_of_wrong_types_is_no_record(cache: Path) -> None:
    store("toy")
    record = json.loads((cache / "toy" / "source.json").read_text())
    record["files"][0]["size_bytes"] = "8"
    (cache / "toy" / "source.json").write_text(json.dumps(record))
    assert list_models() == []
    with pytest.raises(SourceError, match=r"source\.json"):
        find_model("toy")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"GG"), lambda path: path.unlink()])
def test_a_damaged_model_names_the_file_and_the_way_out(cache: Path, damage: object) -> None:
    store("toy")
    damage(cache / "toy" / "model" / "m.gguf")  # type: ignore[operator]
    with pytest.raises(SourceError, match=r"m\.gguf is not as it was stored") as caught:
        find_model("toy")
    assert "heedful pull --force toy" in caught.value.remedy
    assert [model.damaged_file for model in list_models()] == ["m.gguf"]


def test_a_foreign_folder_in_a_models_place_is_an_error(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / "mine.txt").write_text("keep me")
    for use in (find_model, remove_model):
        with pytest.raises(SourceError, match="not a model"):
            use("toy")
    assert (cache / "toy" / "mine.txt").exists()


def test_a_folder_renamed_by_hand_is_not_the_model_of_its_new_name(cache: Path) -> None:
    store("toy")
    (cache / "toy").rename(cache / "other")
    with pytest.raises(SourceError, match="not a model"):
        find_model("other")


def test_removal_leaves_the_others(cache: Path) -> None:
    store("toy")
    store("other")
    assert remove_model("toy").record.name == "toy"
    assert [path.name for path in cache.iterdir()] == ["other"]


def test_removal_of_an_unknown_name_suggests_what_is_there() -> None:
    store("toy-model")
    with pytest.raises(UnknownModel) as caught:
        remove_model("toymodel")
    assert caught.value.nearest == ["toy-model"]


def test_the_first_of_two_finished_pulls_stays(cache: Path) -> None:
    store("toy", b"first")
    store("toy", b"second")
    assert (cache / "toy" / "model" / "m.gguf").read_bytes() == b"first"
    assert [path.name for path in cache.iterdir()] == ["toy"]


def test_replacing_takes_the_place_of_what_was_there(cache: Path) -> None:
    store("toy", b"first")
    store("toy", b"second", replace_old=True)
    assert (cache / "toy" / "model" / "m.gguf").read_bytes() == b"second"
    assert [path.name for path in cache.iterdir()] == ["toy"]


def test_a_failure_leaves_nothing(cache: Path) -> None:
    def fails_halfway() -> None:
        with work_folder() as work:
            write_synced(finished_folder(work) / "x", [b"half"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_halfway()
    assert list(cache.iterdir()) == []


def test_leftovers_of_the_dead_are_swept_and_work_of_the_living_is_not(cache: Path) -> None:
    dead = cache / ".pull-dead"
    (dead / "finished").mkdir(parents=True)
    (dead / "lock").touch()
    dead_early = cache / ".pull-early"
    dead_early.mkdir()
    with work_folder() as living:
        assert sorted(cache.iterdir()) == [living]
        store("toy")
        assert living.exists()
    assert [path.name for path in cache.iterdir()] == ["toy"]


def test_a_sweep_between_making_and_locking_a_folder_makes_it_try_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    swept: list[Path] = []

    def open_after_a_sweep(path: str | Path, *rest: int) -> int:
        if Path(path).name == "lock" and not swept:
            swept.append(Path(path).parent)
            swept[0].rmdir()
        return real_open(path, *rest)

    monkeypatch.setattr(os, "open", open_after_a_sweep)
    with work_folder() as work:
        assert work.exists()
        assert work != swept[0]


def test_file_systems_without_locks_work_and_are_not_swept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / ".pull-other").mkdir(parents=True)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store("toy")
    assert sorted(path.name for path in cache.iterdir()) == [".pull-other", "toy"]


def test_no_room_names_needed_and_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_500_000))
    require_room(1_500_000)
    with pytest.raises(DiskFull, match=r"191\.2 MB are needed and 1\.5 MB are free"):
        require_room(191_233_472)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_wherever_it_shows(number: int) -> None:
    with pytest.raises(DiskFull, match=r"2\.0 kB are needed"), named_os_errors(2000):
        raise OSError(number, os.strerror(number))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match="cannot use the model cache") as caught:
        store("toy")
    assert "HEEDFUL_CACHE" in caught.value.remedy


def test_the_record_survives_its_own_round_trip() -> None:
    store("hf:org/name@v1")
    found = find_model("hf:org/name@v1")
    assert found is not None
    assert replace(found.record, licence="MIT") == found.record
    assert found.record.files == (StoredFile("m.gguf", 4, "00"),)
