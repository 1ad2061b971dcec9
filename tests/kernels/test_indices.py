"""What kernels read as block ids, lengths and slots: one integer type each, and nothing else."""

import pytest
import torch

from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.paged.ops import paged_attention, write_slots
from tests.kernels.helpers import DEVICE, ON_DEVICE

pytest.importorskip("triton")
pytestmark = ON_DEVICE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
def test_a_block_table_that_is_not_int32_is_refused(dtype: torch.dtype):
    """In fp16, block 2,049 would become block 2,048: another sequence's, and no error."""
    assert torch.tensor([2049]).to(torch.float16).int().item() == 2048
    q, k_pool, v_pool, tables, seq_lens = make_paged_inputs(AttentionCase("two", (3, 4)), device=DEVICE).args
    with pytest.raises(AssertionError, match=r"indices must be torch\.int32"):
        paged_attention(q, k_pool, v_pool, tables.to(dtype), seq_lens, tier="triton")
    with pytest.raises(AssertionError, match=r"indices must be torch\.int32"):
        paged_attention(q, k_pool, v_pool, tables, seq_lens.to(dtype), tier="triton")


def test_slots_that_are_not_int64_are_refused():
    k, pool = torch.ones(1, 1, 16, device=DEVICE), torch.zeros(2, 4, 1, 16, device=DEVICE)
    slots = torch.tensor([3], device=DEVICE, dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"indices must be torch\.int64"):
        write_slots(k, k, pool, pool.clone(), slots, tier="triton")
