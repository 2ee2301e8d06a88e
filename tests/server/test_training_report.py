"""A training report in a browser: on a phone and in the dark, and it asks for nothing."""

from __future__ import annotations

import json
from pathlib import Path

from browser import opened

from heedful.train.html_report import write_report
from heedful.train.loop import complete
from heedful.train.settings import TrainSettings, changed


def report(folder: Path) -> Path:
    folder.mkdir()
    told = complete(changed(TrainSettings(), {"run.threads": 1, "data.files": ["a/very/long/path/" * 6 + "text.txt"]}))
    (folder / "run.json").write_text(json.dumps({"settings": told.as_dict()}))
    rows = [{"step": i, "loss": 50 / i, "lr": 1e-3, "grad_norm": 1.0, "tokens": 9, "visits": 9} for i in range(1, 500)]
    rows.append({"step": 499, "sample": "one endless word: " + "x" * 2000})  # type: ignore[dict-item]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return write_report([folder])


def test_it_fits_a_phone_and_goes_dark(tmp_path: Path) -> None:
    page = report(tmp_path / "run")
    with opened(tmp_path / "profile", 360, 740, touch=True) as browser:
        backs = []
        for scheme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.driver.get(page.as_uri())
            backs.append(browser.js("return getComputedStyle(document.body).backgroundColor"))
            assert browser.js("return document.documentElement.scrollWidth") <= 360
        assert backs[0] != backs[1]
        assert browser.js("return [...document.querySelectorAll('figure svg')].every((e) => e.clientHeight > 120)")
        size = browser.js("const t = document.querySelector('figure text').getBoundingClientRect(); return t.height")
        assert size >= 10, "readable"
        assert browser.driver.get_log("browser") == []
        asked = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
        urls = {m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"}
        assert {url for url in urls if url.startswith("http")} == set()
