"""Checks of lesson 05: the name of a block, the walk along the names, and a clock that chooses what is given up."""

from collections.abc import Callable
from typing import Any

from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.prefix.block_key import block_key, root_key
from minipaged.prefix.hash_chain import HashChain

ROOT = root_key("model")


@exercise
def check_block_key(answer: Callable[..., bytes]) -> None:
    """Compare with the product's `block_key`, where a name that is made too simply gives two blocks one name."""
    first, other = block_key(ROOT, [1, 2]), block_key(ROOT, [8, 9])
    kind = type(answer(ROOT, [1, 2])).__name__
    expect(kind, "bytes", "the type of a name", "Return the digest: .digest() gives bytes, .hexdigest() gives text.")
    _expect_different(
        answer(first, [3, 4]),
        answer(other, [3, 4]),
        "[3, 4] behind [1, 2], and [3, 4] behind [8, 9]",
        "Keys and values of a token depend on all tokens before it. The parent's name stands for them: hash it too.",
    )
    _expect_different(
        answer(ROOT, [1, 23]),
        answer(ROOT, [12, 3]),
        "[1, 23] and [12, 3] behind the same parent",
        "Written side by side both are 123. Give every id the same width: 4 bytes.",
    )
    for parent, token_ids in ((ROOT, [1, 2]), (first, [3, 4, 5]), (first, [49151, 0, 256]), (other, (7,))):
        expect(
            answer(parent, token_ids).hex(),
            block_key(parent, token_ids).hex(),
            f"my_block_key(parent, {token_ids!r}).hex()",
            "SHA-256 of the parent's bytes, then of each id as 4 bytes with the lowest byte first.",
        )


def _expect_different(one: bytes, other: bytes, given: str, help: str) -> None:
    if one == other:
        raise WrongAnswer(f"{given}\n  both have the name {one.hex()[:8]}..., expected two\n{help}")


@exercise
def check_find_blocks(answer: Callable[..., list[int]]) -> None:
    """Compare with the product's `HashChain`, at every length around the edges of blocks."""
    cached = [11, 12, 13, 14, 15, 16, 17, 18]
    chain = HashChain("model", 4)
    place, _ = chain.insert(chain.root(""), cached[:4], 7)
    place, _ = chain.insert(place, cached[4:], 2)
    names = {key: entry.block_id for key, entry in chain.entries.items()}
    for token_ids in ([*cached, 19], cached, cached[:5], cached[:4], [11], cached[:7], cached[:4] + [0] * 5):
        _expect_found(answer, chain, names, token_ids)
    chain.forget(7)
    del names[block_key(ROOT, cached[:4])]
    _expect_found(answer, chain, names, [*cached, 19])


def _expect_found(
    answer: Callable[..., Any], chain: HashChain, names: dict[bytes, int | None], token_ids: list[int]
) -> None:
    found = "[7] and [2] are cached" if len(names) == 2 else "only the second of two blocks is still cached"
    expect(
        answer(names, ROOT, token_ids, 4),
        chain.match(token_ids, "", len(token_ids) - 1).block_ids,
        f"S = 4, {len(token_ids)} tokens {token_ids}; {found}",
        "Take whole blocks, stop at the first name that is not there, and leave at least the last token: somebody has "
        "to compute its logits.",
    )


class ReferenceClock:
    """The clock that answers are compared with: blocks stand in the order of their ids, and the hand goes round."""

    def __init__(self) -> None:
        self.is_marked: dict[int, bool] = {}
        self.hand = 0

    def add(self, block_id: int) -> None:
        """Take in a block that was just used."""
        self.is_marked[block_id] = True

    def remove(self, block_id: int) -> None:
        """Let a block go."""
        del self.is_marked[block_id]

    def evict(self) -> int:
        """Take marks away from the hand on, up to the first block that has none."""
        while True:
            block_id = min([each for each in self.is_marked if each >= self.hand] or self.is_marked)
            self.hand = block_id + 1
            if not self.is_marked[block_id]:
                del self.is_marked[block_id]
                return block_id
            self.is_marked[block_id] = False

    def __len__(self) -> int:
        return len(self.is_marked)


Act = tuple[str, int]

CLOCK_CASES: tuple[tuple[str, list[Act]], ...] = (
    ("blocks 0 to 3 come in; evict", [("add", 0), ("add", 1), ("add", 2), ("add", 3), ("evict", 1)]),
    ("blocks 5, 2, 7 come in; evict twice", [("add", 5), ("add", 2), ("add", 7), ("evict", 2)]),
    ("0 to 3 come in; evict, block 0 comes back; evict twice", [("add", 0), ("add", 1), ("add", 2), ("add", 3),
                                                               ("evict", 1), ("add", 0), ("evict", 2)]),
    ("0 to 3 come in; evict, block 1 is used again; evict", [("add", 0), ("add", 1), ("add", 2), ("add", 3),
                                                            ("evict", 1), ("remove", 1), ("add", 1), ("evict", 1)]),
    ("0 and 1 come in; evict twice, 1 and 0 come back; evict twice", [("add", 0), ("add", 1), ("evict", 2),
                                                                     ("add", 1), ("add", 0), ("evict", 2)]),
)  # fmt: skip


@exercise
def check_clock(answer: type) -> None:
    """Compare with `ReferenceClock`, and see that every block that comes in goes out exactly once."""
    for given, acts in CLOCK_CASES:
        expect(
            _evicted(answer(), acts),
            _evicted(ReferenceClock(), acts),
            f"{given}: blocks in the order in which they are given up",
            "From the hand on: a marked block loses its mark and stays, the first one without a mark goes. The hand "
            "then stands behind it, and stays there until the next time. Behind the largest id it begins anew.",
        )
    clock, reference = answer(), ReferenceClock()
    rounds = [("add", block_id) for block_id in range(4)] + [("evict", 1), ("refill", 0)] * 8
    expect(
        _evicted(clock, rounds),
        _evicted(reference, rounds),
        "4 blocks; 8 times: evict one, and it comes back with new content",
        "The hand must not begin at the first block each time: then the last ones are hardly ever looked at.",
    )
    clock.evict()
    expect(len(clock), 3, "len(clock) when 1 of 4 blocks is given up", "`evict` takes its block out of is_marked.")


def _evicted(clock: Any, acts: list[Act]) -> list[int]:
    """Play acts to a policy and return what it gave up. "refill" puts the last one back."""
    evicted: list[int] = []
    for act, number in acts:
        if act == "add":
            clock.add(number)
        elif act == "remove":
            clock.remove(number)
        elif act == "refill":
            clock.add(evicted[-1])
        else:
            evicted += [clock.evict() for _ in range(number)]
    return evicted
