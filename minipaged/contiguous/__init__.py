"""Rung 1: keep K and V, in one dense reservation per sequence.

Rung 0 runs every token through the model at every step, though the keys and values of old tokens never change.
This rung keeps them. A decode step then runs one token per sequence and reads the rest:

    arena of 16 slots, model limit 8           A = 5 tokens so far, B = 2 tokens so far

    slot   0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15
           A0 A1 A2 A3 A4 .  .  . | B0 B1 .  .  .  .  .  .
           '-- reserved for A ---'  '-- reserved for B ---'

Nobody knows how long an answer will be, so each sequence reserves the longest length there is (``max``). The dots are
the price: slots that are reserved and may never be used. A third sequence cannot start, though nine slots are empty.
Two more policies show how much of that is ignorance: ``pow2`` knows the output's length to the next power of two, and
``oracle`` knows it exactly.

One token costs ``2 * layers * KV heads * head size`` numbers: keys and values, in every layer, for the KV heads
(not the query heads: grouped-query attention is why the cache is small).

Modules: `arena` (who owns which slots, and the policies), `buddy` (which ranges are free), `ops`, `reference` and
`kernels` (attention over dense rows), `generate` (the engine).
"""
