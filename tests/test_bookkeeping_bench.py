"""The bookkeeping bench ends with empty caches and covers every cache."""

import json
from pathlib import Path

from minipaged.bench import bookkeeping
from minipaged.bench.__main__ import main


def test_every_cache_is_measured_and_written_down(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bookkeeping, "NUM_SEQUENCES", 3)
    monkeypatch.setattr(bookkeeping, "NUM_TOKENS", 120)
    monkeypatch.setattr(bookkeeping, "POOL_SIZES", (100, 200))
    out = tmp_path / "bookkeeping.json"
    assert main(["bookkeeping", "--repeats", "2", "--out", str(out)]) == 0
    seconds = json.loads(out.read_text())["seconds"]
    assert set(seconds) == {"contiguous", "paged", "sharing"}
    assert all(len(samples) == 2 for by_size in seconds.values() for samples in by_size.values())
    assert "sharing" in capsys.readouterr().out


def test_a_timed_run_leaves_the_cache_empty():
    for name, make in bookkeeping.CACHES.items():
        cache = make(20_000)
        assert bookkeeping.time_once(cache, name) > 0
        cache.check()
        assert cache.waste().token_states == 0
