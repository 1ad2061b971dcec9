"""Lessons as pages, made from their notebooks with all outputs.

Notebooks hold GitHub's Markdown. The site's own kind needs a blank line before a list, four spaces before a list in a
list, and a mark on ``<details>`` whose inside is Markdown; call-outs become boxes.
"""

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.exceptions import BuildError
from repo_links import PROJECT, bend_links, outside_fences

CALLOUT = re.compile(r"> \*\*(?P<name>[^*]+?)\.?\*\* ?(?P<text>.*)")
KINDS = {"predict": "question", "warning": "warning", "careful": "warning", "remember": "tip"}
LIST_ITEM = re.compile(r"( *)([-*+]|\d+[.)])( +)\S")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PICTURES = {"image/svg+xml": "svg", "image/png": "png"}
INSTALLS = "# Installs minipaged"
"""So begins the first cell of every notebook, which only does something where the notebook was opened elsewhere."""


@dataclass
class LessonPage:
    """A lesson as Markdown, its title, and its pictures by file name."""

    title: str
    text: str
    pictures: dict[str, bytes]


def lesson_files() -> list[Path]:
    """Return the lessons' notebooks in their order.

    Raises:
        BuildError: A lesson has no notebook.
    """
    notebooks = [path.with_suffix(".ipynb") for path in sorted((PROJECT / "lessons").glob("[0-9]*.py"))]
    for notebook in notebooks:
        if not notebook.is_file():
            number = notebook.stem.partition("_")[0]
            raise BuildError(f"there is no {notebook.name}: python -m minipaged.lessons build {number} makes it")
    return notebooks


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook, the source of each in one piece."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"]).strip("\n")} for cell in cells]


def render(path: Path) -> LessonPage:
    """Return a lesson as a page of the site."""
    name, pictures = path.stem, {}
    pieces = []
    for cell in read_cells(path):
        source = cell["source"]
        if cell["cell_type"] == "markdown":
            pieces.append(as_site_markdown(source))
            continue
        if source.startswith(INSTALLS):
            continue
        if source.strip():
            title = ' title="your turn"' if "exercise" in cell["metadata"].get("tags", []) else ""
            pieces.append(_fenced(source, f".python{title}"))
        for output in cell["outputs"]:
            pieces.append(_render_output(output, name, pictures))
    body = "\n\n".join(piece for piece in pieces if piece)
    title = match[1] if (match := re.search(r"^# +(.+)$", body, re.MULTILINE)) else name
    title = re.sub(r"\s+", " ", title)
    body = bend_links(body, f"lessons/{name}.ipynb", f"lessons/{name}.md")
    body = body.replace("\n", f"\n\n{_files_of(path)}\n", 1) if body.startswith("# ") else body
    return LessonPage(title, f"---\ntitle: {json.dumps(title)}\n---\n\n{body}\n", pictures)


def _files_of(path: Path) -> str:
    source = f"[source](../source/lessons/{path.stem}.py.md)"
    return f"[Notebook](files/{path.name}){{ download={path.name} }} · {source}\n"


def _fenced(text: str, options: str) -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence} {{{options}}}\n{text.rstrip()}\n{fence}"


def _render_output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    if output["output_type"] == "stream":
        text = "".join(output["text"])
    elif output["output_type"] == "error":
        text = "\n".join(output["traceback"])
    else:
        data = output["data"]
        for kind, suffix in PICTURES.items():
            if kind in data:
                file = f"{name}-{len(pictures) + 1}.{suffix}"
                content = "".join(data[kind])
                pictures[file] = content.encode() if suffix == "svg" else base64.b64decode(content)
                return f"![{_title_of(content)}](pictures/{file}){{ .drawing }}"
        text = "".join(data.get("text/plain", ""))
    text = ANSI.sub("", text)
    return _fenced(text, ".text .output") if text.strip() else ""


def _title_of(picture: str) -> str:
    found = re.search(r"<title>(.*?)</title>", picture)
    return re.sub(r"[\[\]]", "", found[1]) if found else "what the cell drew"


def as_site_markdown(text: str) -> str:
    r"""Return GitHub's Markdown as the site's.

    Example:
        >>> print(as_site_markdown("Two:\n- a\n  - b"))
        Two:
        <BLANKLINE>
        - a
            - b
    """
    text = outside_fences(text, _lists)
    text = re.sub(r"<details( open)?>", r'<details\1 markdown="1">', text)
    return outside_fences(text, _callouts)


def _lists(prose: str) -> str:
    lines: list[str] = []
    widths: list[int] = []  # how far each level of the present list is indented
    for line in prose.split("\n"):
        item = LIST_ITEM.match(line)
        if item:
            indent = len(item[1])
            is_new = not widths
            while widths and indent < widths[-1]:
                widths.pop()
            if not widths or indent > widths[-1]:
                widths.append(indent)
            if is_new and lines and lines[-1].strip():
                lines.append("")
            line = "    " * (len(widths) - 1) + line.lstrip()
        elif line.strip() and not line.startswith(" "):
            after_blank = not lines or not lines[-1].strip()
            widths = [] if after_blank else widths
        elif line.strip() and widths:
            line = "    " * len(widths) + line.lstrip()
        lines.append(line)
    return "\n".join(lines)


def _callouts(prose: str) -> str:
    lines: list[str] = []
    is_inside = False
    for line in prose.split("\n"):
        start = CALLOUT.match(line)
        if start and not is_inside:
            kind = KINDS.get(start["name"].lower(), "note")
            lines += [f'!!! {kind} "{start["name"]}"', "", f"    {start['text']}"]
            is_inside = True
        elif is_inside and line.startswith(">"):
            lines.append(f"    {line[1:].removeprefix(' ')}".rstrip())
        else:
            is_inside = False
            lines.append(line)
    return "\n".join(lines)
