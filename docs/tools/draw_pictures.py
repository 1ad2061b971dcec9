"""Draws the site's pictures of memory: `python docs/tools/draw_pictures.py` writes docs/assets/pictures.

Each one comes from the rung's own objects, driven by hand without a model. Narrow pictures are for telephones.
"""

from pathlib import Path

from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import NextToken
from minipaged.batching.scheduler import Scheduler
from minipaged.contiguous.arena import Arena
from minipaged.paged.cache import PagedCache
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.sharing.cache import SharingCache
from minipaged.viz import (
    Svg,
    Timeline,
    TimelineView,
    WasteView,
    draw_arena_svg,
    draw_block_table_svg,
    draw_index_svg,
    draw_pool_svg,
    draw_tile_walk_svg,
    draw_timeline_svg,
    draw_waste_svg,
    view_arena,
    view_cache,
    view_index,
    view_pool,
    view_tile_walk,
    view_waste,
)

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "pictures"
WIDE, NARROW = 720, 368


def home_pool() -> PrefixCache:
    """Return a pool in which every kind of block can be seen: private, shared, cached and free.

    A system prompt of 8 tokens is computed once. One request that began with it has ended: its own blocks stay cached.
    Two that run share it, and one of them has forked into two answers. A fourth has nothing in common with anybody.
    """
    cache = PrefixCache(18, 4, None, HashChain("model", 4), LRU())
    system = list(range(8))
    _enter(cache, 9, [*system, *range(100, 109)])
    cache.free(9)
    _enter(cache, 0, [*system, *range(200, 206)])
    _enter(cache, 1, [*system, *range(300, 307)])
    cache.fork(1, 2)
    for seq_id in (1, 2, 1, 2, 1):
        cache.append(seq_id)
    _enter(cache, 3, list(range(400, 410)))
    cache.check()
    return cache


def _enter(cache: PrefixCache, seq_id: int, token_ids: list[int]) -> None:
    cache.allocate(PrefixRoom([seq_id], [len(token_ids)], 0, 1, [token_ids], "", [len(token_ids) - 1]))
    cache.note_computed(seq_id, len(token_ids), token_ids)


def contiguous_arena() -> Arena:
    """Return an arena of 64 slots and a limit of 16 tokens, in which one of four sequences has ended."""
    arena = Arena(num_slots=64, max_model_len=16, reservation="max")
    for seq_id, num_tokens in enumerate((5, 11, 2, 7)):
        arena.allocate(seq_id, num_prompt_tokens=num_tokens, num_output_tokens=4)
    arena.free(1)
    arena.check()
    return arena


def paged_cache() -> PagedCache:
    """Return a cache after some coming and going, so that a table's blocks lie anywhere."""
    cache = PagedCache(num_blocks=16, block_size=4)
    for seq_id, num_tokens in enumerate((6, 7, 3)):
        cache.allocate(seq_id, num_prompt_tokens=num_tokens, max_slots=16)
    cache.free(1)
    for _ in range(8):
        cache.append(0)
    cache.append(2)
    cache.append(2)
    cache.check()
    return cache


def sharing_cache() -> SharingCache:
    """Return three samples of one prompt of 6 tokens: each has written 3 more, and two of them made a copy first."""
    cache = SharingCache(num_blocks=16, block_size=4)
    cache.allocate(0, num_prompt_tokens=6, max_slots=12, num_sequences=3)
    cache.fork(0, 1)
    cache.fork(0, 2)
    for _ in range(3):
        for seq_id in (0, 1, 2):
            cache.append(seq_id)
    cache.take_copies()
    cache.check()
    return cache


def same_sequences() -> dict[str, WasteView]:
    """Return where the slots are while the same four sequences run over an arena and over a pool of the same size."""
    arena, paged = Arena(64, max_model_len=16, reservation="max"), PagedCache(num_blocks=16, block_size=4)
    for seq_id, num_tokens in enumerate((5, 11, 2, 7)):
        arena.allocate(seq_id, num_prompt_tokens=num_tokens, num_output_tokens=4)
        paged.allocate(seq_id, num_prompt_tokens=num_tokens, max_slots=16)
    return {"contiguous": view_waste(arena), "paged": view_waste(paged)}


def four_requests() -> TimelineView:
    """Return what a scheduler does with four requests, 8 tokens a step and 7 blocks of 4 slots: one is sent away."""
    timeline = Timeline()
    scheduler = Scheduler(BatchingCache(num_blocks=7, block_size=4), max_num_batched_tokens=8, listener=timeline)
    arrivals = {0: [(10, 6), (5, 9)], 2: [(7, 3)], 4: [(3, 4)]}  # step: (prompt, output) tokens
    left: dict[int, int] = {}
    for step in range(100):
        for prompt, output in arrivals.get(step, []):
            request_id = len(left)
            left[request_id] = output
            scheduler.add(request_id, request_id, [1] * prompt, output)
        if step > max(arrivals) and not scheduler.has_unfinished:
            break
        plan = scheduler.schedule()
        sampled = [chunk.member.seq_id for chunk in plan.chunks if chunk.is_sampled]
        for seq_id in sampled:
            left[seq_id] -= 1
        scheduler.update(plan, [NextToken(seq_id, 1, is_last=left[seq_id] == 0) for seq_id in sampled])
    return timeline.view()


def pictures() -> dict[str, Svg]:
    """Return every picture by its file's name."""
    home, arena, paged, sharing = home_pool(), contiguous_arena(), paged_cache(), sharing_cache()
    table = view_pool(paged.pool, paged.tables).tables[0]
    drawn = {}
    for suffix, width in (("", WIDE), ("-narrow", NARROW)):
        each = {
            "pool": draw_pool_svg(view_cache(home), width),
            "arena": draw_arena_svg(view_arena(arena.num_slots, arena.ranges), width, rows=4),
            "paged-pool": draw_pool_svg(view_cache(paged), width),
            "paged-table": draw_block_table_svg(table, 4, width=width),
            "tile-walk": draw_tile_walk_svg(view_tile_walk(table, 4, tile_keys=8), width=width),
            "waste": draw_waste_svg(same_sequences(), width=width),
            "sharing-pool": draw_pool_svg(view_cache(sharing), width),
            "timeline": draw_timeline_svg(four_requests(), width=width),
            "index": draw_index_svg(view_index(home), width=width),
        }
        drawn |= {f"{name}{suffix}.svg": picture for name, picture in each.items()}
    return drawn


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, picture in pictures().items():
        (FOLDER / file).write_text(picture + "\n", encoding="utf-8")
