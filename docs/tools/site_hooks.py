"""What `mkdocs build` does beyond its plugins.

Pages that exist nowhere as Markdown are made here: one for each lesson, and a listing of each source file that a page
may link to. Links between files of the repository are bent to them, and tables are made from the recorded benches.
"""

from collections.abc import Iterator

import bench_ledger
import chinese
from lesson_pages import LessonPage, lesson_files, read_cells, render
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from narrow import list_parts, part_code, stack_tables
from repo_links import PROJECT, bend_links, linked_paths, page_of, source_page
from source_pages import letters, listing, show_pieces, syntax_tree

PARTS = {
    **bench_ledger.PARTS,
    "<!-- letters -->": letters,
    "<!-- lessons -->": lambda: "\n".join(f"- [{page.title}]({name}.md)" for name, page in _lessons.items()),
}
"""What stands in a page for a table that is made here."""

BOOSTS = {"ladder/": 4, "zh/ladder/": 4, "kernels/": 2, "reference/glossary": 2, "reference/api/": 0.5}
"""Where a word is explained comes before where it is only used: by what the search multiplies a page's score."""

EXPLAINED = {
    "ladder/paged.md": ["block table", "paged attention"],
    "ladder/sharing.md": ["fork", "copy-on-write"],
    "ladder/batching.md": ["preemption", "continuous batching"],
    "ladder/prefix.md": ["prefix cache"],
}
"""The words that a page explains: the search finds it first for them."""

KEPT = (syntax_tree, bench_ledger.read_record, chinese.twins, chinese.glossary)
"""What reads a file once for a build; `mkdocs serve` builds many times in one process."""

_lessons: dict[str, LessonPage] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Forget the last build, render the lessons, and give each a place in the navigation."""
    for kept in KEPT:
        kept.cache_clear()
    _lessons.clear()
    _lessons.update({path.stem: render(path) for path in lesson_files()})
    for section in config.nav or []:
        if isinstance(section, dict) and "Lessons" in section:
            section["Lessons"] = [
                "lessons/index.md",
                *({page.title: f"lessons/{n}.md"} for n, page in _lessons.items()),
            ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the lessons with their pictures and notebooks, and the listings."""
    for name, lesson in _lessons.items():
        files.append(File.generated(config, f"lessons/{name}.md", content=lesson.text))
        for picture, content in lesson.pictures.items():
            files.append(File.generated(config, f"lessons/pictures/{picture}", content=content))
    for path in lesson_files():
        files.append(File.generated(config, f"lessons/files/{path.name}", content=path.read_bytes()))
    for path in sorted(_sources(files)):
        page = source_page(path)
        content = listing(path, page)
        files.append(File.generated(config, page, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def _sources(files: Files) -> set[str]:
    """Return every module of the package, and every other file that a page links to and that is no page itself."""
    found = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "minipaged").rglob("*.py")}
    found |= {f"lessons/{name}.py" for name in _lessons}
    for path, text in _texts(files):
        for target in linked_paths(text, path):
            if (page_of(target) or "").startswith("source/"):
                found.add(target if (PROJECT / target).is_file() else f"{target}/__init__.py")
    return found


def _texts(files: Files) -> Iterator[tuple[str, str]]:
    """Yield the Markdown of every page, with the file that its links start from."""
    for file in files.documentation_pages():
        if file.generated_by is None and file.abs_src_path:
            yield f"docs/{file.src_uri}", file.content_string
    for path in lesson_files():
        yield (
            f"lessons/{path.name}",
            "\n\n".join(cell["source"] for cell in read_cells(path) if cell["cell_type"] == "markdown"),
        )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put sources and tables in their places, and bend the links."""
    boost = next((boost for start, boost in BOOSTS.items() if page.file.src_uri.startswith(start)), None)
    if boost is not None:
        page.meta.setdefault("search", {"boost": boost})
    if page.file.src_uri in EXPLAINED:
        page.meta.setdefault("tags", EXPLAINED[page.file.src_uri])
    if page.file.generated_by is not None:
        return markdown
    for mark, make in PARTS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    path = f"docs/{page.file.src_uri}"
    return bend_links(show_pieces(markdown, path, page.file.src_uri), path, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the page fit for a narrow screen."""
    label = "本页" if page.file.src_uri.startswith("zh/") else "On this page"
    return list_parts(stack_tables(part_code(html)), list(page.toc), label)
