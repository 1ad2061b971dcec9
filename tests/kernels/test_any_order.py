"""Programs of one launch may run in any order. On a GPU they do; in the interpreter they are turned round here."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from minipaged.batching.ops import gather_blocks, ragged_paged_attention
from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.cases_batching import RAGGED_CASES, RAGGED_PIECE_CASES, RaggedCase, make_ragged_inputs
from minipaged.cases_ops import COPY_CASES, make_prefill_inputs
from minipaged.cases_prefix import SHARED_CASES, make_shared_inputs
from minipaged.foundation.ops import causal_attention, rms_norm
from minipaged.paged.ops import paged_attention
from minipaged.prefix.ops import shared_prefix_attention
from minipaged.sharing.ops import copy_blocks
from tests.kernels.helpers import HAS_GPU, run_kernel

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(HAS_GPU, reason="needs a GPU not, but the interpreter")

UNEVEN = AttentionCase("groups-that-leave-rows-of-a-tile-free", (19, 33, 1), 9, 3, 64)


@contextmanager
def last_program_first() -> Iterator[None]:
    """Let the interpreter start with the last program."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_index = builder.set_grid_idx

    def set_mirrored(*index: int) -> None:
        set_index(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    with patch.object(builder, "set_grid_idx", set_mirrored):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_does_not_depend_on_the_order_of_programs(dtype: torch.dtype):
    prefill, decode = make_prefill_inputs(UNEVEN, dtype), make_paged_inputs(UNEVEN, dtype).args
    forwards = run_kernel(causal_attention, *prefill), run_kernel(paged_attention, *decode)
    with last_program_first():
        backwards = run_kernel(causal_attention, *prefill), run_kernel(paged_attention, *decode)
    for one, other in zip(forwards, backwards, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", [RAGGED_CASES[4], RAGGED_PIECE_CASES[3]], ids=str)
def test_a_mixed_batch_does_not_depend_on_the_order_of_programs(case: RaggedCase):
    inputs = make_ragged_inputs(case, torch.float16)
    forwards = run_kernel(ragged_paged_attention, *inputs.args)
    with last_program_first():
        assert torch.equal(run_kernel(ragged_paged_attention, *inputs.args), forwards)


def test_sharing_a_prefix_does_not_depend_on_the_order_of_programs():
    inputs = make_shared_inputs(SHARED_CASES[3], torch.float16)
    forwards = run_kernel(shared_prefix_attention, *inputs.args)
    with last_program_first():
        assert torch.equal(run_kernel(shared_prefix_attention, *inputs.args), forwards)


def test_rows_and_copies_do_not_depend_on_the_order_of_programs():
    x = torch.randn(37, 128)
    forwards = run_kernel(rms_norm, x, x[0], 1e-5, residual=x)
    pool, pairs = COPY_CASES[2].make(torch.float32)
    expected = pool.clone()
    run_kernel(copy_blocks, expected, pairs)
    gathered, backwards_gathered = torch.zeros_like(pool), torch.zeros_like(pool)
    ids = torch.arange(pool.shape[-4]).flip(0)
    run_kernel(gather_blocks, expected, ids, gathered)
    with last_program_first():
        backwards = run_kernel(rms_norm, x, x[0], 1e-5, residual=x)
        run_kernel(copy_blocks, pool, pairs)
        run_kernel(gather_blocks, pool, ids, backwards_gathered)
    assert torch.equal(pool, expected) and torch.equal(gathered, backwards_gathered)
    assert all(torch.equal(one, other) for one, other in zip(forwards, backwards, strict=True))
