"""From a lesson's source to its notebook: the same cells, an install cell in front, and what they print on a CPU."""

import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.errors import UserError
from minipaged.lessons.reading import PROJECT, Cell, Lesson

if TYPE_CHECKING:
    from nbformat import NotebookNode

CELL_LIMIT_S = 120

INSTALL = """\
# Installs minipaged where it is missing, as in a hosted notebook; elsewhere this cell does nothing.
import importlib.util
import subprocess
import sys

REPOSITORY = {repository}

if importlib.util.find_spec("minipaged") is None:
    if not REPOSITORY:
        raise ModuleNotFoundError("minipaged is not installed: write its repository's address into REPOSITORY above")
    subprocess.run([sys.executable, "-m", "pip", "install", f"minipaged @ git+{{REPOSITORY}}"], check=True)"""


def repository(project: Path = PROJECT) -> str:
    """Return the repository's address, which is kept in pyproject.toml alone; empty while there is none."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return metadata.get("urls", {}).get("repository", "")


def install_cell(address: str) -> Cell:
    """Return the cell that the builder puts in front."""
    return Cell(is_code=True, source=INSTALL.format(repository=json.dumps(address)))


def make_notebook(lesson: Lesson, address: str | None = None) -> "NotebookNode":
    """Return a lesson's notebook without outputs.

    Args:
        lesson: The source.
        address: The repository's address; None is what pyproject.toml says.

    Invariants:
        A cell's id is made of its text, so a cell that nobody changed keeps it wherever it moves.
    """
    from nbformat import v4

    cells = [install_cell(repository() if address is None else address), *lesson.cells]
    notebook = v4.new_notebook(metadata=_metadata())
    for cell, cell_id in zip(cells, _cell_ids(lesson, cells), strict=True):
        make = v4.new_code_cell if cell.is_code else v4.new_markdown_cell
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        notebook.cells.append(make(cell.source, id=cell_id, metadata=metadata))
    return notebook


def _metadata() -> dict[str, Any]:
    """Return what says which kernel runs the notebook: no version, which would change from build to build."""
    return {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def _cell_ids(lesson: Lesson, cells: Sequence[Cell]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for cell in cells:
        digest = sha256(f"{cell.is_code} {cell.source}".encode()).hexdigest()[:8]
        count = seen[digest] = seen.get(digest, 0) + 1
        yield f"{lesson.number}-{digest}" + (f"-{count}" if count > 1 else "")


def cpu_environment() -> dict[str, str]:
    """Return the environment in which lessons are run: no GPU, one thread, this project's modules."""
    places = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONIOENCODING": "utf-8",
    }


def build(lesson: Lesson) -> None:
    """Run a lesson's cells on the CPU and write its notebook with what they print.

    Raises:
        UserError: A cell raises an error. No notebook is written then.
    """
    from nbformat import write

    notebook = make_notebook(lesson)
    _execute(lesson, notebook)
    notebook.metadata = type(notebook)(_metadata())
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merged(cell.outputs)
    write(notebook, lesson.notebook)


def _merged(outputs: "Sequence[NotebookNode]") -> "list[NotebookNode]":
    """Join pieces of a stream with nothing between them: where one is cut depends on the moment."""
    merged: list[NotebookNode] = []
    for output in outputs:
        before = merged[-1] if merged else None
        if before is not None and before.output_type == output.output_type == "stream" and before.name == output.name:
            before.text += output.text
        else:
            merged.append(output)
    return merged


def _execute(lesson: Lesson, notebook: "NotebookNode") -> None:
    try:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    except ImportError as error:
        raise UserError(f'notebooks are run with nbclient; pip install -e ".[lessons]" brings it ({error})') from error
    options: dict[str, Any] = {
        "kernel_name": "python3",
        "timeout": CELL_LIMIT_S,
        "record_timing": False,
        "extra_arguments": ["--log-level=ERROR"],
    }
    client = NotebookClient(notebook, resources={"metadata": {"path": str(lesson.path.parent)}}, **options)
    try:
        with ThreadPoolExecutor(1) as pool:  # of its own, since this thread may run an event loop, as Jupyter's does
            pool.submit(lambda: asyncio.run(client.async_execute(env=cpu_environment()))).result()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(_without_colors(str(error)), file=sys.stderr)
        raise UserError(f"{lesson.path.name} has a cell that fails, shown above; no notebook is written") from error


def _without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)
