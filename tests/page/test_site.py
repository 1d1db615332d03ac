"""The documentation site in a real browser, opened from its folder: nothing on it comes from elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conf.test_pages import SITE
from tests.page.chromium import WAIT_S, Browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="extra docs")
    folder = tmp_path_factory.mktemp("site")
    assert SITE.build(folder) == 0
    return folder / "html"


@pytest.mark.parametrize("page", ["index", "docs/architecture", "docs/evaluation", "docs/concepts", "studies/index"])
def test_a_page_is_whole_without_a_network(browser: Browser, site: Path, page: str) -> None:
    browser.look()
    browser.open(site / f"{page}.html")
    assert browser.value("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    elsewhere = [address for address in browser.requests if not address.startswith(("file:", "data:", "about:"))]
    assert elsewhere == [] and browser.problems == []


def test_the_search_works_from_a_folder(browser: Browser, site: Path) -> None:
    browser.look()
    browser.open(site / "docs" / "architecture.html")
    browser.value("document.querySelector('.md-search__button').click()")
    inside = "[...document.querySelectorAll('*')].find((one) => one.shadowRoot).shadowRoot"
    browser.value(f"{inside}.querySelector('input').focus()")
    browser.send("Input.insertText", text="micro-batch")
    found = f"[...{inside}.querySelectorAll('[role=listbox] a')].map((one) => one.href)"
    end = time.monotonic() + WAIT_S
    while not (links := browser.value(found)) and time.monotonic() < end:
        browser.value("new Promise((done) => setTimeout(done, 50))")
    assert links and all(link.startswith(site.as_uri()) for link in links)
    assert browser.problems == []
