"""The page in a real browser, opened from a file: numbers, keyboard, colours, and that it asks for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.server.browser import Browser, opened
from tests.server.test_page import CONTRASTS

from heedful import LLM, CachePolicy
from heedful.cost.receipt import human
from heedful.engine.torch_runner import build_model
from heedful.testing import make_tiny_model
from heedful.view.html import embedded_json, view_page
from heedful.view.record import make_view, recorded_run
from heedful.view.steps import RecordingRunner
from heedful.weights.load import load

RIGHT, LEFT, UP, DOWN, END, HOME, TAB = "\ue014", "\ue012", "\ue013", "\ue015", "\ue010", "\ue011", "\ue004"
NASTY = "</script><script>document.title='x'</script><!-- \x00\x07\x1b[31m\u2028\u2029 &amp; \"'\\ %data% 漢字 \n\t"


@dataclass(frozen=True)
class Page:
    url: str
    view: dict[str, Any]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of a windowed run whose prompt would break a page that does not escape."""
    folder = tmp_path_factory.mktemp("page")
    model = make_tiny_model(folder / "model", context_len=2048)
    policy = CachePolicy(window=128, sinks=4)
    llm = LLM(str(model), policy=policy)
    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder
    completion = llm.generate(NASTY + "once more, " * 40, max_tokens=70, ignore_eos=True)
    loaded = load(str(model))
    run = recorded_run(completion, policy, recorder.steps)
    network = build_model(loaded.config, loaded.weights)
    view = make_view(run, "tiny", llm.config, recorder.cache, llm.tokenizer, network)
    (folder / "view.html").write_text(view_page(view), encoding="utf-8")
    return Page((folder / "view.html").as_uri(), view)


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile"), 1000, 900) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser, page: Page) -> Iterator[Browser]:
    """Whatever a test does, the console stays silent and nothing but the file is asked for."""
    shared_browser.driver.get("about:blank")
    shared_browser.complaints()
    shared_browser.requested()
    shared_browser.driver.get(page.url)
    shared_browser.until(lambda: shared_browser.js("return document.querySelector('#steps svg')"), "it is drawn")
    yield shared_browser
    assert shared_browser.complaints() == []
    asked = {url for url in shared_browser.requested() if not url.startswith("chrome")}
    assert asked == {page.url}


def test_its_numbers_are_the_receipts(browser: Browser, page: Page) -> None:
    visits = page.view["receipt"]["visits"]
    assert browser.text("#total") == f"{visits['total']:,}"
    assert browser.text("#dense") == f"{visits['dense']:,}"
    bar = dict(
        browser.js(
            "return [...document.querySelector('.bar').children].map((one) => [one.dataset.part, +one.dataset.visits])"
        )
    )
    assert set(bar) == {"window", "sink", "saved_window"}
    assert bar["window"] + bar["sink"] == visits["total"]
    assert bar["saved_window"] == visits["saved"]["window"]
    assert sum(bar.values()) == visits["dense"]
    assert human(visits["total"]).strip() in browser.text("#tiles")
    assert browser.text("#receipt") == page.view["receipt_line"]


def test_texts_stay_texts(browser: Browser, page: Page) -> None:
    assert browser.js("return document.title") == "tiny: where the visits went"
    assert browser.js("return document.scripts.length") == 2
    ribbon = browser.text("#ribbon").replace("·", "")  # a dot stands for a byte of a character that goes on
    assert "</script><script>document.title='x'</script>" in ribbon
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]", ribbon)
    assert "␀" in ribbon
    assert "漢字" in ribbon
    held = browser.js("return JSON.parse(document.getElementById('data').textContent)")
    assert held == json.loads(json.dumps(page.view))


