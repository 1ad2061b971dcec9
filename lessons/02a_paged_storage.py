# %% [markdown] given="64 16"
# # 02a  Paged storage: blocks, tables and slots
#
# A language model keeps the keys and values of all tokens that it has seen. In [lesson 01](01_contiguous.ipynb) each
# sequence kept them in one dense range of memory, and the range had to be reserved before anybody knew how long the
# answer would be.
#
# This lesson changes one thing: **where** a key and a value lie. Attention itself stays the same. You will build the
# four parts that do it, each a few lines:
#
# - a *slot mapping*: in which slot of memory does token number i lie?
# - *append*: when does a growing sequence need more memory?
# - a *block pool*: who has which piece of memory?
# - *write*: put keys and values there.
#
# At the end the real chat answers a question on your pool and your writes. Attention that reads this memory is
# [lesson 02b](02b_paged_kernel.ipynb).
#
# ## Where we are
#
# A **slot** is room for the key and the value of one token (in every layer). Here is the memory of lesson 01 with a
# row of 64 slots. The longest sequence allowed is 16 tokens, so every sequence reserves 16 slots when it enters.

# %%
from minipaged.contiguous.arena import Arena
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.viz import draw_arena, draw_arena_svg, view_arena

NUM_TOKENS = [10, 3, 5, 7]  # of four sequences: 0 is drawn as A, 1 as B, and so on
arena = Arena(num_slots=64, max_model_len=16)
for seq_id, num_tokens in enumerate(NUM_TOKENS):
    arena.allocate(seq_id, num_tokens, num_output_tokens=1)
view = view_arena(arena.num_slots, arena.ranges)
show(draw_arena(view), draw_arena_svg(view))

# %% [markdown]
# ## The problem, measured
#
# Now a fifth sequence arrives. It has three tokens.

# %%
held = sum(NUM_TOKENS)
print(f"{held} slots hold a token, {arena.num_slots - held} of {arena.num_slots} hold nothing")
print("a sequence of 3 tokens may enter:", arena.can_admit(num_prompt_tokens=3, num_output_tokens=1))

# %% [markdown] given="10 5 7 4 16"
# More than half of the memory is empty, and three tokens find no place. The empty slots belong to sequences that
# *might* grow into them.
#
# The waste has one cause: a sequence's slots must lie side by side. A range cannot grow later, because a neighbour
# may stand in the way. So it has to be as long as the longest answer from the start.
#
# What if they need not lie side by side?
#
# ## Predict
#
# Cut the same 64 slots into **blocks** of four slots. A sequence gets a block only when it has a token to put there.
# It never gets half a block.
#
# > **Predict.** Four sequences of 10, 3, 5 and 7 tokens, blocks of 4 slots. How many of the 16 blocks do they take
# > together? How many slots of those blocks hold nothing?

# %%
from minipaged.paged.cache import PagedCache
from minipaged.viz import draw_pool, draw_pool_svg, view_cache

cache = PagedCache(num_blocks=16, block_size=4)
for seq_id, num_tokens in enumerate(NUM_TOKENS):
    cache.allocate(seq_id, num_tokens, max_slots=16)
print("blocks taken:", cache.pool.num_blocks - cache.pool.num_free)
print("slots taken that hold nothing:", cache.waste().internal)
show(draw_pool(view_cache(cache)), draw_pool_svg(view_cache(cache)))

# %% [markdown]
# Half of the memory is free again, for anybody. What is lost is lost in the **last** block of each sequence, and there
# it is at most three slots.
#
# ## The idea
#
# It is how operating systems give memory to programs. A program sees one long row of addresses. The system cuts the
# row into pages, puts each page anywhere, and keeps a table that says where. The authors of
# [PagedAttention](https://arxiv.org/abs/2309.06180) did the same to keys and values:
#
# | operating system | here |
# |---|---|
# | process | sequence |
# | page | block |
# | page table | **block table**: the ids of a sequence's blocks, in the order of its tokens |
# | physical memory | **block pool** |
#
# The blocks above lie in a tidy order, because nobody has left yet. After some traffic they do not. Let us make a pool
# that has a past. Our pool hands out free blocks in the order in which they came back, so the past decides the ids.

