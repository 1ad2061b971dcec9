"""The operations of the decoder in plain PyTorch: the readable truth that kernels are held to.

Each computes in fp32 inside, returns the dtype it was given, and never changes its inputs.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from minipaged.shapes import Bool, Float, Int, Tensor

MASK_TILE = 1024
"""Query rows per mask of `newest_tokens_sdpa`: a full mask of 32k x 32k would be a gigabyte."""


def rms_norm(
    x: Float[Tensor, "T E"],
    weight: Float[Tensor, " E"],
    eps: float,
    *,
    residual: Float[Tensor, "T E"] | None = None,
) -> Float[Tensor, "T E"] | tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    """Divide each row by its root mean square and multiply by ``weight``; see `ops.rms_norm`."""
    if residual is not None:
        x = x + residual  # rounded to the model's dtype, as it will be stored
    # Rounded before the weight, not after: checkpoints were trained that way, and tokens in bf16 depend on it.
    normed = F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight
    return normed if residual is None else (normed, x)


def rotary(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    cos: Float[Tensor, "T D_half"],
    sin: Float[Tensor, "T D_half"],
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"]]:
    """Turn entry pairs (i, i + D/2) of every head by the angles given as cos and sin; see `ops.rotary`."""
    both = torch.cat((q, k), dim=1).float()  # [T, H + K, D]: one pass for queries and keys
    first, second = both.chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]  # [T, 1, D/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(q.dtype)
    rotated_q, rotated_k = turned.split((q.shape[1], k.shape[1]), dim=1)
    return rotated_q, rotated_k


def silu_mul(gate: Float[Tensor, "T F"], up: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
    """Return ``gate * sigmoid(gate) * up``; see `ops.silu_mul`."""
    return (F.silu(gate.float()) * up).to(gate.dtype)


def visible_keys(num_rows: int, first_row: int, first_key: int, window: int | None) -> Bool[Tensor, "rows keys"]:
    """Return which keys each row sees: key j is visible to row i when ``i - window < j <= i``.

    Rows are the positions from ``first_row`` on, keys those from ``first_key`` to the last row.

    Example:
        >>> visible_keys(7, 0, 0, window=4).sum(dim=1).tolist()
        [1, 2, 3, 4, 4, 4, 4]
    """
    rows = torch.arange(first_row, first_row + num_rows)[:, None]
    keys = torch.arange(first_key, first_row + num_rows)[None, :]
    visible = keys <= rows
    return visible if window is None else visible & (keys > rows - window)


def causal_attention(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    query_starts: Int[Tensor, " B+1"],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "T H D"]:
    """Attend within each sequence by the definition, one sequence at a time; see `ops.causal_attention`."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for start, end in pairwise(query_starts.tolist()):
        length = end - start
        queries = q[start:end].float().transpose(0, 1)  # [H, L, D]
        keys, values = (x[start:end].float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
        scores = queries @ keys.transpose(1, 2) * factor  # [H, L, L]
        hidden = ~visible_keys(length, 0, 0, window).to(q.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out


def causal_attention_sdpa(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    query_starts: Int[Tensor, " B+1"],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "T H D"]:
    """Do the same through PyTorch's fused attention, which never holds a row of scores for every token.

    Cost:
        O(L x D) memory per head, and O(L x window) time where a window is given.
    """
    group = q.shape[1] // k.shape[1]
    # Heads first; KV heads repeated, since the CPU kernel is slow when it has to share them itself.
    heads_first = [x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    out = torch.empty_like(q)
    for start, end in pairwise(query_starts.tolist()):
        queries, keys, values = (x[None, :, start:end] for x in heads_first)  # [1, H, L, D]
        attended = newest_tokens_sdpa(queries, keys, values, scale, window)
        out[start:end] = attended[0].transpose(0, 1)
    return out


def newest_tokens_sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> Float[Tensor, "1 H rows D"]:
    """Let the newest tokens of one sequence attend; ``queries`` [1, H, rows, D] belong to the last ``rows`` keys.

    Whole sequences need no mask. Otherwise this goes in tiles of query rows, each with the keys that at least one of
    its rows sees.
    """
    num_keys = keys.shape[2]
    first_query = num_keys - queries.shape[2]
    if first_query == 0 and (window is None or window >= num_keys):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    tiles = []
    for rows in queries.split(MASK_TILE, dim=2):
        end = first_query + rows.shape[2]
        first_key = 0 if window is None else max(0, first_query - window + 1)
        mask = visible_keys(rows.shape[2], first_query, first_key, window).to(queries.device)
        visible = keys[:, :, first_key:end], values[:, :, first_key:end]
        tiles.append(F.scaled_dot_product_attention(rows, *visible, attn_mask=mask, scale=scale))
        first_query = end
    return torch.cat(tiles, dim=2)
