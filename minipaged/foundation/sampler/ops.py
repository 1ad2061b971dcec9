"""What choosing tokens means, as an operation on tensors; see `minipaged.tiers` for ``tier`` and ``use``."""

from minipaged.errors import UserError
from minipaged.foundation.sampler import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

MAX_VOCAB_SIZE = 2**22
"""As many weights of at most 2^40 can be summed as integers."""

declare_part(
    "sample_tokens",
    "(logits [B V], temperature [B], top_k [B], top_p [B], min_p [B], seeds [B], output_indices [B]) -> token ids [B]",
)


def sample_tokens(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"] | None,
    top_p: Float[Tensor, " B"] | None,
    min_p: Float[Tensor, " B"] | None,
    seeds: Int[Tensor, " B"],
    output_indices: Int[Tensor, " B"],
    *,
    tier: Tier = None,
) -> Int[Tensor, " B"]:
    """Choose one token per row: the best of score plus noise among those that the row's filters keep.

    A score is (logit - maximum) / temperature. top_k keeps the best ones, top_p the best of these until their share
    reaches it, min_p those of at least that share of the best one's probability. Ties go to the lower id everywhere.

    Args:
        logits: Penalties applied, -inf for a token that must not be chosen.
        temperature: fp32; 0 takes the largest logit, without noise and filters.
        top_k: int32; 0, or V and more, is no limit. None is no limit for any row, and saves a kernel time if top_p
            and min_p are None too; what is None and what not is compiled in.
        top_p: fp64, above 0; 1 is no limit. In fp32 0.3 would be a little more than 0.3, and of ten equal tokens it
            would keep four.
        min_p: fp64; 0 is no limit.
        seeds: int64, see `minipaged.foundation.philox.seed_tensor`.
        output_indices: int64, how many tokens the sequence has put out already.

    Returns:
        Token ids, int64, and -1 for a row that has no best token: its largest logit is NaN or infinite.

    Raises:
        UserError: The shapes do not fit together, or the vocabulary is too large.

    Invariants:
        A row depends on no other. The tiers may differ where two sums of score and noise, or a cut by top_p and the
        edge of a token, are as close as rounding. The kernels neither wait for the GPU nor let it wait for the CPU.

    Cost:
        The kernels read each logit once; with filters four or five times, and compare a few tokens per row exactly. A
        row whose last kept token has a thousand equals is searched by one program, which takes a millisecond.

    Source:
        Gumbel-max as in `minipaged.foundation.sampling`. Sampling on a GPU without sorting the vocabulary as in
        FlashInfer; the way here, counting by bins and sorting what is left of one, is that of radix selection.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 2.0, float("nan")]])
        >>> zero = torch.zeros(2, dtype=torch.int64)
        >>> sample_tokens(logits, torch.tensor([0.0, 1.0]), None, None, None, zero, zero).tolist()
        [1, -1]
    """
    num_rows, vocab_size = logits.shape
    vectors = [x for x in (temperature, top_k, top_p, min_p, seeds, output_indices) if x is not None]
    _check(all(x.shape == (num_rows,) for x in vectors), f"every setting must have {num_rows} entries, one per row")
    _check(1 <= vocab_size <= MAX_VOCAB_SIZE, f"the vocabulary must have 1 to {MAX_VOCAB_SIZE} tokens")
    return run_op(
        "sample_tokens",
        tier,
        logits.device,
        reference.sample_tokens,
        "minipaged.foundation.sampler.kernels:sample_tokens",
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        output_indices,
    )


def _check(is_right: bool, rule: str) -> None:
    if not is_right:
        raise UserError(f"sample_tokens: {rule}")
