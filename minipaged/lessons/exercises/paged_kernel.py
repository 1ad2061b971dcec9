"""The checks of lesson 02b: the online softmax, the walk over the blocks, and two Triton kernels."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from minipaged.cases import ATTENTION_CASES, MAX_ERROR, AttentionCase, PagedInputs, make_paged_inputs
from minipaged.lessons.kit import NotYet, WrongAnswer, exercise, expect
from minipaged.lessons.reading import is_open
from minipaged.paged import reference
from minipaged.shapes import Float, Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TILE = 16
"""Rows of a tile of queries and of a tile of keys: matrix units take no fewer."""

State = tuple[Tensor, Tensor, Tensor]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a reader's kernel.

    Raises:
        NotYet: The kernel is open. It is not launched then, since no compiler could translate it.
        Exception: What went wrong inside the kernel, without the interpreter's wrapping.
    """
    from triton.runtime.errors import InterpreterError

    if is_open(inspect.getsource(kernel.fn)):
        raise NotYet
    try:
        kernel[grid](*args, **constants, enable_fp_fusion=False)
    except InterpreterError as error:
        cause: BaseException = error
        while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None


SCORES = (
    torch.tensor([[0.0, 0.0, torch.tensor(3.0).log(), 0.0]]),
    torch.tensor([[0.0, 1.0, -2.0, 3.0], [90.0, 5.0, 1.0, -90.0]]),
)


@exercise
def check_add_block(add_block: Callable[[State, Tensor, Tensor], State]) -> None:
    """Compare the state after every block with the sums over all keys so far, taken in one go."""
    for scores in SCORES:
        num_rows, num_keys = scores.shape
        values = torch.arange(1.0, 1 + 2 * num_keys).view(-1, 2)
        state = (torch.full((num_rows,), -torch.inf), torch.zeros(num_rows), torch.zeros(num_rows, 2))
        for end in range(2, num_keys + 1, 2):
            state = add_block(state, scores[:, end - 2 : end], values[end - 2 : end])
            top = scores[:, :end].max(-1).values
            weights = (scores[:, :end] - top[:, None]).exp()
            for name, actual, expected in zip(
                ("top", "total", "acc"), state, (top, weights.sum(-1), weights @ values[:end]), strict=True
            ):
                given = (
                    f"scores {scores[:, :end].tolist()} in blocks of 2, values {values[:end].tolist()}: "
                    f"{name} after {end} keys"
                )
                expect(
                    actual,
                    expected,
                    given,
                    "Weights count from the new top. Both sums so far were counted from the old one: they must fade "
                    "by exp(old top - new top) before the new block is added.",
                )


WALK_CASES = ("one-token", "block-edge", "ragged", "block-of-5", "no-grouping", "heads-9-3-64")


def cases(*names: str) -> list[AttentionCase]:
    """Return the project's own test cases of these names."""
    return [case for case in ATTENTION_CASES if case.name in names]


@exercise
def check_walk_blocks(walk_blocks: Callable[..., Float[Tensor, "B H D"]]) -> None:
    """Compare with the gather loop on the project's test cases; slots that no sequence owns hold NaN.

    The model runs in bfloat16, and there is one case of it too, or an answer would be right here and fail in the chat.
    """
    (ragged,) = cases("ragged")
    runs = [(case, torch.float32, case.head_dim**-0.5) for case in cases(*WALK_CASES)]
    for case, dtype, scale in [*runs, (ragged, torch.float32, 0.3), (ragged, torch.bfloat16, 0.3)]:
        inputs = make_paged_inputs(case, dtype)
        _compare(walk_blocks(*inputs.args, scale=scale, window=None), inputs, case, scale)


