"""An engine of this rung whose books are checked after every step, and what its cache held at most."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minipaged import LLM
from minipaged.foundation.sequence import StepOutput
from minipaged.sharing.cache import Sharing


@dataclass
class Watched:
    """An engine, and the accounts of its cache after every step in which a sequence ran."""

    llm: LLM
    accounts: list[Sharing] = field(default_factory=list)

    def __post_init__(self) -> None:
        step, cache = self.llm.engine.step, self.llm.engine.cache

        def watched_step() -> list[StepOutput]:
            outputs = step()
            cache.check()
            assert not cache.pending_copies, "copies wait while no write is due"
            self.accounts.append(cache.sharing())
            return outputs

        self.llm.engine.step = watched_step

    def generate(self, *arguments: Any) -> list[Any]:
        """Generate, and check that nothing is left behind."""
        self.accounts.clear()
        results = self.llm.generate(*arguments)
        self.assert_idle()
        return results

    def run(self) -> list[StepOutput]:
        """Step until nothing is left to do."""
        outputs = []
        while self.llm.engine.has_unfinished():
            outputs += self.llm.engine.step()
        self.assert_idle()
        return outputs

    def assert_idle(self) -> None:
        """Check that all blocks are free, each once, and that no request has left a trace."""
        engine, pool = self.llm.engine, self.llm.engine.cache.pool
        engine.cache.check()
        assert sorted(pool.free_block_ids) == list(range(pool.num_blocks))
        assert not engine.families and not engine.cache.tables and not engine.has_unfinished()

    @property
    def peak(self) -> tuple[int, int]:
        """Return the most blocks that were in use, and the most that there would have been without sharing."""
        return (
            max(each.num_blocks_used for each in self.accounts),
            max(each.num_blocks_without_sharing for each in self.accounts),
        )


def watched(folder: Path, **options: Any) -> Watched:
    """Return a checked engine on rung ``sharing``."""
    return Watched(LLM(folder, **({"rung": "sharing", "dtype": "float32", "device": "cpu"} | options)))
