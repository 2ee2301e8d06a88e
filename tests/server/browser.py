"""A headless Chromium on the page: what a user does, and what the browser saw."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_SECONDS = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def chromium() -> tuple[str, str]:
    """Paths of browser and driver. Skips where they are missing, unless HEEDFUL_BROWSER requires them."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        if os.environ.get("HEEDFUL_BROWSER"):
            pytest.fail("HEEDFUL_BROWSER is set, and chromium or chromedriver is not installed")
        pytest.skip("needs chromium and chromedriver")
    return browser, driver


@contextmanager
def opened(profile: Path, width: int = 1280, height: int = 860, *, touch: bool = False) -> Iterator[Browser]:
    browser, driver_path = chromium()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(driver_path))
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        if touch:
            driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 1})
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """`driver`: selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, **chosen: object) -> None:
        """The page as somebody sees it who has been there before and set what is in `chosen`."""
        self.driver.get(f"{url}/favicon.svg")  # of the same origin, and without a script
        stored = json.dumps({"temperature": 0, "max_tokens": 24, **chosen})
        self.driver.execute_script("localStorage.setItem('heedful.settings', arguments[0])", stored)
        self.driver.get(f"{url}/")
        self.until(lambda: self.js("return !document.querySelector('main').ariaBusy"), "the page is ready")

    def js(self, script: str, *values: object) -> Any:
        return self.driver.execute_script(script, *values)

    def module(self, script: str, *values: object) -> Any:
        """The value of the body of an asynchronous function."""
        done = "const done = arguments[arguments.length - 1];"
        run = f"(async (...args) => {{ {script} }})(...arguments).then(done, (error) => done(`failed: ${{error}}`));"
        return self.driver.execute_async_script(done + run, *values)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def chord(self, held: str, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).key_down(held).send_keys(key).key_up(held).perform()

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Polls, within a bound."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"never came: {what}; the page says {self.js(_TEXT)!r:.2000}"
            time.sleep(0.02)
        return found

    def write(self, text: str) -> None:
        """Into the message box, at once."""
        self.js(
            "const box = document.getElementById('prompt'); box.value = arguments[0];"
            "box.dispatchEvent(new Event('input')); box.focus()",
            text,
        )

    def ask(self, text: str) -> None:
        """And waits for the end of the answer."""
        count = self.js("return document.querySelectorAll('article.assistant').length")
        self.write(text)
        self.keys("\ue007")
        self.until(lambda: self.num_finished() > count, "the answer ends")
        self.until(lambda: not self.is_answering(), "the answer ends")

    def is_answering(self) -> bool:
        return not self.js("return document.getElementById('stop').hidden")

    def num_finished(self) -> int:
        count: int = self.js("return document.querySelectorAll('article.assistant[data-finish]').length")
        return count

    def text(self, selector: str) -> str:
        """Of the last one; empty where there is none."""
        text: str = self.js("return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''", selector)
        return text

    def bar(self) -> dict[str, int]:
        """Part of the last answer's bar → visits."""
        pairs = self.js(
            "return [...[...document.querySelectorAll('.bar')].at(-1).children]"
            ".map((part) => [part.dataset.part, Number(part.dataset.visits)])"
        )
        return dict(pairs)

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.one(selector)).select_by_value(value)

    def complaints(self) -> list[str]:
        """What the console got since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


_TEXT = "return document.body.innerText"
