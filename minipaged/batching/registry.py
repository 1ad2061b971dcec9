"""The requests that a scheduler knows: who waits, who runs, what they hold, and how they come and go."""

from collections.abc import Callable

from minipaged.batching.cache import Cache
from minipaged.batching.group import Group, Member
from minipaged.batching.limits import check_sequences
from minipaged.batching.plan import Act, Event
from minipaged.batching.queue import WaitingQueue


class Registry:
    """Every unfinished request, from its arrival to its end.

    Args:
        cache: Gets back what those hold that leave.
        max_num_seqs: Most sequences that run at a time: a request of more could never enter.
        listener: Called with every `Event`, in the middle of things: it looks, and changes nothing.

    Invariants:
        ``groups`` holds those that run and those that wait; ``running`` is in the order of turns. Who waits holds
        nothing of the cache, only what was swapped out.
    """

    group_type = Group

    def __init__(self, cache: Cache, max_num_seqs: int, listener: Callable[[Event], None] | None = None) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.listener = listener
        self.groups: dict[int, Group] = {}  # every unfinished request
        self.running: list[Group] = []
        self.waiting = WaitingQueue()
        self.num_swapped_blocks = 0  # in the swap space now
        self.num_arrived = self.num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self.groups)

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait."""
        return len(self.groups) - len(self.running)

    def add(
        self,
        request_id: int,
        seq_id: int,
        prompt_token_ids: list[int],
        max_output_tokens: int,
        num_sequences: int = 1,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: Its name.
            seq_id: The name of its first sequence; others fork from it, see `NextToken`.
            prompt_token_ids: Its prompt.
            max_output_tokens: The most tokens that a sequence will generate. The caller sees to it that prompt,
                output and forks fit into an otherwise empty cache.
            num_sequences: The most sequences that it will have at a time.
            priority: Lower goes first.

        Raises:
            UserError: It has more sequences than may run.
        """
        check_sequences(num_sequences, self.max_num_seqs)
        assert request_id not in self.groups and prompt_token_ids
        members = [Member(seq_id, list(prompt_token_ids))]
        group = self.group_type(request_id, members, num_sequences, max_output_tokens, priority, self.num_arrived)
        self.num_arrived += 1
        self.groups[request_id] = group
        self.waiting.push(group)

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """Drop a request wherever it is, and free what it holds. Nothing happens if it is not there."""
        group = self.groups.pop(request_id, None)
        if group is not None:
            self._leave(group, reason)

    def abort_sequence(self, request_id: int, seq_id: int, reason: str = "abort") -> None:
        """Drop one sequence of a request, and the request with its last one. Nothing happens if it is not there."""
        group = self.groups.get(request_id)
        gone = next((member for member in group.members if member.seq_id == seq_id), None) if group else None
        if group is None or gone is None:
            return
        if len(group.members) == 1:
            self.abort(request_id, reason)
            return
        first = group.members[0]
        group.members.remove(gone)
        gone.is_gone = True
        group.num_sequences -= 1
        if group.is_running:
            self.cache.free(seq_id)
        elif group.swapped:
            del group.swapped.tables[seq_id]
        group.waiting_room = None
        if gone is first and not group.is_decoding:  # the next one computes what they share
            heir = group.members[0]
            heir.num_computed = min(heir.num_computed, max(first.num_computed, heir.num_found))
        if group.is_running or group.swapped:
            group.is_decoding |= group.is_prefilled  # perhaps nobody else lacked anything
        self._tell("finish", group, seq_id, reason=reason)

    def _leave(self, group: Group, reason: str) -> None:
        group.is_gone = True
        if group.is_running:
            self.running.remove(group)
            group.is_running = False
            for seq_id in group.seq_ids:
                self.cache.free(seq_id)
        else:
            self.waiting.note_gone()
        self._forget_swapped(group)
        self._tell("finish", group, reason=reason)

    def _forget_swapped(self, group: Group) -> None:
        if group.swapped:
            self.num_swapped_blocks -= group.swapped.num_blocks
            group.swapped = None

    def _tell(self, act: Act, group: Group, seq_id: int | None = None, num_tokens: int = 0, reason: str = "") -> None:
        if self.listener:
            listener, self.listener = self.listener, None  # one that raises is not called again
            listener(Event(self.num_steps, act, group.request_id, seq_id, num_tokens, reason))
            self.listener = listener