# %%
from minipaged.paged.block_pool import BlockPool


def used_pool(num_blocks, block_size, free_ids):
    """Return a pool whose blocks are all taken but `free_ids`, which it will hand out in that order."""
    pool = BlockPool(num_blocks, block_size)
    for _ in range(num_blocks):
        pool.allocate()
    for block_id in free_ids:
        pool.free(block_id)
    return pool


print(used_pool(8, 4, [7, 2, 5]).free_block_ids)

# %% [markdown]
# A sequence of ten tokens enters this pool. It takes blocks 7, 2 and 5, and that list is its block table. (The marks
# `?` are blocks that others hold.)

# %%
from minipaged.paged.block_table import BlockTable
from minipaged.viz import TableView, draw_block_table, draw_block_table_svg, view_pool

pool = used_pool(8, 4, [7, 2, 5])
table = BlockTable(block_size=4, block_ids=[pool.allocate() for _ in range(3)], num_tokens=10)
show(draw_pool(view_pool(pool, {0: table})), draw_pool_svg(view_pool(pool, {0: table})))
own = TableView(seq_id=0, block_ids=tuple(table.block_ids), num_tokens=table.num_tokens)
show(draw_block_table(own, block_size=4), draw_block_table_svg(own, block_size=4))

# %% [markdown]
# ## By hand
#
# Slots are numbered through the whole pool. Block 0 has slots 0 to 3, block 1 has slots 4 to 7, and block `b` begins
# at slot `b * 4`.
#
# Take token 6 of our sequence (tokens are counted from 0):
#
# 1. `6 // 4 = 1`: look at entry 1 of the table. (Entries are counted from 0, too.)
# 2. This entry says: block 2 of the pool.
# 3. `6 % 4 = 2`: it has place 2 inside the block.
# 4. So its slot is `2 * 4 + 2 = 10`.
#
# A division, a look-up, a remainder. That is all of paging.
#
# > **Predict.** With the table `[7, 2, 5]`: in which slots do tokens 0, 3, 4 and 9 lie?

# %%
for token in (0, 3, 4, 6, 9):
    index, place = token // 4, token % 4
    block_id = table.block_ids[index]
    print(f"token {token}: table[{index}] = block {block_id}, place {place}, slot {table.slot(token)}")

# %% [markdown]
# Tokens 3 and 4 are neighbours in the text. In memory they are far apart: slot 31 is the last of the pool and slot 8
# is near its beginning. Nobody minds, as long as everybody asks the table.
#
# The list of slots of some tokens is called their **slot mapping**. Whoever writes keys needs it.
#
# ### Exercise 1: the slot mapping