def test_keys_move_through_all_of_it(browser: Browser, page: Page) -> None:
    """By Tab to each thing that is drawn, then by arrows."""
    reached = {}
    browser.js("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    for _ in range(24):
        browser.keys(TAB)
        name = browser.js("const one = document.activeElement; return one.id || one.name || one.tagName")
        if name in ("steps", "heads", "pages", "ribbon") and name not in reached:
            reached[name] = said_after(browser, name)
        elif name == "metrics":
            browser.keys(RIGHT)
            assert browser.js("return document.querySelector('[name=metrics]:checked').value") != "light"
    assert set(reached) == {"steps", "heads", "pages", "ribbon"}
    for before, after in reached.values():
        assert before
        assert after
        assert before != after
    last = page.view["steps"][-1]
    browser.js("document.getElementById('steps').focus()")
    browser.keys(HOME, END)
    assert f"{last['window']:,}" in browser.text("#steps-said")
    browser.js("document.getElementById('heads').focus()")
    browser.keys(HOME, RIGHT, DOWN)
    said = browser.text("#heads-said")
    assert said.startswith("Layer 1, head ")
    assert f"{page.view['layers']['visits'][1]:,}" in said


def said_after(browser: Browser, name: str) -> tuple[str, str]:
    place = "#token-said" if name == "ribbon" else f"#{name}-said"
    before = browser.text(place)
    browser.keys(LEFT, UP)
    after = browser.text(place)
    if before == after:
        browser.keys(RIGHT, DOWN)
        after = browser.text(place)
    return before, after


def test_a_token_says_what_it_cost_and_looked_at(browser: Browser, page: Page) -> None:
    tokens, queries = page.view["tokens"], page.view["queries"]
    browser.js("document.getElementById('ribbon').focus()")
    browser.keys(END, LEFT)
    at = len(tokens["text"]) - 2
    said = browser.text("#token-said")
    assert said.startswith(f"Token {at:,} ")
    assert f"{tokens['visits'][at]:,} visits" in said
    assert f"{tokens['surprisal'][at]:.2f} bits" in said
    sources = queries["sources"][queries["at"].index(at)]
    marked = browser.js("return [...document.querySelectorAll('#ribbon .source')].map((one) => +one.dataset.i)")
    assert set(marked) == {place for place, _ in sources} - {at}  # itself is marked as what is looked at
    browser.keys(RIGHT)
    assert "not read by the model" in browser.text("#token-said")


def test_the_slider_and_the_layers_move_the_page_map(browser: Browser, page: Page) -> None:
    browser.js("document.getElementById('page-row').focus()")
    browser.keys(HOME)
    assert browser.text("#pages-said").startswith("Query 0, page 0")
    browser.keys(RIGHT)
    assert browser.text("#pages-said").startswith(f"Query {page.view['pages']['at'][1]:,}, page 0")
    browser.choose("#page-layer", "1")
    assert "of the weight" in browser.text("#pages-said")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(browser: Browser, scheme: str) -> None:
    browser.prefer(scheme)
    browser.js("document.querySelectorAll('details').forEach((one) => one.open = true)")
    contrasts = browser.js(CONTRASTS)
    browser.prefer("light")
    assert len(contrasts) > 15
    solid = {what: ratio for what, ratio in contrasts.items() if not what.startswith("INPUT")}  # a slider says none
    assert {what: ratio for what, ratio in solid.items() if ratio < 4.5} == {}


def test_it_fits_a_phone(page: Page, tmp_path: Path) -> None:
    with opened(tmp_path, 375, 700, touch=True) as browser:
        browser.driver.get(page.url)
        browser.until(lambda: browser.js("return document.querySelector('#steps svg')"), "it is drawn")
        assert browser.js("return document.documentElement.scrollWidth") <= 375
        browser.js("document.querySelectorAll('#ribbon span')[9].scrollIntoView()")
        browser.one("#ribbon [data-i='9']").click()
        assert browser.text("#token-said").startswith("Token 9 ")
        assert browser.complaints() == []


def test_every_drawing_has_a_name(browser: Browser) -> None:
    unnamed = browser.js(
        "return [...document.querySelectorAll('[role=application], [role=img], [role=region], input, select')]"
        ".filter((one) => !(one.ariaLabel || one.labels?.length)).map((one) => one.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    assert browser.js("return [...document.querySelectorAll('h1, h2')].length") == 7


def test_data_cannot_end_its_element() -> None:
    text = embedded_json({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}
