"""The page: its files as they are served, and what a user does with it in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.browser import Browser, opened
from tests.server.running import KEYS, RunningServer, start_server

from heedful.server.page_api import FILES
from heedful.testing import make_tiny_model

ENTER, ESCAPE, TAB, SHIFT, ALT = "\ue007", "\ue00c", "\ue004", "\ue008", "\ue00a"
ENDLESS = "tell me more"
"""The tiny model's greedy answer to it is over 6,000 tokens long."""
LAYERS, HEADS = 2, 4
"""Of the tiny model."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that keeps conversations; its model has room for an endless answer."""
    folder = tmp_path_factory.mktemp("home")
    model = make_tiny_model(folder / "model", context_len=16384)
    running = start_server(model, history_path=str(folder / "page.sqlite"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """Whatever a test does, the console stays silent and nothing but the server is asked."""
    shared_browser.complaints()
    shared_browser.requested()
    yield shared_browser
    assert shared_browser.complaints() == []
    hosts = {re.match(r"(data:|[a-z]+://[^/]*)", url).group(0) for url in shared_browser.requested()}  # type: ignore[union-attr]
    hosts = {host for host in hosts if not host.startswith("chrome://")}  # of its start page, which is no network
    assert all(re.fullmatch(r"http://127\.0\.0\.1:\d+|data:", host) for host in hosts), hosts
    shared_browser.driver.get("about:blank")


def metric(server: RunningServer, name: str, state: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf'^heedful_{name}{{model="tiny",state="{state}"}} (\S+)$', text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def conversations(server: RunningServer) -> list[dict[str, Any]]:
    """With their messages, the last touched first."""
    heads = httpx.get(f"{server.url}/history").json()["conversations"]
    return [httpx.get(f"{server.url}/history/{head['id']}").json() for head in heads]


# Files


@pytest.mark.parametrize("path", sorted(FILES))
def test_files_are_served_under_a_strict_policy(locked_server: RunningServer, path: str) -> None:
    response = httpx.get(locked_server.url + path)  # no key
    assert response.status_code == 200
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules.pop("img-src") == "'self' data:"
    assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert set(rules.values()) == {"'none'"}
    assert "default-src" in rules
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "ico": "image/svg+xml"}
    kind = "text/html" if path == "/" else kinds[path.rpartition(".")[2]]
    assert response.headers["content-type"].split(";")[0] == kind


@pytest.mark.parametrize("path", sorted(FILES))
def test_a_known_file_is_not_sent_again(server: RunningServer, path: str) -> None:
    first = httpx.get(server.url + path)
    again = httpx.get(server.url + path, headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert httpx.get(server.url + path, headers={"if-none-match": '"other"'}).content == first.content


def test_the_list_of_files_is_whole(server: RunningServer) -> None:
    """Every file of the folder is served, and the page refers to nothing but these, and to no other host."""
    import heedful.server.page_api as module

    folder = Path(module.__file__).parent / "page"
    assert {path.name for path in folder.iterdir()} == {name for name, _ in FILES.values()}
    for path, (name, _) in FILES.items():
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        imports = re.findall(r'^import .* from "\./([^"]+)"', text, re.MULTILINE)
        assert {f"/page/{one}" for one in imports} <= set(FILES), path
    index = (folder / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son[a-z]+=|\sstyle=", index)


def test_other_paths_are_not_files(server: RunningServer) -> None:
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page.js"):
        assert httpx.get(server.url + path).status_code == 404


# In a browser


def test_an_answer_streams_and_its_cost_is_drawn(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, max_tokens=2500)
    browser.write(ENDLESS)
    browser.keys(ENTER)
    browser.until(lambda: browser.text("article[aria-busy] .body"), "text while the answer is written")
    browser.until(
        lambda: browser.is_answering() and "tokens/s" in browser.text("article[aria-busy] .figures"),
        "tokens/s while it is written",
    )
    browser.until(lambda: not browser.is_answering(), "the end")
    assert re.search(r"2,500 tokens\s*[\d.]+ tokens/s", browser.text(".figures"))
    assert re.search(r"~[\d.,]+ J \(estimated [\d.,]+–[\d.,]+\)", browser.text(".figures"))
    assert re.search(r"[\d.]+ [kMG]B KV read \(\w+\)", browser.text(".figures"))
    receipt = conversations(home)[0]["messages"][-1]["receipt"]
    assert browser.bar() == {"full": receipt["visits"]["dense"]}
    assert f"{receipt['prompt_tokens'] + 2500:,} of 16,384 tokens" in browser.text("#context .text")
    assert "2,500 out" in browser.text(".receipt-line")


def test_the_model_is_seen_loading(tmp_path: Path, tiny_dir: Path, browser: Browser) -> None:
    running = start_server(tiny_dir)
    try:
        browser.open(running.url)
        # whatever the page says between sending and the first token
        browser.js(
            "window.said = []; new MutationObserver(() => {"
            "  const text = document.querySelector('.waiting')?.textContent; if (text) window.said.push(text);"
            "}).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"
        )
        browser.ask("hello")
        said = browser.js("return window.said")
        assert said[0] == "loading the model…"
        assert any(text.startswith("reading the prompt…") for text in said)
        assert browser.text("#history-note") == "This server keeps no conversations."
        browser.driver.get_log("browser")  # the 404 that said so is in the console
    finally:
        running.stop()


def test_stop_frees_the_pages_and_what_came_stays(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, max_tokens=16000)
    idle = metric(home, "kv_bytes", "used")
    browser.write(ENDLESS)
    browser.keys(ENTER)
    browser.until(lambda: browser.text("article[aria-busy] .body"), "text")
    assert metric(home, "requests", "running") == 1
    browser.click("#stop")
    browser.until(lambda: metric(home, "requests", "running") == 0, "no request is open")
    browser.until(lambda: metric(home, "kv_bytes", "used") == idle, "its pages are free")
    browser.until(lambda: not browser.is_answering(), "the page knows")
    text = browser.text(".body")
    assert text
    assert browser.text(".ending") == "Stopped."
    assert "tokens/s" in browser.text(".figures")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "it is kept")
    kept = conversations(home)[0]["messages"][1]
    assert kept["finish"] == "cancelled"
    assert kept["content"]
    assert 0 < kept["live"]["tokens"] < 16000
    browser.driver.refresh()
    browser.until(lambda: browser.text(".body") == text, "it is there after a reload")


def test_leaving_the_page_keeps_what_came(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, max_tokens=16000)
    browser.write(f"{ENDLESS}")
    browser.keys(ENTER)
    browser.until(lambda: browser.text("article[aria-busy] .body"), "text")
    browser.until(lambda: browser.js("return location.hash"), "the question is kept")
    browser.driver.get("about:blank")
    kept = browser.until(lambda: conversations(home)[0]["messages"][1:], "what came is kept")[0]
    assert kept["finish"] == "cancelled"
    assert kept["content"]
    browser.until(lambda: metric(home, "requests", "running") == 0, "no request is open")


def test_regenerate_replaces_the_answer(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, temperature=2)
    browser.ask("hello")
    first = browser.text(".body")
    browser.click(".again")
    browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the end")
    second = browser.text(".body")
    assert second != first
    assert browser.js("return document.querySelectorAll('article').length") == 2
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "both are kept")
    browser.driver.refresh()
    browser.until(lambda: browser.text(".body") == second, "it is there after a reload")


def test_conversations_are_listed_found_renamed_and_deleted(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.ask("the first zebra")
    browser.click("#new-chat")
    browser.until(lambda: browser.text(".welcome"), "an empty conversation")
    browser.ask("a second walrus")
    titles = "return [...document.querySelectorAll('#conversations .open')].slice(0, 2).map((one) => one.textContent)"
    browser.until(lambda: browser.js(titles) == ["a second walrus", "the first zebra"], "both are listed")
    browser.one("#search").send_keys("zebra")
    browser.until(lambda: browser.js(titles) == ["the first zebra"], "the search finds it")
    browser.click("#conversations .open")
    browser.until(lambda: browser.text("article.user p") == "the first zebra", "it is open")
    browser.click("#conversations [title=Rename]")
    browser.keys("stripes", ENTER)
    browser.until(lambda: browser.js(titles) == ["stripes"], "its new title")
    browser.click("#conversations [title=Delete]")
    assert browser.js(titles) == ["stripes"], "once is not enough"
    browser.click("#conversations [title=Delete]")
    browser.until(lambda: browser.js(titles) == [], "it is gone")
    assert browser.text(".welcome")
    assert "the first zebra" not in {one["title"] for one in conversations(home)}


def test_a_conversation_goes_on_after_a_reload(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.ask("hello")
    browser.driver.refresh()
    browser.until(lambda: browser.num_finished() == 1, "the conversation")
    assert browser.js("return document.querySelectorAll('.bar').length") == 1
    browser.ask("and then")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 4, "all of it is kept")
    assert [one["content"] for one in conversations(home)[0]["messages"]][::2] == ["hello", "and then"]


def test_a_policy_changes_the_bar(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.ask("x" * 1500)
    full = browser.bar()
    assert set(full) == {"full"}
    browser.choose("#policy", "window")
    browser.click(".again")
    browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the end")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "it is kept")
    receipt = conversations(home)[0]["messages"][-1]["receipt"]
    computed = receipt["prompt_tokens"] + receipt["output_tokens"] - 1
    keys, queries = np.arange(computed), np.arange(computed)[:, None]
    in_window = (keys <= queries) & (keys > queries - 1024)
    in_sinks = (keys <= queries) & (keys < 4) & ~in_window
    assert browser.bar() == {
        "window": LAYERS * HEADS * int(in_window.sum()),
        "sink": LAYERS * HEADS * int(in_sinks.sum()),
        "saved_window": receipt["visits"]["saved"]["window"],
    }
    assert sum(browser.bar().values()) == receipt["visits"]["dense"]
    widths = browser.js("return [...document.querySelector('.bar').children].map((one) => one.offsetWidth)")
    assert widths[2] / sum(widths) == pytest.approx(receipt["visits"]["saved"]["window"] / sum(full.values()), abs=0.02)


def test_custom_fields_are_sent(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.choose("#policy", "custom")
    browser.until(lambda: browser.js("return document.getElementById('settings').open"), "the fields")
    browser.one("[name=kv]").send_keys("f16")
    browser.one("[name=window]").send_keys("64")
    browser.one("[name=max_tokens]").clear()
    browser.one("[name=max_tokens]").send_keys("7")
    browser.keys(ENTER)
    browser.until(lambda: not browser.js("return document.getElementById('settings').open"), "they are done")
    browser.ask("y" * 200)
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "it is kept")
    receipt = conversations(home)[0]["messages"][-1]["receipt"]
    assert (receipt["policy"]["kv"], receipt["policy"]["windows"]) == ("f16", {"64": LAYERS})
    assert receipt["output_tokens"] == 7


def test_a_refused_request_says_why_and_can_be_mended(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, policy="custom", custom={"kv": "q3"})
    browser.ask("hello")
    assert "q3" in browser.text(".ending")
    browser.driver.get_log("browser")  # the browser reports the 400
    browser.choose("#policy", "exact")
    browser.click(".again")
    browser.until(lambda: browser.text(".cost") and not browser.is_answering(), "an answer")
    browser.until(lambda: conversations(home)[0]["messages"][-1]["finish"] == "length", "it is kept")


def _masks(windows: list[int | None], sinks: int, budget: int, prompt: int, end: int) -> dict[str, int]:
    """Keys seen by each query, one after another, by why."""
    seen = dict.fromkeys(("full", "window", "sink", "selected"), 0)
    for layer, window in enumerate(windows):
        for position in range(end):
            pages = position // 64 + 1
            if window is not None:
                seen["window"] += sum(1 for key in range(position + 1) if key > position - window)
                seen["sink"] += sum(1 for key in range(position + 1) if key <= position - window and key < sinks)
            elif budget and position >= prompt and layer >= 2 and pages > budget // 64:
                seen["selected"] += sum(1 for key in range(position + 1) if key // 64 >= pages - budget // 64)
            else:
                seen["full"] += position + 1
    return seen


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize(
    ("windows", "sinks", "budget"),
    [([None] * 5, 0, 256), ([100] * 3, 4, 0), ([64, 64, None], 0, 0), ([32, 32, 128], 8, 0), ([None], 0, 0)],
)
def test_parts_of_a_bar_are_those_of_the_masks(
    home: RunningServer, browser: Browser, windows: list[int | None], sinks: int, budget: int, ends_itself: bool
) -> None:
    browser.open(home.url)
    prompt, output, heads = 700, 20, 3
    end = prompt + output - (not ends_itself)
    # the widest window is the policy's: the layers with a narrower one keep theirs, without sinks
    narrowed = [window for window in windows if window == max(w or 0 for w in windows)]
    others = [window for window in windows if window not in narrowed]
    parts = [_masks(narrowed, sinks, budget, prompt, end), _masks(others, 0, budget, prompt, end)]
    if budget:
        parts = [_masks(windows, 0, budget, prompt, end)]
    expected = {name: heads * sum(part[name] for part in parts) for name in parts[0]}
    prefill = heads * sum(sum(_masks([w], s, 0, 0, prompt).values()) for w, s in
                          [*((w, sinks) for w in narrowed), *((w, 0) for w in others)])  # fmt: skip
    total, dense = sum(expected.values()), heads * len(windows) * end * (end + 1) // 2
    names = ["full" if window is None else str(window) for window in windows]
    receipt = {
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "output_tokens": output,
        "policy": {"windows": {name: names.count(name) for name in names}, "sinks": sinks, "budget": budget},
        "visits": {"prefill": prefill, "total": total, "dense": dense,
                   "saved": {"window": dense - total, "pages": 0, "prefix": 0}},
    }  # fmt: skip
    found = browser.module("return (await import('/page/visits.js')).segments(args[0])", receipt)
    found = {one["part"]: one["visits"] for one in found}
    assert found.pop("saved_window", 0) == dense - total
    assert found == {name: visits for name, visits in expected.items() if visits}


def test_sums_that_do_not_fit_are_not_split(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    receipt = {
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 2,
        "policy": {"windows": {"4": 1, "full": 1}},
        "visits": {"prefill": 100, "total": 123, "dense": 200, "rejected": 3,
                   "saved": {"window": 70, "pages": 0, "prefix": 7}},
    }  # fmt: skip
    found = browser.module("return (await import('/page/visits.js')).segments(args[0])", receipt)
    assert {one["part"]: one["visits"] for one in found} == {
        "made": 120,
        "rejected": 3,
        "saved_window": 70,
        "saved_prefix": 7,
    }


MARKDOWN = """# Head
one **bold** and `code <b>` and *soft*

- a
- b
  more

1) x

```python
<script>alert(1)</script>
# no head
```
> said
<img src=x onerror="alert(1)"> [link](javascript:alert(1))
```
open"""


def test_markdown_becomes_nodes_and_markup_stays_text(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    found = browser.module(
        "const {markdown} = await import('/page/markdown.js'); const box = document.createElement('div');"
        "box.append(markdown(args[0])); return [box.innerHTML, box.querySelectorAll('script, img, a, b').length]",
        MARKDOWN,
    )
    assert found[1] == 0
    assert found[0] == (
        '<p class="heading">Head</p>'
        "<p>one <strong>bold</strong> and <code>code &lt;b&gt;</code> and <em>soft</em></p>"
        "<ul><li>a</li><li>b\nmore</li></ul>"
        '<ol start="1"><li>x</li></ol>'
        '<pre tabindex="0" data-language="python"><code>&lt;script&gt;alert(1)&lt;/script&gt;\n# no head</code></pre>'
        "<blockquote>said</blockquote>"
        '<p>&lt;img src=x onerror="alert(1)"&gt; [link](javascript:alert(1))</p>'
        '<pre tabindex="0"><code>open</code></pre>'
    )


def test_numbers_are_those_of_the_terminal(home: RunningServer, browser: Browser) -> None:
    from heedful.cost.receipt import human

    numbers = [0, 1, 99, 100, 999, 999.4, 999.5, 1000, 1234567, 99949, 99950, 999499, 999500, 5_120_000_000, 3e21]
    browser.open(home.url)
    found = browser.module("const {human} = await import('/page/format.js'); return args[0].map(human)", numbers)
    assert found == [human(number).strip() for number in numbers]


FOCUSABLE = """
const shown = (one) => one.checkVisibility({visibilityProperty: true}) && !one.disabled;
return [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')].filter(shown)
  .map((one) => { one.dataset.stop ??= Math.random(); return one.dataset.stop; })"""


def test_all_of_it_works_by_keyboard(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.js("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    browser.keys(TAB)
    assert browser.js("return document.activeElement.className") == "skip"
    browser.keys(ENTER)
    assert browser.js("return document.activeElement.id") == "prompt"
    browser.keys("one")
    browser.chord(SHIFT, ENTER)
    browser.keys("two")
    assert browser.js("return document.getElementById('prompt').value") == "one\ntwo"
    assert browser.js("return document.querySelectorAll('article').length") == 0
    browser.keys(ENTER)
    browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the answer")
    browser.until(lambda: browser.js("return document.querySelector('[aria-current=page]')"), "it is listed")
    browser.js("document.querySelector('.assistant').dataset.old = ''")
    browser.chord(ALT, "r")
    browser.until(lambda: not browser.js("return document.querySelector('[data-old]')"), "another answer")
    browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the answer")
    wanted = set(browser.js(FOCUSABLE))
    reached = set()
    for _ in range(3 * len(wanted)):
        browser.keys(TAB)
        reached.add(browser.js("return document.activeElement.dataset.stop"))
    assert wanted <= reached


def test_escape_stops(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, max_tokens=16000)
    browser.write(ENDLESS)
    browser.keys(ENTER)
    browser.until(lambda: browser.text("article[aria-busy] .body"), "text")
    browser.keys(ESCAPE)
    browser.until(lambda: not browser.is_answering(), "the end")
    assert browser.text(".ending") == "Stopped."
    browser.until(lambda: metric(home, "requests", "running") == 0, "no request is open")


CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
};
const light = (colour) => {
  const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const [r, g, b] = [...rgba(colour)].map((c) => linear(c / 255));
  return .2126 * r + .7152 * g + .0722 * b;
};
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  throw new Error('no ground');
};
const found = {};
for (const one of document.querySelectorAll('body *')) {
  const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const says = hasText || one.matches('input, textarea');
  if (!says || !one.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
  found[`${one.tagName}.${one.className}#${one.id}`] = (a + .05) / (b + .05);
}
return found"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("how", ["system", "chosen"])
def test_all_text_has_contrast_in_both_schemes(home: RunningServer, browser: Browser, scheme: str, how: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    browser.prefer(scheme if how == "system" else other)
    browser.open(home.url, theme="system" if how == "system" else scheme)
    browser.ask("hello")
    browser.js("document.querySelectorAll('details').forEach((one) => one.open = true)")
    contrasts = browser.js(CONTRASTS)
    assert len(contrasts) > 15
    assert {what: ratio for what, ratio in contrasts.items() if ratio < 4.5} == {}
    ground = browser.js("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == (scheme == "dark")


def test_it_fits_a_phone_and_enter_is_a_new_line_there(home: RunningServer, tmp_path: Path) -> None:
    with opened(tmp_path, 375, 700, touch=True) as browser:
        browser.open(home.url)
        browser.write("word" * 200)
        browser.keys(ENTER, "more")
        assert browser.js("return document.getElementById('prompt').value") == "word" * 200 + "\nmore"
        assert not browser.is_answering()
        browser.click("#send")
        browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the answer")
        browser.js("document.querySelectorAll('details').forEach((one) => one.open = true)")
        wide = "return [...document.querySelectorAll('html, body, main, header, #scroller, #log, article, #composer')]"
        wide += ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.outerHTML.slice(0, 80))"
        assert browser.js(wide) == []
        assert browser.js("return document.documentElement.scrollWidth") == 375
        browser.click("#open-sidebar")
        inside = "const box = document.getElementById('sidebar').getBoundingClientRect(); return [box.left, box.right]"
        browser.until(lambda: browser.js(inside)[0] == 0, "the drawer opens")
        assert browser.js(inside)[1] < 375
        browser.click("#close-sidebar")
        browser.until(lambda: browser.js(inside)[1] <= 0, "the drawer closes")
        browser.click("#open-settings")
        assert browser.js("const box = document.getElementById('settings'); return box.scrollWidth <= box.clientWidth")
        assert browser.complaints() == []


def test_a_key_is_asked_for_and_kept_for_the_session_only(locked_server: RunningServer, browser: Browser) -> None:
    browser.driver.get(locked_server.url)
    browser.until(lambda: browser.js("return document.getElementById('settings').open"), "the field")
    assert browser.js("return document.activeElement.name") == "key"
    browser.keys(KEYS[0], ENTER)
    browser.until(lambda: browser.js("return document.getElementById('model').options.length"), "models are listed")
    browser.until(lambda: browser.text("#history-note"), "and conversations")
    browser.ask("hello")
    assert browser.text(".cost")
    assert KEYS[0] in browser.js("return JSON.stringify(sessionStorage)")
    assert KEYS[0] not in browser.js("return JSON.stringify(localStorage) + document.cookie")
    complaints = browser.complaints()  # the browser reports each 401, and the 404 of a server without history
    assert all("401" in text or "404" in text for text in complaints), complaints


def test_a_conversation_that_was_deleted_elsewhere_is_kept_anew(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.ask("hello")
    browser.until(lambda: browser.js("return location.hash"), "it is kept")
    old = browser.js("return location.hash.slice(1)")
    browser.until(lambda: len(httpx.get(f"{home.url}/history/{old}").json()["messages"]) == 2, "all of it")
    httpx.delete(f"{home.url}/history/{old}").raise_for_status()
    browser.ask("still there?")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 4, "all of it is kept")
    assert conversations(home)[0]["id"] == browser.js("return location.hash.slice(1)") != old
    assert browser.text("#problem") == ""
    complaints = browser.complaints()
    assert all(old in text and "404" in text for text in complaints), complaints


def test_what_cannot_be_saved_is_said(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url)
    browser.ask("hello")
    browser.until(lambda: browser.js("return location.hash"), "it is kept")
    # the server's history breaks while the page is open
    browser.js("const real = fetch; window.fetch = (path, more) => real(path, path.startsWith('/history') ?"
               " {...more, body: '{'} : more)")  # fmt: skip
    browser.ask("again")
    browser.until(lambda: "not saved" in browser.text("#problem"), "the page says so")
    assert browser.num_finished() == 2
    assert all("400" in text for text in browser.complaints())


def test_a_question_without_an_answer_can_be_answered(home: RunningServer, browser: Browser) -> None:
    body = {"title": "t", "messages": [{"role": "user", "content": "hello"}]}
    made = httpx.post(f"{home.url}/history", json=body).json()["id"]
    browser.open(f"{home.url}")
    browser.driver.get(f"{home.url}/#{made}")
    browser.until(lambda: browser.text("article.user p") == "hello", "the question")
    browser.click(".again")
    browser.until(lambda: browser.num_finished() == 1 and not browser.is_answering(), "the answer")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "it is kept")


def test_what_is_deleted_while_it_is_answered_stays_deleted(home: RunningServer, browser: Browser) -> None:
    browser.open(home.url, max_tokens=16000)
    browser.write(f"{ENDLESS}")
    browser.keys(ENTER)
    browser.until(lambda: browser.js("return document.querySelector('[aria-current=page]')"), "it is listed")
    gone = browser.js("return location.hash.slice(1)")
    browser.click(f"[data-id={gone}] [title=Delete]")
    browser.click(f"[data-id={gone}] [title=Delete]")
    browser.until(lambda: browser.text(".welcome"), "an empty conversation")
    browser.until(lambda: metric(home, "requests", "running") == 0, "no request is open")
    before = len(conversations(home))
    browser.ask("hello")
    browser.until(lambda: len(conversations(home)[0]["messages"]) == 2, "saves are done")
    assert len(conversations(home)) == before + 1
    assert httpx.get(f"{home.url}/history/{gone}").status_code == 404
