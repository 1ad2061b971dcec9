"""Rung 2: fixed-size blocks from one pool, and a block table per sequence (PagedAttention).

Rung 1 reserves the longest length there is. This rung hands out slots in blocks, when they are needed:

    pool of 8 blocks, 4 slots each      sequence A, 10 tokens          sequence B, 3 tokens

    block  0  1  2  3  4  5  6  7       block table A: [7, 2, 5]       block table B: [0]
           B  .  A  .  .  A  .  A

    token 6 of A  ->  its block 6 // 4 = 1, that is pool block 2; place 6 % 4 = 2  ->  slot 2 * 4 + 2 = 10

Blocks need not lie side by side, so any free block serves anybody: no external waste. Only the last block of a
sequence can be part empty: at most ``block size - 1`` slots. The idea is an operating system's paging: block =
page, block table = page table, sequence = process.

The price is one more look-up: attention walks the block table to find its keys and values.

Modules: `block_pool` (which blocks are free), `block_table` (which blocks a sequence has), `cache` (both together
for all sequences), `ops`, `reference` and `kernels` (writing slots, attention through block tables), `generate`.
Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023.
"""
