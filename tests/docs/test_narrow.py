"""A telephone's screen: tables that stack, a list of a page's parts, and a search that explains before it quotes."""

from typing import Any

import pytest

from tests.docs.conftest import WIDE, Site
from tests.docs.helpers import search

import narrow  # isort: skip  (from docs/tools, which conftest puts on the path)


def test_tables_of_numbers_and_tables_of_two_columns_are_left_alone():
    head = "<tr><th>a</th><th>b</th><th>c</th></tr>"
    aligned = f'<table>{head}<tr><td>x</td><td style="text-align: right;">1 of 2</td></tr></table>'
    numbers = f"<table>{head}<tr><td>x</td><td>1,024</td><td>55.8 %</td></tr></table>"
    two = "<table><tr><th>a</th><th>b</th></tr><tr><td>x</td><td>y</td></tr></table>"
    for table in (aligned, numbers, two):
        assert narrow.stack_tables(table) == table
    words = numbers.replace("1,024", "block 16")
    assert narrow.stack_tables(words) != words


def test_a_page_of_few_parts_gets_no_list_of_them():
    assert narrow.list_parts("<h1>Title</h1>", [], "On this page") == "<h1>Title</h1>"


def test_every_cell_of_the_glossary_knows_its_column(site: Site):
    glossary = site.pages["reference/glossary/index.html"]
    for name in ("here", "what it is", "vLLM", "SGLang", "FlashInfer", "TensorRT-LLM"):
        assert glossary.count(f'<td data-head="{name}"') == glossary.count('<td data-head="here"') > 20


def test_rows_of_the_glossary_are_stacked_on_a_phone_and_side_by_side_on_a_desk(page: Any, address: str):
    page.goto(f"{address}reference/glossary/")
    cell = page.locator(".stacked td[data-head=vLLM]").first
    first = page.locator(".stacked td[data-head=here]").first
    assert cell.bounding_box()["x"] == first.bounding_box()["x"]
    page.set_viewport_size({"width": WIDE, "height": 900})
    assert cell.bounding_box()["x"] > first.bounding_box()["x"]


def test_a_page_lists_its_parts_only_where_they_do_not_stand_beside_it(page: Any, address: str):
    page.goto(f"{address}ladder/paged/")
    parts = page.locator(".parts")
    assert "Where others differ" in parts.inner_text()
    page.set_viewport_size({"width": WIDE, "height": 900})
    assert not parts.is_visible()


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("block table", "ladder/paged/"),
        ("copy-on-write", "ladder/sharing/"),
        ("preemption", "ladder/batching/"),
        ("continuous batching", "ladder/batching/"),
        ("prefix cache", "ladder/prefix/"),
    ],
)
def test_the_first_pages_that_a_search_finds_explain_the_words(page: Any, address: str, words: str, where: str):
    page.goto(address)
    page.click("label.md-header__button[for=__search]")
    search(page, words)
    results = page.locator(".md-search-result__item > a.md-search-result__link")
    page.wait_for_function("document.querySelectorAll('.md-search-result__item').length > 2")
    links = [result.get_attribute("href").partition("?")[0].partition("#")[0] for result in results.all()[:3]]
    assert address + where in links, links
