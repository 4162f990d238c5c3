"""A real headless Chromium for tests: the system's, driven by playwright, with everything it complains about kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(__file__).parents[2] / "test_artifacts" / "report"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def find_chromium() -> str | None:
    """The path of Chromium, if there is one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; tests are skipped where it cannot be had."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    path = find_chromium()
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium (`make test` does it where it may)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """An open page, with what it complained about and what it tried to load."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def screenshot(self, name: str, *, full: bool = False) -> None:
        """Keep what it looks like."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(ARTIFACTS / f"{name}.png"), full_page=full)

    def text(self, selector: str) -> str:
        """The text of an element, as it is in the document."""
        found: str = self.page.locator(selector).evaluate("(element) => element.textContent")
        return found


@contextmanager
def open_page(
    browser: Any, path: Path, *, hash: str = "", scheme: str = "light", viewport: dict[str, int] = DESKTOP
) -> Iterator[Tab]:
    """Open a file in a fresh profile; leaving the block fails if the console or the network was touched."""
    context = browser.new_context(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
    tab = Tab(context.new_page())
    tab.page.on("console", lambda message: tab.complaints.append(f"{message.type}: {message.text}"))
    tab.page.on("pageerror", lambda error: tab.complaints.append(f"error: {error}"))
    tab.page.on("request", lambda request: tab.requests.append(request.url))
    tab.page.goto(f"file://{path}{hash}")
    yield tab
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(f"file://{path}")] == []
    context.close()
