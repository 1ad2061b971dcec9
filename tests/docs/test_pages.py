"""What the pages are made of: examples that run, pictures that the objects still give, lessons, sources and tables."""

import doctest
import json
import re
from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError

from minipaged.lessons.building import install_cell
from tests.docs.conftest import PROJECT

import bench_ledger  # isort: skip  (from docs/tools, which conftest puts on the path)
import chinese  # isort: skip
import draw_pictures  # isort: skip
import languages  # isort: skip
import lesson_pages  # isort: skip
import narrow  # isort: skip
import repo_links  # isort: skip
import site_hooks  # isort: skip
import source_pages  # isort: skip

PAGES = sorted((PROJECT / "docs").rglob("*.md"))


def examples(text: str) -> str:
    """Return the blocks of a page that are a session of Python, one after the other."""
    blocks = re.findall(r"^ *```(?:python|pycon)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(block for block in blocks if block.lstrip().startswith(">>>"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_the_examples_of_a_page_give_what_they_say(path: Path):
    session = examples(path.read_text(encoding="utf-8"))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(session, {}, path.name, str(path), 0)
    result = doctest.DocTestRunner(optionflags=flags, verbose=False).run(test)
    assert result.failed == 0


def test_some_pages_have_examples():
    assert sum(">>>" in examples(path.read_text(encoding="utf-8")) for path in PAGES) >= 2


@pytest.mark.parametrize(
    "module",
    [bench_ledger, chinese, languages, lesson_pages, narrow, repo_links, source_pages],
    ids=lambda each: each.__name__,
)
def test_the_examples_of_the_tools_give_what_they_say(module):
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0 and result.attempted > 0


def test_the_pictures_are_those_that_the_objects_give_now():
    drawn = draw_pictures.pictures()
    kept = {path.name: path.read_text(encoding="utf-8") for path in draw_pictures.FOLDER.glob("*.svg")}
    assert kept.keys() == drawn.keys()
    for name, picture in drawn.items():
        assert kept[name] == f"{picture}\n", f"{name} is out of date; run python docs/tools/draw_pictures.py"


def test_the_home_picture_has_private_shared_cached_and_free_blocks():
    from minipaged.viz import view_cache

    view = view_cache(draw_pictures.home_pool())
    holders = view.holders()
    counts = {len(held) for held in holders.values()}
    assert {1, 2, 3} <= counts and len(view.cached_ids) == 2
    assert view.free_ids - view.cached_ids and not view.free_ids & holders.keys()


# -- lessons


def notebook(folder: Path, *cells: dict) -> lesson_pages.LessonPage:
    path = folder / "01_contiguous.ipynb"
    path.write_text(json.dumps({"cells": [{"metadata": {}, "outputs": [], **cell} for cell in cells]}))
    return lesson_pages.render(path)


def markdown(text: str) -> dict:
    return {"cell_type": "markdown", "source": [text]}


def test_a_lesson_s_links_lead_to_pages(tmp_path: Path):
    links = "[next](02a_paged_storage.ipynb) [code](../minipaged/paged/cache.py) [docs](../docs/fast.md#overlap)"
    text = f"# 01  Keep\n{links}"
    page = notebook(tmp_path, markdown(text))
    assert page.title == "01 Keep"
    assert "[code](../source/minipaged/paged/cache.py.md)" in page.text
    assert "[docs](../fast.md#overlap)" in page.text
    assert "[next](02a_paged_storage.md)" in page.text


def test_call_outs_lists_and_folded_text_become_the_site_s_kind(tmp_path: Path):
    call_out, items = "> **Predict.** How many?\n> Say it.", "Text:\n- one\n- two\n  - deep"
    folded = "<details>\n<summary>Hint</summary>\n\n*x*\n</details>"
    lines = notebook(tmp_path, markdown(f"{call_out}\n\n{items}\n\n{folded}")).text
    assert '!!! question "Predict"\n\n    How many?\n    Say it.' in lines
    assert "Text:\n\n- one\n- two\n    - deep" in lines
    assert '<details markdown="1">' in lines


def test_code_inside_a_lesson_s_text_is_left_as_it_is(tmp_path: Path):
    fence = "```text\n> **Predict.** no\n[a](../minipaged/llm.py)\n- x\n```"
    assert fence in notebook(tmp_path, markdown(f"Text.\n\n{fence}")).text


def test_outputs_become_blocks_and_pictures(tmp_path: Path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mred\x1b[0m\n"]},
        {
            "output_type": "display_data",
            "data": {"image/svg+xml": ["<svg><title>a pool</title></svg>"], "text/plain": "x"},
        },
        {"output_type": "execute_result", "data": {"text/plain": ["``` 42"]}},
    ]
    install = {"cell_type": "code", "source": install_cell("").source}
    page = notebook(tmp_path, install, {"cell_type": "code", "source": "run()", "outputs": outputs})
    assert "importlib" not in page.text and "Installs" not in page.text
    assert "``` {.python}\nrun()\n```\n\n``` {.text .output}\nred\n```" in page.text
    assert "![a pool](pictures/01_contiguous-1.svg){ .drawing }" in page.text
    assert "```` {.text .output}\n``` 42\n````" in page.text
    assert page.pictures == {"01_contiguous-1.svg": b"<svg><title>a pool</title></svg>"}


def test_a_lesson_without_a_notebook_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lesson_pages, "PROJECT", tmp_path)
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "03_sharing.py").touch()
    with pytest.raises(BuildError, match=r"no 03_sharing.ipynb: python -m .* build 03 makes it"):
        lesson_pages.lesson_files()


