"""A lesson's source: where it is, its cells, its exercises and their solutions.

A source is a Python script in the percent format, ``lessons/NN_name.py``: cells begin with ``# %%``, and the text of
the Markdown ones stands in comments. The notebook beside it is made from it; see `minipaged.lessons.building`.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minipaged.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
LESSONS = PROJECT / "lessons"

NAME = re.compile(r"(\d\d[a-z]?)_\w+")
_TITLE = re.compile(r"^# # (.+)$", re.MULTILINE)
_SOLUTION = re.compile(r"<summary>Solution</summary>(.*?)</details>", re.DOTALL)
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """One cell. ``given`` lists the numbers that the text tells and no output above it shows."""

    is_code: bool
    source: str
    given: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def is_exercise(self) -> bool:
        """Return whether the reader is to replace this cell."""
        return "exercise" in self.tags

    @cached_property
    def exercise_name(self) -> str:
        """Return the name of the function or class that is open in this cell."""
        for node in ast.parse(self.source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_open(ast.unparse(node)):
                return node.name
        raise UserError(f"an exercise has no open function or class: {self.source.splitlines()[0]}")


def is_open(source: str) -> bool:
    r"""Return whether a function still raises `NotYet`. Words in a comment or a docstring do not count.

    Example:
        >>> is_open("def f():\n    raise NotYet"), is_open("def f():\n    # raise NotYet\n    return 5")
        (True, False)
    """
    raised = [node.exc for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Raise)]
    names = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in raised if each is not None]
    return any(name.split(".")[-1] == "NotYet" for name in names)


@dataclass(frozen=True)
class Lesson:
    """The source of one lesson, read when its cells are asked for."""

    path: Path

    @property
    def name(self) -> str:
        """Return the file's name without its ending: ``02a_paged_storage``."""
        return self.path.stem

    @property
    def number(self) -> str:
        """Return the number that begins the name: ``02a``."""
        return self.name.split("_")[0]

    @property
    def notebook(self) -> Path:
        """Return where the notebook of this lesson is, or will be."""
        return self.path.with_suffix(".ipynb")

    @cached_property
    def title(self) -> str:
        """Return the heading of the lesson, its number left out."""
        found = _TITLE.search(self.path.read_text(encoding="utf-8"))
        return found[1].removeprefix(self.number).strip() if found else ""

    @cached_property
    def cells(self) -> list[Cell]:
        """Return the cells in their order."""
        return list(_read_cells(self.path.read_text(encoding="utf-8")))

    @property
    def exercise_names(self) -> list[str]:
        """Return the names of all functions and classes that the reader is to write."""
        return [cell.exercise_name for cell in self.cells if cell.is_exercise]

    def solution(self, index: int) -> str:
        """Return the code that replaces the exercise cell at this index: the fence in the folded text below it.

        Raises:
            UserError: There is no such text, or it does not hold exactly one fence.
        """
        below = self.cells[index + 1].source if index + 1 < len(self.cells) else ""
        folded = _SOLUTION.search(below)
        fences = _FENCE.findall(folded[1]) if folded else []
        if len(fences) != 1:
            raise UserError(
                f"{self.path.name}: the text below exercise {self.cells[index].exercise_name!r} must hold one folded "
                f"solution with one python fence, not {len(fences)}"
            )
        return fences[0].rstrip("\n")

    def solved(self) -> str:
        """Return the lesson as a script in which every exercise is replaced by its solution."""
        code = [(index, cell) for index, cell in enumerate(self.cells) if cell.is_code]
        return "\n\n".join(self.solution(index) if cell.is_exercise else cell.source for index, cell in code) + "\n"


def _read_cells(text: str) -> Iterator[Cell]:
    try:
        import jupytext
    except ImportError as error:
        raise UserError(
            'the lessons\' sources are read with jupytext; pip install -e ".[lessons]" brings it'
        ) from error
    # Or a comment that begins with a shell command's name, such as "copy", would become one.
    percent = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    for cell in jupytext.reads(text, fmt=percent).cells:
        given, tags = cell.metadata.get("given", ""), cell.metadata.get("tags", [])
        yield Cell(cell.cell_type == "code", cell.source, tuple(given.split()), tuple(tags))


def find_lessons(folder: Path = LESSONS) -> list[Lesson]:
    """Return all lessons in the order of their numbers.

    Raises:
        UserError: There is no folder of lessons: they come with a checkout and not with the installed package.
    """
    if not folder.is_dir():
        raise UserError(
            "the lessons are not part of the installed package: run this in a checkout of the repository, "
            'after pip install -e ".[lessons]" there'
        )
    return [Lesson(path) for path in sorted(folder.glob("*.py")) if NAME.fullmatch(path.stem)]


def choose_lessons(names: Sequence[str], folder: Path = LESSONS) -> list[Lesson]:
    """Return the lessons with these numbers, names or file names; all of them for no names.

    Raises:
        UserError: There is no such lesson.
    """
    lessons = find_lessons(folder)
    keys = {key: lesson for lesson in lessons for key in (lesson.number, lesson.name)}
    for name in names:
        if _key(name) not in keys:
            numbers = ", ".join(lesson.number for lesson in lessons) or "none"
            raise UserError(f"no lesson is called {name!r}; the lessons are {numbers}")
    return [keys[_key(name)] for name in names] if names else lessons


def _key(name: str) -> str:
    return Path(name).name.removesuffix(".py").removesuffix(".ipynb")
