"""Kernels that only move bits: writes into slots and copies of blocks. Equal means equal to the bit."""

import pytest
import torch

from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.cases_ops import COPY_CASES, WRITE_CASES, CopyCase, WriteCase
from minipaged.paged.ops import paged_attention, write_slots
from minipaged.sharing.ops import copy_blocks
from tests.kernels.helpers import DEVICE, DTYPES, NEEDS_GPU, ON_DEVICE, run_kernel

pytest.importorskip("triton")
pytestmark = ON_DEVICE


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits, in which NaN equals NaN."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_write_slots_writes_the_named_slots_and_no_other(case: WriteCase, dtype: torch.dtype):
    k, v, k_pool, v_pool, slots = case.make(dtype, DEVICE)
    expected = [pool.clone().view(-1, *k.shape[1:]) for pool in (k_pool, v_pool)]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot], expected[1][slot] = k[token], v[token]
    run_kernel(write_slots, k, v, k_pool, v_pool, slots)
    for pool, slots_of_pool in zip((k_pool, v_pool), expected, strict=True):
        assert torch.equal(bits(pool).view(-1), bits(slots_of_pool).view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COPY_CASES, ids=str)
def test_copy_blocks_copies_each_pair_in_every_plane_and_nothing_else(case: CopyCase, dtype: torch.dtype):
    pool, pairs = case.make(dtype, DEVICE)
    expected = pool.clone().view(-1, *pool.shape[-4:])
    for source, target in case.pairs:
        expected[:, target] = expected[:, source]
    run_kernel(copy_blocks, pool, pairs)
    assert torch.equal(pool.view(expected.shape), expected)


FAR_BLOCKS = """
import torch
from minipaged.paged.kernels import paged_attention, write_slots
from minipaged.sharing.kernels import copy_blocks

# Pages of memory that nothing touches are never made real, so this pool of 4 GB costs nothing.
pool = torch.empty(131_080, 16, 8, 128, dtype=torch.float16)
assert pool.numel() > 2**31
k, q = torch.randn(20, 8, 128).half(), torch.randn(1, 8, 128).half()
outs = []
for blocks in ([3, 5], [131_074, 131_079]):
    slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(20)])
    write_slots(k, k, pool, pool, slots)
    assert torch.equal(pool[blocks].flatten(0, 1)[:20], k)
    tables, lens = torch.tensor([blocks], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    outs.append(paged_attention(q, pool, pool, tables, lens, scale=0.1, window=None))
assert torch.equal(*outs)
copy_blocks(pool, torch.tensor([[131_074, 131_075]]))
assert torch.equal(pool[131_075], k[:16])
print("far and near agree")
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a GPU not: the test below does this in real memory")
def test_block_addresses_past_2_to_the_31_do_not_wrap_in_the_interpreter(run_python):
    done = run_python("-c", FAR_BLOCKS, TRITON_INTERPRET="1")
    assert done.returncode == 0 and done.stdout == "far and near agree\n", done.stderr


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_GPU, id="gpu")])
def test_a_sequence_gives_the_same_bits_in_blocks_past_2_to_the_31_elements(mark: None):
    case = AttentionCase("near", (40,), num_heads=32, num_kv_heads=8, head_dim=128)
    inputs = make_paged_inputs(case, torch.float16, DEVICE)
    k, v = (rows[0, :40] for rows in inputs.dense())
    pools = torch.full((2, 131_080, 16, 8, 128), float("nan"), dtype=torch.float16, device=DEVICE)
    outs = []
    for blocks in ([3, 4, 5], [131_074, 131_075, 131_079]):
        slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(40)], device=DEVICE)
        run_kernel(write_slots, k, v, *pools, slots)
        for pool, new in zip(pools, (k, v), strict=True):
            assert torch.equal(pool[blocks].flatten(0, 1)[:40], new)
        tables = torch.tensor([blocks], dtype=torch.int32, device=DEVICE)
        outs.append(run_kernel(paged_attention, inputs.q, *pools, tables, inputs.seq_lens))
    assert torch.equal(*outs)
