"""Rung 4: continuous batching. Requests join and leave at every step, and nobody waits for the longest.

A static batch runs until its longest member ends; whoever ends before leaves a seat that stays empty. Here the batch
is formed anew at every step, of the tokens of prompts (p) and of answers (a):

    5 tokens a step       step 1   step 2   step 3   step 4   step 5       A: prompt of 3, 4 answer tokens
    request A             p p p    a        a        a                     B: prompt of 5, 2 answer tokens
    request B             p p      p p p    a                              C: prompt of 6, 2 answer tokens
    request C                      p        p p p    p p      a            (a prompt's last token gives the first)

Long prompts are cut into chunks that fit beside the others' tokens, so no answer stops for them. A request enters as
soon as the blocks of its prompt are free. That is a bet: all of them may grow until no block is left. Then the newest
is sent away. Its blocks are thrown away and computed again later, or moved to CPU memory and back; its tokens, its
text and its noise are kept either way. (What was moved has the same bits. What was computed again may round otherwise
in half precision, as a chunk where it was decoded before.)

                 enter                              end
      waiting ----------> running -----------------------> done
         ^                   |
         +-------------------+ no block left: recompute or swap

Modules: `scheduler` (who runs), `plan` (what a step does), `group` (a request with all its samples or beams),
`preemption` (who is sent away, and how), `cache` and `arena_cache` (the books under the scheduler), `swap_space`,
`ops`, `reference`, `kernels` (attention over rows of any length; moving blocks) and `prefill.kernels` (its prompts),
`params`, `generate` (the engine).
Source: Yu et al., OSDI 2022 (Orca); Kwon et al., SOSP 2023, sections 4.3 and 4.5 (vLLM).
"""
