"""The lessons that there are, their notebooks, and what stands above each of their cells."""

import re
from collections.abc import Iterator

import nbformat
import pytest

from minipaged.lessons.reading import Lesson, find_lessons
from tests.lessons.prose import texts_of

NAMES = (
    "00_foundation",
    "01_contiguous",
    "02a_paged_storage",
    "02b_paged_kernel",
    "03_sharing",
    "04_batching",
    "05_prefix",
    "09_engine",
)
each_lesson = pytest.mark.parametrize("lesson", find_lessons(), ids=lambda lesson: lesson.name)

CHECK = re.compile(r"\b(check_\w+)\(")
"""The call of a check."""


def read_notebook(lesson: Lesson) -> nbformat.NotebookNode:
    """Return a lesson's notebook."""
    if not lesson.notebook.is_file():
        pytest.fail(f"there is no {lesson.notebook.name}: python -m minipaged.lessons build {lesson.number} makes it")
    return nbformat.read(lesson.notebook, as_version=4)


def outputs_above(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yield for each cell behind the install cell what is printed above it."""
    text = ""
    for cell in notebook.cells[1:]:
        yield text
        text += "\n".join(["", *texts_of(cell.get("outputs", []))])
