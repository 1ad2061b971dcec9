# %% [markdown]
# # 03  Sharing
#
# Three answers to one question need the question's keys and values once, not three times. This lesson lets several
# block tables hold the same block. It takes a count per block, a **fork** that copies nothing, and a **copy-on-write**
# that copies one block at the last possible moment. That is all that n samples, best-of and beam search need.
#
# You write the counts, the copy-on-write and the copies. At the end the real chat answers three times with your code.
#
# ## Where we are
#
# [Lesson 02a](02a_paged_storage.ipynb) gave every sequence a block table over one pool. Below is the pool of that rung
# with three sequences in it. All three have the same prompt of six tokens, in blocks of four slots.

# %%
import torch

from minipaged import LLM, SamplingParams, use
from minipaged.errors import AccountingError
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.lessons.exercises.sharing import check_copy_blocks, check_prepare_write, check_ref_counts
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.cache import PagedCache
from minipaged.sharing.cache import SharingCache
from minipaged.viz import draw_pool, draw_pool_svg, letter, view_cache

# %%
paged = PagedCache(num_blocks=8, block_size=4)
for seq_id in range(3):
    paged.allocate(seq_id, num_prompt_tokens=6, max_slots=8)
show(draw_pool(view_cache(paged)), draw_pool_svg(view_cache(paged)))
print({letter(seq_id): table.block_ids for seq_id, table in paged.tables.items()})

# %% [markdown] given="16"
# A, B and C each have two blocks. The pool cannot know it, but blocks 0, 2 and 4 hold the same bits: the keys and
# values of a token depend on that token and on those before it, and on nothing else, and the
# tokens are equal. So blocks 1, 3 and 5 hold the same bits too.
#
# ## The problem, measured
#
# People ask for several answers to one prompt all the time: samples to choose from, the best of several, a beam search,
# `/fork` in our chat. Often the prompt is long and the answers are short. Here are eight answers to a prompt of a
# thousand tokens, in blocks of 16.

# %%
cache = PagedCache(num_blocks=1000, block_size=16)
for seq_id in range(8):
    cache.allocate(seq_id, num_prompt_tokens=1000, max_slots=1032)
    for _ in range(32):
        cache.append(seq_id)
used = cache.pool.num_blocks - cache.pool.num_free
print(f"{used} blocks in use for 8 answers of 32 tokens")
print(f"{7 * 1000} of {8 * 1032} keys and values are in the pool already, in another block")

# %% [markdown] given="16 40"
# Most of the memory holds copies. And to fill it, the model has computed the prompt eight times.
#
# > **Predict.** Let sequences share a block for as long as they agree about everything in it. Blocks of 16 slots, one
# > prompt of 40 tokens, three sequences, and each writes 8 tokens of its own behind the prompt. How many blocks are in
# > use at the end? How many would it be without sharing? How many blocks had to be copied on the way?
#
# The next cell runs it on the real bookkeeping of this rung. It knows no tensors; it only keeps the books. As on the
# rung before, `allocate` promises room before anything is written: here for three sequences of up to `max_slots` each.

# %%
cache = SharingCache(num_blocks=20, block_size=16)
cache.allocate(0, num_prompt_tokens=40, max_slots=48, num_sequences=3)
cache.fork(0, 1)
cache.fork(0, 2)
for _ in range(8):
    for seq_id in (0, 1, 2):
        cache.append(seq_id)
print(cache.sharing())
show(draw_pool(view_cache(cache)), draw_pool_svg(view_cache(cache)))

