"""Files from a hub: the real client against a small hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from heedful.errors import DownloadError, HashMismatch, HeedfulError, NetworkUnavailable, SourceError
from heedful.weights.child_process import Finished
from heedful.weights.hub import hub_failure, needed_paths
from heedful.weights.progress import no_progress
from heedful.weights.source_names import HubRepo
from heedful.weights.sources import find_model, resolve

COMMIT = "a1" * 20
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights " * 500,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# toy",
    "toy.Q4_0.gguf": b"GGUF" * 700,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "models"


class Hub:
    """One repository, org/toy, with the branches `main` and `v1`; its large files are those above 1 kB."""

    def __init__(self) -> None:
        self.stated_digest: str | None = None
        self.status = 200

    def facts(self, name: str) -> dict[str, object]:
        content = FILES[name]
        digest = self.stated_digest or hashlib.sha256(content).hexdigest()
        large = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}
        return {"size": len(content), **({"lfs": large} if len(content) > 1000 else {})}

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        path, _, _ = path.partition("?")
        if self.status != 200:
            return self.status, b"{}", {}
        if path in (
            "/api/models/org/toy",
            *(f"/api/models/org/toy/revision/{name}" for name in ("main", "v1", COMMIT)),
        ):
            siblings = [{"rfilename": name, **self.facts(name)} for name in FILES]
            facts = {"id": "org/toy", "sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}}
            return 200, json.dumps(facts).encode(), {}
        if path == f"/api/models/org/toy/tree/{COMMIT}":
            tree = [{"type": "file", "oid": "0" * 40, "path": name, **self.facts(name)} for name in FILES]
            return 200, json.dumps(tree).encode(), {}
        name = path.removeprefix(f"/org/toy/resolve/{COMMIT}/")
        if name in FILES:
            return 200, FILES[name], {"ETag": f'"{hashlib.sha256(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        missing = "RevisionNotFound" if path.startswith("/api/models/org/toy") else "RepoNotFound"
        return 404, b"{}", {"X-Error-Code": missing}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    running = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            status, content, headers = running.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(running.answer(self.path)[1])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield running
    server.shutdown()
    thread.join()
    server.server_close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("hub")
def test_a_repository_gives_the_files_that_a_model_needs(cache: Path, tmp_path: Path) -> None:
    model = resolve("hf:org/toy", progress=no_progress)
    needed = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    assert contents(model.path) == {name: FILES[name] for name in needed}
    assert model.licence == "mit"
    found = find_model("hf:org/toy")
    assert found is not None
    assert found.record.revision == COMMIT
    digests = {file.path: file.sha256 for file in found.record.files}
    assert digests == {name: hashlib.sha256(FILES[name]).hexdigest() for name in needed}
    assert len(list(cache.iterdir())) == 1
    assert not [path for path in tmp_path.rglob("*.safetensors") if not path.is_relative_to(cache)]


@pytest.mark.usefixtures("hub")
def test_one_gguf_of_a_revision() -> None:
    model = resolve("hf:org/toy/toy.Q4_0.gguf@v1", progress=no_progress)
    assert model.path.name == "toy.Q4_0.gguf"
    assert model.path.read_bytes() == FILES["toy.Q4_0.gguf"]
    assert model.source == "hf:org/toy/toy.Q4_0.gguf@v1"


def test_bytes_that_are_not_those_the_hub_states_are_not_kept(hub: Hub, cache: Path) -> None:
    hub.stated_digest = "0" * 64
    with pytest.raises(HashMismatch, match=hashlib.sha256(FILES["model.safetensors"]).hexdigest()):
        resolve("hf:org/toy", progress=no_progress)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("hf:org/other", "no model repository org/other"), ("hf:org/toy@v9", "no revision 'v9'")],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_told_apart(name: str, message: str, cache: Path) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        resolve(name, progress=no_progress)
    assert type(caught.value) is SourceError
    assert list(cache.iterdir()) == []


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkUnavailable) as caught:
        resolve("hf:org/toy", progress=no_progress)
    assert "HF_ENDPOINT" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceError) as caught:
        resolve("hf:org/toy", progress=no_progress)
    assert "heedful[hub]" in caught.value.remedy


PATHS = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "1_Pooling/config.json",
    "chat_template.jinja",
]


def test_shards_tokenizer_files_and_subfolders_are_needed_and_copies_are_not() -> None:
    copies = ["consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "original/params.json", "README.md"]
    assert needed_paths(HubRepo("o/n"), [*PATHS, *copies, "pytorch_model.bin", "x.gguf", ".gitattributes"]) == PATHS


def test_a_repository_of_ggufs_asks_for_one_of_them() -> None:
    with pytest.raises(SourceError) as caught:
        needed_paths(HubRepo("o/n"), ["config.json", "a.gguf", "b.gguf"])
    assert "hf:o/n/a.gguf" in caught.value.remedy


def test_pickled_weights_are_not_a_model() -> None:
    with pytest.raises(SourceError, match="no safetensors"):
        needed_paths(HubRepo("o/n"), ["config.json", "pytorch_model.bin"])


def test_a_missing_gguf_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(SourceError, match=r"o/n has no c\.gguf") as caught:
        needed_paths(HubRepo("o/n", "c.gguf"), ["a.gguf", "b.gguf"])
    assert "a.gguf, b.gguf" in caught.value.remedy


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error. Access to model is restricted", SourceError),
        ("huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url", SourceError),
        ("httpx.ReadTimeout: The read operation timed out", NetworkUnavailable),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='h', port=443)", NetworkUnavailable),
        ("huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach it: offline mode is enabled", NetworkUnavailable),
        ("huggingface_hub.errors.HfHubHTTPError: Server Error '503 Service Unavailable'", NetworkUnavailable),
        ("OSError: Consistency check failed: file should be of size 5 but has size 3", DownloadError),
        ("", DownloadError),
    ],
)
def test_the_clients_words_become_the_error_that_fits(said: str, error: type[HeedfulError]) -> None:
    failure = hub_failure(
        HubRepo("org/toy"), Finished(1, f"Traceback (most recent call last):\n{said}\n" if said else "")
    )
    assert type(failure) is error
    assert failure.remedy
