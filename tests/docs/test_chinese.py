"""The Chinese pages: they say what the English ones say, in the words of one glossary, and are found."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.docs import translation
from tests.docs.conftest import PHONE, PROJECT, WIDE, Site
from tests.docs.helpers import Watch, page_file, search, tags

import chinese  # isort: skip  (from docs/tools, which conftest puts on the path)

HAN = r"[\u4e00-\u9fff]"
PAGES = sorted(chinese.twins())
TRANSLATED = [name for name in PAGES if name != chinese.GLOSSARY]

OTHER_WORDS: tuple[str, ...] = (
    "解码器",
    "注意力后端",
    "PyTorch 后端运行",
    "模块",
    "代码块",
    "字段",
    "阶段",
    "段落",
    "这段",
    "那段",
    "一段",
    "一块",
)
"""Words that hold a term and mean something else."""


def path_of(built: str) -> str:
    """Return where a page is on the site, as a browser asks for it."""
    return page_file(built.removeprefix("docs/"))


# -- what the source says


def test_readme_start_and_ladder_are_there_in_chinese():
    wanted = {"README.md", "docs/reference/glossary.md"}
    for folder in ("start", "ladder"):
        wanted |= {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "docs" / folder).glob("*.md")}
    assert set(chinese.twins().values()) == wanted
    for name, source in chinese.twins().items():
        same_place = source.replace("docs/", "docs/zh/", 1) if source.startswith("docs/") else f"docs/zh/{source}"
        assert name in (same_place, chinese.GLOSSARY)


def test_no_page_follows_a_source_that_has_moved_on():
    assert not list(chinese.stale()), "\n".join(["", *chinese.stale()])


def test_a_change_of_a_source_is_noticed_and_an_update_settles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.md").write_text("# A\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("---\nsource: a.md\nsource_hash: 0\n---\n\n# 甲\n", encoding="utf-8")
    monkeypatch.setattr(chinese, "PROJECT", tmp_path)
    monkeypatch.setattr(chinese, "twins", lambda: {"b.md": "a.md"})
    assert "b.md follows an older a.md" in next(chinese.stale())
    assert "chinese.py update b.md" in next(chinese.stale())
    chinese.update("b.md")
    assert not list(chinese.stale())
    (tmp_path / "a.md").write_text("# A\n\nMore.\n", encoding="utf-8")
    assert list(chinese.stale())


def test_what_is_no_chinese_page_is_refused_in_a_sentence():
    for argument in ("docs/index.md", "docs/zh/vanished.md", "/elsewhere/a.md"):
        with pytest.raises(SystemExit, match=f"{argument} is no Chinese page"):
            chinese.page_named(argument)


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_those_of_the_source(name: str):
    assert translation.headings(chinese.read(name)) == translation.headings(chinese.read(chinese.twins()[name]))


@pytest.mark.parametrize("name", PAGES)
def test_code_is_that_of_the_source(name: str):
    source = chinese.twins()[name]
    assert translation.code(chinese.read(name), name) == translation.code(chinese.read(source), source)


def test_pages_have_code_of_all_kinds():
    found = [piece for name in PAGES for piece in translation.code(chinese.read(name), name)]
    starts = ("```sh", "```python", "```text", ":::", "<!-- ", "minipaged/", "README.md: ")
    assert all(any(piece.lstrip().startswith(start) for piece in found) for start in starts)


def missing_links(name: str) -> set[str]:
    """Return the links of the source that the page does not have; of two languages of a page, only the Chinese one."""
    source = chinese.twins()[name]
    to_chinese = {english: each for each, english in chinese.twins().items()}
    wanted = {to_chinese.get(link, link) for link in translation.links(chinese.read(source), source)}
    return wanted - translation.links(chinese.read(name), name) - {name}


@pytest.mark.parametrize("name", TRANSLATED)
def test_every_link_of_the_source_is_there_and_leads_to_chinese_where_there_is_some(name: str):
    assert not missing_links(name)
    foreign = translation.links(chinese.read(name), name) & set(chinese.twins().values())
    assert foreign <= {chinese.twins()[name]}


@pytest.mark.parametrize("name", TRANSLATED)
def test_every_number_of_the_source_is_there(name: str):
    def numbers(text: str) -> set[str]:
        return set(re.findall(r"(?<![\w.])\d(?:[\d,.]*\d)?(?![\w])", translation.prose(text)))

    missing = numbers(chinese.read(chinese.twins()[name])) - numbers(chinese.read(name))
    assert not missing, f"{name} lacks {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_of_the_checkout(name: str):
    for link in translation.links(chinese.read(name), name):
        assert re.match(r"[a-z]+:", link) or (PROJECT / link).exists(), f"{name}: {link} leads nowhere"


# -- words


def test_every_word_of_the_english_glossary_that_chinese_pages_use_has_one_rendering():
    english = [term.english for term in chinese.glossary()]
    assert len(english) == len(set(english)) > 35
    assert len({term.chinese for term in chinese.glossary()}) == len(english)
    rows = re.findall(r"^\| \*\*(.+?)\*\*", chinese.read("docs/reference/glossary.md"), re.MULTILINE)
    known = chinese.read(chinese.GLOSSARY)
    unknown = [word for word in rows if not any(re.search(rf"\b{form}\b", known) for form in (word, word.rstrip("s")))]
    assert not unknown, f"{chinese.GLOSSARY} has no word for {unknown}"


def unexplained(text: str) -> list[str]:
    """Return the terms whose English does not stand in brackets where they come first."""
    terms = {term.chinese: term.english for term in chinese.glossary()}
    words = sorted([*terms, *OTHER_WORDS], key=len, reverse=True)
    prose = translation.prose(text)
    seen: set[str] = set(OTHER_WORDS)
    found = []
    for match in re.finditer("|".join(words), prose):
        if match[0] not in seen:
            seen.add(match[0])
            if not re.match(rf"\*{{0,2}}（{re.escape(terms[match[0]])}[）、，]", prose[match.end() :]):
                found.append(f"{match[0]}: {prose[max(0, match.start() - 20) : match.end() + 20]!r}")
    return found


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_term_s_english_stands_in_brackets_where_it_comes_first(name: str):
    assert not unexplained(chinese.read(name))


def test_a_term_without_its_english_would_be_noticed():
    assert not unexplained("**块表**（block table）记下块（block）。块表和块。")
    assert len(unexplained("块表记下块（block）。")) == 1
    assert len(unexplained("块表（block table）记下块。")) == 1
    assert not unexplained("解码器模块")


def wrong_words(text: str) -> list[str]:
    """Return the renderings in a text that the glossary rules out; in brackets, English is what it should be."""
    prose = re.sub(r"（[^（）]*）", "", translation.prose(text))
    wrong = {word for term in chinese.glossary() for word in term.wrong}
    return [
        word
        for word in sorted(wrong)
        if re.search(rf"(?<![\w/.-]){word}s?(?![\w/.-])" if word.isascii() else word, prose)
    ]


@pytest.mark.parametrize("name", TRANSLATED)
def test_no_term_is_rendered_in_another_way(name: str):
    assert not wrong_words(chinese.read(name))


def test_every_term_but_one_with_no_likely_mistake_has_wrong_renderings_and_they_would_be_noticed():
    assert all(term.wrong for term in chinese.glossary())
    assert wrong_words("把令牌放进插槽，kernel 会去读。") == ["kernel", "令牌", "插槽"]
    assert not wrong_words("核函数（kernel）`kernel`")


MARKS = "，。；：！？、（）「」"
TYPOGRAPHY = {
    "a half-width mark beside a Chinese character": rf"{HAN}[,;:!?()]|[,;:!?()]{HAN}|{HAN}\.(?!\w)",
    "no space between Chinese and Latin": rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`]{HAN}",
    "a space beside a full-width mark": rf"[{MARKS}] +(?![|*\s])|(?<![|*\-#.\s]) +[{MARKS}]",
    "bold text that other renderers would not end": rf"[{MARKS}]»(?=\w)|(?<=\w)«[{MARKS}]",
    "two lines that would be joined by a space": rf"{HAN}[^\n|]*[^\n|:]\n {{0,4}}[\u4e00-\u9fffA-Za-z`][^\n]*{HAN}",
}


def clumsy(text: str) -> list[str]:
    """Return what is against the customs of Chinese typography."""
    prose = re.sub(r"\*\*(.+?)\*\*", r"«\1»", translation.prose(text))
    found = {what: re.search(pattern, prose) for what, pattern in TYPOGRAPHY.items()}
    return [f"{what}: {prose[max(0, m.start() - 15) : m.end() + 15]!r}" for what, m in found.items() if m]


@pytest.mark.parametrize("name", PAGES)
def test_marks_and_spaces_are_as_is_customary(name: str):
    assert not clumsy(chinese.read(name))


@pytest.mark.parametrize("text", ["块,表", "用GPU 算", "块 ，表", "**块（block）**的", "一行\n两行"])
def test_a_clumsy_text_would_be_noticed(text: str):
    assert clumsy(text)


# -- the site


@pytest.mark.parametrize("page_name", PAGES)
def test_a_page_and_its_source_lead_to_each_other(site: Site, page_name: str):
    source = chinese.twins()[page_name]
    built = {"zh": path_of(page_name), "en": path_of("docs/index.md" if source == "README.md" else source)}
    for language, name in built.items():
        html = site.pages[name]
        assert f'<html lang="{language}"' in html
        switch = {
            attributes["hreflang"]: attributes["href"]
            for tag, attributes in tags(html)
            if tag == "a" and attributes.get("class") == "md-select__link"
        }
        for other, target in built.items():
            leads_to = (site.root / name).parent / switch[other] / "index.html"
            assert leads_to.resolve() == (site.root / target).resolve()


def test_a_page_without_a_twin_leads_to_the_chinese_home(site: Site):
    html = site.pages["kernels/index.html"]
    assert re.search(r'href="\.\./zh/" hreflang="zh" class="md-select__link"', html)


def test_each_language_has_its_own_navigation_and_labels(site: Site):
    def tabs(name: str) -> list[str]:
        return [
            re.sub(r"<[^>]+>", "", tab).strip()
            for tab in re.findall(r'<a [^>]*class="md-tabs__link"[^>]*>(.*?)</a>', site.pages[name], re.DOTALL)
        ]

    assert tabs("zh/ladder/paged/index.html") == ["首页", "上手", "阶梯", "术语表"]
    assert "中文" not in tabs("index.html") and "Kernels" in tabs("index.html")
    assert (
        "下一页" in site.pages["zh/ladder/paged/index.html"] and "下一页" not in site.pages["ladder/paged/index.html"]
    )
    last, first = site.pages["contributing/index.html"], site.pages["zh/index.html"]
    assert 'rel="next"' not in last and 'rel="prev"' not in first


def test_headings_have_anchors_that_say_something(site: Site):
    for name in map(path_of, PAGES):
        anchors = re.findall(r'<h[23] id="([^"]+)"', site.pages[name])
        assert not [anchor for anchor in anchors if re.fullmatch(r"_\d+", unquote(anchor))], name


def test_the_index_has_each_term_as_one_word(site: Site):
    index = json.loads((site.root / "search" / "search_index.json").read_text(encoding="utf-8"))
    words = {
        word for entry in index["docs"] if entry["location"].startswith("zh/") for word in entry["text"].split("\u200b")
    }
    used = [term.chinese for term in chinese.glossary()]
    assert not [term for term in used if term.replace("KV ", "") not in words and " " not in term]
    assert index["config"]["lang"] == ["en", "zh"]


@pytest.mark.parametrize("width", [PHONE, WIDE])
@pytest.mark.parametrize("start", ["", "zh/"])
def test_search_finds_the_block_table_in_chinese(page: Any, address: str, width: int, start: str):
    watch = Watch(page, address)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(address + start)
    if width == PHONE:
        page.click("label.md-header__button[for=__search]")
    page.click("input.md-search__input")
    search(page, "块表")
    results = page.locator(".md-search-result__item a")
    found = [results.nth(i).get_attribute("href") for i in range(results.count())]
    assert any("/zh/ladder/paged/" in link for link in found) and all("/zh/" in link for link in found)
    assert not watch.problems


def test_the_switch_in_the_header_leads_to_the_same_page(page: Any, address: str):
    page.goto(address + "ladder/paged/")
    page.hover(".md-select button")
    page.click(".md-select__link[hreflang=zh]")
    assert page.url.endswith("/zh/ladder/paged/")
    page.hover(".md-select button")
    page.click(".md-select__link[hreflang=en]")
    assert page.url.endswith("/ladder/paged/") and "/zh/" not in page.url
