"""The steps of speed around an engine of the ladder: what is computed stays the rung's, when and how changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from minipaged.batching.cache import BatchingCache
from minipaged.batching.generate import Engine as BatchingEngine
from minipaged.batching.generate import Read
from minipaged.batching.plan import Chunk, Plan
from minipaged.batching.rows import Rows
from minipaged.fast.device_batch import DeviceBatch, num_outputs
from minipaged.fast.fused import SWALLOWED, FusedModel
from minipaged.fast.graphs import DecodeGraphs, Ending, Kind
from minipaged.fast.inputs import MAX_SHARED_GROUPS, DecodeInputs, batch_sizes
from minipaged.fast.overlap import Flight, OverlappingEngine
from minipaged.fast.steps import Steps
from minipaged.fast.warm_up import kernel_calls, run_side_by_side
from minipaged.foundation.sampler.ops import sample_tokens
from minipaged.foundation.sampling import sampling_settings
from minipaged.foundation.sequence import Sequence, StepOutput
from minipaged.garbage import collector_at_rest
from minipaged.paged.block_table import num_blocks_for
from minipaged.prefix.generate import Engine as PrefixEngine
from minipaged.prefix.scheduler import PrefixPlan, SharedRows
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import replacement

COMPUTED = (
    *SWALLOWED,
    *("ragged_paged_attention", "merge_states", "shared_prefix_attention", "sample_tokens"),
    *("skinny_linear", "norm_rotate_write", "silu_mul_packed"),
)
"""Operations of a forward pass. A step runs eagerly while a reader has put something in the place of one."""

MIN_SHARED_BYTES = 35 * 10**8
"""So much reading of keys and values must be saved before a recorded decode step reads a common beginning once.

