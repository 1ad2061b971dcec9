"""Rules of the project as a whole: its commands, the ladder's imports, what an import costs, and form."""

import ast
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "minipaged"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400

# From the ground up. A module may import its own line and the lines above it here, never one below.
LADDER = [
    ["errors", "shapes", "tiers", "progress", "cli", "launch", "transfer", "garbage"],
    ["foundation"],
    ["contiguous"],
    ["paged"],
    ["sharing"],
    ["batching"],
    ["prefix"],
    ["quantized"],
    ["offload"],
    ["distributed"],
    ["fast"],
    [
        "arguments",
        "machine",
        "cases",
        "cases_ops",
        "cases_batching",
        "cases_fast",
        "cases_prefix",
        "triton_support",
        "llm",
        "viz",
        "__init__",
    ],
    ["chat", "bench", "lab", "server", "lessons", "compile_gate"],
]
HEIGHT = {name: height for height, names in enumerate(LADDER) for name in names}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part_of(path: Path) -> str:
    """Return the name that stands in LADDER for this file: its rung or its module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the full names that one node imports: a statement, or a kernel named in a string."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and re.fullmatch(r"minipaged(\.\w+)+(:\w+)?", str(node.value)):
        yield node.value.replace(":", ".")


def own_imports(path: Path) -> Iterator[str]:
    """Yield every name of this package that a module imports, also inside functions."""
    for node in ast.walk(parse(path)):
        yield from (name for name in imported_names(node) if name.split(".")[0] == "minipaged")


def part_named(name: str) -> str:
    """Return the LADDER name behind ``minipaged.x.y``; what __init__.py defines itself belongs to it."""
    first = [*name.split("."), ""][1]
    return first if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file() else "__init__"


def relative(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


# -- the commands


def readme_commands() -> list[str]:
    lines = (PROJECT / "README.md").read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith("pip install ")]


def test_the_readme_sets_up_the_chat_and_the_tests_with_one_command_each():
    assert readme_commands() == [
        "pip install -e . && python -m minipaged.chat",
        'pip install -e ".[dev]" && pytest',
    ]


def test_ci_reads_the_test_command_from_the_readme_and_runs_it():
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8")
    extraction = re.search(r"^test_command=\$\((.+)\)$", script, re.MULTILINE)
    assert extraction, ".ci/run no longer reads the test command out of README.md"
    shown = subprocess.run(
        ["bash", "-c", extraction[1]], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines() == [readme_commands()[1]]
    assert 'bash -euo pipefail -c "$test_command"' in script
    assert "python -m minipaged.chat" in script
    assert not re.search(r"^\s*(python -m )?pytest\b", script, re.MULTILINE), "a second place runs pytest"


def test_the_installer_refuses_python_below_3_11():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"


# -- the ladder


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_only_go_down_the_ladder(path: Path):
    assert part_of(path) in HEIGHT, f"{relative(path)} has no place in LADDER above"
    height = HEIGHT[part_of(path)]
    if path == PACKAGE / "__init__.py":
        return  # it names the home of everything public
    for name in own_imports(path):
        assert HEIGHT[part_named(name)] <= height, f"{relative(path)} imports {name}, which stands above it"


@pytest.mark.parametrize(
    ("name", "part"),
    [("minipaged.paged.ops", "paged"), ("minipaged.LLM", "__init__"), ("minipaged.tiers.use", "tiers")],
)
def test_an_import_is_traced_to_its_part(name: str, part: str):
    assert part_named(name) == part


def test_references_and_kernels_never_import_each_other():
    for path in MODULES:
        other = {"reference": "kernels", "kernels": "reference"}.get(path.stem)
        for name in own_imports(path):
            assert other is None or other not in name.split("."), f"{relative(path)} imports {name}"


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports outside functions, type-checking blocks left out."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_names(node)
        waiting += ast.iter_child_nodes(node)


def test_only_kernels_load_triton_and_nothing_loads_transformers_at_import():
    for path in MODULES:
        loaded = {name.split(".")[0] for name in imports_when_loaded(parse(path))}
        assert "transformers" not in loaded, relative(path)
        assert "triton" not in loaded or path.stem == "kernels", relative(path)


# -- what an import costs, and what it needs


def test_importing_the_package_loads_neither_torch_nor_transformers(run_python):
    code = "import sys, minipaged; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert run_python("-W", "error", "-c", code).stdout == "[]\n"


def test_every_public_name_is_there(run_python):
    code = "import minipaged; [getattr(minipaged, name) for name in minipaged.__all__]; print(dir(minipaged))"
    listing = run_python("-W", "error", "-c", code)
    assert listing.returncode == 0, listing.stderr
    assert "'LLM'" in listing.stdout and "'SamplingParams'" in listing.stdout


BLOCK = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import minipaged
"""


def test_every_module_but_kernels_imports_without_triton(run_python):
    names = [".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in MODULES]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith((".kernels", ".__main__"))]
    done = run_python(
        "-W", "error", "-c", BLOCK.format(blocked=["triton"]) + f"for n in {names!r}: importlib.import_module(n)"
    )
    assert done.returncode == 0, done.stderr


def test_without_triton_and_transformers_a_model_runs_and_the_triton_tier_is_refused_in_one_line(
    run_python, tmp_path: Path
):
    folder = str(make_tiny_model(tmp_path))
    done = run_python(
        "-c",
        BLOCK.format(blocked=["triton", "transformers"])
        + f"""
llm = minipaged.LLM({folder!r}, num_blocks=8, device="cpu")
print(len(llm.generate([1, 2, 3], minipaged.SamplingParams(max_tokens=4, temperature=0))[0].token_ids))
try:
    minipaged.LLM({folder!r}, num_blocks=8, device="cpu", tier="triton")
except minipaged.UserError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    count, refusal = done.stdout.splitlines()
    assert count == "4"
    assert "triton" in refusal.lower()


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem == "__main__"], ids=relative)
def test_importing_a_command_line_does_not_run_it(path: Path, capsys):
    spec = importlib.util.spec_from_file_location("imported_main", path)
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert capsys.readouterr().out == ""


# -- form


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Tell whether a definition only describes one call form of the function that follows."""
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield public functions and classes, and the public methods of public classes."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_") and not is_overload(node):
            yield node
            waiting += node.body if isinstance(node, ast.ClassDef) else []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_and_public_definition_has_a_docstring(path: Path):
    tree = parse(path)
    assert ast.get_docstring(tree), f"{relative(path)} does not say what it is"
    silent = [node.name for node in public_definitions(tree) if not ast.get_docstring(node)]
    assert not silent, f"{relative(path)}: no docstring on {', '.join(silent)}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_is_too_long_to_read(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_no_file_names_a_place_on_one_machine():
    place = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/(?!me\b)\w")  # /home/me is nobody's
    files = [*MODULES, *(PROJECT / "tests").rglob("*.py"), *(PROJECT / "docs").rglob("*.md")]
    files += [PROJECT / name for name in ("README.md", "pyproject.toml", ".ci/run", ".pre-commit-config.yaml")]
    for path in files:
        found = place.search(path.read_text(encoding="utf-8"))
        assert not found, f"{relative(path)} names {found[0]}"


def test_every_folder_of_modules_is_a_package_that_is_installed():
    pattern = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert pattern["packages"]["find"]["include"] == ["minipaged*"]
    for folder in {path.parent for path in MODULES}:
        assert (folder / "__init__.py").is_file(), f"{relative(folder)} has no __init__.py"
