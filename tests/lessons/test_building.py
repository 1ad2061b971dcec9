"""From a source to a notebook: the same cells, ids that stay, an install cell in front, and outputs."""

import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest

from minipaged.errors import UserError
from minipaged.lessons.building import build, install_cell, make_notebook, repository
from tests.lessons.tiny_lessons import GOOD, write_lesson

SHOWN = """\
# %% [markdown]
# # 02  Shown

# %%
from minipaged.lessons import ask, kit, show

print(1)
show("text", "<svg xmlns='http://www.w3.org/2000/svg'/>")
print(2)
print(3)

# %%
kit.os.environ[kit.MODEL_VARIABLE] = "random"
ask("Hi", "paged", "--show-blocks", "--num-blocks", "4", max_tokens=2)
"""


def test_a_notebook_has_the_cells_of_the_source_behind_the_install_cell(tmp_path: Path):
    lesson = write_lesson(tmp_path)
    notebook = make_notebook(lesson)
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells[1:]] == [cell.source for cell in lesson.cells]
    assert notebook.metadata.kernelspec.name == "python3"
    assert [dict(cell.metadata) for cell in notebook.cells[2:4]] == [{}, {"tags": ["exercise"]}]


def test_cells_keep_their_ids_when_others_change_or_move(tmp_path: Path):
    def ids(source: str) -> dict[str, str]:
        return {cell.source: cell.id for cell in make_notebook(write_lesson(tmp_path, source=source)).cells}

    before = ids(GOOD)
    after = ids(GOOD.replace("doubled", "made twice as large").replace("# %%\n", "# %%\nx = 1\n\n# %%\n", 1))
    assert before == ids(GOOD)
    assert len(before.keys() & after.keys()) == len(before) - 1
    assert all(before[source] == after[source] for source in before.keys() & after.keys())
    twice = make_notebook(write_lesson(tmp_path, source=GOOD + "\n# %%\ncheck_double(double)\n"))
    assert len({cell.id for cell in twice.cells}) == len(twice.cells)


def test_the_address_comes_from_the_one_place_and_none_is_invented(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text('[project]\nurls.repository = "https://example.org/minipaged"')
    assert repository(tmp_path) == "https://example.org/minipaged"
    (tmp_path / "pyproject.toml").write_text("[project]\n[project.urls]")
    assert repository(tmp_path) == ""
    assert 'REPOSITORY = "https://example.org/a"\n' in install_cell("https://example.org/a").source
    assert 'REPOSITORY = ""\n' in install_cell("").source
    assert "http" not in install_cell("").source


def test_the_install_cell_does_nothing_where_minipaged_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("it installs something"))
    exec(install_cell("https://example.org/minipaged").source, {})


def test_the_install_cell_installs_where_minipaged_is_missing(monkeypatch: pytest.MonkeyPatch):
    ran: list[Any] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    exec(install_cell("https://example.org/minipaged").source, {})
    assert ran[0][1:] == ["-m", "pip", "install", "minipaged @ git+https://example.org/minipaged"]
    with pytest.raises(ModuleNotFoundError, match="write its repository's address into REPOSITORY above"):
        exec(install_cell("").source, {})
    assert len(ran) == 1


def test_a_built_notebook_holds_what_its_cells_print_in_order_and_pictures_with_their_text(tmp_path: Path):
    lesson = write_lesson(tmp_path, "02_shown", SHOWN)
    build(lesson)
    notebook = nbformat.read(lesson.notebook, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == make_notebook(lesson).metadata
    first, second = notebook.cells[2:]
    assert [output.get("text", output.get("data")) for output in first.outputs] == [
        "1\n",
        {"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>", "text/plain": "text"},
        "2\n3\n",
    ]
    assert "image/svg+xml" in second.outputs[1].data
    assert "pool: 4 blocks of 16 slots, 1 used, 3 free" in second.outputs[1].data["text/plain"]
    assert all(output.get("name") != "stderr" for output in second.outputs)


def test_a_lesson_with_an_error_gets_no_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lesson = write_lesson(tmp_path, source="# %%\nprint(1 / 0)\n")
    with pytest.raises(UserError, match=r"01_doubling\.py has a cell that fails"):
        build(lesson)
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not lesson.notebook.exists()
