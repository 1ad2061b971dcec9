"""A request as the scheduler sees it: numbers and token ids, no text and no tensors."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minipaged.batching.cache import Cache, Room, Swapped

if TYPE_CHECKING:
    from minipaged.batching.plan import NextToken


@dataclass(eq=False, slots=True)
class Member:
    """One sequence of a request.

    Args:
        seq_id: Its name in the cache.
        token_ids: Prompt and output.
        num_computed: How many of its first tokens have keys and values in the cache.
        target: How many its prefill computes; it has slots for them from the start.
        num_found: How many were in the cache when it entered, whatever the group's first sequence computes for it.
        is_gone: Whether it was aborted.
    """

    seq_id: int
    token_ids: list[int]
    num_computed: int = 0
    target: int = 0
    num_found: int = 0
    is_gone: bool = False


@dataclass(eq=False)
class Group:
    """A request: all its sequences enter, leave and return together.

    Args:
        request_id: Its name.
        members: Its living sequences. A new request has one; others fork from it.
        num_sequences: The most members that it may still have at a time; it takes so many seats in the batch.
        max_output_tokens: The most tokens that any member will generate.
        priority: Lower goes first.
        arrival: Counts requests in the order in which they came.

    Invariants:
        Before its first token a group has one member. While ``is_decoding``, every member lacks exactly its newest
        token in the cache. ``swapped`` is set only while the group waits.
    """

    request_id: int
    members: list[Member]
    num_sequences: int
    max_output_tokens: int
    priority: int
    arrival: int
    num_prompt_tokens: int = field(init=False)
    is_running: bool = False
    is_decoding: bool = False
    swapped: Swapped | None = None
    num_preemptions: int = 0
    waiting_room: Room | None = None  # what `room` returned; nothing of it changes while the group waits
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.members[0].token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Return the group's place among all: first come, first served, within its priority."""
        return self.priority, self.arrival

    @property
    def seq_ids(self) -> list[int]:
        """Return the members' names in the cache."""
        return [member.seq_id for member in self.members]

    @property
    def is_prefilled(self) -> bool:
        """Return whether every member has what its prefill computes."""
        return all(member.num_computed == member.target for member in self.members)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens all members have."""
        return sum(len(member.token_ids) for member in self.members)

    def advance(self, tokens: list["NextToken"], cache: Cache) -> None:
        """Fork, extend and end the members. Those that no token names any more give back what they hold."""
        before = {member.seq_id: member for member in self.members}
        everybody = dict(before)
        for token in tokens:
            if token.parent_id is not None:  # forks first, before any list of tokens grows
                parent = before[token.parent_id]
                cache.fork(token.parent_id, token.seq_id)
                everybody[token.seq_id] = Member(token.seq_id, list(parent.token_ids), parent.num_computed)
        self.members = []
        for token in tokens:
            everybody[token.seq_id].token_ids.append(token.token_id)
            if token.is_last:
                self.num_sequences -= 1
            else:
                self.members.append(everybody.pop(token.seq_id))
        for seq_id in everybody:
            cache.free(seq_id)
        self.is_decoding = True

    def room(self) -> Room:
        """Return what the group needs of the cache to enter, or to come back and compute everything again.

        A lone sequence computes all its tokens, and the newest one's logits choose the next. Several stop one short
        of it and then decode together, since beams must be compared at the same step. They share whole blocks of what
        all of them have in common; beams that shared more than that in pairs compute it each for itself.
        """
        is_lone = len(self.members) == 1
        lengths = [len(member.token_ids) - (not is_lone) for member in self.members]
        return Room(self.seq_ids, lengths, self._num_common(), self._num_output_tokens_left())

    def num_tokens_computed(self) -> int:
        """Return how many tokens would have to be computed again; what all members have in common counts once."""
        first, *others = self.members
        common = self._num_common()
        # The others begin behind what the first one computes for them, even before it has.
        own = sum(max(0, member.num_computed - common) for member in others) if first.num_computed >= common else 0
        return first.num_computed + own

    def _num_common(self) -> int:
        """Return how many first tokens all members have in common; 0 for a lone one."""
        if len(self.members) == 1:
            return 0
        lists = [member.token_ids for member in self.members]
        first, last = min(lists), max(lists)  # what these two have in common, all lists between them have too
        place = self.num_prompt_tokens
        while place < min(len(first), len(last)) and first[place] == last[place]:
            place += 1
        return place

    def _num_output_tokens_left(self) -> int:
        return self.max_output_tokens - (len(self.members[0].token_ids) - self.num_prompt_tokens)