Of blocks that several rows read, most reads hit the L2 cache, which gives about 7 TB/s, and the sums of what is shared
have to be written down and folded. On an H200 both ways take equally long at 3.5 GB. 64 rows of a 0.6B model that share
2,048 tokens, 0.23 GB, read 15 GB less, and a run of them gains a fifth.
"""


class FastEngine(OverlappingEngine):
    """A mixin before an engine of the rungs from ``batching`` up; see `fast_engine`."""

    steps: Steps

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make what the rung makes, and what the steps need."""
        self.fused = FusedModel(self.model) if self.steps.fused else None  # first: it needs room for a moment
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        super().make_cache(num_blocks, block_size)
        self.begin()
        self.is_late = self.steps.overlap
        if self.steps.graphs or self.steps.device_batch:
            self._make_decode(num_blocks, block_size)

    def _make_decode(self, num_blocks: int, block_size: int) -> None:
        device, num_rows = self.model.device, self.scheduler.max_num_seqs
        width = min(num_blocks_for(self.options.max_model_len, block_size), num_blocks)
        self.inputs = DecodeInputs(num_rows, width, device)
        self.batch = DeviceBatch(num_rows, width, block_size, self.model.config.vocab_size, device)
        self._logits: Float[Tensor, "B V"] | None = None
        is_recorded = self.steps.graphs and device.type == "cuda"
        self.graphs = DecodeGraphs(self._decode, batch_sizes(num_rows), self._at_rest, is_recorded)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Let no row of the batch be anybody's, and none share anything, while a step is recorded.

        Without a batch on the device the inputs are the rows of the step itself, which writes the same once more.
        """
        with self.batch.at_rest(), self.inputs.without_groups():
            yield

    def warm_up(self, show_progress: Callable[[str], None]) -> None:
        """Record the decode steps, so that no request waits for it."""
        if self.steps.graphs and not self._is_replaced(COMPUTED):
            endings: tuple[Ending, ...] = ("plain", "filtered") if self.steps.device_batch else ("logits",)
            with torch.inference_mode(), collector_at_rest():
                if self.graphs.is_recorded:
                    show_progress("compiling kernels")
                    with self._at_rest():
                        run_side_by_side(kernel_calls(self))
                self.graphs.record_all(tuple(map(Kind, endings)), show_progress)

    # -- one forward pass

    def compute(self, plan: Plan) -> Float[Tensor, "R V"]:
        """Run the plan's chunks through the model; return the logits of those that are sampled."""
        if self.steps.graphs and self.is_decode(plan):
            size = self.graphs.size_for(len(plan.chunks))
            self._choose_groups(plan)
            self.inputs.fill(self._rows(plan), size)
            self.graphs.run(self._kind("logits", plan, size), size)
            assert self._logits is not None
            return self._logits[: len(plan.chunks)]
        return self._run_eagerly(plan)

    def _run_eagerly(self, plan: Plan) -> Float[Tensor, "R V"]:
        rows = self._rows(plan)
        return self._forward(rows, self.read_rows(plan, rows))

    def _rows(self, plan: Plan) -> Rows:
        """Return the step's rows, with the tokens of the step before that the host does not know yet."""
        rows = Rows.of(plan.chunks, self.cache, self.model.device)
        if self.in_flight is None:
            return rows
        return replace(rows, token_ids=self.batch.with_chosen(rows.token_ids))

    def _forward(self, rows: Rows, read: Read) -> Float[Tensor, "R V"]:
        if self.fused is None or self._is_replaced(SWALLOWED):
            return self.model.forward(rows.token_ids, rows.positions, self.attend_rows(rows, read), rows.logits_at)
        return self.fused.forward(rows, self.kv, read)

    def is_decode(self, plan: Plan) -> bool:
        """Return whether the step is one token of each of its sequences, and no reader's function is in its way."""
        if self._is_replaced(COMPUTED):
            return False
        return all(chunk.is_sampled and chunk.stop - chunk.start == 1 for chunk in plan.chunks)

    def arrange(self, plan: Plan) -> None:
        """Sort long rows of a decode step first, or the last of them would run alone at the end of every layer.

        Rows that read together stay together, at the front.
        """
        self._choose_groups(plan)
        start = 0
        for end in (*accumulate(rows.num_rows for rows in _groups(plan)), len(plan.chunks)):
            plan.chunks[start:end] = sorted(plan.chunks[start:end], key=lambda chunk: -chunk.stop)
            start = end

    def _choose_groups(self, plan: Plan) -> None:
        """Keep those of the plan's groups that a step of a fixed size reads together: none if that saves little."""
        if isinstance(plan, PrefixPlan):
            shared = plan.shared[:MAX_SHARED_GROUPS]
            num_tokens = sum((rows.num_rows - 1) * rows.num_tokens for rows in shared)
            num_bytes = num_tokens * self.model.config.kv_bytes_per_token(self.model.dtype)
            plan.shared = shared if not self.graphs.is_recorded or num_bytes >= MIN_SHARED_BYTES else []

    def _kind(self, ending: Ending, plan: Plan, size: int) -> Kind:
        """Return what kind of step a plan's is, and tell its inputs which rows read together."""
        if not (shared := _groups(plan)):
            return Kind(ending)
        assert isinstance(self, PrefixEngine)
        self.inputs.set_groups(shared, size)
        self.num_shared_launches += self.model.config.layer_windows.count(None)
        return Kind(ending, is_shared=True)

    def _is_replaced(self, ops: tuple[str, ...]) -> bool:
        return any(replacement(op) is not None for op in ops)

    def _decode(self, kind: Kind, size: int) -> None:
        """Run one decode step of a fixed size, over tensors that stay where they are: this is what a graph holds."""
        if self.steps.device_batch:
            self.batch.expand(self.inputs, size, self.model.tier)
        rows = self.inputs.rows(size)
        logits = self._forward(rows, self._read_decode(kind, rows))
        if kind.ending == "logits":
            if self._logits is None:
                num_rows = self.graphs.sizes[-1]
                self._logits = torch.empty(num_rows, logits.shape[1], dtype=logits.dtype, device=logits.device)
            self._logits[:size] = logits
            return
        self.batch.chosen[:size] = self.choose_rows(kind.ending, logits)

    def choose_rows(self, ending: Ending, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        """Return a token of each row of the batch."""
        settings, size = self.batch.step_sampling, len(logits)
        filters = (settings.top_k[:size], settings.top_p[:size], settings.min_p[:size])
        return sample_tokens(
            logits,
            settings.temperature[:size],
            *(filters if ending == "filtered" else (None, None, None)),
            settings.seeds[:size],
            self.batch.output_indices[:size],
            tier=self.model.tier,
        )

    def _read_decode(self, kind: Kind, rows: Rows) -> Read:
        """Return the attention of a decode step of a fixed size."""
        read_alone = self.read_rows(Plan(), rows)
        if not kind.is_shared:
            return read_alone
        assert isinstance(self, PrefixEngine)
        read_shared, windows = self.read_shared(rows, self.inputs.groups), self.model.config.layer_windows
        return lambda layer, q: (read_alone if windows[layer] is not None else read_shared)(layer, q)

    # -- one step

    def _run_batch(self) -> list[StepOutput]:
        return self.run_ahead() if self.steps.device_batch else super()._run_batch()

    def launch(self, plan: Plan, sampled: list[Chunk], seqs: list[Sequence], is_decode: bool) -> Flight:
        """Start the forward pass and the choice of tokens, and the way of the tokens to the host."""
        chosen = self.batch.chosen[: len(seqs)]
        if is_decode:
            self._run_decode("filtered" if any(map(_is_filtered, seqs)) else "plain", plan, seqs)
        elif not sampled:
            self._run_eagerly(plan)
        else:
            settings = sampling_settings(seqs, self.model.config.vocab_size, self.model.device)[:-1]
            indices = self.tensor([num_outputs(chunk) for chunk in sampled])  # the settings' own may lack a token
            logits = self._run_eagerly(plan)
            chosen.copy_(sample_tokens(logits, *settings, indices, tier=self.model.tier))
        return Flight.of(plan.chunks, sampled, seqs, chosen)

    def launch_logits(self, plan: Plan, seqs: list[Sequence], is_decode: bool) -> Float[Tensor, "R V"]:
        """Start the forward pass, and return the logits of the sampled rows."""
        if not is_decode:
            return self._run_eagerly(plan)
        self._run_decode("logits", plan, seqs)
        assert self._logits is not None
        return self._logits[: len(seqs)]

    def _run_decode(self, ending: Ending, plan: Plan, seqs: list[Sequence]) -> None:
        """Run a decode step over the resident tensors."""
        assert isinstance(self.cache, BatchingCache)
        size = self.graphs.size_for(len(plan.chunks))
        self.batch.place(plan.chunks, seqs, self.cache, size)
        self.graphs.run(self._kind(ending, plan, size), size)

    def drop_batch(self) -> None:
        """Abort what a failed step may have touched, and let everybody leave the resident batch."""
        if self.steps.device_batch:
            self.batch.forget()
        super().drop_batch()

    def stats(self) -> dict[str, int]:
        """Return the rung's counters, and how many steps were replayed from a graph and how many came late."""
        counters = super().stats() | {"late_steps": self.num_late_steps}
        if self.steps.graphs or self.steps.device_batch:
            counters["fixed_size_steps"] = self.graphs.num_runs
        return counters


def _groups(plan: Plan) -> list[SharedRows]:
    return plan.shared if isinstance(plan, PrefixPlan) else []


def _is_filtered(seq: Sequence) -> bool:
    params = seq.params
    return bool(params.temperature) and bool(params.top_k or params.top_p != 1 or params.min_p)


def fast_engine(engine: type[BatchingEngine], steps: Steps) -> type[BatchingEngine]:
    """Return an engine of the same rung that takes the steps; the rung itself if there are none."""
    if not steps:
        return engine
    attributes: dict[str, Any] = {"steps": steps, "__doc__": engine.__doc__}
    return type("Engine", (FastEngine, engine), attributes)
