"""The site, built once for all tests of a session, and a browser that looks at it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from filelock import FileLock

PROJECT = Path(__file__).resolve().parents[2]

PHONE, WIDE = 390, 1440
"""Widths of screens."""

# The modules of the hook import each other by these names.
sys.path.insert(0, str(PROJECT / "docs" / "tools"))

BUILD = """
import socket, sys

def refuse(*_):
    raise OSError("the site is built without a network")

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""


@dataclass(frozen=True)
class Site:
    """A built site. ``pages`` has the text of every HTML file by its path from the site's root."""

    root: Path

    @cached_property
    def pages(self) -> dict[str, str]:
        files = sorted(self.root.rglob("*.html"))
        return {path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8") for path in files}

    @property
    def written_pages(self) -> list[str]:
        """Return all pages but the listings, which look the same; of those the ones with the longest names."""
        listings = sorted((name for name in self.pages if name.startswith("source/")), key=len)
        return [name for name in self.pages if not name.startswith("source/")] + listings[-2:]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return the site, as `mkdocs build --strict` makes it without a network."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share one
        folder = folder.parent
    root = folder / "site"
    with FileLock(folder / "site.lock"):
        if not root.exists():
            part = folder / "site.part"  # so that half a site is never taken for a whole one
            environment = {name: value for name, value in os.environ.items() if name != "SITE_URL"}
            build = subprocess.run(
                [sys.executable, "-c", BUILD, str(part)],
                cwd=PROJECT,
                env={**environment, "NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                timeout=300,
            )
            if build.returncode:
                pytest.fail(f"mkdocs build --strict: {build.stdout}{build.stderr}")
            part.rename(root)
    return Site(root)


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    protocol_version = "HTTP/1.1"  # one connection for many files

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=600")  # all pages have the same scripts
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Site) -> Iterator[str]:
    """Return where the site is served, on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site.root)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return the system's Chromium; skip where there is none, which CI does not allow.

    One for each module: while it is open an event loop runs in this thread, and `asyncio.run` refuses to start another.
    """
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("Chromium is missing; on Debian and Ubuntu, apt-get install chromium brings it")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Whoever else a page might ask for something does not exist.
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", rules])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Any:
    """Return a page of the browser, as wide as a telephone."""
    context = browser.new_context(viewport={"width": PHONE, "height": 844}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield page
    context.close()
