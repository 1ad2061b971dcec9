"""The site in a browser: on a telephone's screen and a wide one, light and dark, with no request to anybody else."""

from typing import Any

import pytest

from tests.docs.conftest import PHONE, WIDE, Site
from tests.docs.helpers import Watch, search

SIZES = "[document.documentElement.scrollWidth, window.innerWidth]"
SCHEME = "document.body.dataset.mdColorScheme"
PREPARE = """
document.head.insertAdjacentHTML(
    'beforeend', '<style>*, ::before, ::after { transition: none !important; animation: none !important; }</style>');
[...document.querySelectorAll('details')].slice(0, 20).forEach(details => details.open = true);
"""
"""Lets a page stand still, and opens what is folded."""

NO_SEARCH = "window.Worker = class extends EventTarget { postMessage() {} terminate() {} }"
"""Every page would read the whole index again; search has a test of its own."""


def look(page: Any, width: int, scheme: str) -> str | None:
    """Show the open page in a width and in colours; return what is wrong with it."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function(f"{SCHEME} === '{'slate' if scheme == 'dark' else 'default'}'")
    content, window = page.evaluate(SIZES)
    return f"is {content} wide in a window of {window}, {scheme}" if content > window or window != width else None


def test_no_page_scrolls_sideways_complains_or_asks_another_host(site: Site, page: Any, address: str):
    watch = Watch(page, address)
    page.add_init_script(NO_SEARCH)
    faults = []
    looks = [(PHONE, "light"), (WIDE, "dark")]  # colours change no width, so each is seen in one
    assert len(site.written_pages) > 30
    for name in site.written_pages:
        page.goto(address + name.removesuffix("index.html"))
        page.evaluate(PREPARE)
        wrong = [look(page, width, scheme) for width, scheme in looks]
        looks.reverse()  # the next page is first seen as this one was last, which saves a change
        faults += [f"{name} {fault}" for fault in [*wrong, *watch.problems] if fault]
        watch.problems.clear()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "name", ["", "ladder/paged/", "lessons/02a_paged_storage/", "reference/api/paged/", "zh/ladder/paged/"]
)
def test_a_page_of_each_kind_is_right_in_all_widths_and_colours(page: Any, address: str, name: str):
    watch = Watch(page, address)
    page.goto(address + name)
    page.evaluate(PREPARE)
    assert not [
        fault for width in (PHONE, 768, WIDE) for scheme in ("light", "dark") if (fault := look(page, width, scheme))
    ]
    assert not watch.problems


def test_a_page_that_is_too_wide_would_be_noticed(page: Any, address: str):
    page.goto(address)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"width: 500px\">wide</p>')")
    content, window = page.evaluate(SIZES)
    assert content > window == PHONE


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_search_finds_block_table(page: Any, address: str, width: int):
    watch = Watch(page, address)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(address)
    if width == PHONE:
        page.click("label.md-header__button[for=__search]")
    page.click("input.md-search__input")
    search(page, "block table")
    results = page.locator(".md-search-result__item a")
    texts = " ".join(results.all_inner_texts()).lower()
    assert "block table" in texts and "paged" in texts
    assert not watch.problems


def test_formulas_are_set_where_there_are_some_and_cost_nothing_elsewhere(page: Any, address: str):
    watch = Watch(page, address)
    page.add_init_script(NO_SEARCH)  # which the second page would find at work
    page.goto(address + "ladder/foundation/")
    page.wait_for_selector(".arithmatex .katex-html")
    assert page.locator(".arithmatex").count() == page.locator(".arithmatex .katex-html").count() > 3
    assert page.locator(".katex-error").count() == 0
    watch.requests.clear()
    page.goto(address + "start/")
    page.wait_for_load_state("networkidle")
    assert watch.requests and not any("katex" in url for url in watch.requests)
    assert not watch.problems


def test_a_phone_gets_the_narrow_picture_and_a_desk_the_wide_one(page: Any, address: str):
    page.goto(address)
    for width, shown, hidden in ((PHONE, "img.narrow", "img.wide"), (WIDE, "img.wide", "img.narrow")):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.locator(shown).first.is_visible() and not page.locator(hidden).first.is_visible()


def test_the_colours_are_the_system_s_until_they_are_changed_by_hand(page: Any, address: str):
    page.goto(address)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{SCHEME} === 'slate'")
    page.click("label[title='Light colours']:visible")
    page.wait_for_function(f"{SCHEME} === 'default'")
    page.click("label[title='Dark colours']:visible")
    page.wait_for_function(f"{SCHEME} === 'slate'")
