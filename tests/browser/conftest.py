"""One headless Chromium for all browser tests, offline; a loud skip where there is none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "HEADSTREAM_REQUIRE_BROWSER"

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    # Nothing but the disk: any other address fails to resolve, at once.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@dataclass
class Browser:
    """A Chromium under test.

    Attributes:
        driver: selenium's.
        downloads: the folder into which the page's button saves.
    """

    driver: Any
    downloads: Path

    def command(self, name: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def open(self, path: Path, *, dark: bool = False, scripts: bool = True) -> None:
        """Open a file with a clean log, in the theme asked for."""
        self.driver.get("about:blank")
        self.messages(), self.requests()
        self.command("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = "dark" if dark else "light"
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str, *, seconds: float = 30) -> None:
        """Until a JavaScript expression is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, seconds, poll_frequency=0.05)
        waiting.until(lambda _: self.run(f"return Boolean({condition})"), condition)

    def scroll_through(self) -> None:
        """Down the page, as a reader would, until every figure is drawn."""
        self.run("document.querySelectorAll('.plot').forEach((p) => p.scrollIntoView())")
        plots = "document.querySelectorAll('.plot')"
        for index in range(self.run(f"return {plots}.length")):
            self.run(f"{plots}[{index}].scrollIntoView()")
            self.wait(f"{plots}[{index}].dataset.drawn === 'yes'")
        self.run("scrollTo(0, 0)")

    def messages(self) -> list[str]:
        """What the console said since the last call, policy violations included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses asked for since the last call."""
        urls = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                urls.append(message["params"]["request"]["url"])
        return urls

    def size(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium, or a skip that says why (a failure where HEADSTREAM_REQUIRE_BROWSER=1)."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    chromedriver = shutil.which("chromedriver")
    if program is None or chromedriver is None:
        missing = "chromium" if program is None else "chromedriver"
        words = f"BROWSER TESTS NOT RUN: there is no {missing} here (Debian: apt install chromium)"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{words}, and {REQUIRED}=1 requires it", pytrace=False)
        pytest.skip(words)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    folder = tmp_path_factory.mktemp("chromium")
    downloads = folder / "downloads"
    downloads.mkdir()
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option(
        "prefs",
        {"download.default_directory": str(downloads), "download.prompt_for_download": False},
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver, downloads)
    finally:
        driver.quit()
