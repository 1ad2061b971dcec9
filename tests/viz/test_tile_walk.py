"""The drawn walk is the one that the kernels take, program by program and tile by tile."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from minipaged.launch import decode_tiles, programs_per_row
from minipaged.viz import (
    TableView,
    TileWalkView,
    cut_before,
    draw_tile_walk,
    draw_tile_walk_svg,
    hue,
    num_pieces,
    piece_of,
    share_of,
    view_tile_walk,
)
from minipaged.viz.pieces import COARSE_FROM, COARSE_PIECE, FINE_PIECE

TOKENS = [*range(0, 2100, 61), 127, 128, 129, 1023, 1024, 1025, 1535, 1536, 1537]


def test_the_cuts_are_those_of_the_kernels():
    kernels = pytest.importorskip("minipaged.contiguous.kernels")
    constants = kernels.FINE_PIECE.value, kernels.COARSE_PIECE.value, kernels.COARSE_FROM.value
    assert constants == (FINE_PIECE, COARSE_PIECE, COARSE_FROM)
    assert [num_pieces(token) for token in TOKENS] == [kernels.num_pieces(token) for token in TOKENS]


def test_every_piece_begins_at_a_cut_and_has_one_number():
    for token in TOKENS:
        assert cut_before(cut_before(token)) == cut_before(token) <= token
        assert piece_of(cut_before(token)) == piece_of(token)
        assert token == 0 or piece_of(cut_before(token) - 1) == piece_of(token) - 1 or cut_before(token) == 0


@pytest.mark.parametrize("num_programs", [1, 2, 7, 66])
def test_the_shares_of_the_programs_cover_the_pieces_once(num_programs: int):
    for first, end in [(0, 1), (0, 128), (0, 3000), (200, 1300), (1030, 1031)]:
        shares = [share_of(first, end, program, num_programs) for program in range(num_programs)]
        taken = [share for share in shares if share[0] < share[1]]
        assert taken[0][0] == cut_before(first) and taken[-1][1] == end
        assert all(before[1] == after[0] for before, after in pairwise(taken))


def kernel_walk(monkeypatch: Any, table: TableView, block_size: int, window: int | None, num_programs: int) -> Any:
    """Run the decode kernels in the interpreter; return the tiles that each program of KV head 0 loads.

    A tile is its first token, the blocks that the kernel looked up for its visible tokens, and those tokens.
    """
    from triton.runtime.interpreter import interpreter_builder

    from minipaged.batching import kernels as batching
    from minipaged.paged import kernels as paged

    walk: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    cuts: dict[int, list[int]] = {}
    load_tokens, is_cut = paged.load_tokens, paged.is_cut

    def program() -> int | None:
        kv_head, _, split = interpreter_builder.grid_idx
        return split if kv_head == 0 else None

    def spy(k_pool, v_pool, block_id, kv_head, start, visible, *sizes: Any) -> Any:
        if (at := program()) is not None:
            seen = visible.handle.data.nonzero()[0]
            first = int(start if isinstance(start, int) else start.handle.data.item())
            blocks = block_id.handle.data[seen].tolist()
            walk.setdefault(at, []).append((first, blocks, (seen + first).tolist()))
        return load_tokens(k_pool, v_pool, block_id, kv_head, start, visible, *sizes)

    def spy_on_cut(end: Any, seq_len: Any) -> Any:
        answer = is_cut(end, seq_len)
        if (at := program()) is not None and bool(answer.handle.data.item()):
            cuts.setdefault(at, []).append(len(walk[at]) - 1)
        return answer

    monkeypatch.setattr(paged, "load_tokens", spy)
    monkeypatch.setattr(paged, "is_cut", spy_on_cut)
    num_blocks = max(table.block_ids) + 1
    pools = torch.zeros(2, num_blocks, block_size, 2, 16)
    q = torch.zeros(1, 2, 16)
    tables = torch.tensor([table.block_ids], dtype=torch.int32)
    seq_lens = torch.tensor([table.num_tokens], dtype=torch.int32)
    if num_programs == 1:
        paged.paged_attention(q, *pools, tables, seq_lens, scale=1.0, window=window)
    else:
        monkeypatch.setattr(batching, "programs_per_row", lambda num_rows, num_pieces: num_programs)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        batching.ragged_paged_attention(q, *pools, tables, starts, seq_lens, scale=1.0, window=window)
    return walk, cuts


CASES = {
    "one-program": (10, 4, None, 1),
    "tile-edge": (64, 16, None, 1),
    "odd-blocks": (77, 5, None, 1),
    "window": (150, 16, 70, 1),
    "splits": (300, 16, None, 3),
    "more-programs-than-pieces": (140, 8, None, 4),
    "window-and-splits": (420, 16, 250, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_walk_is_the_one_that_the_kernel_takes(name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("needs the interpreter, which has no GPU beside it")
    num_tokens, block_size, window, num_programs = CASES[name]
    num_blocks = -(-num_tokens // block_size)
    block_ids = random.Random(1).sample(range(2 * num_blocks), num_blocks)
    table = TableView(0, tuple(block_ids), num_tokens)
    tile_keys = decode_tiles(torch.zeros(1, 2, 16), 1).keys
    view = view_tile_walk(table, block_size, tile_keys, num_programs, window)
    walk, cuts = kernel_walk(monkeypatch, table, block_size, window, num_programs)
    for program, tiles in enumerate(view.programs):
        taken = walk.get(program, [])
        assert [tile.start for tile in tiles] == [tokens[0] for _, _, tokens in taken]
        for tile, (first, blocks, tokens) in zip(tiles, taken, strict=True):
            assert first == tile.start // tile_keys * tile_keys
            assert tokens == list(range(tile.start, tile.stop))
            assert blocks == [run.block_id for run in tile.runs for _ in range(run.stop - run.start)]
            slots = [slot for run in tile.runs for slot in range(run.start, run.stop)]
            assert slots == [token % block_size for token in tokens]
        assert [i for i, tile in enumerate(tiles) if tile.ends_piece] == cuts.get(program, [])
    assert sum(map(len, walk.values())) == view.num_tiles > 0


def test_pieces_are_counted_from_the_first_that_is_seen_and_each_ends_once():
    for num_tokens, window, num_programs in [(3000, None, 5), (3000, 700, 3), (128, None, 1), (129, None, 9)]:
        table = TableView(0, tuple(range(num_tokens)), num_tokens)
        view = view_tile_walk(table, 1, 32, num_programs, window)
        ends = [tile.piece for tiles in view.programs for tile in tiles if tile.ends_piece]
        assert ends == list(range(piece_of(num_tokens - 1) - piece_of(view.first) + 1))


def long_walk() -> TileWalkView:
    num_tokens = 1500
    num_programs = programs_per_row(8, num_pieces(num_tokens))
    return view_tile_walk(TableView(2, tuple(range(500, 406, -1)), num_tokens), 16, 64, num_programs)


def test_the_text_says_which_program_reads_which_tokens_from_which_blocks():
    lines = str(draw_tile_walk(view_tile_walk(TableView(1, (7, 2, 5), 10), 4, 8))).splitlines()
    assert lines == [
        "tile walk of B: 10 tokens in blocks of 4, 2 tiles of 8 keys, 1 program",
        "program  tile  tokens  piece  blocks",
        "      0     0  0-7         0  7 2",
        "      0     1  8-9         0  5[0-1]  then piece 0 is done",
        "the result is piece 0",
    ]


def test_a_long_walk_leaves_out_its_middle_and_counts_it():
    view = long_walk()
    lines = str(draw_tile_walk(view, width=80, max_rows=8)).splitlines()
    assert max(map(len, lines)) <= 80
    tiles = [line for line in lines[2:] if line.startswith("    ") and line.split()[0].isdigit()]
    left_out = next(line for line in lines if "more tiles" in line)
    assert len(tiles) + int(left_out.split()[1]) == view.num_tiles
    assert len(tiles) == 7
    assert lines[-2] == "the result is pieces 0 + 1 + 2 + ... + 8, folded from left to right"


def test_programs_without_work_are_mentioned():
    view = view_tile_walk(TableView(0, tuple(range(9)), 140), 16, 32, 4)
    assert str(draw_tile_walk(view)).endswith("3 programs found no piece to take")


@pytest.mark.parametrize("width", [1, 40, 80])
def test_a_walk_takes_any_width_and_no_tokens(width: int):
    empty = view_tile_walk(TableView(0, (), 0), 4, 8, 2)
    assert str(draw_tile_walk(empty, width)).splitlines()[2].startswith("no token is seen")
    assert draw_tile_walk_svg(empty, 200)
    assert draw_tile_walk(long_walk(), width).lines


def test_the_picture_has_each_tile_once_in_the_hue_of_its_sequence():
    view = long_walk()
    picture = draw_tile_walk_svg(view)
    assert picture.count(f'fill="{hue(2)}"') == view.num_tiles
    assert picture.count("stroke-dasharray") == view.num_pieces
    assert all(f">program {program}<" in picture for program in range(len(view.programs)))
