"""What the benches write down beside their samples: where and with what they ran."""

import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import progress as rich
from rich.console import Console

from minipaged.errors import UserError

PACKAGES = ("minipaged", "torch", "transformers", "tokenizers", "triton", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return what this machine is, as far as speed depends on it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python and of every package that matters; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = str(torch.__version__)  # with its build, such as +cpu
    return versions


def current_commit() -> str | None:
    """Return this checkout's commit; None without git."""
    return _git("rev-parse", "HEAD")


def is_clean() -> bool | None:
    """Return whether the checkout is its commit and nothing else, new files counted; None without git."""
    changes = _git("status", "--porcelain")
    return None if changes is None else not changes


def _git(*arguments: str) -> str | None:
    """Return what git prints about this checkout; None where there is no git or no checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def new_record(bench: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a record that says what ran where, to which a bench adds its samples."""
    return {
        "bench": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": current_commit(),
        "is_clean": is_clean(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": settings,
    }


def check_output(path: Path) -> None:
    """Find out before a long run whether its result can be written and drawn.

    Raises:
        UserError: The name does not end in .json, its folder does not exist, or matplotlib is missing.
    """
    if path.suffix != ".json":
        raise UserError(f"the result is JSON, so its name must end in .json, not {path.name!r}")
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError('the plot needs matplotlib; pip install -e ".[bench]" brings it') from None


def check_plot(path: Path) -> None:
    """Find out before a long run whether its plot can be written.

    Raises:
        UserError: The name ends in neither .svg nor .png, or its folder does not exist.
    """
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"the plot's name must end in .svg or .png, not {path.name!r}")
    check_writable(path)


def import_pyplot() -> Any:
    """Return matplotlib's pyplot, made to draw into files: the same record gives the same one."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "minipaged"
    from matplotlib import pyplot

    return pyplot


def check_writable(path: Path) -> None:
    """Find out whether a file can be written, without leaving one behind.

    Raises:
        UserError: Its folder does not exist, it is a folder itself, or the system refuses.
    """
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
    if not existed:
        path.unlink()


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write the record as JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n")


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call when a step begins: on a terminal it moves a bar, elsewhere it says a line."""
    if not sys.stderr.isatty():
        count = itertools.count(1)
        yield lambda name: progress(f"{next(count)} of {total}: {name}")
        return
    columns = (rich.SpinnerColumn(), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    text = rich.TextColumn("{task.description}")
    with rich.Progress(*columns, text, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda name: bar.update(task, advance=1, description=name)


def progress(text: str) -> None:
    """Say on standard error what is running; the report alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)
