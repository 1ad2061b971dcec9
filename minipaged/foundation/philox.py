"""Random numbers without a state: Philox4x32-10, a function from a seed and a place of use to random bits.

A generator with a state gives a sequence other tokens as soon as a neighbour draws one number more or less.
Here the noise of a token depends on three integers only: the sequence's seed, the index of the output token
being chosen, and the candidate's token id. So the same seed gives the same text alone, in any batch, and
after any interruption, and a kernel computes the same bits.

::

    key      (seed mod 2^32, seed >> 32)
    counter  (token_id >> 2, output_index, 0, 0)    noise; token_id & 3 chooses one of the four words
    counter  (i, 0, 0, 1)                           seed of child i: word 0 + word 1 * 2^32
    uniform  u = ((word >> 9) + 1/2) * 2^-23        exact in fp32, never 0 and never 1
    Gumbel   g = -log(-log(u))

To check an implementation: counter (0, 0, 0, 0) with key (0, 0) gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8. So
with seed 0, output index 0 and token id 0: word >> 9 is 3347444, u = 0.39904648, g = 0.08482.

A seed is a Python integer with 0 <= seed < 2^64. A tensor of seeds is int64 and holds the same 64 bits.

Source:
    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), and the known-answer
    vectors of the Random123 library.
"""

import secrets
from collections.abc import Sequence

import torch

from minipaged.shapes import Float, Int, Tensor
from minipaged.transfer import send

SEED_LIMIT = 2**64
_MASK = 0xFFFFFFFF
_ROUNDS = 10

# The paper's multipliers, less 2^32. A 32-bit factor times the full multiplier can pass the range of int64;
# times these negative numbers of less than 30 bits it cannot. The 2^32 left out is added to the high word.
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_CHILD_DOMAIN = 1
_CACHED_TOKENS = 65_536

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Turn counters and keys into four random 32-bit words each.

    Args:
        counter: Four int64 tensors with values in [0, 2^32); they broadcast against each other and the key.
        key: Two int64 tensors with values in [0, 2^32).

    Returns:
        Four int64 tensors with values in [0, 2^32).

    Cost:
        10 rounds of two multiplications; about 0.1 microseconds a counter on one CPU core.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [f"{word.item():08x}" for word in philox4x32((zero, zero, zero, zero), (zero, zero))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    words = torch.broadcast_tensors(*counter)
    # A round treats words 0 and 2 alike, and words 1 and 3: each pair is one tensor, half as many operations.
    even = torch.stack((words[0], words[2]))
    odd = torch.stack((words[1], words[3]))
    round_key = torch.stack(torch.broadcast_tensors(*key))
    by_pair = (2,) + (1,) * words[0].dim()
    multiplier = even.new_tensor(_MULTIPLIERS).view(by_pair)
    key_step = even.new_tensor(_KEY_STEPS).view((2,) + (1,) * key[0].dim())
    for _ in range(_ROUNDS):
        product = even * multiplier
        high, low = (product >> 32).add_(even), product.bitwise_and_(_MASK)
        even = high.flip(0).bitwise_xor_(odd).bitwise_xor_(round_key)
        odd = low.flip(0)
        round_key = (round_key + key_step) & _MASK
    return even[0], odd[0], even[1], odd[1]


def gumbel_noise(
    seeds: Int[Tensor, " B"], output_indices: Int[Tensor, " B"], vocab_size: int, device: torch.device | str
) -> Float[Tensor, "B V"]:
    """Draw the Gumbel noise of every token of the vocabulary.

    Args:
        seeds: int64, see `seed_tensor`.
        output_indices: int64, how many output tokens the sequence has already; below 2^32.

    Returns:
        fp32 noise. A row depends on its own seed and output index only.

    Cost:
        V / 4 counters and 2 V logarithms a row: about 2 ms for 49,152 tokens on one CPU core.
    """
    groups = torch.arange((vocab_size + 3) // 4, device=device)[None, :]
    # On a CPU the words of one row of a real vocabulary stay in the cache and those of a batch do not; a GPU
    # wants few launches.
    rows_at_once = max(1, _CACHED_TOKENS // vocab_size if groups.device.type == "cpu" else len(seeds))
    chunks = zip(seeds.to(device).split(rows_at_once), output_indices.to(device).split(rows_at_once), strict=True)
    noise = torch.empty(len(seeds), vocab_size, device=device)
    for row, (seed, index) in enumerate(chunks):
        words = torch.stack(_noise_words(seed, index, groups), dim=-1).flatten(1)  # [B, V rounded up to 4]
        noise[row * rows_at_once :][:rows_at_once] = _to_gumbel(words[:, :vocab_size])
    return noise


def gumbel_noise_at(
    seeds: Int[Tensor, " B"], output_indices: Int[Tensor, " B"], token_ids: Int[Tensor, "B C"]
) -> Float[Tensor, "B C"]:
    """Draw the noise of the given tokens only: the same numbers that `gumbel_noise` has at these ids.

    Cost:
        One counter and two logarithms a token, so it pays below a quarter of the vocabulary.
    """
    words = torch.stack(_noise_words(seeds, output_indices, token_ids >> 2), dim=-1)  # [B, C, 4]
    return _to_gumbel(words.gather(-1, (token_ids & 3)[..., None])[..., 0])


def _noise_words(seeds: Tensor, output_indices: Tensor, groups: Tensor) -> Words:
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    zero = torch.zeros_like(groups)
    return philox4x32((groups, output_indices[:, None], zero, zero), key)


def _to_gumbel(words: Int[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    # 23 bits and a half are 24 significant bits: the most that fp32 holds exactly. One bit more would round
    # some numbers up to 1, whose noise is infinite.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Int[Tensor, " B"]:
    """Put seeds into an int64 tensor; one of 2^63 or more keeps its bits and reads as a negative number.

    Example:
        >>> seed_tensor([42, 2**64 - 1]).tolist()
        [42, -1]
    """
    return send([seed - SEED_LIMIT if seed >= 2**63 else seed for seed in seeds], torch.int64, device)


def child_seed(seed: int, index: int) -> int:
    """Return the seed of the child ``index`` of a request; child 0 keeps the request's seed.

    Example:
        >>> child_seed(42, 0), child_seed(42, 1) != child_seed(42, 2)
        (42, True)
    """
    if index == 0:
        return seed
    words = [torch.tensor([word]) for word in (index, 0, 0, _CHILD_DOMAIN)]
    key = (torch.tensor([seed & _MASK]), torch.tensor([seed >> 32]))
    low, high, _, _ = philox4x32((words[0], words[1], words[2], words[3]), key)
    return int(low) | int(high) << 32


def draw_seed() -> int:
    """Draw a seed for a request that names none.

    53 bits, since JSON readers that keep numbers as doubles then give a reported seed back unchanged.
    """
    return secrets.randbits(53)
