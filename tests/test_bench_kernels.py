"""What the cases of ``bench kernels`` build, compare and count, as far as a machine without a GPU can tell."""

import pytest
import torch

from minipaged.bench import kernel_cases_step, kernels
from minipaged.bench.gpu_timing import Workbench
from minipaged.bench.kernel_case import Case, Score
from minipaged.bench.kernel_cases_attention import (
    Heads,
    chosen_backend,
    chunk,
    decode,
    every_batch,
    paged_inputs,
    paging,
    prefill,
    shared_prefix,
)
from minipaged.bench.kernel_cases_memory import add_and_norm, cache_write, gather, swap
from minipaged.bench.kernel_cases_step import fused_write, products, sampler
from tests.bench_cases import BENCH, COPY, HEADS, SMALL, FakeTimer

ONE_SET = ("copy", "writes", "swap", "prefix", "fused", "sampler", "batch")
"""Rows that are larger than any cache in the real table, or whose inputs are in the cache when a step reads them. Of a
sweep over batch sizes, the larger batches are."""


# -- what is compared


def out_of(case: Case) -> dict[str, list]:
    """Run a case once and return what each side gave."""
    timer = FakeTimer()
    timer(case.build(BENCH))
    return timer.outputs


def test_both_operations_on_blocks_agree_in_decode():
    out = out_of(decode(3, 40, Score("TB/s"), heads=HEADS))
    for ragged, paged in zip(out["ragged"], out["paged"], strict=True):
        torch.testing.assert_close(ragged, paged)
    assert out["sdpa"][0].shape == (3, 4, 1, 8)
    assert chosen_backend(BENCH, 3, 40, heads=HEADS) in ("FLASH_ATTENTION", "MATH")  # on a CPU


def test_a_shared_prefix_and_plain_decode_over_the_same_blocks_agree():
    out = out_of(shared_prefix(3, 32, 16, 8.0, HEADS))
    torch.testing.assert_close(out["shared"][0], out["plain"][0])
    assert not torch.allclose(out["shared"][0], out["plain, own blocks"][0])


def test_our_products_and_those_of_the_peer_agree():
    for case in products(((8, 12),)):
        (ours, *_), (peer, *_) = out_of(case).values()
        torch.testing.assert_close(ours, peer)


def test_the_fused_kernel_and_the_separate_ones_return_the_same_and_write_the_same():
    sides = fused_write(3, HEADS).build(BENCH)
    pools = sides["fused"][0].args[6:8]
    written = []
    for (call,) in sides.values():
        for pool in pools:
            pool.zero_()
        written.append((call(), *(pool.clone() for pool in pools)))
    for fused, separate in zip(*written, strict=True):
        torch.testing.assert_close(fused, separate)
        assert fused.any()


@pytest.mark.parametrize(("spread", "num_allowed"), [(0.01, 3), (1000.0, 1)])
def test_both_samplers_keep_to_the_filters(spread: float, num_allowed: int, monkeypatch):
    torch.manual_seed(0)
    # Far apart, the best token alone has the share that top_p asks for; close together, top_k is the limit.
    logits = torch.randn(4, 50) * spread
    monkeypatch.setattr(kernel_cases_step, "random_logits", lambda *_: logits)
    allowed = logits.topk(num_allowed).indices
    for _ in range(5):
        for (ids,) in out_of(sampler(4, 50, top_k=3, top_p=0.9)).values():
            assert (ids.view(-1, 1) == allowed).any(-1).all()


def test_blocks_in_order_are_a_table_that_counts_up_and_shuffled_ones_are_not():
    sides = paging(4, 3, 40, None, HEADS).build(BENCH)
    tables = {side: calls[0].__self__.block_tables for side, calls in sides.items()}
    assert torch.equal(tables["in order"].flatten(), torch.arange(30).int())
    assert not torch.equal(tables["shuffled"], tables["in order"])
    assert torch.equal(tables["shuffled"].flatten().sort().values, tables["in order"].flatten())


def test_lengths_that_differ_get_tables_filled_up_with_unused_entries():
    one = paged_inputs(BENCH, [5, 40], HEADS)
    assert one.block_tables.shape == (2, 3)
    assert one.block_tables[0, 1:].tolist() == [-1, -1]
    assert sorted(one.block_tables[one.block_tables >= 0].tolist()) == [0, 1, 2, 3]


