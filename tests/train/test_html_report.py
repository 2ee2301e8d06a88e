"""The report of a run: what its files say, escaped, as one page without anything from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from math import nan
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import FileFormatError, UsageError
from heedful.train.html_report import read_run, smoothed, write_report
from heedful.train.line_chart import HEIGHT, Line, in_short, line_chart, round_numbers
from heedful.train.loop import complete
from heedful.train.settings import TrainSettings, changed

EVIL = "</pre><script>alert('1')</script> & \"quoted\""


def write_run(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    folder.mkdir(parents=True)
    values = {name.replace("__", "."): value for name, value in settings.items()}
    told = complete(changed(TrainSettings(), {"run.threads": 1, "run.steps": 60, "optim.lr": 0.003} | values))
    facts = {"heedful": "0.1.0", "begun": "2026-11-30T20:00:00+00:00", "settings": told.as_dict()}
    (folder / "run.json").write_text(json.dumps({**facts, "machine": {"processor": "A <fast> one", "threads": 2}}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "data" / "train").mkdir(parents=True)
    store = {"documents": 31, "text_bytes": 268569, "tokens": 116955, "sha256": "ab" * 32}
    (folder / "data" / "train" / "store.json").write_text(json.dumps(store))
    return folder


def step_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": 5 - i / 20, "lr": 0.003, "grad_norm": 1.0, "tokens": 100, "visits": 3000, "epoch": 0}
        for i in range(1, count + 1)
    ]


def full_rows() -> list[dict[str, Any]]:
    judged = [{"step": 20, "judged_by": "bits_per_byte", "bits_per_byte": 2.75, "choices_acc": 0.25},
              {"step": 40, "judged_by": "bits_per_byte", "bits_per_byte": 2.5, "choices_acc": 0.5}]  # fmt: skip
    speeds = [{"step": 20, "tokens_per_second": 900.0, "peak_share": 0.5}]
    return [*step_rows(40), *judged, *speeds, {"step": 40, "sample": EVIL}]


class Page(HTMLParser):
    """Its tags in balance, and its text by the tags around it."""

    EMPTY = ("meta", "path", "circle", "line")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]


def test_the_page_says_what_the_files_say(tmp_path: Path) -> None:
    path = write_report([write_run(tmp_path / "run", full_rows(), data__files=["a <b>.txt"])])
    assert path == tmp_path / "run" / "report.html"
    page = Page(path)
    assert page.all("h1") == ["run"]
    tiles = dict(zip(page.all("dt"), page.all("dd"), strict=True))
    assert tiles["steps"] == "40 of 60"
    assert tiles["best bits a byte"] == "2.5000 at 40"
    assert (tiles["tokens"], tiles["visits"], tiles["tokens a second"]) == ("4 k", "120 k", "900")
    # by hand: Σ .95^(40-i) (5 - i/20) / Σ .95^(40-i)
    weights = [0.95 ** (40 - i) for i in range(1, 41)]
    by_hand = sum(w * (5 - i / 20) for w, i in zip(weights, range(1, 41), strict=True)) / sum(weights)
    assert tiles["loss, smoothed"] == f"{by_hand:.4f}"
    charts = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert charts == ["Loss", "Validation: bits a byte", "Validation: choices acc", "Learning rate",
                      "Norm of the gradients", "Visits of a step", "Tokens a second"]  # fmt: skip
    commands = next(text for text in page.all("pre") if text.startswith("heedful"))
    assert commands == f"heedful train --resume --out {tmp_path / 'run'}    # go on"
    cells = page.all("td")
    assert {"a <b>.txt", "A <fast> one", "31 documents, 268,569 bytes, 116,955 tokens"} <= set(cells)


def test_all_text_is_escaped_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    name = "<i>run & 'co'"
    path = write_report([write_run(tmp_path / name, full_rows(), run__sample_prompt=EVIL)])
    page = Page(path)
    assert page.all("h1") == [name]
    assert EVIL in page.all("pre")
    assert EVIL in page.all("td")
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "i", "object", "base"}
    names = {name for _, attrs in page.tags for name in attrs}
    assert not {name for name in names if name in ("src", "href", "style") or name.startswith("on")}
    assert not re.search(r"url\(|@import|https?:", path.read_text(encoding="utf-8"))


def test_runs_over_each_other(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", full_rows())
    second = write_run(tmp_path / "b", step_rows(60), optim__lr=0.01)
    path = write_report([first, second])
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert page.all("h1") == ["a · b"]
    assert page.all("li")[:2] == ["a", "b"]
    loss = re.search(r'aria-label="Loss".*?</svg>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert loss is not None
    assert re.findall(r'class="(run .*?)"', loss[0]) == ["run r0 raw", "run r1 raw", "run r0", "run r1"]
    differing = [attrs for tag, attrs in page.tags if tag == "tr" and attrs.get("class") == "differs"]
    assert len(differing) == 1
    heads = page.all("th")
    assert heads[heads.index("setting") : heads.index("setting") + 4] == ["setting", "a", "b", "optim.lr"]
    elsewhere = write_report([first, second], tmp_path / "both.html")
    assert elsewhere.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_a_run_that_has_just_begun_and_one_with_numbers_that_are_none(tmp_path: Path) -> None:
    page = Page(write_report([write_run(tmp_path / "new", [])]))
    assert "0 of 60" in page.all("dd")
    assert [attrs for tag, attrs in page.tags if tag == "svg"] == []
    rows = step_rows(9)
    rows[4]["loss"] = nan
    path = write_report([write_run(tmp_path / "gap", rows)])
    assert "nan" not in path.read_text(encoding="utf-8").lower()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training run"):
        write_report([tmp_path])
    folder = write_run(tmp_path / "run", full_rows())
    (folder / "data" / "train" / "store.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"store\.json cannot be read"):
        read_run(folder)
    assert not (folder / "report.html").exists()


def test_smoothing_forgets_nothing_that_is_a_number() -> None:
    assert smoothed([(1, 2.0), (2, nan), (3, 4.0)]) == [(1, 2.0), (2, 2.0), (3, (0.95 * 2 + 4) / 1.95)]


def test_a_line_goes_where_its_numbers_are() -> None:
    drawn = line_chart("Line", [Line([(0, 0.0), (50, 10.0), (100, 5.0)], "run r0")], first_step=0, last_step=100)
    line = re.search(r'class="run r0" d="M(.*?)"', drawn)
    assert line is not None
    points = [tuple(map(float, point.split())) for point in line[1].split("L")]
    (left, bottom), (middle, top), (right, half) = points
    assert (middle - left, right - middle) == (pytest.approx(172), pytest.approx(172))
    assert bottom > half > top
    assert half == pytest.approx((top + bottom) / 2)
    assert 0 < top < bottom < HEIGHT
    for label in ("0", "5", "10", "50", "100"):
        assert f">{label}</text>" in drawn


def test_long_lines_are_thinned_but_keep_their_peaks() -> None:
    values = [(float(i), 1.0) for i in range(100_000)]
    values[31_234] = (31_234.0, 9.0)
    values[77_777] = (77_777.0, -3.0)
    drawn = line_chart("Line", [Line(values, "x")], first_step=0, last_step=100_000)
    assert len(drawn) < 8_000
    heights = [float(point.split()[1]) for point in re.search(r'class="x" d="M(.*?)"', drawn)[1].split("L")]  # type: ignore[index]
    assert heights.count(min(heights)) == 1
    assert heights.count(max(heights)) == 1


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0, 10, [0, 5, 10]),
        (2.61, 3.32, [2.6, 2.8, 3.0, 3.2, 3.4]),
        (0, 0.003, [0, 0.001, 0.002, 0.003]),
        (7, 7, [2, 4, 6, 8, 10, 12]),
    ],
)  # fmt: skip
def test_axes_have_round_numbers(low: float, high: float, numbers: list[float]) -> None:
    assert round_numbers(low, high) == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0005, "5e-4"), (0.02, "0.02"), (2.6, "2.6"), (1500, "1500"), (264192, "264.2k"), (-2e9, "-2G")],
)  # fmt: skip
def test_numbers_of_axes_are_short(value: float, text: str) -> None:
    assert in_short(value) == text
