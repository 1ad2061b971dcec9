"""Kernels that only move bits: writes into slots, copies and swaps of blocks. Equal means equal to the bit."""

import pytest
import torch

from minipaged.batching.ops import gather_blocks, ragged_paged_attention, scatter_blocks
from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.cases_ops import COPY_CASES, WRITE_CASES, CopyCase, WriteCase
from minipaged.errors import UserError
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


def make_staging(pool: torch.Tensor, ids: torch.Tensor, is_pinned: bool = False) -> torch.Tensor:
    """Return room for the blocks, full of NaN."""
    shape = (*pool.shape[:-4], len(ids), *pool.shape[-3:])
    device = torch.device("cpu") if is_pinned else pool.device
    staging = torch.full(shape, float("nan"), dtype=pool.dtype, device=device)
    return staging.pin_memory() if is_pinned else staging


@pytest.mark.parametrize("is_pinned", [False, pytest.param(True, marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COPY_CASES, ids=str)
def test_blocks_go_to_staging_in_order_and_come_back_to_their_places(
    case: CopyCase, dtype: torch.dtype, is_pinned: bool
):
    pool, _ = case.make(dtype, DEVICE)
    pool[..., -1, 0, 0, 0] = float("nan")
    ids = torch.tensor(case.block_ids, dtype=torch.int64, device=DEVICE)
    before, staging = pool.clone(), make_staging(pool, ids, is_pinned)
    run_kernel(gather_blocks, pool, ids, staging)
    if is_pinned:
        torch.cuda.synchronize()
    assert torch.equal(bits(pool), bits(before))
    assert torch.equal(bits(staging.to(DEVICE)), bits(before[..., case.block_ids, :, :, :]))
    fresh = torch.full_like(pool, 7.0)
    expected = fresh.clone()
    for block_id in case.block_ids:
        expected[..., block_id, :, :, :] = before[..., block_id, :, :, :]
    run_kernel(scatter_blocks, fresh, ids, staging)
    assert torch.equal(bits(fresh), bits(expected))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_GPU, id="gpu")])
def test_staging_that_is_not_pinned_is_refused(mark: None):
    pool, _ = COPY_CASES[1].make(torch.float16, DEVICE)
    ids = torch.tensor([1, 2], device=DEVICE)
    with pytest.raises(UserError, match="must be pinned"):
        gather_blocks(pool, ids, make_staging(pool, ids).cpu(), tier="triton")
    staging = make_staging(pool, ids).cpu()
    gather_blocks(pool, ids, staging, tier="torch")
    assert torch.equal(staging.to(DEVICE), pool[:, :, [1, 2]]), "the torch tier copies through PyTorch"


FAR_BLOCKS = """
import torch
from minipaged.batching.kernels import gather_blocks, ragged_paged_attention, scatter_blocks
from minipaged.paged.kernels import paged_attention, write_slots
from minipaged.sharing.kernels import copy_blocks

# Pages of memory that nothing touches are never made real, so this pool of 4 GB costs nothing.
pool = torch.empty(131_080, 16, 8, 128, dtype=torch.float16)
assert pool.numel() > 2**31
k, q = torch.randn(70, 8, 128).half(), torch.randn(2, 8, 128).half()
starts = [torch.tensor([0, num_queries], dtype=torch.int32) for num_queries in (1, 2)]
lens = torch.tensor([70], dtype=torch.int32)
outs = []
for blocks in ([3, 5, 6, 4, 9], [131_074, 131_079, 131_072, 131_076, 131_078]):
    slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(70)])
    write_slots(k, k, pool, pool, slots)
    assert torch.equal(pool[blocks].flatten(0, 1)[:70], k)
    tables = torch.tensor([blocks], dtype=torch.int32)
    rows = [paged_attention(q[:1], pool, pool, tables, lens, scale=0.1, window=None)]
    rows += [
        ragged_paged_attention(q[:i], pool, pool, tables, starts[i - 1], lens, scale=0.1, window=None) for i in (1, 2)
    ]
    outs.append(torch.cat(rows))
assert torch.equal(*outs)
ids, staging = torch.tensor([131_079, 131_074]), torch.empty(2, 16, 8, 128, dtype=torch.float16)
gather_blocks(pool, ids, staging)
assert torch.equal(staging[1], k[:16])
scatter_blocks(pool, ids - 2, staging)
assert torch.equal(pool[131_072], k[:16]) and torch.equal(pool[131_077], k[16:32])
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
    case = AttentionCase("near", (80,), num_heads=32, num_kv_heads=8, head_dim=128)
    inputs = make_paged_inputs(case, torch.float16, DEVICE)
    k, v = (rows[0, :80] for rows in inputs.dense())
    pools = torch.full((2, 131_080, 16, 8, 128), float("nan"), dtype=torch.float16, device=DEVICE)
    outs = []
    for blocks in ([3, 4, 5, 7, 6], [131_074, 131_075, 131_079, 131_072, 131_077]):
        slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(80)], device=DEVICE)
        run_kernel(write_slots, k, v, *pools, slots)
        for pool, new in zip(pools, (k, v), strict=True):
            assert torch.equal(pool[blocks].flatten(0, 1)[:80], new)
        tables = torch.tensor([blocks], dtype=torch.int32, device=DEVICE)
        decoded = run_kernel(paged_attention, inputs.q, *pools, tables, inputs.seq_lens)
        queries = inputs.q.repeat(3, 1, 1)
        starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
        chunk = run_kernel(ragged_paged_attention, queries, *pools, tables, starts, inputs.seq_lens)
        ids = torch.tensor(blocks, device=DEVICE)
        staging = make_staging(pools[0], ids)
        run_kernel(gather_blocks, pools[0], ids, staging)
        assert torch.equal(staging.flatten(0, 1)[:80], k)
        run_kernel(scatter_blocks, pools[0], ids - 1, staging)
        assert torch.equal(pools[0][blocks[0] - 1], k[:16])
        outs.append(torch.cat((decoded, chunk)))
    assert torch.equal(*outs)
