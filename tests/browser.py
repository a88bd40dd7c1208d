"""A real browser, where there is one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    not (_BROWSER and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
)


@contextlib.contextmanager
def opened(page: Any, width: int = 1400) -> Iterator[Any]:
    """A driver that has opened a page; in the end, the page must have had no errors."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},1200")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"), env=dict(os.environ))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.get(page.as_uri())
        yield driver
        assert driver.get_log("browser") == []
    finally:
        driver.quit()