def _compare(out: Tensor, inputs: PagedInputs, case: AttentionCase, scale: float) -> None:
    """Refuse a wrong result with the first sequence and head that are wrong."""
    expected = reference.paged_attention(*inputs.args, scale=scale, window=None)
    given = (
        f"sequences of {list(case.seq_lens)} tokens, blocks of {case.block_size}, {case.num_heads} query heads on "
        f"{case.num_kv_heads} KV heads, scale = {scale:.4g}, {str(inputs.q.dtype).removeprefix('torch.')}"
    )
    if not isinstance(out, Tensor) or out.shape != expected.shape or out.dtype != expected.dtype:
        raise WrongAnswer(f"{given}\nReturn a tensor of the shape {list(expected.shape)} and this dtype, like q.")
    if out.isnan().any():
        seq = int(out.isnan().flatten(1).any(1).nonzero()[0])
        raise WrongAnswer(
            f"{given}\nThe result of sequence {seq} holds NaN: slots behind its {case.seq_lens[seq]} tokens were read. "
            "The last block may be part empty."
        )
    is_wrong = (out - expected).abs().amax(-1) > 10 * MAX_ERROR[out.dtype]  # [B, H]
    if is_wrong.any():
        seq, head = is_wrong.nonzero()[0].tolist()
        group = case.num_heads // case.num_kv_heads
        raise WrongAnswer(
            f"{given}\nSequence {seq} ({case.seq_lens[seq]} tokens) is wrong in query head {head}, which reads KV head "
            f"{head} // {group} = {head // group}.\n"
            f"  expected {expected[seq, head, :3].tolist()} and so on\n  got      {out[seq, head, :3].tolist()}"
        )


GATHER_CASES = ((4, [7, 2, 5], 10), (4, [7, 2, 5, 0, 6], 20), (16, [3, 1], 17), (5, [4, 6, 1, 2], 16))
"""Block size, block table, tokens."""


@exercise
def check_gather_kernel(gather_kernel: Any) -> None:
    """Compare with gathering by PyTorch. The table goes on with blocks of NaN, and the row with a guard of sevens."""
    for block_size, block_ids, seq_len in GATHER_CASES:
        pool = torch.full((9, block_size, 2, TILE), float("nan"), device=DEVICE)
        rows = torch.arange(1.0, 1 + seq_len * 2 * TILE, device=DEVICE).view(seq_len, 2, TILE)
        slots = [block_ids[i // block_size] * block_size + i % block_size for i in range(seq_len)]
        pool.view(-1, 2, TILE)[slots] = rows
        num_tiles = -(-seq_len // TILE)
        table = torch.tensor(block_ids + [8] * num_tiles * TILE, dtype=torch.int32, device=DEVICE)
        out = torch.full((num_tiles * TILE, 2, TILE), 7.0, device=DEVICE)
        launch(
            gather_kernel, (2, num_tiles), pool, table, out, seq_len,
            SLOTS=block_size, NUM_KV_HEADS=2, HEAD_DIM=TILE, TILE_KEYS=TILE,
        )  # fmt: skip
        given = f"table {block_ids}, blocks of {block_size}, {seq_len} tokens, 2 KV heads"
        for token in range(seq_len):
            if not torch.equal(out[token], rows[token]):
                raise WrongAnswer(
                    f"{given}\nToken {token} lies in slot {slots[token]}; its row begins with "
                    f"{rows[token, :, 0].tolist()} (head 0, head 1), and the kernel wrote {out[token, :, 0].tolist()}."
                )
        if not bool((out[seq_len:] == 7).all()):
            raise WrongAnswer(f"{given}\nThe kernel wrote behind token {seq_len - 1}: mask the store, too.")


KERNEL_CASES = ("one-token", "block-edge", "block-of-5", "heads-14-2-64")


@exercise
def check_paged_kernel(paged_kernel: Any) -> None:
    """Compare with the gather loop. The tables go on with blocks of NaN, so that no slip reads outside the pool."""
    runs = [(case, case.head_dim**-0.5) for case in cases(*KERNEL_CASES)]
    for case, scale in [*runs, *((case, 0.3) for case in cases("block-edge"))]:
        inputs = make_paged_inputs(case, device=DEVICE)
        _compare(run_paged_kernel(paged_kernel, inputs, scale), inputs, case, scale)


def run_paged_kernel(paged_kernel: Any, inputs: PagedInputs, scale: float) -> Tensor:
    """Launch the lesson's attention kernel with a program per KV head and sequence."""
    q, k_pool, v_pool, block_tables, seq_lens = inputs.args
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    spare = min(set(range(len(k_pool))) - set(block_tables.flatten().tolist()))  # no sequence's block: all NaN
    more = block_tables.new_full((num_seqs, TILE), spare)
    tables = torch.cat([block_tables.masked_fill(block_tables < 0, spare), more], dim=1)
    out = torch.full_like(q, float("nan"))
    launch(
        paged_kernel, (num_kv_heads, num_seqs), q, k_pool, v_pool, out, tables, seq_lens, tables.shape[1],
        scale, SLOTS=block_size, NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim, TILE_GROUP=TILE, TILE_KEYS=TILE,
    )  # fmt: skip
    return out