# %% [markdown]
# Five blocks, where nine would be needed. The prompt fills two blocks and half of a third. The two full ones are shared
# by all, and drawn hatched. In the third, all three want to write different things behind the prompt, so each needs a
# block of its own. That makes two copies and not three: the last of the three can have the old block.
#
# ## The idea
#
# Every block gets a **count**: how many block tables hold it. Four rules follow.
#
# | when | what happens |
# |---|---|
# | a block is taken from the pool | its count is one |
# | a sequence is **forked** | the child gets a copy of the block *table*; each block in it counts one more |
# | a sequence is **freed** | each of its blocks counts one less; at zero the block is free |
# | a sequence **writes** into a block that counts over one | it takes a new block and copies; the old counts one less |
#
# The last rule is copy-on-write. Operating systems do the same with the memory of a process that forks, and the words
# come from there. The [PagedAttention paper](https://arxiv.org/abs/2309.06180) brought it to keys and values, and vLLM
# began with it. In today's vLLM each sample is a request of its own that finds the prompt's full blocks by their
# content, which is [lesson 05](05_prefix.ipynb), and beam search runs outside the engine.
#
# Two things make it cheap. A sequence only ever writes behind its last token, so **a full block is never written
# again** and never copied. And only the last block can be part-full, so **each fork costs at most one block copy**,
# however long the prompt is.
#
# ## By hand
#
# Here is a small pool that has been in use for a while. Its next free blocks are 7, 2, 5 and 0, in this order. A prompt
# of six tokens comes in, and two sequences fork from it.

# %%
cache = SharingCache(num_blocks=8, block_size=4)
for _ in range(8):
    cache.pool.allocate()
for block_id in (7, 2, 5, 0, 1, 3, 4, 6):  # the order in which they become free is the order in which they are reused
    cache.pool.free(block_id)


def print_books() -> None:
    for seq_id, table in cache.tables.items():
        counts = [cache.pool.num_references(block_id) for block_id in table.block_ids]
        print(f"{letter(seq_id)}: {table.num_tokens} tokens, blocks {table.block_ids}, counts {counts}")


# %%
cache.allocate(0, num_prompt_tokens=6, max_slots=12, num_sequences=3)
cache.fork(0, 1)
cache.fork(0, 2)
print_books()
show(draw_pool(view_cache(cache)), draw_pool_svg(view_cache(cache)))

# %% [markdown]
# Three tables, two blocks, and every count is 3. Nothing was moved.
#
# > **Predict.** Now A writes its seventh token, then B, then C. Write down the three tables after each of the writes,
# > the counts, and which block is copied to which. The next free blocks are 5 and 0.

# %%
for seq_id in (0, 1, 2):
    slot = cache.append(seq_id)
    print(f"{letter(seq_id)} writes into slot {slot}; copies (from, to) {cache.take_copies()}")
    print_books()
show(draw_pool(view_cache(cache)), draw_pool_svg(view_cache(cache)))

# %% [markdown]
# A found block 2 with a count of 3. It took block 5 and the count of block 2 fell to 2. B did the same with block 0,
# and the count fell to 1. C then was alone: it writes in place. Block 7 is full. It stays shared, and nobody will ever
# write into it.
#
# ## Build it: the counts
#
# Rung paged's pool knows two states, free and taken. Yours counts. The class below is that pool with a list of counts
# beside it: 0 for a free block, and 1 for one that was just taken. And this is what a pool says when somebody uses it
# wrongly:

# %%
try:
    BlockPool(num_blocks=3, block_size=4).free(0)
except AccountingError as error:
    print("AccountingError:", error)


