"""The operations of the paged rung: the readable loop, the padded form, and attention over dense rows agree."""

import pytest
import torch

from minipaged.cases import ATTENTION_CASES, MAX_ERROR, AttentionCase, PagedInputs, make_paged_inputs
from minipaged.contiguous.ops import contiguous_attention
from minipaged.paged import reference
from minipaged.paged.ops import paged_attention, write_slots


def loop(inputs: PagedInputs, case: AttentionCase) -> torch.Tensor:
    return reference.paged_attention(*inputs.args, scale=case.head_dim**-0.5, window=case.window)


def repeat_kv_attention(inputs: PagedInputs, case: AttentionCase) -> torch.Tensor:
    """Attend in fp64 with K and V repeated for every query head: written apart from the code under test."""
    k_rows, v_rows = inputs.dense()
    out = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for b, length in enumerate(inputs.seq_lens.tolist()):
        first = 0 if case.window is None else max(0, length - case.window)
        for head in range(case.num_heads if length else 0):
            kv_head = head // (case.num_heads // case.num_kv_heads)
            keys, values = (rows[b, first:length, kv_head].double() for rows in (k_rows, v_rows))
            weights = (keys @ inputs.q[b, head].double() * case.head_dim**-0.5).softmax(0)
            out[b, head] = weights @ values
    return out


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_loop_equals_attention_with_repeated_kv_heads(case: AttentionCase):
    inputs = make_paged_inputs(case)
    torch.testing.assert_close(
        loop(inputs, case).double(), repeat_kv_attention(inputs, case), atol=MAX_ERROR[torch.float32], rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_padded_form_equals_the_loop(case: AttentionCase, dtype: torch.dtype):
    inputs = make_paged_inputs(case, dtype)
    out = paged_attention(*inputs.args, window=case.window, tier="torch")
    assert out.dtype == dtype
    torch.testing.assert_close(out, loop(inputs, case), atol=MAX_ERROR[dtype], rtol=0)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_contiguous_attention_equals_the_loop_bit_for_bit(case: AttentionCase):
    inputs = make_paged_inputs(case)
    dense = contiguous_attention(inputs.q, *inputs.dense(), inputs.seq_lens, window=case.window, tier="torch")
    assert torch.equal(dense, loop(inputs, case))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_unwritten_slots_never_reach_the_output(poison: float):
    case = AttentionCase("partial blocks and an empty row", (17, 0, 5, 32))
    clean = paged_attention(*make_paged_inputs(case, poison=0.0).args)
    dirty = paged_attention(*make_paged_inputs(case, poison=poison).args)
    assert torch.equal(clean, dirty)
    assert torch.equal(dirty[1], torch.zeros_like(dirty[1])), "a row with no visible key gives zeros"


def test_a_batch_of_empty_rows_gives_zeros():
    inputs = make_paged_inputs(AttentionCase("empty", (0, 0)))
    for out in (paged_attention(*inputs.args), loop(inputs, AttentionCase("empty", (0, 0)))):
        assert torch.equal(out, torch.zeros_like(inputs.q))


def test_a_sequence_does_not_depend_on_its_neighbours_in_the_loop():
    case = AttentionCase("many", tuple(range(1, 65)))
    inputs = make_paged_inputs(case)
    together = loop(inputs, case)
    for row in range(0, 64, 7):
        assert torch.equal(loop(inputs.rows(row), case)[0], together[row])
    backwards = loop(inputs.rows(*reversed(range(64))), case)
    assert torch.equal(backwards.flip(0), together)


def test_inputs_keep_their_bits():
    inputs = make_paged_inputs(AttentionCase("ragged", (3, 18)), poison=1.0)
    before = [tensor.clone() for tensor in inputs.args]
    paged_attention(*inputs.args)
    assert all(torch.equal(old, new) for old, new in zip(before, inputs.args, strict=True))


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_write_slots_writes_the_named_slots_and_no_other(block_size: int):
    num_blocks, num_tokens = 40 // block_size + 1, 9
    k = torch.randn(num_tokens, 2, 8)
    pools = [torch.full((num_blocks, block_size, 2, 8), float("nan")) for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[4] = -1
    write_slots(k, -k, *pools, slots)
    for pool, new in zip(pools, (k, -k), strict=True):
        expected = torch.full_like(pool, float("nan")).view(-1, 2, 8)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = new[token]
        assert torch.equal(pool.view(-1, 2, 8).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_slot_of_minus_one_does_not_write_the_last_slot():
    pool = torch.zeros(2, 4, 1, 1)
    write_slots(torch.ones(3, 1, 1), torch.ones(3, 1, 1), pool, pool.clone(), torch.tensor([-1, -1, -1]))
    assert not pool.any()


def test_visible_keys_per_row_with_a_window_of_four():
    case = AttentionCase("window", tuple(range(1, 8)), num_heads=1, num_kv_heads=1, head_dim=8, block_size=4, window=4)
    inputs = make_paged_inputs(case)
    # With equal scores the output is the mean of the visible values; all values 1 but one 0 shows each key apart.
    counts = []
    for row, length in enumerate(case.seq_lens):
        seen = 0
        for key in range(length):
            v_pool = torch.ones_like(inputs.v_pool)
            v_pool[inputs.block_tables[row, key // 4], key % 4] = 0
            one = inputs.rows(row)
            out = paged_attention(torch.zeros_like(one.q), one.k_pool, v_pool, one.block_tables, one.seq_lens, window=4)
            seen += bool(out[0, 0, 0] < 1)
        counts.append(seen)
    assert counts == [1, 2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("gone", [-1, 10**6])
@pytest.mark.parametrize("seq_len", [9, 12, 13, 30])
def test_blocks_before_the_window_are_not_looked_up_in_either_form(seq_len: int, gone: int):
    case = AttentionCase("given-back", (seq_len, 40, 3), block_size=4, window=5)
    inputs = make_paged_inputs(case)
    expected = loop(inputs, case)
    for row, length in enumerate(case.seq_lens):
        num_gone = max(0, length - 5) // 4
        for pool in (inputs.k_pool, inputs.v_pool):
            pool[inputs.block_tables[row, :num_gone].long()] = float("nan")
        inputs.block_tables[row, :num_gone] = gone
    assert torch.equal(loop(inputs, case), expected)
    out = paged_attention(*inputs.args, window=5, tier="torch")
    torch.testing.assert_close(out, expected, atol=MAX_ERROR[torch.float32], rtol=0)
