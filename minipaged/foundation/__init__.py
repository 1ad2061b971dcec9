"""Rung 0: a decoder without a cache. Every token is recomputed at every step; the oracle of all rungs above.

    step 1    The capital of France            -> is          5 tokens through the model
    step 2    The capital of France is         -> Paris       6 tokens, 5 of them again
    step 3    The capital of France is Paris   -> .           7 tokens, 6 of them again

An answer of g tokens to a prompt of P costs ``g * P + g * (g - 1) / 2`` token passes. With keys and values kept
(rung 1) it costs ``P + g - 1``: for P = 100 and g = 100 that is 199 in the place of 14,950.

Modules, in the order of a request's life: `weights` and `config` (a checkpoint becomes a model; `default_model`
makes the one that comes through pip), `tokenizer` (text becomes ids), `generate` (the engine: requests become
batches, batches become steps), `model` (a step becomes logits; `ops` and `reference` are its operations),
`sampling` and `philox` (logits become a token), `detokenizer` (tokens become text that can be streamed).
"""