# %%
class PoolWithCounts(BlockPool):
    """A pool with a count for each block."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.counts = [0] * num_blocks

    def num_references(self, block_id: int) -> int:
        return self.counts[block_id]

    def allocate(self) -> int:
        block_id = super().allocate()
        self.counts[block_id] = 1
        return block_id


# %% [markdown]
# What makes counts out of them are two methods, `share` and `free`. They are yours.


# %% tags=["exercise"]
class MyRefCountedPool(PoolWithCounts):
    """A pool whose blocks can have several owners.

    `share` counts one more. Nobody can share a free block: raise AccountingError("...") then. `free` counts one less.
    Only the last one gives the block back, with `super().free(block_id)`, which also raises for a block that is free.
    """

    def share(self, block_id: int) -> None:
        raise NotYet

    def free(self, block_id: int) -> None:
        raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# In `free` there are two cases. While others hold the block too, the count changes and nothing else. Otherwise
# `super().free(block_id)` goes first: it raises if the block is free already, and then the count must stay as it is.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class MyRefCountedPool(PoolWithCounts):
#     def share(self, block_id: int) -> None:
#         if self.counts[block_id] == 0:
#             raise AccountingError(f"block {block_id} is free and cannot be shared")
#         self.counts[block_id] += 1
#
#     def free(self, block_id: int) -> None:
#         if self.counts[block_id] > 1:
#             self.counts[block_id] -= 1
#             return
#         super().free(block_id)
#         self.counts[block_id] = 0
# ```
#
# </details>

# %%
check_ref_counts(MyRefCountedPool)

# %% [markdown]
# ## Build it: copy-on-write
#
# Before a token is written, `SharingCache.append` looks at the sequence's last block. If the block is full, a new one
# is taken and there is nothing to copy. If not, it calls `prepare_write`. That one has to see to it that the last block
# belongs to this sequence alone.
#
# The bookkeeping has no tensors, so it cannot copy keys and values. It **notes** the copy, as a pair (from, to). The
# engine collects the pairs of all sequences and makes all copies of a step at once, *before* the step writes anything.


# %% tags=["exercise"]
def my_prepare_write(cache: SharingCache, seq_id: int) -> None:
    """Make the last block of a sequence its own before a token is written into it.

    `cache.tables[seq_id].block_ids` is the sequence's table, and `cache.pool.num_references(id)` a block's count. If
    the last block has only this sequence, do nothing. If others hold it too: take a block with `cache.pool.allocate()`,
    give this sequence's reference to the old one back with `cache.pool.free(old)`, put the new id in its place in the
    table, append the pair (old, new) to `cache.pending_copies`, and count the copy in `cache.num_copies`.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `cache.pool.free(old)` does not free the block here: it takes one reference away, and others are left. That is why the
# content is still there when the copy is made.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_prepare_write(cache: SharingCache, seq_id: int) -> None:
#     table = cache.tables[seq_id]
#     old = table.block_ids[-1]
#     if cache.pool.num_references(old) == 1:
#         return
#     new = cache.pool.allocate()
#     cache.pool.free(old)
#     table.block_ids[-1] = new
#     cache.pending_copies.append((old, new))
#     cache.num_copies += 1
# ```
#
# </details>

# %%
check_prepare_write(my_prepare_write)

# %% [markdown] given="30 60"
# ## Build it: the copies
#
# A decoder layer has a pool of keys and a pool of values, each `[N, S, K, D]`: blocks, slots, KV heads, head dim. Our
# engine allocates all of them as one tensor `[layers, 2, N, S, K, D]`. One id then names a block in every layer, and
# one call can copy it in all of them. With the 30 layers of our default model that is 60 small copies in one call.
#
# `copy_blocks` gets either form, with 4 axes or with 6.


# %% tags=["exercise"]
def my_copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks inside the pool, in place.

    `pool` is [N, S, K, D], or everything at once: [layers, 2, N, S, K, D]. `pairs` is [P, 2], int64: (from, to) block
    ids. The block axis is the fourth from the end in both forms. No target stands twice or is also a source, so the
    order of the copies does not matter. Return nothing: `pool` itself has to change.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `pool.view(-1, *pool.shape[-4:])` sees both forms as `[planes, N, S, K, D]` without a copy. Then a list of block ids
# can index the second axis on both sides of an assignment.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
#     planes = pool.view(-1, *pool.shape[-4:])  # [planes, N, S, K, D]
#     planes[:, pairs[:, 1]] = planes[:, pairs[:, 0]]
# ```
#
# </details>

# %%
check_copy_blocks(my_copy_blocks)

# %% [markdown]
# ## Samples of a real model
#
# Now the real engine of this rung, with small blocks so that there is something to see. It computes the prompt
# **once**. Then it forks, and each sample draws its first token from the same logits, with its own seed.

