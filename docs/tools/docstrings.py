"""What the reference makes of this project's docstrings before it reads them."""

import re
from textwrap import dedent
from typing import Any

import griffe

OWN_SECTIONS = re.compile(r"^(Invariants|Cost|Source):\n((?:(?: +.*)?\n)*(?: +.*)?)", re.MULTILINE)


class Sections(griffe.Extension):
    """Let an "Example" be a section of examples, and this project's own sections look like all others."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the headings in an object's docstring."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = OWN_SECTIONS.sub(lambda found: f"**{found[1]}:**\n\n{dedent(found[2])}", text)
