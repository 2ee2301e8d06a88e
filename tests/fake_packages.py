"""Tiny wheels, and a package index on 127.0.0.1 that serves, stalls and cuts off: what pip meets in the tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import heedful


def write_wheel(folder: Path, project: str, version: str, files: Mapping[str | zipfile.ZipInfo, bytes]) -> Path:
    """A valid wheel without dependencies that holds `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{project.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        info = f"{stem}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def use_only_wheels_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on pip knows the wheels in `folder` and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


def use_only_index_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on pip knows the index at `url` and nothing else, and gives up at once."""
    use_only_wheels_in(Path(os.devnull), monkeypatch)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def python_child(code: str, **popen: object) -> subprocess.Popen[str]:
    """Another Python that runs `code` with this heedful."""
    package_parent = str(Path(heedful.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package_parent, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **popen)  # type: ignore[call-overload]


class PackageIndex:
    """Serves the wheels in `folder`. `deliver` decides how a wheel's bytes go out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.half_sent = threading.Event()
        self.client_left = threading.Event()
        self.let_go = threading.Event()
        self.status = 200
        self.deliver = self.deliver_whole
        self.both_asked = threading.Barrier(2, timeout=60)

    def deliver_whole(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.wfile.write(content)

    def deliver_when_two_have_asked(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        self.both_asked.wait()
        request.wfile.write(content)

    def deliver_half(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.wfile.write(content[: len(content) // 2])

    def deliver_half_and_stall(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        self.deliver_half(request, content)
        self.half_sent.set()
        while not self.let_go.is_set():
            if select.select([request.connection], [], [], 0.05)[0]:  # readable without a request: the client hung up
                self.client_left.set()
                return


@contextmanager
def running(index: PackageIndex) -> Iterator[str]:
    """Runs `index` and yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = [path for path in index.folder.iterdir() if self.path == f"/files/{path.name}"]
            if index.status != 200:
                self.send_error(index.status)
            elif wanted:
                self._head(wanted[0].read_bytes(), "application/octet-stream")
                index.deliver(self, wanted[0].read_bytes())
            else:
                project = self.path.strip("/").replace("-", "_")
                names = [path.name for path in index.folder.glob(f"{project}-*.whl")]
                page = "".join(f'<a href="/files/{name}">{name}</a>' for name in names).encode()
                if names:
                    self._head(page, "text/html")
                    self.wfile.write(page)
                else:
                    self.send_error(404)

        def _head(self, content: bytes, content_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        index.let_go.set()
        server.shutdown()
        thread.join()
        server.server_close()
