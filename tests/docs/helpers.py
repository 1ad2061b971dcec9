"""What the tests of the site share: a page's tags, the file that a page becomes, and who watches an open page."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import PurePosixPath
from typing import Any

TAG = re.compile(r"<([a-zA-Z][a-zA-Z0-9]*)((?:\s+[\w:-]+(?:=(?:\"[^\"]*\"|'[^']*'|[^\s>\"']+))?)*)\s*/?>")
ATTRIBUTE = re.compile(r"([\w:-]+)=(?:\"([^\"]*)\"|'([^']*)'|([^\s>\"']+))")


def tags(page: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every tag of a page with its attributes."""
    for name, attributes in TAG.findall(page):
        yield name.lower(), {key: unescape(a or b or c) for key, a, b, c in ATTRIBUTE.findall(attributes)}


def page_file(source: str) -> str:
    """Return the HTML file that a Markdown file becomes."""
    path = PurePosixPath(source.replace("README.md", "index.md"))
    return str(path.with_suffix(".html") if path.stem == "index" else path.with_suffix("") / "index.html")


class Watch:
    """Notes what a page complains about and whom it asks for anything."""

    def __init__(self, page: Any, address: str):
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.address = address
        page.on("console", self.note_message)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("requestfailed", lambda request: self.problems.append(f"{request.url} was not there"))
        page.on("response", self.note_response)
        page.on("request", self.note_request)

    def note_message(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def note_response(self, response: Any) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.url}: {response.status}")

    def note_request(self, request: Any) -> None:
        self.requests.append(request.url)
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"asks {request.url}")


def search(page: Any, words: str) -> None:
    """Type words into the search field until results are there: what is typed before the page's scripts run is lost."""
    from playwright.sync_api import TimeoutError

    for attempt in range(8):
        page.fill("input.md-search__input", "")
        page.type("input.md-search__input", words)
        try:
            page.wait_for_selector(".md-search-result__item a", timeout=15_000)
            return
        except TimeoutError:
            if attempt == 7:
                raise