# %%
llm = LLM(lesson_model(), rung="sharing", block_size=4, num_blocks=64, dtype="float32")
prompt = llm.tokenizer.encode("The old man looked at") if llm.tokenizer else [3, 14, 15, 92, 65]
params = SamplingParams(n=3, temperature=0.8, max_tokens=8, seed=1, ignore_eos=True)
llm.engine.add_request(prompt, params)
print(f"prompt of {len(prompt)} tokens, 3 samples")
while llm.engine.has_unfinished():
    llm.engine.step()
    tables, sharing = llm.engine.cache.tables.values(), llm.engine.cache.sharing()
    print([table.block_ids for table in tables], f"used {sharing.num_blocks_used}", f"copies {sharing.num_copies}")

# %% [markdown]
# Read it from the top. After the first step the three tables are equal: the fork. In the next step all three write
# behind the prompt. Two of them copy and the third keeps the old block. From then on each grows alone, and the first
# block of the prompt stays shared to the end. (In the last step all three end, and their tables are gone.)
#
# Is it right? There is a hard test. Every sample has its own seed, so it can be made again **alone**, as the only
# sequence of the engine. If sharing is right, the tokens must be the same, one by one.


# %%
def matches_alone(results) -> list[bool]:
    """Return for each sample whether a run of it alone gives the same tokens."""
    alone = [SamplingParams(temperature=0.8, max_tokens=8, seed=r.seed, ignore_eos=True) for r in results]
    return [llm.generate([prompt], p)[0].token_ids == r.token_ids for r, p in zip(results, alone, strict=True)]


results = llm.generate([prompt], params)
print([result.text or result.token_ids for result in results])
print(matches_alone(results))

# %% [markdown]
# ## Beam search: a fork at every step
#
# Samples fork once. Beam search forks all the time. It keeps the few continuations with the highest probability so far,
# the **beams**. At every step it looks at all continuations of all beams by one token, and keeps the best again. A beam
# with two good continuations forks. A beam with none is dropped, and its blocks are freed.
#
# `BeamSearch` decides who lives. It knows only numbers, so it runs by hand. Take a vocabulary of three tokens and two
# beams. The first token has the probabilities below; the two best live on.

# %%
from minipaged.sharing.beam import BeamSearch

search = BeamSearch(beam_width=2, max_tokens=9, end_token_ids=())
print(search.advance(torch.tensor([[0.2, 0.5, 0.3]]).log()))
print([(beam.token_ids, round(beam.cumulative_logprob, 2)) for beam in search.live])

# %% [markdown] given="0.5 0.3 0.1 0.4"
# Beam 0 has probability 0.5, beam 1 has 0.3. (The numbers printed are logarithms.) Each entry of the first line is
# (parent, token): both come from the prompt, which is parent 0, and took the tokens 1 and 2.
#
# > **Predict.** After beam 0, the next token has the probabilities 0.5, 0.1, 0.4. After beam 1 they are 0.3, 0.3, 0.4.
# > Which two continuations live on? Which beam forks, and which one is dropped?

# %%
after_beam_0, after_beam_1 = [0.5, 0.1, 0.4], [0.3, 0.3, 0.4]
print(search.advance(torch.tensor([after_beam_0, after_beam_1]).log()))
print("all six:", [[round(p * q, 2) for q in row] for p, row in ((0.5, after_beam_0), (0.3, after_beam_1))])

# %% [markdown]
# 0.25 and 0.2 are the best two: token 0 and token 2, both after beam 0. Beam 0 goes on as its own first child and forks
# once for the second. Beam 1 is dropped. Its blocks go back **before** the others write, since those may be the ones
# they need.
#
# Here is a search of the real model, three beams wide. Watch who shares what.

# %%
llm.engine.add_request(prompt, SamplingParams(beam_width=3, max_tokens=9))
before = llm.stats()["copies"]
while llm.engine.has_unfinished():
    outputs = llm.engine.step()
    tables, sharing = llm.engine.cache.tables, llm.engine.cache.sharing()
    print(
        {letter(seq_id): table.block_ids for seq_id, table in tables.items()},
        f"used {sharing.num_blocks_used}, without sharing {sharing.num_blocks_without_sharing},",
        f"copies {sharing.num_copies - before}",
    )
