"""The kernel for the prompts of a mixed batch, and for chunks of them; `batching.kernels` launches it.

Nothing is folded here. All tiles of keys of a row are added up in one sum, so that a prompt gets the same bits
whole and in any chunks of two or more tokens. Its last token, decoded, would add the same numbers in another order.
"""

# Constants are plain numbers in a kernel and tl.range is a loop, which pyright does not know.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from minipaged.contiguous.kernels import is_visible, no_keys
from minipaged.foundation.kernels import absorb, count_tiles, find_tile, normalized
from minipaged.paged.kernels import load_tokens, look_up


@triton.jit(do_not_specialize=["num_seqs", "table_width"])
def prefill_rows_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
    num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr, IS_LOOP: tl.constexpr,
):  # fmt: skip
    """Program i computes the i-th tile of the batch's prompts, counted from the last to the first.

    All heads of the same tokens are neighbours. A prompt's late tiles see the most keys, and work that takes long
    must not begin last. Decode rows have no tiles here.

    With IS_LOOP there may be fewer programs than tiles. Each then goes on, with the same heads, with the tile of tokens
    that is as many further as there are programs for its heads. Its body needs more registers, so it is not for batches
    that have much to do here.
    """
    HEAD_TILES: tl.constexpr = NUM_HEADS // TILE_HEADS
    num_tiles = count_tiles(query_starts_ptr, num_seqs, TILE_QUERIES // TILE_HEADS)
    first = tl.program_id(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    if IS_LOOP:
        # What the compiler would take out of the loop, to compute it once, would fill registers all through the body.
        for i in tl.range(first, num_tiles, tl.num_programs(0) // HEAD_TILES, disable_licm=True):
            attend_prompt_tile(
                q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
                num_seqs, table_width, scale, num_tiles - 1 - i, head_tile,
                SLOTS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_QUERIES, TILE_HEADS, TILE_KEYS, TILE_DIM,
            )  # fmt: skip
    elif first < num_tiles:
        attend_prompt_tile(
            q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
            num_seqs, table_width, scale, num_tiles - 1 - first, head_tile,
            SLOTS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_QUERIES, TILE_HEADS, TILE_KEYS, TILE_DIM,
        )  # fmt: skip


@triton.jit
def attend_prompt_tile(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
    num_seqs, table_width, scale, tile, head_tile,
    SLOTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the batch's query tokens for the ``head_tile``-th TILE_HEADS query heads.

    Tiles of queries are laid out as in `causal_attention_kernel`, counted from a sequence's first query. Tiles of keys
    start at multiples of TILE_KEYS in the sequence, wherever the queries begin: that, and that a tile of keys which a
    row does not see leaves its sums as they are, makes all ways to cut a prompt agree. Of other sequences, nothing is
    read but how many queries they have, to find out which tile this is.

    Loop invariant: ``acc / row_sum`` is the attention of every row over the keys before ``start``, and ``block_id``
    says where the tile of keys at ``start`` lies. Keys that all rows see come first and need no mask; the tiles on
    the diagonal follow, in a loop that looks up its first tile anew.
    """
    TILE_TOKENS: tl.constexpr = TILE_QUERIES // TILE_HEADS
    seq, tile = find_tile(query_starts_ptr, num_seqs, tile, TILE_TOKENS)
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_query = tile * TILE_TOKENS
    first_token = seq_len - num_queries + first_query
    end = tl.minimum(first_token + TILE_TOKENS, seq_len)

    row = tl.arange(0, TILE_QUERIES)
    token = first_token + row // TILE_HEADS
    query = query_start + first_query + row // TILE_HEADS
    head = head_tile * TILE_HEADS + row % TILE_HEADS
    kv_head = head_tile * TILE_HEADS // (NUM_HEADS // NUM_KV_HEADS)
    dim = tl.arange(0, TILE_DIM)
    q_at = (query.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q_mask = ((row < TILE_TOKENS * TILE_HEADS) & (token < seq_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * table_width
    row_max, row_sum, acc = no_keys(TILE_QUERIES, TILE_DIM)
    first_key = 0
    if WINDOW is None:
        first_masked = (first_token + 1) // TILE_KEYS * TILE_KEYS
        block_id = look_up(table_ptr, 0, first_key, end, SLOTS, WINDOW, TILE_KEYS)
        for start in range(0, first_masked, TILE_KEYS):
            k, v = load_tokens(
                k_pool_ptr, v_pool_ptr, block_id, kv_head, start, None,
                SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_KEYS, TILE_DIM,
            )  # fmt: skip
            block_id = look_up(table_ptr, start + TILE_KEYS, first_key, end, SLOTS, WINDOW, TILE_KEYS)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    else:
        first_key = tl.maximum(first_token - WINDOW + 1, 0)  # blocks before may have been given back
        first_masked = first_key // TILE_KEYS * TILE_KEYS
    block_id = look_up(table_ptr, first_masked, first_key, end, SLOTS, WINDOW, TILE_KEYS)
    for start in range(first_masked, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, block_id, kv_head, start, is_visible(key, first_key, end, WINDOW),
            SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        block_id = look_up(table_ptr, start + TILE_KEYS, first_key, end, SLOTS, WINDOW, TILE_KEYS)
        visible = key[None, :] <= token[:, None]
        if WINDOW is not None:
            visible &= key[None, :] > token[:, None] - WINDOW
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    tl.store(out_ptr + q_at, normalized(row_sum, acc).to(out_ptr.dtype.element_ty), mask=q_mask)
