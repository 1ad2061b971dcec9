"""Rung 3: reference counts, fork, copy-on-write. Several continuations share the blocks of what they have in common.

Three samples of one prompt differ only behind the prompt, yet rung 2 would store the prompt three times:

    S = 4, prompt of 6 tokens, three samples, 1 token each       block      7     2     5     0
                                                                 holds     P0-3  P4-5  P4-5  P4-5
    after fork           A, B, C: [7, 2]     counts 3, 3                         + a   + b   + c
    A writes token a     copies 2 to 5       A: [7, 5]
    B writes token b     copies 2 to 0       B: [7, 0]           counts     3     1     1     1
    C writes token c     owns 2 alone now    C: [7, 2]           (A has 5, B has 0, C has 2)

A fork copies no keys and values, it only counts. The first write into a block that others still read copies that
block first, in all decoder layers with one launch; the last reader writes in place. Full blocks are never written
again, so they are never copied: a fork costs at most one block copy, however long the prompt is.

What becomes possible: `n` samples and `best_of` over one prompt, and beam search, which forks at every step.

Modules: `ref_pool` (counts), `cache` (fork and copy-on-write), `ops`, `reference`, `kernels` (copying blocks), `params`
(what a request may ask for), `beam` (which beams live on), `family` (the sequences of a request), `generate` (the
engine).
Source: Kwon et al., SOSP 2023, section 4.4; the idea is the copy-on-write of a process's fork.
"""