print(outputs[0].result.text or outputs[0].result.token_ids)

# %% [markdown]
# Letters come and go: a new letter is a fork, a missing one was dropped. Often two tables agree in more than the
# prompt, because both beams come from one parent a few tokens ago. Nobody arranged that. It follows from the four
# rules.
#
# Copies happen only where a fork falls into a part-full block. Where every beam has a dense range of its own, as in
# [lesson 01](01_contiguous.ipynb), a fork copies *all* keys and values of the beam.
#
# ## Your version in the real chat
#
# `ask` starts the same chat that `python -m minipaged.chat` starts, with your function in the place of the engine's
# own. `--fork 3` answers three times over one prompt. First your copy-on-write alone; then everything you have built.

# %%
ask("Write one sentence about the sea.", "sharing", "--fork", "3", "--num-blocks", "16", "--seed", "1",
    max_tokens=16, prepare_write=my_prepare_write)  # fmt: skip

# %%
ask("Write one sentence about the moon.", "sharing", "--fork", "3", "--num-blocks", "16", "--seed", "1", max_tokens=12,
    prepare_write=my_prepare_write, copy_blocks=my_copy_blocks, ref_counted_block_pool=MyRefCountedPool)  # fmt: skip

# %% [markdown]
# If you have solved them, look at the line under the tables: blocks in use, blocks saved, and the two copies that your
# function asked for. A shared block is drawn with `#`.
#
# ## Reference to kernel
#
# [`sharing/reference.py`](../minipaged/sharing/reference.py) is the two lines you have just written.
# [`sharing/kernels.py`](../minipaged/sharing/kernels.py) is the Triton kernel. There is no arithmetic in it. Its grid
# has three axes: a program copies a piece of **one pair's block, in one plane**, and all of them run in any order. That
# is allowed because no target stands twice or is also a source. The bookkeeping sees to it: a target is a new block,
# and `check()` asserts that one sequence alone has it.
#
# The next cell runs the kernel on a small pool, in Triton's interpreter if this machine has no GPU.

# %%
import os

from minipaged import UserError
from minipaged.sharing.ops import copy_blocks
from minipaged.triton_support import require_triton

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which the next cell does
pool = torch.arange(3 * 2 * 8 * 4 * 1 * 2, dtype=torch.float32, device=device).view(3, 2, 8, 4, 1, 2)
pairs = torch.tensor([[2, 5], [2, 0]], device=device)

# %%
by_torch, by_triton = pool.clone(), pool.clone()
copy_blocks(by_torch, pairs, tier="torch")
try:
    require_triton(device)
    copy_blocks(by_triton, pairs, tier="triton")
    print("programs", (len(pairs), 3 * 2, 1), "same bits as PyTorch:", torch.equal(by_torch, by_triton))
except UserError as error:
    print(error)

# %% [markdown]
# ## What would break if...
#
# **... nobody copied?** One line takes the copy-on-write away: all three samples write into the same slot, and the last
# one wins. Nothing crashes.
#
# > **Predict.** Which of the three samples are still what they would be alone?

# %%
with use(prepare_write=lambda cache, seq_id: None):
    broken = llm.generate([prompt], params)
print([result.text or result.token_ids for result in broken])
print(matches_alone(broken))

# %% [markdown]
# Only the last one: nobody wrote over it. With the default model the wrong answers still read like language. That is
# what makes this bug so bad: two of the three samples went on from keys and values that belong to another one. The test
# that catches it compares with solo runs, as you did above: `test_every_child_equals_a_solo_run_with_its_seed` in
# `tests/sharing/test_generate.py`.
#
# **... the old reference was not given back?** Engines have had this bug in both directions: a reference freed twice,
# and one that was never freed. Here is the second.
#
# > **Predict.** Without the line marked below, three samples of a prompt with a part-full block make how many copies?
# > How many blocks does every such request lose for ever?


# %%
def leak(cache: SharingCache, seq_id: int) -> None:
    old = cache.tables[seq_id].block_ids[-1]
    if cache.pool.num_references(old) > 1:
        new = cache.pool.allocate()
        # cache.pool.free(old) is missing here
        cache.tables[seq_id].block_ids[-1] = new
        cache.pending_copies.append((old, new))


