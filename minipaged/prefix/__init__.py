"""Rung 5: prefix caching. A block is found again by what it holds, so a common beginning is computed once.

When a request ends, its blocks go back to the pool, but what they hold is still right: keys and values depend on the
tokens up to them and on nothing else. So a full block gets a name made of its tokens and its parent's name, and the
next request looks its own blocks up:

    S = 4    A: [The cat sat on] [a mat and then] [it]        names: h1 = H(root, "The cat sat on")
             block 7: h1         block 2: h2      block 5            h2 = H(h1, "a mat and then")

             B: [The cat sat on] [a dog and then] [it]        finds h1 and shares block 7, whether A still runs or
             block 7: h1         block 3: h3      block 4     has ended; everything behind "on" is computed

A cached block that nobody uses counts as free. It is given up when the pool needs it, the one that was used longest
ago first; until then it costs nothing. A radix tree in place of the names finds a beginning to the token: it copies
the block that begins as the prompt goes on ("a" of block 2), where names can only share whole blocks.

Who shares can be heard: a prompt that answers sooner than it should was sent before, by somebody. A request's
`cache_salt` goes into the root of its names, so only requests with the same salt find each other's blocks.

Where rows of a step have 1,024 tokens or more at their beginning in the same blocks, attention reads those once for
all of them (`shared_prefix_attention`; vLLM calls it cascade attention).

Modules: `block_key` (names), `index` (the interface), `hash_chain`, `radix_tree`, `eviction`, `caching_pool`, `walk`,
`cache`, `scheduler`, `ops`, `reference`, `kernels`, `params`, `metrics`, `generate`.
Source: automatic prefix caching of vLLM; RadixAttention of SGLang (Zheng et al., 2024).
"""
