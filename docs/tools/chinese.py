"""The Chinese pages, and the English ones that they follow.

    python docs/tools/chinese.py                                    # lists the pages whose source has moved on
    python docs/tools/chinese.py update docs/zh/ladder/paged.md     # after the change was carried over
    python docs/tools/chinese.py update                             # the same for all pages

A page in docs/zh names its source in its front matter, with a hash of the source as it was when they last agreed.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from repo_links import PROJECT

FOLDER = PROJECT / "docs" / "zh"
GLOSSARY = "docs/zh/glossary.md"

FRONT = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
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


def page_named(argument: str) -> str:
    """Return the page that somebody means, by its path from the project's root; end with a sentence if it is none.

    Example:
        >>> page_named("./docs/zh/ladder/paged.md")
        'docs/zh/ladder/paged.md'
    """
    path = (PROJECT / argument).resolve()
    page = path.relative_to(PROJECT).as_posix() if path.is_relative_to(PROJECT) else argument
    if page not in twins():
        sys.exit(f"{argument} is no Chinese page; give the path of one from the project's root, as docs/zh/README.md.")
    return page


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["update"]:
        for each in [page_named(argument) for argument in sys.argv[2:]] or twins():
            update(each)
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        print(*stale(), sep="\n")