# %% tags=["exercise"]
def slot_mapping(block_ids, start, stop, block_size):
    """Return the slots of tokens `start` to `stop - 1` of a sequence, as a list.

    Token i lies in block `block_ids[i // block_size]` of the pool, at place `i % block_size`.
    The slot counts over the whole pool: block id times block size, plus the place.
    With table [7, 2, 5] and blocks of 4, tokens 3 to 5 lie in slots [31, 8, 9].
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Write it for one token first, as in the four steps above. Then put it into a list comprehension over
# `range(start, stop)`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def slot_mapping(block_ids, start, stop, block_size):
#     """Return the slots of tokens `start` to `stop - 1` of a sequence, as a list."""
#     return [block_ids[i // block_size] * block_size + i % block_size for i in range(start, stop)]
# ```
#
# </details>

# %%
from minipaged.lessons.exercises import paged_storage as checks

checks.check_slot_mapping(slot_mapping)

# %% [markdown]
# ## Build it: a sequence that grows
#
# A sequence gets a token at every step. When does it take a block? Not early: a block that waits for its first token
# is waste. Not late: the token must go somewhere.
#
# > **Predict.** Blocks of 4. A prompt of 3 tokens enters, then five tokens are generated one by one. Write down the
# > number of blocks after each: with 3, 4, 5, 6, 7 and 8 tokens.

# %%
cache = PagedCache(num_blocks=8, block_size=4)
cache.allocate(0, num_prompt_tokens=3, max_slots=8)
counts = [(cache.tables[0].num_tokens, len(cache.tables[0].block_ids))]
for _ in range(5):
    cache.append(0)
    counts.append((cache.tables[0].num_tokens, len(cache.tables[0].block_ids)))
print("(tokens, blocks):", counts)

# %% [markdown]
# Token number 4 fills the block, and nothing happens. The second block is taken with the fifth token. The same at 8:
# two blocks, both full. Everybody gets this edge wrong once, in one of two ways: one block too early, or one slot too
# far.
#
# ### Exercise 2: append


# %% tags=["exercise"]
def append(table, pool):
    """Take the slot of a sequence's next token and return it.

    `table` has `block_ids` (a list), `num_tokens` and `block_size`. `pool.allocate()` returns the id of a free block.
    If all blocks of the table are full (at the beginning there are none), take one and put it at the end of the list.
    Then count the new token in `table.num_tokens`. Return the new token's slot: `table.slot(i)` is that of token i.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# All blocks are full if `num_tokens == len(block_ids) * block_size`. The new token's number is the value of
# `num_tokens` *before* it is counted.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def append(table, pool):
#     """Take the slot of a sequence's next token and return it."""
#     if table.num_tokens == len(table.block_ids) * table.block_size:
#         table.block_ids.append(pool.allocate())
#     table.num_tokens += 1
#     return table.slot(table.num_tokens - 1)
# ```
#
# </details>

# %%
checks.check_append(append)

# %% [markdown]
# ## Build it: the pool of free blocks
#
# All blocks have one size, so any free block is as good as any other. A list of free ids is enough. There is nothing
# to search, nothing to merge and nothing to move: the neighbour of a free block does not matter.
#
# Two mistakes must be refused, and loudly. Both are bugs of the caller, but the pool is where they can be seen:
#
# - to take a block when none is free;
# - to give a block back that is free already. The pool would hand it out twice, and two sequences would write over each
#   other's keys. No error would follow, only a strange answer.
#
# This is how the product's pool says it:

# %%
from minipaged.errors import AccountingError

for free_ids, call in (([], lambda pool: pool.allocate()), ([7], lambda pool: pool.free(7))):
    try:
        call(used_pool(8, 4, free_ids))
    except AccountingError as error:
        print("AccountingError:", error)

# %% [markdown]
# Your pool starts from this list, and from what everybody may ask about it.


# %%
class FreeList:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_ids = list(range(num_blocks))

    @property
    def num_free(self):
        return len(self.free_ids)

    def is_free(self, block_id):
        return block_id in self.free_ids


# %% [markdown]
# ### Exercise 3: your block pool


# %% tags=["exercise"]
class MyPool(FreeList):
    """Hand out the ids in `self.free_ids` and take them back, in any order you like."""

    def allocate(self):
        """Take a free block: remove its id from the list and return it.

        Raise AccountingError("...") if no block is free.
        """
        raise NotYet

    def free(self, block_id):
        """Give a block back. Raise AccountingError if it is free already, or no id from 0 to num_blocks - 1."""
        raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `self.free_ids.pop()` takes the last id of the list, and `self.free_ids.append(...)` puts one back. Look before you
# change anything: `not self.free_ids` in one method; `self.is_free(block_id)` and
# `block_id not in range(self.num_blocks)` in the other.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class MyPool(FreeList):
#     """Hand out the ids in `self.free_ids`; the block that came back last goes out first."""
#
#     def allocate(self):
#         """Take a free block and return its id."""
#         if not self.free_ids:
#             raise AccountingError("no block is free")
#         return self.free_ids.pop()
#
#     def free(self, block_id):
#         """Give a block back."""
#         if block_id not in range(self.num_blocks) or self.is_free(block_id):
#             raise AccountingError(f"block {block_id} is free already, or does not exist")
#         self.free_ids.append(block_id)
# ```
#
# </details>

