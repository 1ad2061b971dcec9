"""Plausible wrong answers to the exercises of lesson 04."""

from minipaged.batching.group import Group
from minipaged.batching.plan import Plan
from minipaged.batching.scheduler import Scheduler
from minipaged.lessons.exercises.batching import Piece, check_plan_step, check_rows, check_victim, check_way

Lists = tuple[list[int], list[int], list[int], list[int]]


def prompts_first(scheduler: Scheduler) -> Plan:
    """Let those who decode have what prompts leave."""
    plan, num_running = Plan(), len(scheduler.running)
    for group in scheduler.running:
        if not group.is_decoding:
            scheduler.plan_prefill(group, plan)
    scheduler.plan_decode(plan)
    if len(scheduler.running) == num_running:
        scheduler.plan_admission(plan)
    return plan


def newcomers_first(scheduler: Scheduler) -> Plan:
    """Let others enter before prompts that have entered go on."""
    plan, num_running = Plan(), len(scheduler.running)
    scheduler.plan_decode(plan)
    running = list(scheduler.running)
    if len(running) == num_running:
        scheduler.plan_admission(plan)
    for group in running:
        if not group.is_decoding:
            scheduler.plan_prefill(group, plan)
    return plan


def enter_always(scheduler: Scheduler) -> Plan:
    """Let others enter in a step in which somebody was sent away."""
    plan = Plan()
    scheduler.plan_decode(plan)
    for group in scheduler.running:
        if not group.is_decoding:
            scheduler.plan_prefill(group, plan)
    scheduler.plan_admission(plan)
    return plan


def static_batches(scheduler: Scheduler) -> Plan:
    """Form a batch only when the last one has ended."""
    plan, was_empty = Plan(), not scheduler.running
    scheduler.plan_decode(plan)
    for group in scheduler.running:
        if not group.is_decoding:
            scheduler.plan_prefill(group, plan)
    if was_empty:
        scheduler.plan_admission(plan)
    return plan


def forget_the_plan(scheduler: Scheduler) -> None:
    """Fill a plan and return nothing."""
    Scheduler.plan_step(scheduler)


def rows(pieces: list[Piece], block_size: int, is_new_counted: bool = True, has_end: bool = True) -> Lists:
    """Return the right lists, or wrong ones."""
    positions = [i for start, stop, _ in pieces for i in range(start, stop)]
    slots = [
        ids[i // block_size] * block_size + i % block_size for start, stop, ids in pieces for i in range(start, stop)
    ]
    starts = [0]
    for start, stop, _ in pieces:
        starts.append(starts[-1] + stop - start)
    lens = [stop if is_new_counted else start for start, stop, _ in pieces]
    return positions, slots, starts if has_end else starts[:-1], lens


def positions_in_the_batch(pieces: list[Piece], block_size: int) -> Lists:
    """Count positions over the whole batch."""
    positions, slots, query_starts, seq_lens = rows(pieces, block_size)
    return list(range(len(positions))), slots, query_starts, seq_lens


def slots_without_a_table(pieces: list[Piece], block_size: int) -> Lists:
    """Take a token's place for its slot."""
    positions, _, query_starts, seq_lens = rows(pieces, block_size)
    return positions, positions, query_starts, seq_lens


def lengths_before_the_step(pieces: list[Piece], block_size: int) -> Lists:
    """Leave the new tokens out."""
    return rows(pieces, block_size, is_new_counted=False)


def blocks_of_four(pieces: list[Piece], block_size: int) -> Lists:
    """Take the size of a block for granted."""
    return rows(pieces, 4)


def forget_the_lists(pieces: list[Piece], block_size: int) -> None:
    """Make the lists and return nothing."""
    rows(pieces, block_size)


def starts_without_the_end(pieces: list[Piece], block_size: int) -> Lists:
    """Give each piece its start, and no more."""
    return rows(pieces, block_size, has_end=False)


def oldest(groups: list[Group]) -> Group:
    """Send away the one that has been there longest."""
    return groups[0]


def largest(groups: list[Group]) -> Group:
    """Send away the one that frees the most."""
    return max(groups, key=lambda group: group.num_tokens)


def newest_whatever_its_priority(groups: list[Group]) -> Group:
    """Look at the order of arrival only."""
    return max(groups, key=lambda group: group.arrival)


def without_places(num_tokens: int, num_blocks: int, per_token: float, per_block: float, places_left: int) -> str:
    """Forget that the swap space ends."""
    return "swap" if num_blocks * per_block < num_tokens * per_token else "recompute"


def swap_when_equal(num_tokens: int, num_blocks: int, per_token: float, per_block: float, places_left: int) -> str:
    """Swap where both take the same."""
    fits = num_blocks <= places_left
    return "swap" if fits and num_blocks * per_block <= num_tokens * per_token else "recompute"


def one_place_short(num_tokens: int, num_blocks: int, per_token: float, per_block: float, places_left: int) -> str:
    """Leave the last place empty."""
    fits = num_blocks < places_left
    return "swap" if fits and num_blocks * per_block < num_tokens * per_token else "recompute"


WRONG = [
    (check_plan_step, prompts_first, "Those who decode come first"),
    (check_plan_step, newcomers_first, "Those who decode come first"),
    (check_plan_step, enter_always, "not in a step in which somebody was sent away"),
    (check_plan_step, static_batches, "step 2"),
    (check_plan_step, forget_the_plan, "return the plan"),
    (check_rows, positions_in_the_batch, "positions"),
    (check_rows, slots_without_a_table, "slots"),
    (check_rows, blocks_of_four, "in blocks of 2: slots"),
    (check_rows, forget_the_lists, "Return four lists"),
    (check_rows, lengths_before_the_step, "seq_lens"),
    (check_rows, starts_without_the_end, "query_starts"),
    (check_victim, oldest, "whose turn comes last"),
    (check_victim, largest, "whose turn comes last"),
    (check_victim, newest_whatever_its_priority, "whose turn comes last"),
    (check_way, without_places, "room for 3 more blocks"),
    (check_way, swap_when_equal, '"recompute"'),
    (check_way, one_place_short, "room for 4 more blocks"),
]
