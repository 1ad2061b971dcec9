"""What has to be equal in both languages of a page, and what of a page is text."""

import posixpath
import re

import chinese  # isort: skip  (from docs/tools, which conftest puts on the path)
from repo_links import CODE_SPAN, LINK, parts  # isort: skip
from source_pages import SHOW  # isort: skip

HEADING = re.compile(r"^(#{1,6}) +(.+)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^(?:::: .*(?:\n    .*)*|<!-- .* -->)$", re.MULTILINE)


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


def prose(text: str) -> str:
    """Return what a reader reads as text: no front matter, code, addresses, headings or titles of what is shown."""
    text = chinese.FRONT.sub("", text)
    text = "".join(part for is_code, part in parts(text) if not is_code)
    text = HEADING.sub("", DIRECTIVE.sub("", SHOW.sub("", text)))
    text = re.sub(r"!\[[^\]]*\]\([^()\s]+\)(?:\{[^}]*\})?", "", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()\s]+\)", r"\1", text)
    text = re.sub(r"\\\[.*?\\\]|\\\(.*?\\\)", "M", text, flags=re.DOTALL)
    return CODE_SPAN.sub("`C`", text)