# %%
checks.check_block_pool(MyPool)

# %% [markdown]
# `is_free` looks through the list, which takes longer in a larger pool. The
# [pool of the product](../minipaged/paged/block_pool.py) keeps one mark per block beside the list, so every call costs
# the same whatever the size. It also hands out in the order of return: a block is used again as late as possible.
# [Lesson 05](05_prefix.ipynb) will need that, because a free block still holds its old keys.
#
# ## Build it: write keys and values
#
# So far there were only numbers of slots. The memory itself is a tensor. The keys of one layer have the shape
# `[N, S, K, D]`: blocks in the pool, slots in a block, KV heads, size of a head. The values have a second tensor of the
# same shape. (One letter names one axis in the whole project; [the table](../minipaged/shapes.py) has them all.)
#
# The first two axes are one row of slots, block after block. So `k_pool.view(N * S, K, D)[slot]` is the key of a token,
# and `view` copies nothing.

# %%
import torch

k_pool = torch.zeros(8, 4, 1, 1)  # 8 blocks, 4 slots, one KV head of size 1: one number per token
v_pool = torch.zeros(8, 4, 1, 1)
slots = torch.tensor(table.slots(0, 10))
k_pool.view(8 * 4, 1, 1)[slots] = torch.arange(10.0).view(10, 1, 1)  # the key of token i is i
for block_id in (7, 2, 5):
    print(f"block {block_id}:", k_pool[block_id].flatten().tolist())

# %% [markdown]
# Look at block 5: its last two places keep the zeros that were there. On a real machine they hold whatever was left
# behind by the last owner. Remember them; they come back in lesson 02b.
#
# One more rule. Batches for a GPU are often filled up to a fixed length, and the padding tokens have no slot. They get
# the slot -1, which means: write nowhere.
#
# ### Exercise 4: write the slots


