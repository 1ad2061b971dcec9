"""Rung 0: a decoder without a cache. Every token is recomputed at every step; the oracle of all rungs above.

    step 1    The capital of France            -> is          5 tokens through the model
    step 2    The capital of France is         -> Paris       6 tokens, 5 of them again
    step 3    The capital of France is Paris   -> .           7 tokens, 6 of them again

An answer of g tokens to a prompt of P costs ``g * P + g * (g - 1) / 2`` token passes. With keys and values kept
(rung 1) it costs ``P + g - 1``: for P = 100 and g = 100 that is 199 in the place of 14,950.

Modules, in the order of a request's life:

- `default_model` makes the model that comes through pip ready, with `gguf_conversion`.
- `config` says what a checkpoint is, `rope` how it turns queries and keys, and `weights` loads it.
- `tokenizer` turns text into ids, and a conversation by its `chat_template`, which `control_tokens` guards.
- `sampling_params` holds how a request's tokens are chosen and when it stops.
- `sequence` is the request while it runs, and `generate` the engine that moves all of them on, step by step.
- `model` turns a step's tokens into logits; its `ops` run as `reference` (PyTorch) or as `kernels` (Triton).
- `sampling` turns logits into a token: `filters` leave out the unlikely ones, `philox` draws the noise, and `sampler`
  makes the choice an operation with kernels.
- `detokenizer` turns tokens into text that can be streamed.
"""
