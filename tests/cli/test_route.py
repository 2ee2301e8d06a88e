"""`heedful route` as a user calls it: a tiny model here, an endpoint over HTTP, answers that can be checked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.router.upstream import Upstream, upstream

from heedful.cli.main import run
from heedful.router.choose import Choice
from heedful.router.ledger import Entry as LedgerEntry
from heedful.router.ledger import RouteLedger
from heedful.router.policy import LedgerSpec
from heedful.testing import make_tiny_model

POLICY = """\
version: 1
targets:
  small: {kind: local, model: TINY, max_tokens: 6}
  big: {kind: openai, base_url: "UPSTREAM", model: x, retries: 0}
constraints:
  - {if: has_pii, never: [big]}
rules:
  - {match: '^hi\\W*$', to: small}
decision:
  model: TINY
  timeout_s: 60
  calibration: cal.json
  questions: {easy: "Is it easy?"}
routes:
  - {to: small, when: p_easy > 0.0, min_p: calibrated}
default: big
"""


@pytest.fixture(scope="module")
def bad() -> Iterator[Upstream]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, bad: Upstream) -> Path:
    folder = tmp_path_factory.mktemp("route")
    tiny = make_tiny_model(folder / "tiny")
    path = folder / "policy.yaml"
    path.write_text(POLICY.replace("TINY", str(tiny)).replace("UPSTREAM", bad.base_url("fine")))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    assert run(["route", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_explain_says_where_and_why(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, "explain", "hi!", "--policy", policy)
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (facts["target"], facts["because"]) == ("small", "rule 1")
    assert facts["policy"].startswith("policy.yaml ")
    assert "cal.json is not there: 1 calibrated route is never taken" in err
    out, _ = said(capsys, "explain", "What is 2 + 2? Ask jane@example.org.", "--policy", policy, "--json")
    choice = json.loads(out)
    assert (choice["target"], choice["forbidden"]) == ("small", ["big"])
    assert choice["signals"]["has_pii"] is True
    assert set(choice["answers"]) == {"easy"}


def test_dry_run_goes_through_a_file(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi"}\n\n{"messages": [{"role": "user", "content": "so?"}]}\n')
    out, err = said(capsys, "dry-run", rows, "--policy", policy)
    assert [(line["line"], line["target"]) for line in map(json.loads, out.splitlines())] == [(1, "small"), (3, "big")]
    assert "2 requests: small 1 (50%), big 1 (50%)" in err


def test_calibrate_asks_checks_fits_and_keeps(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoint says Hello, which is right; the tiny model never does."""
    draw = random.Random(1)
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"Greet {draw.random()}", "check": {"exact": "hello"}} for _ in range(16)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    out, err = said(capsys, "calibrate", "--policy", policy, "--rows", rows, "--threads", 1, "--validate", 0.5)
    assert f"kept in {policy.parent / 'cal.json'}" in err
    assert "never" in out  # the threshold: small is always wrong
    assert "always big: quality +0.000 (+0.000 to +0.000); saved a request" in out
    assert "routed at 0.05 wrong" in out
    kept = json.loads((policy.parent / "cal.json").read_text())
    assert kept["baselines"]["always small"]["quality"]["mean"] == 0.0
    assert kept["baselines"]["always big"]["cost"]["visits"] is None
    assert kept["baselines"]["always small"]["cost"]["visits"]["mean"] > 0
    out, err = said(capsys, "explain", "so?", "--policy", policy, "--json")
    assert json.loads(out)["calibration_version"] is not None
    assert err == ""
    (policy.parent / "cal.json").unlink()


def test_report_sums_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = RouteLedger(LedgerSpec(tmp_path / "ledger.jsonl", "never"))
    entry = LedgerEntry(ledger, "a")
    with entry.charging("big") as tab:
        entry.add(tab, {"visits": None, "prompt_tokens": 3, "output_tokens": 2, "seconds": {"total": 1.0}})
    entry.close(Choice("big", "rule 1"), {"finish": "stop"})
    ledger.close()
    out, _ = said(capsys, "report", tmp_path / "ledger.jsonl")
    assert "1 requests: stop 1" in out
    assert "answered by big 1" in out
    out, _ = said(capsys, "report", tmp_path / "ledger.jsonl", "--json")
    assert json.loads(out)["spent"]["big"]["answer"]["unknown"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "a", "--policy", "none.yaml"], "none.yaml: cannot be read"),
        (["dry-run", "none.jsonl", "--policy", "POLICY"], "none.jsonl cannot be read"),
        (["calibrate", "--policy", "POLICY", "--rows", "none.jsonl"], "none.jsonl cannot be read"),
        (["calibrate", "--policy", "POLICY", "--rows", "ODD"], "line 1.check: must be an object"),
        (["calibrate", "--policy", "POLICY", "--rows", "ODD", "--error", "2"], "--error: must be"),
        (["report", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a"}\n')
    names = {"POLICY": str(policy), "ODD": str(tmp_path / "odd.jsonl")}
    _, err = said(capsys, *[names.get(one, one) for one in arguments], code=2)
    assert words in err
    assert "Traceback" not in err


def test_serve_refuses_a_bad_policy_before_it_loads_anything(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1\ntargets: {a: {kind: locl, model: m}}\ndefault: a\n")
    command = [sys.executable, "-m", "heedful", "serve", "--router", str(tmp_path / "policy.yaml"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("heedful: policy.yaml line 2, targets.a.kind: is 'locl'")
    assert "Did you mean local?" in done.stderr
    lacking = "version: 1\ntargets: {a: {kind: openai, model: m, base_url: '${ROUTE_TEST_NONE}'}}\ndefault: a\n"
    (tmp_path / "policy.yaml").write_text(lacking)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "needs ROUTE_TEST_NONE" in done.stderr) == (2, True)
