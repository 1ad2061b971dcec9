"""How lesson 02b launches a reader's kernel: open ones are not launched, and a reader's errors come out as they are."""

import pytest
import torch

from minipaged.lessons import NotYet, WrongAnswer
from minipaged.lessons.exercises.paged_kernel import check_gather_kernel, launch
from tests.kernels.helpers import DEVICE, HAS_GPU

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def open_kernel(out_ptr):
    if tl.program_id(0) > 0:
        raise NotYet


@triton.jit
def add_a_word(out_ptr):
    tl.store(out_ptr, len(tl.program_id(0)))


@triton.jit
def call_one_that_adds_a_word(out_ptr):
    add_a_word(out_ptr)


def test_an_open_kernel_is_not_launched():
    with pytest.raises(NotYet):
        launch(open_kernel, (1,), torch.zeros(1))


@triton.jit
def solved_kernel(out_ptr):
    # raise NotYet
    tl.store(out_ptr, 5.0)


def test_a_kernel_whose_open_part_became_a_comment_is_launched():
    out = torch.zeros(1, device=DEVICE)
    launch(solved_kernel, (1,), out)
    assert out.item() == 5


@pytest.mark.skipif(HAS_GPU, reason="a compiler refuses such kernels in its own words")
@pytest.mark.parametrize("kernel", [add_a_word, call_one_that_adds_a_word])
def test_a_type_error_in_a_kernel_comes_out_of_the_interpreter_as_it_is(kernel):
    with pytest.raises(TypeError, match="len"):
        launch(kernel, (1,), torch.zeros(1))


@triton.jit
def write_nothing(
    pool_ptr, table_ptr, out_ptr, seq_len,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    pass


def test_a_kernel_that_writes_nothing_is_told_which_row_is_missing():
    with pytest.raises(WrongAnswer, match="Token 0 lies in slot 28"):
        check_gather_kernel(write_nothing)
