"""One row of the ladder bench: an engine, a queue of requests, and what the cache holds while they wait."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minipaged import LLM, SamplingParams
from minipaged.bench.workload import Request
from minipaged.contiguous.arena import RESERVATIONS
from minipaged.errors import UserError

KINDS = ("token_states", "reserved", "internal", "external", "free")
"""What a slot can be: the kinds of `Waste`, and free. A promise of the rungs ``paged`` and ``sharing`` takes no slots,
so what it keeps from others counts as free here, and shows in the sequences held."""


@dataclass(frozen=True)
class Row:
    """A rung over a cache; ``options`` of `LLM` choose the cache. A static row cannot let anybody join its batch."""

    rung: str
    cache: str
    options: dict[str, Any] = field(default_factory=dict)
    is_static: bool = True

    @property
    def names(self) -> tuple[str, str]:
        """Return the words that choose this row: its rung, and its own name."""
        return self.rung, f"{self.rung}:{self.cache.split()[-1]}"

    @property
    def knows_lengths(self) -> bool:
        """Return whether the policy is told the length of an answer before it begins."""
        return self.options.get("reservation", "max") != "max"


ROWS = (
    Row("foundation", "none"),
    *(Row("contiguous", f"contiguous {policy}", {"reservation": policy}) for policy in RESERVATIONS),
    Row("paged", "paged"),
    Row("sharing", "paged"),
    *(
        Row("batching", f"contiguous {policy}", {"cache": "contiguous", "reservation": policy}, is_static=False)
        for policy in RESERVATIONS
    ),
    Row("batching", "paged", {"cache": "paged"}, is_static=False),
    Row("prefix", "paged hash", {"prefix_cache": "hash"}, is_static=False),
    Row("prefix", "paged radix", {"prefix_cache": "radix"}, is_static=False),
)


class Census:
    """Sums of sequences and slots, counted after each step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_held = 0
        self.peak = 0
        self.slots: dict[str, int] = {kind: 0 for kind in KINDS if kind != "free"}

    def count(self, engine: Any, output_lengths: dict[int, int]) -> int:
        """Look at an engine between two steps and return how many sequences it holds.

        Args:
            engine: Of any rung.
            output_lengths: Of each request, to tell slots that will be used from those that never will.
        """
        sequences = [*engine.admitted, *engine.running]
        num_held = len(sequences)
        if hasattr(engine, "cache"):  # all but rung 0
            num_held = len(engine.cache.seq_ids)
            waste = engine.cache.waste({seq.seq_id: output_lengths[seq.request_id] for seq in sequences})
            for kind, num_slots in asdict(waste).items():
                self.slots[kind] += num_slots
        self.num_steps += 1
        self.num_held += num_held
        self.peak = max(self.peak, num_held)
        return num_held

    def summary(self, num_slots: int | None) -> dict[str, Any]:
        """Return means over the steps; ``num_slots`` is the size of the cache, None where there is none."""
        held = {"held_mean": self.num_held / self.num_steps, "held_peak": self.peak}
        if num_slots is None:
            return held
        used = sum(self.slots.values())
        wasted = used - self.slots["token_states"]
        shares = {kind: count / (num_slots * self.num_steps) for kind, count in self.slots.items()}
        return held | {
            "slots": {**shares, "free": 1 - sum(shares.values())},
            "wasted_slots_per_sequence": wasted / self.num_held,
            "wasted_share_of_used_slots": wasted / used,
        }


def run_row(llm: LLM, row: Row, requests: Sequence[Request], max_steps: int | None = None) -> dict[str, Any]:
    """Queue all requests, run while some of them wait, and return what the record says of the row.

    A static row runs one batch to its end: the next is like it. The others run until nobody waits.

    Only a policy that may know the length of an answer gets it, as ``max_tokens``. To the others an answer may go
    on to the limit, and its client ends it by `abort` when it has what it wanted.

    Args:
        max_steps: Where a row that is not static ends at the latest.

    Raises:
        UserError: The cache ended a request too early, or the requests are too few to fill it.
    """
    llm.generate([requests[0].prompt[:1]], _params(2), progress=False)  # warms up
    engine, lengths = llm.engine, {}
    for request in requests:
        max_tokens = request.output_length if row.knows_lengths else None
        lengths[engine.add_request(request.prompt, _params(max_tokens))] = request.output_length
    missing, census, seconds = dict(lengths), Census(), 0.0  # missing: tokens that are still to come, by request
    while True:
        start = time.perf_counter()
        for output in engine.step():
            missing[output.request_id] -= len(output.token_ids)
            if missing[output.request_id] == 0:
                del missing[output.request_id]
                engine.abort(output.request_id)
            elif output.is_last:
                raise UserError(f"{row.rung} over {row.cache} ended a request before its length; give more slots")
        seconds += time.perf_counter() - start
        num_held = census.count(engine, lengths)
        is_over = num_held == 0 if row.is_static else num_held == len(missing) or census.num_steps == max_steps
        if is_over:
            break
    if not row.is_static and num_held == len(requests):
        raise UserError(f"{len(requests)} requests are too few for {row.rung} over {row.cache}: nobody had to wait")
    num_tokens = sum(lengths.values()) - sum(missing.values())
    return {
        "rung": row.rung,
        "cache": row.cache,
        "num_requests": len(requests),
        "requests_ended": len(requests) - len(missing),
        "generated_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "steps": census.num_steps,
        "preemptions": llm.stats()["preemptions"],
        **census.summary(llm.num_blocks and llm.num_blocks * llm.block_size),
    }


def _params(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, repetition_penalty=1.0, ignore_eos=True, max_tokens=max_tokens)
