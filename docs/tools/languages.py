"""Two languages on one site: each has its own navigation and labels, and a switch from a page to the same page.

A second hook of `mkdocs build`, beside site_hooks.
"""

import logging
import re
from copy import copy
from typing import Any

import jieba
from chinese import glossary, twins
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from repo_links import page_of

SECTION = "中文"
"""The title of the part of the navigation that holds the Chinese pages."""

HOME = "zh/README.md"
ALTERNATE = re.compile(r'<link rel="alternate"( [^>]*hreflang[^>]*)>\s*')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Teach the glossary to what cuts Chinese text into words for the search, so that each term is one word."""
    jieba.setLogLevel(logging.WARNING)
    for term in glossary():
        jieba.add_word(term.chinese)
    return config


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """End each language's chain of next pages where the other begins."""
    first = next(page for page in nav.pages if page.file.src_uri == HOME)
    if first.previous_page:
        first.previous_page.next_page = None
    first.previous_page = None
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the same code come first in English when it is searched for."""
    if is_chinese(page):
        boost = page.meta.get("search", {}).get("boost", 1)  # as site_hooks weighs the page
        page.meta["search"] = {"boost": boost / 2}
    return markdown


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Set the language of the page that is rendered next."""
    config.theme["language"] = "zh" if is_chinese(page) else "en"
    addresses = {each.file.src_uri: each.url for each in nav.pages}
    english, chinese = pair(page.file.src_uri)
    config.extra["alternate"] = [
        {"name": "English", "lang": "en", "link": addresses.get(english, "") or "./"},
        {"name": "中文", "lang": "zh", "link": addresses[chinese]},
    ]
    context["nav"] = part_of(nav, page)
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the page in the other language to search engines, where there is one."""
    english, chinese = pair(page.file.src_uri)
    return tamed(output, has_twin=english != page.file.src_uri or chinese != HOME or page.is_homepage)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Do so for pages that no file stands behind, as the one for addresses that lead nowhere."""
    return tamed(output, has_twin=False)


def tamed(html: str, has_twin: bool) -> str:
    """Keep the theme's script from asking beside each `<link rel="alternate">` for a sitemap that is not there.

    It looks for exactly this value; what reads the links as it should takes words between spaces.
    """
    return ALTERNATE.sub(r'<link rel="alternate "\1>' if has_twin else "", html)


def is_chinese(page: Page) -> bool:
    """Return whether a page is one of the Chinese ones."""
    return page.file.src_uri.startswith("zh/")


def pair(page: str) -> tuple[str, str]:
    """Return a page in both languages; where there is no Chinese one, the Chinese home.

    Example:
        >>> pair("zh/ladder/paged.md"), pair("index.md"), pair("kernels/index.md")
        (('ladder/paged.md', 'zh/ladder/paged.md'), ('index.md', 'zh/README.md'), ('kernels/index.md', 'zh/README.md'))
    """
    pairs = {page_of(source): chinese.removeprefix("docs/") for chinese, source in twins().items()}
    for english, chinese in pairs.items():
        if english and page in (english, chinese):
            return english, chinese
    return page, HOME


def part_of(nav: Navigation, page: Page) -> Navigation:
    """Return the navigation of a page's language."""
    found = copy(nav)
    section = next(item for item in nav.items if isinstance(item, Section) and item.title == SECTION)
    if is_chinese(page):
        found.items = section.children
        found.homepage = next(each for each in nav.pages if each.file.src_uri == HOME)
    else:
        found.items = [item for item in nav.items if item is not section]
    return found
