"""Rung 4's operations: attention of mixed prefill and decode rows, merged parts of it, and blocks moved for swap."""

from minipaged.batching import reference
from minipaged.errors import UserError
from minipaged.shapes import Float, Int, Shaped, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part(
    "ragged_paged_attention",
    "(q, k_pool, v_pool, block_tables, query_starts, seq_lens, *, scale, window) -> [T, H, D]",
)
declare_part("merge_states", "(out_a, lse_a, out_b, lse_b) -> (out [T, H, D], lse [T, H])")
declare_part("gather_blocks", "(pool, ids, staging) -> None; copies blocks of the pool into staging")
declare_part("scatter_blocks", "(pool, ids, staging) -> None; copies staging into blocks of the pool, in place")


def ragged_paged_attention(
    q: Float[Tensor, "T H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    query_starts: Int[Tensor, " B+1"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    max_query_len: int | None = None,
    tier: Tier = None,
) -> Float[Tensor, "T H D"]:
    """Let the newest tokens of each sequence attend, a whole prompt, a chunk of it or one token, in one call.

    Args:
        q: Queries of the new tokens, sequence after sequence.
        k_pool: Keys of all blocks of one layer.
        v_pool: Values of all blocks of one layer.
        block_tables: The block ids of each sequence in order, int32, filled up with -1.
        query_starts: Where the queries of each sequence begin, and where the last ones end, int32. A sequence may
            have none.
        seq_lens: Tokens in the cache, int32, the new ones included: writes come before attention. Query i of n
            stands at position ``seq_len - n + i``.
        scale: Factor on the scores; None is ``D ** -0.5``.
        window: How many newest tokens a token sees, itself included; None shows all.
        max_query_len: The most queries of any sequence, if the caller knows; 1 saves the launch for prompts.

    Returns:
        The attention of every query token. Rows of ``q`` behind the last sequence are padding, and so are theirs.

    Invariants:
        Only slots of a sequence's own tokens count; all others may hold anything, NaN too. Blocks that lie wholly
        before the window of a sequence's first query are not looked up: they may have been given back, and stand
        as -1.
        In the Triton tier a sequence's bits depend on nothing else in the batch. A sequence with one query gets the
        bits of ``paged_attention``; in chunks of two or more tokens, a prompt gets the same bits however it is cut.

    Cost:
        Reads the visible keys and values of a sequence once per tile of its queries: once in decode.

    Source:
        Chunks beside decode rows as in Sarathi-Serve (arXiv 2403.02310).

    Example:
        S = 4; scores are equal, so a result is the mean of the visible values. Five and six tokens are visible to
        the first sequence's two queries, in blocks 7 and 2, and one to the other's, in block 5.

        >>> import torch
        >>> v_pool = torch.full((8, 4, 1, 1), float("nan"))
        >>> v_pool[7, :, 0, 0], v_pool[2, :2, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
        >>> v_pool[5, 0] = 9.0
        >>> q, k_pool = torch.zeros(3, 1, 1), torch.zeros(8, 4, 1, 1)
        >>> tables, starts, lens = (torch.tensor(x).int() for x in ([[7, 2], [5, -1]], [0, 2, 3], [6, 1]))
        >>> out = ragged_paged_attention(q, k_pool, v_pool, tables, starts, lens)
        >>> [round(x, 4) for x in out.flatten().tolist()]
        [3.0, 3.5, 9.0]
    """
    num_heads, head_dim = q.shape[1:]
    assert k_pool.shape == v_pool.shape and k_pool.shape[3] == head_dim and num_heads % k_pool.shape[2] == 0
    assert query_starts.shape == (len(seq_lens) + 1,) and block_tables.shape[0] == len(seq_lens)
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1, not {window}")
    return run_op(
        "ragged_paged_attention",
        tier,
        q.device,
        reference.ragged_paged_attention_sdpa,
        "minipaged.batching.kernels:ragged_paged_attention",
        q,
        k_pool,
        v_pool,
        block_tables,
        query_starts,
        seq_lens,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        **({} if max_query_len is None else {"max_query_len": max_query_len}),
    )


def merge_states(
    out_a: Float[Tensor, "T H D"],
    lse_a: Float[Tensor, "T H"],
    out_b: Float[Tensor, "T H D"],
    lse_b: Float[Tensor, "T H"],
    *,
    tier: Tier = None,
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T H"]]:
    """Merge attention over two disjoint sets of keys into attention over both.

    Args:
        out_a: Attention over the first set.
        lse_a: Natural logarithm of the sum of ``exp(score)`` over the first set, fp32; -inf for a set without keys,
            whose ``out_a`` may then be anything, NaN too.
        out_b: Attention over the second set.
        lse_b: Like ``lse_a``.

    Returns:
        Attention over both sets in the dtype of ``out_a``, and its logarithm of the sum. No keys at all give zeros
        and -inf.

    Source:
        FlashInfer (arXiv 2501.01005), section 2.2.

    Example:
        One key with the value 8, and three with the mean 4, all with score 0: their mean is 5, and their sum 4.

        >>> import torch
        >>> outs, lses = torch.tensor([8.0, 4.0]).view(2, 1, 1, 1), torch.tensor([1.0, 3.0]).log().view(2, 1, 1)
        >>> out, lse = merge_states(outs[0], lses[0], outs[1], lses[1])
        >>> round(out.item(), 4), round(lse.exp().item(), 4)
        (5.0, 4.0)
    """
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]
    return run_op(
        "merge_states",
        tier,
        out_a.device,
        reference.merge_states,
        "minipaged.batching.kernels:merge_states",
        out_a,
        lse_a,
        out_b,
        lse_b,
    )


def gather_blocks(
    pool: Shaped[Tensor, "N S K D"] | Shaped[Tensor, "layers 2 N S K D"],
    ids: Int[Tensor, " P"],
    staging: Shaped[Tensor, "P S K D"] | Shaped[Tensor, "layers 2 P S K D"],
    *,
    tier: Tier = None,
) -> None:
    """Copy blocks of the pool side by side into ``staging``, in the order of ``ids``, bit for bit.

    Args:
        pool: One layer's K or V, or everything: keys and values of all layers move in one launch.
        ids: Block ids, int64, on the pool's device.
        staging: Where they go, on the pool's device or on the CPU. In the Triton tier, memory on the CPU must be
            pinned: the kernel writes it over the bus, and the caller must wait for the GPU before reading it.

    Cost:
        Reads and writes ``P * S * K * D`` numbers a plane, 2 x layers planes.

    Example:
        >>> import torch
        >>> pool, staging = torch.arange(8.0).view(8, 1, 1, 1), torch.zeros(3, 1, 1, 1)
        >>> gather_blocks(pool, torch.tensor([7, 2, 5]), staging)
        >>> staging.flatten().tolist()
        [7.0, 2.0, 5.0]
    """
    _check_staging(pool, ids, staging)
    run_op(
        "gather_blocks",
        tier,
        pool.device,
        reference.gather_blocks,
        "minipaged.batching.kernels:gather_blocks",
        pool,
        ids,
        staging,
    )


def scatter_blocks(
    pool: Shaped[Tensor, "N S K D"] | Shaped[Tensor, "layers 2 N S K D"],
    ids: Int[Tensor, " P"],
    staging: Shaped[Tensor, "P S K D"] | Shaped[Tensor, "layers 2 P S K D"],
    *,
    tier: Tier = None,
) -> None:
    """Copy ``staging`` into blocks of the pool, in place: the way back of `gather_blocks`, with the same arguments.

    Invariants:
        No id stands twice. All other blocks keep their bits.

    Example:
        >>> import torch
        >>> pool, staging = torch.zeros(8, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1)
        >>> scatter_blocks(pool, torch.tensor([7, 2, 5]), staging)
        >>> pool.flatten().tolist()
        [0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 1.0]
    """
    _check_staging(pool, ids, staging)
    run_op(
        "scatter_blocks",
        tier,
        pool.device,
        reference.scatter_blocks,
        "minipaged.batching.kernels:scatter_blocks",
        pool,
        ids,
        staging,
    )


def _check_staging(pool: Tensor, ids: Tensor, staging: Tensor) -> None:
    assert pool.ndim in (4, 6) and pool.dtype == staging.dtype, (pool.shape, pool.dtype, staging.dtype)
    assert staging.shape == (*pool.shape[:-4], *ids.shape, *pool.shape[-3:]), (pool.shape, ids.shape, staging.shape)
