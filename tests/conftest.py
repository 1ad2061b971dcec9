"""What every test shares: one thread, no network but pip's, no silent skips in CI, and the default model."""

import os
import signal

# Before torch and the hub's client are imported: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI") == "true"

if not torch.cuda.is_available():
    # Read by triton when it is imported: kernels then run in its interpreter, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker one thread, so that workers do not fight for the cores; let Ctrl-C reach tests of it."""
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is for what a script starts with "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)


def fail_if_skipped(report: Any) -> None:
    """Turn a skip into a failure in CI, where everything that a test may need has to be there.

    A skip for want of a CUDA device stays one, and so does an example in a docstring that is only for reading.
    """
    if not (IN_CI and report.skipped) or hasattr(report, "wasxfail"):
        return
    path, line, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", "", str(report.longrepr))
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(("needs a GPU", "all tests skipped by +SKIP")):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: skipped in CI, where nothing may be missing: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Apply `fail_if_skipped` to a test."""
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Apply `fail_if_skipped` to a module that skips itself as a whole."""
    report = yield
    fail_if_skipped(report)
    return report


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return the folder of the default model, fetched and converted into the ordinary cache if need be."""
    from minipaged.errors import UserError
    from minipaged.foundation.default_model import ensure_default_model

    try:
        return ensure_default_model()
    except UserError as error:
        pytest.skip(f"the default model is not to be had: {error}")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a new Python: ``run_python("-m", "minipaged.chat", ...)``."""

    def run(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=PROJECT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def poisoned_caches(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let every slot that holds no sequence's token hold NaN, in every engine, before the first step and after each.

    What a prefix cache keeps for later stays too. An engine that reads a slot nobody wrote, or one of a sequence that
    has left, then shows NaN in its logits. A test that is parametrized with this fixture (``indirect=True``) names
    another poison.
    """
    from minipaged.contiguous.generate import Engine

    poison = getattr(request, "param", float("nan"))
    init, step = Engine.__init__, Engine.step

    def poisoned_init(self: Any, *args: Any) -> None:
        init(self, *args)
        self.kv.fill_(poison)

    def poisoned_step(self: Any) -> Any:
        try:
            return step(self)
        finally:
            is_owned = torch.zeros(self.kv.shape[2] * self.kv.shape[3], dtype=torch.bool)
            is_owned[owned_slots(self)] = True
            self.kv.view(*self.kv.shape[:2], len(is_owned), -1)[:, :, ~is_owned] = poison

    monkeypatch.setattr(Engine, "__init__", poisoned_init)
    monkeypatch.setattr(Engine, "step", poisoned_step)


def owned_slots(engine: Any) -> list[int]:
    """Return the slots that hold keys and values of a running sequence's token, or of one that can be found again."""
    cache = engine.cache
    if hasattr(engine, "scheduler"):
        running = [slot for group in engine.scheduler.running for slot in computed_slots(cache, group)]
        return running + (cached_slots(cache) if hasattr(cache, "index") else [])
    if hasattr(cache, "tables"):
        return [slot for table in cache.tables.values() for slot in table.slots(0, table.num_tokens)]
    return [own.start + i for own in cache.ranges.values() for i in range(own.num_tokens)]


def computed_slots(cache: Any, group: Any) -> list[int]:
    """Return the slots of the tokens that a scheduled request has computed, those that were given back left out.

    While its first sequence computes what all share, the others have slots of it that nobody has written yet.
    """
    first = group.members[0]
    has_common = group.is_decoding or first.num_computed == first.target
    slots = []
    for member in group.members if has_common else [first]:
        released = cache.tables[member.seq_id].num_released * cache.pool.block_size if hasattr(cache, "tables") else 0
        slots += cache.slots(member.seq_id, released, max(released, member.num_computed))
    return slots


def cached_slots(cache: Any) -> list[int]:
    """Return the slots of all tokens that the index of a prefix cache knows, whoever uses them now."""
    entries = cache.index._entry_of if hasattr(cache.index, "_entry_of") else cache.index._node_of
    size = cache.pool.block_size
    return [
        slot
        for block_id, entry in entries.items()
        for slot in range(block_id * size, block_id * size + len(entry.token_ids))
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have counted with ``record_property``; their own output may come from another process."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run go on longer with its random walks: ``pytest --num-operations 1000000``."""
    parser.addoption(
        "--num-operations", type=int, default=10_000, help="operations of each random walk over bookkeeping"
    )


@pytest.fixture
def num_operations(request: pytest.FixtureRequest) -> int:
    """Return how many operations a random walk makes."""
    return request.config.getoption("--num-operations")
