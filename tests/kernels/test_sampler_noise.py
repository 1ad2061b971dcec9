"""The noise that the sampler's kernels draw: the words of Philox bit by bit, and what becomes of them."""

# Options of a launch, such as num_warps, are no parameters of the kernel; constants go in as plain numbers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from minipaged.foundation.philox import _noise_words, gumbel_noise, seed_tensor
from minipaged.foundation.sampler.rows import kernels as rows
from tests.kernels.helpers import DEVICE, ON_DEVICE

pytestmark = ON_DEVICE


@triton.jit
def words_kernel(seeds_ptr, output_indices_ptr, out_ptr):
    group = tl.arange(0, 4) * 0x40000000 + tl.arange(0, 4)
    words = rows.random_words(seeds_ptr, output_indices_ptr, tl.program_id(0), group)
    for i in tl.static_range(4):
        tl.store(out_ptr + (tl.program_id(0) * 4 + i) * 4 + tl.arange(0, 4), words[i].to(tl.int64))


@triton.jit
def noise_kernel(seeds_ptr, output_indices_ptr, out_ptr, at_ptr, TILE: tl.constexpr):
    row = tl.program_id(0)
    token = TILE + tl.arange(0, TILE)
    tl.store(out_ptr + row * TILE + token - TILE, rows.tile_noise(seeds_ptr, output_indices_ptr, row, TILE))
    tl.store(at_ptr + row * TILE + token - TILE, rows.noise_at(seeds_ptr, output_indices_ptr, row, token))


SEEDS = [0, 1, 42, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def test_the_random_words_are_those_of_the_module_philox():
    seeds = seed_tensor(SEEDS, DEVICE)
    indices = torch.tensor([0, 7, 2**31, 2**32 - 1, 1, 2, 3], device=DEVICE)
    words = torch.empty(7, 4, 4, dtype=torch.int64, device=DEVICE)
    words_kernel[(7,)](seeds, indices, words, enable_fp_fusion=False)
    group = torch.arange(4, device=DEVICE)[None, :] * 0x40000001
    assert torch.equal(words, torch.stack(_noise_words(seeds, indices, group), dim=1))
    assert [f"{word:08x}" for word in words[0, :, 0].tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_the_noise_is_that_of_the_module_philox_up_to_rounding():
    seeds, tile = seed_tensor(SEEDS, DEVICE), rows.TILE.value
    indices = torch.arange(7, device=DEVICE)
    out, at = torch.empty(2, 7, tile, device=DEVICE)
    noise_kernel[(7,)](seeds, indices, out, at, TILE=tile, enable_fp_fusion=False)
    expected = gumbel_noise(seeds, indices, 2 * tile, DEVICE)[:, tile:]
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(at, out)


def test_noise_lifts_no_token_over_one_that_is_20_better_and_weights_end_at_the_last_bin():
    noise = [-math.log(-math.log(uniform)) for uniform in (2.0**-24, 1 - 2.0**-24)]
    assert noise == pytest.approx([-2.8115, 16.6355], abs=1e-4)
    reach = rows.REACH.value
    assert reach > 20 and math.exp(-reach) * rows.WEIGHT_SCALE.value < 1
