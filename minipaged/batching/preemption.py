"""Who is sent away when blocks run out, and what becomes of its keys and values."""

from dataclasses import dataclass
from typing import Literal, get_args

from minipaged.batching.group import Group
from minipaged.errors import AccountingError, UserError
from minipaged.tiers import declare_part, replacement

declare_part("choose_victim", "(groups) -> Group; picks who is sent away, of groups in the order of their turn")

Policy = Literal["auto", "recompute", "swap"]
POLICIES = get_args(Policy)


@dataclass(frozen=True)
class Preemption:
    """Choose between throwing blocks away and computing them again, and moving them to CPU memory and back.

    Computing again takes time for every token, moving takes time for every block, there and back. "auto" takes
    whatever is quicker by these two numbers. What decides is how large the model is for the keys and values of a
    token: on a fast GPU Qwen3-0.6B computes again and Llama-3.1-8B moves; on a CPU, where moving is a copy within the
    same memory, all of them move. Whoever has nothing computed yet has nothing to move. When the swap space is full,
    everybody computes again.

    Args:
        policy: "recompute", "swap" or "auto".
        seconds_per_token: What computing one token again costs.
        seconds_per_block: What moving one block out and in again costs.
        max_swapped_blocks: The size of the swap space; None is without limit.

    Raises:
        UserError: There is no such policy.

    Example:
        Four blocks of 16 tokens at 2 units a token and 10 units a block: 40 against 128.

        >>> Preemption("auto", seconds_per_token=2, seconds_per_block=10).choose(64, 4, 0)
        ('swap', '4 blocks take 40 s to move, 64 tokens 128 s to compute')
        >>> Preemption("recompute").choose(64, 4, 0)[0]
        'recompute'
    """

    policy: Policy = "auto"
    seconds_per_token: float = 1.0
    seconds_per_block: float = 1.0
    max_swapped_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UserError(f"preemption must be one of {', '.join(POLICIES)}, not {self.policy!r}")

    def choose(self, num_tokens: int, num_blocks: int, num_swapped_blocks: int) -> tuple[str, str]:
        """Return "swap" or "recompute", and why.

        Args:
            num_tokens: Tokens that the request would compute again.
            num_blocks: Blocks that it has.
            num_swapped_blocks: Blocks in the swap space now.
        """
        if self.policy == "recompute":
            return "recompute", "that is the policy"
        if num_tokens == 0:
            return "recompute", "nothing is computed yet"
        if self.max_swapped_blocks is not None and num_swapped_blocks + num_blocks > self.max_swapped_blocks:
            return "recompute", f"the swap space of {self.max_swapped_blocks} blocks is full"
        if self.policy == "swap":
            return "swap", "that is the policy"
        moving, computing = num_blocks * self.seconds_per_block, num_tokens * self.seconds_per_token
        why = f"{num_blocks} blocks take {moving:.3g} s to move, {num_tokens} tokens {computing:.3g} s to compute"
        return ("swap" if moving < computing else "recompute"), why


def choose_victim(groups: list[Group]) -> Group:
    """Send away the newest of the lowest priority, so that everybody before it gets done."""
    return groups[-1]


def pick_victim(groups: list[Group]) -> Group:
    """Ask `choose_victim`, or what has taken its place.

    Raises:
        AccountingError: It returned a group that it was not given.
    """
    victim = (replacement("choose_victim") or choose_victim)(groups)
    if victim not in groups:
        names = [each.request_id for each in groups]
        raise AccountingError(f"choose_victim returned none of the groups that it was given, requests {names}")
    return victim
