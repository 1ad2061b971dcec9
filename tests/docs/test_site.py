"""The built site as files: nothing is missing, nothing is fetched from elsewhere, every link leads somewhere."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote

from mkdocs.utils.yaml import yaml_load

from tests.docs.conftest import PROJECT, Site
from tests.docs.helpers import page_file, tags

LOADED = ("src", "srcset", "data", "poster", "href")
"""Attributes that a browser follows by itself; ``href`` only where it is not of a link to click on."""

ELSEWHERE = re.compile(r"(?:[a-zA-Z][a-zA-Z+.-]*:)?//")


def entries(nav: list) -> Iterator[str]:
    """Yield the files that a navigation names."""
    for each in nav:
        value = next(iter(each.values())) if isinstance(each, dict) else each
        yield from entries(value) if isinstance(value, list) else [value]


# -- the pages


def test_every_entry_of_the_navigation_is_a_page_that_a_home_page_links_to(site: Site):
    config = yaml_load((PROJECT / "mkdocs.yml").read_text(encoding="utf-8"))
    lessons = {path.stem for path in (PROJECT / "lessons").glob("[0-9]*.*") if path.suffix in (".py", ".ipynb")}
    wanted = {page_file(source) for source in [*entries(config["nav"]), *(f"lessons/{name}.md" for name in lessons)]}
    assert len(wanted) > 30 and lessons
    assert wanted <= site.pages.keys(), wanted - site.pages.keys()
    reached = set()
    for home in ("index.html", "zh/index.html"):  # each language has its own navigation
        links = {attributes.get("href", "") for name, attributes in tags(site.pages[home]) if name == "a"}
        links = {f"{link}/index.html" if link.endswith("/") or link == "." else link for link in links}
        reached |= {normpath(f"{home}/../{link}") for link in links}
    assert wanted - {"index.html"} <= reached | {"index.html"}, wanted - reached


def test_every_module_has_a_listing(site: Site):
    for path in (PROJECT / "minipaged").rglob("*.py"):
        assert f"source/{path.relative_to(PROJECT).as_posix()}/index.html" in site.pages


def test_tools_are_not_published(site: Site):
    assert not (site.root / "tools").exists()


def test_no_page_is_left_with_marks_that_should_have_become_something(site: Site):
    marks = {
        "a list inside a paragraph": r"<p>[^<]*\n[-*] ",
        "a table inside a paragraph": r"<p>\|",
        "a call-out": r"<p>!!! ",
        "a fence": r"<p>(?:```|~~~)",
        "a link": r"<p>[^<]*\]\([^)]*\)",
        "bold text": r"<p>[^<`]*\*\*\w",
        "a piece of source": r'title="show ',
        "a table made at build time": r"<!-- (?:ledger|letters|lessons|[\w ]+ bench|missed targets) -->",
        "a folded text without Markdown": r"<details>\s*<summary>[^<]*</summary>\s*[^<\s]",
        "an object that is not there": r"::: minipaged",
    }
    for name in site.written_pages:
        article = site.pages[name].partition("<article")[2]
        for what, pattern in marks.items():
            found = re.search(pattern, article)
            assert not found, f"{name}: {what} was not rendered: {article[found.start() : found.end() + 80]}"


def test_ladder_pages_have_one_outline_and_show_the_code_that_runs(site: Site):
    outline = ["The idea", "The picture", "The contract", "Reference and kernel", "Invariants", "What it costs"]
    outline += ["Bugs in the wild", "Where others differ"]
    kernels = {
        "foundation": "causal_attention_kernel",
        "contiguous": "contiguous_attention_kernel",
        "paged": "paged_attention_kernel",
        "sharing": "copy_blocks_kernel",
        "batching": "decode_rows_kernel",
        "prefix": "prefix_splits_kernel",
    }
    for rung, kernel in kernels.items():
        page = site.pages[f"ladder/{rung}/index.html"]
        headings = re.findall(r"<h2 [^>]*>(.*?)<a", page)
        assert [heading for heading in headings if heading in outline] == outline, rung
        text = unescape(re.sub(r"<[^>]+>", "", page))
        assert f"def {kernel}(" in text, f"{rung} does not show {kernel}"


# -- what they ask for, and where they lead


def test_nothing_is_fetched_from_another_host(site: Site):
    for name, page in site.pages.items():
        for tag, attributes in tags(page):
            for key in LOADED:
                is_click = key == "href" and (tag == "a" or attributes.get("rel") in ("canonical", "prev", "next"))
                value = attributes.get(key, "")
                assert is_click or not ELSEWHERE.match(value.strip()), f"{name}: <{tag} {key}={value!r}>"
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", page), name
    for path in site.root.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", text), path.name
    for path in site.root.rglob("*.svg"):
        for tag, attributes in tags(path.read_text(encoding="utf-8")):
            assert not ELSEWHERE.match(attributes.get("xlink:href", attributes.get("href", ""))), f"{path.name}: {tag}"


def test_every_link_and_anchor_inside_leads_somewhere(site: Site):
    @cache
    def anchors(file: Path) -> set[str]:
        return {value for _, attributes in tags(file.read_text(encoding="utf-8")) for value in ids(attributes)}

    def ids(attributes: dict[str, str]) -> list[str]:
        return [attributes[key] for key in ("id", "name") if key in attributes]

    checked = 0
    for name, page in site.pages.items():
        seen = set()
        for tag, attributes in tags(page):
            for key in ("href", "src"):
                value = attributes.get(key)
                if value is None or value in seen or re.match(r"[a-z]+:|//", value):
                    continue
                seen.add(value)
                path, _, anchor = value.partition("#")
                base = site.root if path.startswith("/") else (site.root / name).parent
                target = (base / unquote(path.lstrip("/").partition("?")[0])).resolve() if path else site.root / name
                target = target / "index.html" if target.is_dir() else target
                assert target.is_file(), f"{name}: <{tag} {key}={value!r}> leads nowhere"
                if anchor and target.suffix == ".html":
                    assert unquote(anchor) in anchors(target), f"{name}: {value!r} has no such anchor"
                checked += 1
    assert checked > 5000


def test_the_readme_s_links_go_where_they_say():
    text = re.sub(r"```.*?```", "", (PROJECT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^()\s]+)\)", text)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = PROJECT / path if path else PROJECT / "README.md"
        assert target.exists(), f"README.md: {link} leads nowhere"
        if anchor:
            titles = re.findall(r"^#+ +(.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"README.md: {link} has no such anchor"


def test_tests_that_a_page_names_exist():
    defined = set()
    for path in (PROJECT / "tests").rglob("*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    named = 0
    for path in (PROJECT / "docs").rglob("*.md"):
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")):
            assert name in defined, f"{path.name} names {name}"
            named += 1
    assert named > 20


def test_threads_are_named_by_their_address():
    checked = 0
    for path in (PROJECT / "docs").rglob("ladder/*.md"):
        for label, url in re.findall(r"\[([^\]]*#\d+)\]\(([^)]*)\)", path.read_text(encoding="utf-8")):
            number = label.rpartition("#")[2]
            thread = rf"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/{number}"
            assert re.fullmatch(thread, url), f"{path.name}: [{label}]({url})"
            checked += 1
    assert checked > 50


# -- search


def test_search_finds_the_block_table_and_no_listings(site: Site):
    index = json.loads((site.root / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"] if "block table" in entry["text"].lower()}
    assert {"ladder/paged/", "reference/glossary/", ""} <= places
    assert not any(entry["location"].startswith("source/") for entry in index["docs"])
