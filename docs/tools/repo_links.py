"""Where a file of the repository stands on the site.

Pages link to files as they lie in the repository, so that the links work in a checkout and on a code host too. On the
site a lesson is a page, and so is the listing of a source file; links are bent to them here.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

LINK = re.compile(r'(?P<open>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<url>[^()\s]+)(?P<title>(?:\s+"[^"]*")?)\)')
FENCE = re.compile(r"\s*(?:> ?)*(`{3,}|~{3,})")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)


def page_of(path: str) -> str | None:
    """Return the page or file of the site that shows a file of the repository, None where none does.

    Args:
        path: The file or folder, from the project's root, with forward slashes.

    Example:
        >>> page_of("docs/fast.md"), page_of("docs/kernels"), page_of("minipaged/paged/cache.py")
        ('fast.md', 'kernels/index.md', 'source/minipaged/paged/cache.py.md')
        >>> page_of("README.md"), page_of("no/such/file.py")
        ('index.md', None)
    """
    file = PROJECT / path
    if path == "README.md":
        return "index.md"
    if path == "lessons":
        return "lessons/index.md"
    if match := re.fullmatch(r"lessons/(\w+)\.(ipynb|py)", path):
        return f"lessons/{match[1]}.md"
    if path == "docs" or path.startswith("docs/"):
        inside = "index.md" if path == "docs" else path.removeprefix("docs/")
        if not inside.startswith("tools/"):
            return f"{inside}/index.md" if file.is_dir() else inside
    if file.is_dir():
        path, file = f"{path}/__init__.py", file / "__init__.py"
    return source_page(path) if file.is_file() else None


def source_page(path: str) -> str:
    """Return the page that lists a file. A folder must not begin with a dot there."""
    return "source/" + path.replace("/.", "/dot-").removeprefix(".") + ".md"


def bend(url: str, path: str, page: str) -> str:
    """Return where a link leads on the site.

    Args:
        url: The link as it is written, relative to the file that it stands in.
        path: That file, from the project's root.
        page: The page that the file becomes, from the site's root.

    Example:
        >>> bend("../minipaged/launch.py#L3", "docs/fast.md", "fast.md")
        'source/minipaged/launch.py.md'
        >>> bend("../docs/fast.md#overlap", "lessons/09_engine.ipynb", "lessons/09_engine.md")
        '../fast.md#overlap'
        >>> bend("https://arxiv.org/abs/2309.06180", "docs/fast.md", "fast.md")
        'https://arxiv.org/abs/2309.06180'
    """
    target, hash_sign, anchor = url.partition("#")
    if not target or re.match(r"[a-z][a-z+.-]*:|/", target):
        return url
    wanted = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
    if wanted is None:
        return url
    if wanted.startswith("source/"):
        hash_sign = anchor = ""  # a line's number on a code host; lines of a listing have none that is checked
    return posixpath.relpath(wanted, posixpath.dirname(page) or ".") + hash_sign + anchor


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown with every stretch of text between fenced code changed."""
    return "".join(part if is_code else change(part) for is_code, part in parts(text))


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield a text in pieces, in order: (whether it is fenced code with its fences, the piece)."""
    piece: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if not fence and mark:
            yield False, "".join(piece)
            piece, fence = [line], mark[1]
        elif fence and mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
            yield True, "".join([*piece, line])
            piece, fence = [], ""
        else:
            piece.append(line)
    yield bool(fence), "".join(piece)


def bend_links(text: str, path: str, page: str) -> str:
    """Return Markdown whose links lead to pages of the site; code is left as it is."""

    def bend_one(match: re.Match[str]) -> str:
        return f"{match['open']}{bend(match['url'], path, page)}{match['title']})"

    def change(prose: str) -> str:
        spans = [match.span() for match in CODE_SPAN.finditer(prose)]

        def unless_code(match: re.Match[str]) -> str:
            place = match.start("url")
            return match[0] if any(start < place < end for start, end in spans) else bend_one(match)

        return LINK.sub(unless_code, prose)

    return outside_fences(text, change)


def linked_paths(text: str, path: str) -> Iterator[str]:
    """Yield the files of the repository that a Markdown file links to, from the project's root."""
    for is_code, prose in parts(text):
        for match in () if is_code else LINK.finditer(prose):
            target = match["url"].partition("#")[0]
            if target and not re.match(r"[a-z][a-z+.-]*:|/", target):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
