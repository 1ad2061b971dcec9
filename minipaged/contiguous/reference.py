"""Rung 1's operation in plain PyTorch."""

from minipaged.shapes import Float, Int, Tensor


def attend_one(
    q: Float[Tensor, "H D"],
    k: Float[Tensor, "L K D"],
    v: Float[Tensor, "L K D"],
    scale: float,
    window: int | None,
) -> Float[Tensor, "H D"]:
    """Let one query token attend to L keys, in fp32. Query heads ``g`` of KV head ``j`` are ``j * G + g``."""
    if window is not None:
        k, v = k[-window:], v[-window:]
    num_kv_heads, head_dim = k.shape[1:]
    grouped = q.float().view(num_kv_heads, -1, head_dim)  # [K, G, D]
    scores = grouped @ k.float().permute(1, 2, 0) * scale  # [K, G, L]
    out = scores.softmax(-1) @ v.float().transpose(0, 1)  # [K, G, D]
    return out.reshape(q.shape).to(q.dtype)


def contiguous_attention(
    q: Float[Tensor, "B H D"],
    k: Float[Tensor, "B L K D"],
    v: Float[Tensor, "B L K D"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H D"]:
    """Walk over the rows. A slice ends the row where its tokens end, so nothing behind them is ever read."""
    out = q.new_zeros(q.shape)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            out[row] = attend_one(q[row], k[row, :length], v[row, :length], scale, window)
    return out