# %%
books = SharingCache(num_blocks=16, block_size=4)
with use(prepare_write=leak):
    for _ in range(4):
        books.allocate(0, num_prompt_tokens=6, max_slots=8, num_sequences=3)
        books.fork(0, 1)
        books.fork(0, 2)
        for seq_id in (0, 1, 2):
            books.append(seq_id)
        num_copies = len(books.take_copies())
        for seq_id in (0, 1, 2):
            books.free(seq_id)
        print(f"{num_copies} copies; nobody runs any more, and {books.pool.num_free} of 16 blocks are free")

# %% [markdown]
# The count of the old block stays at three. So the third sequence copies too, and then nobody is left who could give
# the old block back. All answers are right, and yet the pool shrinks by a block with every request, until nothing fits
# any more. Tests of answers cannot see it. `test_small_random_walks_lose_no_block_and_change_no_token` in
# `tests/sharing/test_cache.py` can: it forks, writes and frees at random, and after every step `check()` compares each
# count with the tables.
#
# ## Measure
#
# What does sharing save? That depends on how much of a request is prompt. Four samples of 32 tokens each, in blocks of
# 16, counted on the books of both rungs:


# %%
def blocks_in_use(cache, num_prompt_tokens: int) -> int:
    if isinstance(cache, SharingCache):
        cache.allocate(0, num_prompt_tokens, num_prompt_tokens + 32, num_sequences=4)
        for seq_id in (1, 2, 3):
            cache.fork(0, seq_id)
    else:
        for seq_id in range(4):
            cache.allocate(seq_id, num_prompt_tokens, num_prompt_tokens + 32)
    for _ in range(32):
        for seq_id in range(4):
            cache.append(seq_id)
    return cache.pool.num_blocks - cache.pool.num_free


# %%
print("prompt   paged   sharing   copies   paged/sharing")
for num_prompt_tokens in (8, 40, 200, 1000):
    sharing_cache = SharingCache(1000, 16)
    paged_blocks = blocks_in_use(PagedCache(1000, 16), num_prompt_tokens)
    blocks = blocks_in_use(sharing_cache, num_prompt_tokens)
    ratio = paged_blocks / blocks
    print(f"{num_prompt_tokens:6} {paged_blocks:7} {blocks:9} {sharing_cache.num_copies:8} {ratio:15.2f}")

# %% [markdown]
# With a short prompt there is nothing to share: no full block, so no saving. With a long one the ratio goes towards
# four, the number of samples. The copies stay at three: one less than the samples, wherever the prompt ends within a
# block. The prompt is also *computed* once and not four times.
#
# ## Recap
#
# Three takeaways:
#
# 1. A fork copies a table and counts. Keys and values do not move.
# 2. Only a part-full block is ever copied, at the first write, and the last reader writes in place.
# 3. A wrong count does not crash. It corrupts or it leaks, so the books have a `check()` and tests that call it.
#
# Three questions:
#
# <details>
# <summary>A prompt fills its blocks exactly. How many copies do its samples make?</summary>
#
# None. The first token of each sample opens a new block, and full blocks are never written.
#
# </details>
#
# <details>
# <summary>Why are the copies made before the writes of a step, and not after?</summary>
#
# The copy brings the old content of the whole block. Made afterwards, it would overwrite the new token's key and value
# with whatever the old block has in that slot. And the last reader may have written its own token there by then.
#
# </details>
#
# <details>
# <summary>Two users send the same long system prompt in two requests. Do they share its blocks here?</summary>
#
# No. Blocks are shared only by forking, inside one request. Finding equal blocks of strangers by their content is
# [lesson 05](05_prefix.ipynb).
#
# </details>
#
# **What the next rung fixes.** All this still runs in static batches: the batch is formed, and nobody joins before its
# longest member has ended. And every request is promised the blocks of its longest possible answer before it may start.
# [Lesson 04](04_batching.ipynb) gives up both.