def test_what_goes_out_to_the_cpu_are_the_blocks_that_were_named():
    call = swap(3, 2, is_gather=True, heads=HEADS).build(BENCH)["ours"][0]
    call()
    pool, ids, staging = call.args
    assert torch.equal(staging, pool[:, :, ids])


def test_the_cache_write_fills_every_slot_of_shuffled_blocks_in_order_within_a_block():
    k, _, k_pool, _, slots = cache_write(40, HEADS).build(BENCH)["ours"][0].args
    assert len(set(slots.tolist())) == len(k) == 40
    assert (slots[:16] - slots[0]).tolist() == list(range(16))
    assert k_pool.shape[0] == 3


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_buffers_of_a_side_do_not_fit_into_the_cache(case: Case):
    bench = Workbench(BENCH.device, BENCH.dtype, cache_bytes=20_000)
    for calls in case.build(bench).values():
        assert len(calls) * case.num_bytes >= bench.cache_bytes or case.row in ONE_SET


def test_the_batches_of_a_sweep_take_turns_over_sequences_that_do_not_fit_into_the_cache():
    bench = Workbench(BENCH.device, BENCH.dtype, cache_bytes=3 * HEADS.kv_bytes(40))
    sides = every_batch(40, 12, HEADS).build(bench)
    assert [*sides] == [str(batch) for batch in range(1, 13)]
    for batch, calls in sides.items():
        tables = torch.cat([call.__self__.block_tables for call in calls])
        assert tables.numel() == len(tables.unique()), batch  # no sequence is read twice in a turn
        assert len(tables) == len(calls) * int(batch) >= 3
        out = [call() for call in calls]
        assert all(isinstance(one, torch.Tensor) and one.shape[0] == int(batch) for one in out)


def test_blocks_gathered_on_the_device_are_those_that_were_named():
    call = gather(3, 2, HEADS).build(BENCH)["ours"][0]
    call()
    pool, ids, staging = call.args
    assert torch.equal(staging, pool[:, :, ids])


def test_bytes_and_operations_are_those_of_a_hand_count():
    assert Heads().kv_bytes(64 * 4096) == 2 * 64 * 4096 * 8 * 128 * 2
    assert chunk(2, 5, Heads(4, 2, 8)).num_flop == 4 * (4 + 5) * 4 * 8  # the two queries see 4 and 5 keys
    assert prefill(3, heads=Heads(4, 2, 8)).num_flop == 4 * (1 + 2 + 3) * 4 * 8
    assert add_and_norm(4, 8).num_bytes == 4 * 4 * 8 * 2
    assert COPY.num_bytes == 2 * 1024


# -- the table of cases


def test_every_case_has_a_name_of_its_own_and_compares_with_a_side_that_it_has():
    names = [case.name for case in kernels.CASES]
    assert len(names) == len(set(names))
    for case in SMALL:
        sides = case.build(BENCH)
        assert all(score.against in (None, *sides) for score in case.scores), case.name


def test_the_issue_s_targets_stand_in_the_cases():
    targets = {
        (case.name, score.unit, score.target)
        for case in kernels.CASES
        for score in case.scores
        if score.target is not None
    }
    assert targets >= {
        ("decode 64 x 4,096", "% over", 2.0),
        ("decode 64 x 1,024", "TB/s", 3.8),
        ("decode 1 x 32,768", "TB/s", 3.4),
        ("decode 1 x 1,024", "us", 9.0),
        ("causal prefill 8,192", "TFLOP/s", 400.0),
        ("paging, blocks of 8", "% over", 10.0),
        *((f"paging, blocks of {block_size}", "% over", 2.0) for block_size in (16, 32, 64, 128, 256)),
        ("batch 1 to 256 x 1,024", "% rise", 15.0),
        ("cache write, 131,072 tokens", "% of copy", 90.0),
        ("block copy, 256 x 28 layers", "% of copy", 90.0),
        ("gather, 256 x 28 layers", "% of copy", 90.0),
        ("product 1 x 1,024 x 4,096", "% of read", 70.0),
        ("prefix 8,192 + 256 x 128", "x", 8.0),
    }


def test_copy_and_read_are_measured_whatever_is_chosen():
    assert [case.name for case in kernels.choose_cases(["prefix"])] == ["copy", "read", "prefix 8,192 + 256 x 128"]
    assert kernels.choose_cases(None) == list(kernels.CASES)
