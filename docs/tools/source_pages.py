"""Source files as pages, and pieces of them inside other pages.

A paragraph that is nothing but a link with the title "show NAME" is replaced by the source of NAME; several names are
parted by commas, and of a Markdown file the block of code that begins with NAME is shown. Two or more such links in one
paragraph become tabs. In a checkout they are plain links:

    [write_slots](../../minipaged/paged/reference.py "show write_slots")
"""

import ast
import posixpath
import re
from functools import cache
from textwrap import dedent

from repo_links import PROJECT, bend, outside_fences, parts

SHOW = re.compile(r'\[(?P<text>[^\]]+)\]\((?P<url>[^()\s]+) "show (?P<names>[^"]+)"\)')
FENCE = "`" * 8
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".md": "markdown"}


def listing(path: str, page: str) -> str:
    """Return the page that shows a whole file."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(posixpath.splitext(path)[1], "bash" if text.startswith("#!") else "text")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    return f'{head}{_explained(path, page)}{FENCE} {{.{language} linenums="1"}}\n{text}\n{FENCE}\n'


def _explained(path: str, page: str) -> str:
    """Return a line that leads to where a module is explained."""
    parts = path.removesuffix(".py").split("/")
    target = f"reference/api/{parts[1]}.md" if parts[0] == "minipaged" and len(parts) > 1 else ""
    if not target or not (PROJECT / "docs" / target).is_file():
        return ""
    return f"[`{parts[1]}` in the reference]({posixpath.relpath(target, posixpath.dirname(page))})\n\n"


@cache
def syntax_tree(path: str) -> tuple[list[str], ast.Module]:
    """Return the lines and the syntax tree of a Python file."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text, filename=path)


def piece(path: str, name: str) -> tuple[int, str]:
    """Return the first line's number and the source of a function, class or method.

    "docstring" is the module's docstring, and "figures" are the indented parts of it.

    Raises:
        LookupError: The file has no such name, so the page that shows it is out of date.

    Example:
        >>> piece("minipaged/foundation/reference.py", "silu_mul")[1].splitlines()[-1]
        '    return (F.silu(gate.float()) * up).to(gate.dtype)'
    """
    lines, tree = syntax_tree(path)
    if name in ("docstring", "figures"):
        text = ast.get_docstring(tree) or ""
        return 1, text if name == "docstring" else _figures(text)
    node: ast.AST = tree
    for part in name.split("."):
        found = [each for each in getattr(node, "body", []) if getattr(each, "name", None) == part]
        if not found:
            raise LookupError(f"{path} has no {name}")
        node = found[-1]  # behind the call forms of an overloaded function
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    source = [line[node.col_offset :] for line in lines[first - 1 : node.end_lineno]]
    return first, "\n".join(source)


def _figures(text: str) -> str:
    """Return the indented parts of a text, moved to the left."""
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", f"{text}\n", re.MULTILINE)
    return "\n\n".join(dedent(figure).rstrip() for figure in found)


def letters() -> str:
    """Return the table of axis letters, which stands in the docstring of `minipaged.shapes`."""
    rows = re.split(r"^=[= ]+$", piece("minipaged/shapes.py", "docstring")[1], flags=re.MULTILINE)[2]
    cells = [cell for line in rows.strip().splitlines() for cell in re.split(r"  +", line.strip())]
    pairs = sorted(zip(cells[::2], cells[1::2], strict=True))
    return "\n".join(["| letter | axis |", "|---|---|", *(f"| **{letter}** | {axis} |" for letter, axis in pairs)])


def fenced_block(path: str, first_line: str) -> str:
    """Return the inside of a Markdown file's fenced block that begins with a line.

    Raises:
        LookupError: There is no such block.
    """
    text = (PROJECT / path).read_text(encoding="utf-8")
    for is_code, block in parts(text):
        lines = block.splitlines()
        if is_code and len(lines) > 2 and lines[1] == first_line:
            return "\n".join(lines[1:-1])
    raise LookupError(f"{path} has no block that begins with {first_line!r}")


def show_pieces(text: str, path: str, page: str) -> str:
    """Return Markdown with every paragraph of "show" links replaced by what they show."""

    def replace(prose: str) -> str:
        paragraphs = prose.split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            links = [SHOW.fullmatch(line) for line in paragraph.strip().splitlines()]
            if links and all(links):
                paragraphs[i] = "\n" * paragraph.startswith("\n") + _shown([link for link in links if link], path, page)
        return "\n\n".join(paragraphs)

    return outside_fences(text, replace)


def _shown(links: list[re.Match[str]], path: str, page: str) -> str:
    shown = [(link["text"].replace("`", ""), _code(link, path, page)) for link in links]
    if len(shown) == 1:
        return shown[0][1]
    return "\n".join(f'=== "{title}"\n\n{_indented(code)}\n' for title, code in shown)


def _code(link: re.Match[str], path: str, page: str) -> str:
    """Return the code blocks that one link stands for, and where the rest of the file is."""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["url"]))
    blocks = []
    if file.endswith(".md"):
        return f"{FENCE} text\n{fenced_block(file, link['names'])}\n{FENCE}"
    for name in link["names"].split(", "):
        line, source = piece(file, name)
        options = ".text" if name in ("docstring", "figures") else f'.python title="{file}" linenums="{line}"'
        blocks.append(f"{FENCE} {{{options}}}\n{source}\n{FENCE}")
    words = "`{}` 全文" if page.startswith("zh/") else "All of `{}`"
    more = f"[{words.format(posixpath.basename(file))}]({bend(link['url'], path, page)}){{ .rest-of-file }}"
    return "\n\n".join([*blocks, more])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