# -- sources and tables


def test_links_that_show_something_are_replaced_by_it_alone_or_as_tabs():
    link = '[one](../../minipaged/paged/reference.py "show write_slots")'
    shown = source_pages.show_pieces(f"Before.\n\n{link}\n\nAfter.", "docs/ladder/paged.md", "ladder/paged.md")
    assert shown.startswith("Before.\n\n````````") and shown.endswith("After.") and "def write_slots(" in shown
    tabs = source_pages.show_pieces(f"{link}\n{link.replace('one', 'two')}", "docs/ladder/paged.md", "ladder/paged.md")
    assert '=== "one"' in tabs and '=== "two"' in tabs
    inside = f"A sentence with {link} in it."
    assert source_pages.show_pieces(inside, "docs/ladder/paged.md", "ladder/paged.md") == inside


def test_a_page_that_shows_what_is_gone_stops_the_build():
    with pytest.raises(LookupError, match="has no vanished"):
        source_pages.piece("minipaged/paged/reference.py", "vanished")
    with pytest.raises(LookupError, match="no block"):
        source_pages.fenced_block("README.md", "$ vanished")


def test_a_build_reads_again_what_an_earlier_one_has_read():
    source_pages.letters()
    bench_ledger.ledger()
    languages.pair("index.md")
    chinese.glossary()
    assert all(kept.cache_info().currsize for kept in site_hooks.KEPT)
    site_hooks.on_config(MkDocsConfig())
    assert not any(kept.cache_info().currsize for kept in site_hooks.KEPT)


def test_every_letter_of_the_table_of_shapes_is_on_the_page():
    table = source_pages.letters()
    assert "| **N** | blocks in the pool |" in table and "| **C** | tokens that may still be chosen |" in table
    assert len(table.splitlines()) == 2 + 17


def test_every_record_has_its_line_in_the_ledger_and_every_table_can_be_made():
    for path in bench_ledger.BENCHMARKS.glob("*.json"):
        assert f"({path.name})" in bench_ledger.ledger()
    for make in bench_ledger.PARTS.values():
        assert make()


def test_a_missed_target_is_listed_and_one_that_is_met_is_not(monkeypatch: pytest.MonkeyPatch):
    results = [
        {"name": "slow", "unit": "TB/s", "target": 4, "value": 3.0, "against": None, "is_hit": False},
        {"name": "quick", "unit": "TB/s", "target": 4, "value": 4.5, "against": None, "is_hit": True},
    ]
    monkeypatch.setattr(bench_ledger, "records", lambda: [("kernels.json", {"bench": "kernels", "results": results})])
    table = bench_ledger.missed()
    assert table.startswith("1 of 2 targets are met") and "slow" in table and "quick" not in table
