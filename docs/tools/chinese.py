"""The Chinese pages, and the English ones that they follow.

    python docs/tools/chinese.py                                    # lists the pages whose source has moved on
    python docs/tools/chinese.py update docs/zh/ladder/paged.md     # after the change was carried over
    python docs/tools/chinese.py update                             # the same for all pages

A page in docs/zh names its source in its front matter, with a hash of the source as it was when they last agreed.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from repo_links import CODE_SPAN, LINK, PROJECT, parts
from source_pages import SHOW

FOLDER = PROJECT / "docs" / "zh"
GLOSSARY = "docs/zh/glossary.md"

FRONT = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#{1,6}) +(.+)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^(?:::: .*(?:\n    .*)*|<!-- .* -->)$", re.MULTILINE)
HASH = re.compile(r"(?<=^source_hash: )\w+$", re.MULTILINE)


def read(path: str) -> str:
    """Return a file's text by its path from the project's root."""
    return (PROJECT / path).read_text(encoding="utf-8")


@cache
def twins() -> dict[str, str]:
    """Return the source of every Chinese page: both paths from the project's root."""
    pages = sorted(path.relative_to(PROJECT).as_posix() for path in FOLDER.rglob("*.md"))
    return {page: front(page)["source"] for page in pages}


def front(page: str) -> dict[str, str]:
    """Return what stands in a page's front matter.

    Raises:
        LookupError: It does not say which page it follows.
    """
    match = FRONT.match(read(page))
    found = dict(line.split(": ", 1) for line in match[1].splitlines()) if match else {}
    if not {"source", "source_hash"} <= found.keys():
        raise LookupError(f"{page} must begin with front matter that has source and source_hash")
    return found


def digest(source: str) -> str:
    """Return the hash of an English page as it is now."""
    return sha256(read(source).encode()).hexdigest()[:16]


def stale() -> Iterator[str]:
    """Yield a sentence for every page whose source has moved on."""
    for page, source in twins().items():
        if front(page)["source_hash"] != digest(source):
            yield (
                f"{page} follows an older {source}: carry the change over, then run "
                f"`python docs/tools/chinese.py update {page}`"
            )


def update(page: str) -> None:
    """Note in a page that it says what its source says now."""
    text = HASH.sub(digest(twins()[page]), read(page), count=1)
    (PROJECT / page).write_text(text, encoding="utf-8")


# -- what has to be equal in both languages


def headings(text: str) -> list[int]:
    r"""Return the levels of a page's headings, in order.

    Example:
        >>> headings("# a\n\n## b\n\n~~~\n# no heading\n~~~\n")
        [1, 2]
    """
    return [len(match[1]) for is_code, part in parts(text) if not is_code for match in HEADING.finditer(part)]


def code(text: str, path: str) -> list[str]:
    r"""Return a page's code in order: fenced blocks, what the hook and mkdocstrings put in, and what is shown of files.

    Example:
        >>> code('[Bild](../../README.md "show $ ls")\n\n<!-- letters -->\n', "docs/ladder/life.md")
        ['README.md: $ ls', '<!-- letters -->']
    """
    found = []
    for is_code, part in parts(text):
        if is_code:
            found.append(part.rstrip())
            continue
        places = [(match.start(), match[0]) for match in DIRECTIVE.finditer(part)]
        for match in SHOW.finditer(part):
            places.append((match.start(), f"{resolved(match['url'], path)}: {match['names']}"))
        found += [piece for _, piece in sorted(places)]
    return found


def links(text: str, path: str) -> set[str]:
    """Return where a page leads: files from the project's root, without anchors, and addresses; not what it shows."""
    prose = SHOW.sub("", "".join(part for is_code, part in parts(text) if not is_code))
    urls = [match["url"] for match in LINK.finditer(prose) if not match["url"].startswith("#")]
    return {url if re.match(r"[a-z]+:", url) else resolved(url, path) for url in urls}


def resolved(url: str, path: str) -> str:
    """Return the file that a link leads to, from the project's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), url.partition("#")[0]))


# -- words


@dataclass(frozen=True)
class Term:
    """A line of the glossary: a word, the English one, and renderings that are not used."""

    chinese: str
    english: str
    wrong: tuple[str, ...]


@cache
def glossary() -> list[Term]:
    """Return the glossary's terms, the longest first."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| .+? \| ?(.*?) ?\|$", read(GLOSSARY), re.MULTILINE)
    terms = [Term(chinese, english, tuple(filter(None, wrong.split("、")))) for chinese, english, wrong in rows]
    return sorted(terms, key=lambda term: -len(term.chinese))


def prose(text: str) -> str:
    """Return what a reader reads as text: no front matter, code, addresses, headings or titles of what is shown."""
    text = FRONT.sub("", text)
    text = "".join(part for is_code, part in parts(text) if not is_code)
    text = HEADING.sub("", DIRECTIVE.sub("", SHOW.sub("", text)))
    text = re.sub(r"!\[[^\]]*\]\([^()\s]+\)(?:\{[^}]*\})?", "", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()\s]+\)", r"\1", text)
    text = re.sub(r"\\\[.*?\\\]|\\\(.*?\\\)", "M", text, flags=re.DOTALL)
    return CODE_SPAN.sub("`C`", text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["update"]:
        for each in sys.argv[2:] or twins():
            update(each)
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        print(*stale(), sep="\n")