# %% tags=["exercise"]
def write_slots(k, v, k_pool, v_pool, slot_mapping):
    """Write the keys `k` and values `v` [T, K, D] of T new tokens into the two pools [N, S, K, D], in place.

    `slot_mapping` [T] has the slot of each token. A token whose slot is -1 is written nowhere.
    Both pools are contiguous, so `pool.view(-1, K, D)` is a view of their slots.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Make a mask first, `is_used = slot_mapping != -1`, and leave the other tokens out: `k[is_used]`. Then assign to the
# view of the pool with the slots as an index. Do the same for the values.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def write_slots(k, v, k_pool, v_pool, slot_mapping):
#     """Write keys and values of new tokens into the slots of two pools, in place."""
#     is_used = slot_mapping != -1
#     for new, pool in ((k, k_pool), (v, v_pool)):
#         pool.view(-1, *pool.shape[2:])[slot_mapping[is_used]] = new[is_used]
# ```
#
# </details>

# %%
checks.check_write_slots(write_slots)

# %% [markdown] given="40 41 19 33 2,048"
# ## Put together: the example that everyone meets first
#
# A prompt of 40 tokens, blocks of 16 slots, and a pool in which the blocks 41, 7, 19, 2 and 33 are free, in this order.
# The keys go in through the slot mapping. Then we **gather**: take the blocks of the table in order, lay them side by
# side, and cut the result at 40 tokens. What comes out must be what went in.
#
# > **Predict.** Which blocks will the table have? How many slots stay unused? And how many would be unused if the
# > sequence had reserved 2,048 slots, as in lesson 01?

# %%
from minipaged.paged.ops import write_slots as product_write_slots

cache = PagedCache(num_blocks=48, block_size=16)
cache.pool = used_pool(48, 16, [41, 7, 19, 2, 33])
cache.allocate(0, num_prompt_tokens=40, max_slots=40)
table = cache.tables[0]

k, v = torch.randn(40, 2, 8), torch.randn(40, 2, 8)  # 2 KV heads of size 8
k_pool, v_pool = torch.full((48, 16, 2, 8), float("nan")), torch.full((48, 16, 2, 8), float("nan"))
product_write_slots(k, v, k_pool, v_pool, torch.tensor(table.slots(0, 40)))

# %%
gathered = k_pool[table.block_ids].flatten(0, 1)[: table.num_tokens]  # [3, 16, K, D] -> [48, K, D] -> [40, K, D]
print(f"block table {table.block_ids}, keys intact: {torch.equal(gathered, k)}")

reserved = Arena(num_slots=4096, max_model_len=2048)
reserved.allocate(0, num_prompt_tokens=40, num_output_tokens=1)
print(f"unused slots: {table.num_empty_slots} paged vs {reserved.waste().reserved} with a 2,048-token reservation")

# %% [markdown] given="33"
# Blocks 2 and 33 stay free for others. Three blocks of 16 have 48 slots, so 8 are left over: the end of block 19. And
# the dense range holds back 2008 slots for an answer that may never come.
#
# ## Gather is the oracle
#
# Gathering gives us something precious: a definition of *right*. Attention over blocks must equal attention over the
# gathered, dense row. Nothing about paging may be seen in the result. The project's readable
# [`paged_attention`](../minipaged/paged/reference.py) is written exactly so: gather, then attend. All kernels are
# tested against it.
#
# In the next cell four query heads share two KV heads, and every slot that does not belong to the sequence holds NaN.
# If one of them were read, the result would be NaN.

# %%
from minipaged.contiguous.ops import contiguous_attention
from minipaged.paged import reference

q, seq_lens = torch.randn(1, 4, 8), torch.tensor([40], dtype=torch.int32)
block_tables = torch.tensor([table.block_ids], dtype=torch.int32)
paged = reference.paged_attention(q, k_pool, v_pool, block_tables, seq_lens, scale=8**-0.5, window=None)
dense = contiguous_attention(q, k[None], v[None], seq_lens, tier="torch")
print("NaN in the pool:", k_pool.isnan().any().item(), "· NaN in the result:", paged.isnan().any().item())
print("the same bits as over the dense row:", torch.equal(paged, dense))

# %% [markdown] given="128"
# ## The same on the real model
#
# Run one prompt through two engines: `contiguous` from lesson 01, and `paged`. Both have 128 blocks of 16 slots, which
# is 2,048 slots. Stop after the first step, the prefill, while the sequences are in memory. Then gather the keys and
# values of **every layer** through the block table and compare them with the dense range.

# %%
from minipaged import LLM, SamplingParams

name, params = lesson_model(), SamplingParams(temperature=0, max_tokens=8)
engines = {rung: LLM(name, rung=rung, num_blocks=128).engine for rung in ("contiguous", "paged")}
for engine in engines.values():
    engine.add_request(range(1, 41), params)  # token ids 1 to 40: no meaning is needed here
    engine.step()

# %%
(own,), (table,) = engines["contiguous"].cache.ranges.values(), engines["paged"].cache.tables.values()
equal = []
for dense, blocks in zip(engines["contiguous"].kv, engines["paged"].kv, strict=True):  # one layer each: [2, N, S, K, D]
    for row, pool in zip(dense, blocks, strict=True):  # keys, then values
        gathered = pool[table.block_ids].flatten(0, 1)[: table.num_tokens]
        equal.append(torch.equal(gathered, row[0, own.start : own.start + own.num_tokens]))
print(f"{len(equal)} tensors, all equal to the dense range: {all(equal)}")
print(f"unused: {table.num_empty_slots} slots paged, {own.num_reserved - own.num_tokens} of {own.num_reserved} dense")

# %% [markdown]
# ## Your version drives the real engine
#
# `ask` is the chat of this project. Whatever stands behind the question takes a part's place: here your pool hands out
# the blocks, and your function writes all keys and values of all layers. First the answer with the product's own parts:

# %%
ask("What is the capital of France?", "paged")

# %% [markdown]
# Now with yours. `--show-blocks` draws the memory at the end. If your list gives out its last id first, the drawing
# fills from the end of the pool. The answer stays the same: which block it is does not matter.

# %%
ask(
    "What is the capital of France?",
    "paged",
    "--num-blocks",
    "12",
    "--show-blocks",
    block_pool=MyPool,
    write_slots=write_slots,
)

# %% [markdown]
# ## From reference to kernel
#
# This is the product's `write_slots` in plain PyTorch. Yours does the same.

# %%
import inspect

print(inspect.getsource(reference.write_slots))

# %% [markdown]
# On a GPU a [kernel](../minipaged/paged/kernels.py) takes its place, `write_slots_kernel`. It handles all tokens at
# the same time, each on its own: load one slot number, skip it if it is -1, copy the token's heads there. No two tokens
# have the same slot, so none has to wait for another. Lesson 02b shows how such a kernel is read.
#
# In both, the work grows with the number of *new* tokens, not with the size of the pool.
#
# ## What would break if...
#
# **... the pool did not notice a double free?** One line less in `free`, and nothing else changes.


# %%
class CarelessPool(BlockPool):
    def free(self, block_id):
        self._free.append(block_id)  # the check that the block is taken is gone


pool = CarelessPool(num_blocks=3, block_size=4)
first = pool.allocate()
pool.free(first)
pool.free(first)  # the caller's mistake
a = BlockTable(4, [pool.allocate() for _ in range(3)], num_tokens=12)
b = BlockTable(4, [pool.allocate()], num_tokens=4)
print("table of A:", a.block_ids, "· table of B:", b.block_ids)

# %%
k_pool, v_pool = torch.zeros(3, 4, 1, 1), torch.zeros(3, 4, 1, 1)
for table, key in ((a, 1.0), (b, 2.0)):  # every key of A is 1, every key of B is 2
    new = torch.full((table.num_tokens, 1, 1), key)
    product_write_slots(new, new, k_pool, v_pool, torch.tensor(table.slots(0, table.num_tokens)))
print("what A reads:", k_pool[a.block_ids].flatten().tolist())

# %% [markdown]
# The last four keys of A are those of B. Nothing raised. A would answer a question that B was asked: a wrong answer,
# and somebody else's text. In the product this is refused, and
# `test_a_double_free_is_refused_and_changes_nothing` in
# [`tests/paged/test_bookkeeping.py`](../tests/paged/test_bookkeeping.py) holds it so.
#
# **... the slot -1 were divided like any other?**
#
# > **Predict.** Python and PyTorch round down. With blocks of 4, what are `-1 // 4` and `-1 % 4`? Which slot of a pool
# > of 8 blocks is that?

# %%
padding = torch.tensor([-1])
block, place = padding // 4, padding % 4
k_pool = torch.zeros(8, 4, 1, 1)
k_pool[block, place] = 9.0
print("block", block.item(), "place", place.item(), "· written:", k_pool.flatten().nonzero().flatten().tolist())

# %% [markdown] given="200 1,000"
# Index -1 means the last block to PyTorch, so every padding token writes over the last slot of the pool. It is wrong
# only when somebody has that slot: late, and on a full machine.
# `test_a_slot_of_minus_one_does_not_write_the_last_slot` in [`tests/paged/test_ops.py`](../tests/paged/test_ops.py)
# catches it.
#
# **... a block were taken one token too early?** Nothing would be wrong but the memory: a sequence whose length is a
# multiple of the block size holds an empty block. `test_a_block_is_taken_with_the_token_that_needs_it` checks one token
# to each side of the edge.
#
# ## Measure
#
# How large should a block be? Take 200 sequences with lengths from 1 to 1,000, drawn at random but always the same
# ones, and count the unused slots for several block sizes. With blocks of 2048 every sequence fits into one: that is
# lesson 01.

# %%
from random import Random

rng = Random(0)
lengths = [rng.randint(1, 1000) for _ in range(200)]
print("block size  unused slots per sequence  entries per table")
for block_size in (1, 4, 16, 64, 256, 2048):
    cache = PagedCache(num_blocks=200 * -(-1000 // block_size), block_size=block_size)
    for seq_id, length in enumerate(lengths):
        cache.allocate(seq_id, length, max_slots=1000)
    entries = sum(len(table.block_ids) for table in cache.tables.values())
    print(f"{block_size:10}  {cache.waste().internal / 200:25.1f}  {entries / 200:17.1f}")

# %% [markdown] given="32,768 40 200"
# While blocks are much shorter than the sequences, about half a block is unused per sequence. Small blocks waste less
# and make longer tables, and every entry has to be made, sent to the GPU and looked up. Blocks of 16 are a common
# middle: a handful of slots lost, and tables that stay short. There are engines with blocks of 1, and others with 256.
#
# And how many sequences fit at a time? Every request has 40 tokens and may generate up to 200. The memory has 32,768
# slots. We let requests in until the next one must wait: into lesson 01's memory, into a dense memory that reserves no
# more than the request may need, and into blocks.


# %%
def count_admitted(memory, limit):
    """Let requests of 40 tokens in until the next one must wait, and return how many there are."""
    num_seqs = 0
    while memory.can_admit(40, limit):
        memory.allocate(num_seqs, 40, limit)
        num_seqs += 1
    return num_seqs


cache = PagedCache(num_blocks=2048, block_size=16)
print("32768 slots; a dense range of 2048 each:", count_admitted(Arena(32768, 2048), 200))
print("as long as the request may get:", count_admitted(Arena(32768, 2048, "oracle"), 200))
print("blocks:", count_admitted(cache, 239))  # in slots: the last generated token needs none
print(f"of 2048 blocks {2048 - cache.pool.num_free} are taken, {cache.num_promised} are promised")

# %% [markdown] given="8.5 33 200"
# 136 are 8.5 times as many as 16. A larger batch is what keeps a GPU busy while it decodes, as
# [lesson 00](00_foundation.ipynb) has shown.
#
# But be fair to the dense memory. Most of the gain is there as soon as it asks each request for its own limit. Blocks
# add a little: here the allocator of lesson 01 rounds ranges up to a power of two, and a block table has nothing to
# round but its last block.
#
# So what are blocks good for? Read the last line. Most blocks are not *taken*; they are *promised*. This rung cannot
# take a block away from a sequence that runs, so it lets one in only if the whole answer would fit. Many answers will
# be shorter than 200 tokens. A dense range cannot drop such a promise, because it cannot grow later. Blocks can, and
# [lesson 04](04_batching.ipynb) does it.
#
# ## Recap
#
# Three things to take along:
#
# 1. A sequence's slots need not lie side by side. A **block table** says where they are: `table[i // S] * S + i % S`.
# 2. All blocks have one size, so any free block serves anybody. Only the last block of a sequence can be part empty.
# 3. **Gather** through the table gives back the dense row. It defines what every later kernel must compute.
#
# Three questions:
#
# 1. A sequence has 33 tokens in blocks of 16. How many blocks, and how many unused slots?
# 2. Two sequences leave, and their blocks lie between those of others. Why does no one have to move?
# 3. Why may the pool hand out blocks in any order?
#
# <details>
# <summary>Answers</summary>
#
# 1. Three blocks hold 48 slots, so 15 are unused: the third block has one token.
# 2. Whoever comes next needs single blocks, not a range. A gap of one block is as useful as any.
# 3. Positions are in the table, not in the place. Attention reads keys in the order of the table (and position was put
#    into each key by `rotary` before it was written).
#
# </details>
#
# What the next lesson fixes: gathering copies every key before it is used, at every step and in every layer.
# [Lesson 02b](02b_paged_kernel.ipynb) reads them where they lie.
