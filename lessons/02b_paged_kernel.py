# %% [markdown]
# # 02b  The paged kernel: attention that walks the block table
#
# In [lesson 02a](02a_paged_storage.ipynb) keys and values moved into blocks that may lie anywhere in a pool. To attend,
# we gathered them: copied them side by side, in the order of the block table. That is easy to believe and slow.
#
# This lesson gets rid of the copy, in three steps. You will build:
#
# 1. attention in PyTorch, block by block, with running sums (the *online softmax*);
# 2. in Triton, the smallest kernel that can find a key through a block table;
# 3. from these two, the attention kernel.
#
# You need to know PyTorch and attention. You need not know Triton. No GPU is needed either: without one, kernels run in
# Triton's interpreter, one program after the other, on the CPU. It is slow, and it computes the same.
#
# Triton wants to know beforehand, so that comes first.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, further down

# %% [markdown]
# ## Where we are
#
# Two sequences took turns in growing, so their blocks lie mixed. Each has a block table.

# %%
from minipaged.lessons import NotYet, ask, show
from minipaged.paged.cache import PagedCache
from minipaged.viz import draw_pool, draw_pool_svg, view_cache

cache = PagedCache(num_blocks=12, block_size=4)
for seq_id, num_tokens in ((0, 3), (1, 2)):
    cache.allocate(seq_id, num_tokens, max_slots=20)
for seq_id in [0, 1] * 9:
    cache.append(seq_id)
show(draw_pool(view_cache(cache)), draw_pool_svg(view_cache(cache)))
print("block tables:", {"AB"[seq_id]: table.block_ids for seq_id, table in cache.tables.items()})

# %% [markdown] given="40 100 148"
# ## The problem, measured
#
# When a token is generated, its query must meet all keys and values of its sequence, in every layer. Each key and each
# value has to be read once; less is not possible. How much does gathering read and write?
#
# On a CPU the project gathers the whole batch at once, padded to the longest sequence, and then calls PyTorch's
# attention. We look over its shoulder and count the tokens that it copies. (`make_paged_inputs` makes random queries
# and pools for sequences of given lengths. PyTorch shows every operation to a *dispatch mode* before it is done.)
#
# > **Predict.** Four sequences of 1, 40, 7 and 100 tokens. They have 148 tokens together. How many tokens does the
# > gather copy?

# %%
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.paged.ops import paged_attention


class CountCopies(TorchDispatchMode):
    copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "index_select" in str(func):
            self.copied += len(out)
        return out


# %%
lengths = (1, 40, 7, 100)
inputs = make_paged_inputs(AttentionCase("ragged", lengths))
with CountCopies() as count:
    paged_attention(*inputs.args, tier="torch")
needed, copied = sum(lengths), count.copied // 2  # keys and values are copied alike
print(f"tokens in the cache: {needed}; copied: {copied}")
print(f"moved: {copied} read, {copied} written, {copied} read again = {3 * copied / needed:.1f} times what is needed")

# %% [markdown] given="100"
# Four rows, each padded to 100 tokens. Every copy is read from the pool, written to a buffer, and read again from
# there: without any padding that would still be 3 times what is needed. Attention of one new token is limited by how
# fast memory can be read, so on a GPU gathering would slow it down by about such a factor.
#
# So: no copy. Read each key where it lies, use it, forget it.
#
# ## Predict
#
# That sounds simple, but there is a catch. Softmax divides by the sum over **all** keys, and a loop over blocks sees
# only one block at a time.
#
# Here is the smallest example that can go wrong. One query, `q = 1`. Four keys: 0, 0, ln 3, 0. Four values: 1, 2, 3, 4.
# The keys lie in two blocks of two. (The scale is 1, so a score is just query times key.)
#
# > **Predict.** A weight is exp(score). Which four weights are there? What is their sum? What is the result?

# %%
import math

k_pool = torch.tensor([0.0, 0.0, math.log(3), 0.0]).view(2, 2, 1, 1)  # [N, S, K, D]: 2 blocks of 2 slots
v_pool = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2, 1, 1)
table, seq_len = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
right = paged_attention(torch.ones(1, 1, 1), k_pool, v_pool, table, seq_len, scale=1.0)
print(f"weights 1, 1, 3, 1 of 6: (1*1 + 1*2 + 3*3 + 1*4) / 6 = 16 / 6 = {right.item():.3f}")

# %% [markdown] given="90"
# ## The idea
#
# Do not divide until the end. Keep two running sums over the keys seen so far:
#
# - `total`, the sum of the weights;
# - `acc`, the sum of weight times value.
#
# After the last block, `acc / total` is the result. For the example: `total` is 2 after block 0 and 6 after block 1;
# `acc` is 3 and then 16.
#
# One more thing. A score of 90 can happen, and exp(90) is too large for a float32; for a float16 exp(12) is too large
# already. So softmax subtracts the largest score from all others first. A loop over blocks does not know the
# largest score yet. It uses the largest **so far**, `top`, and when a larger one comes, it corrects:
#
# - all old weights were computed as exp(score - old top);
# - they should have been exp(score - new top);
# - so both sums are multiplied by **exp(old top - new top)**. They *fade*.
#
# This is the [online softmax](https://arxiv.org/abs/1805.02867). A state of three things, (top, total, acc), stands for
# any number of keys. Together with blocks it is all that PagedAttention needs.
#
# ## By hand
#
# | | top | total | acc |
# |---|---|---|---|
# | no key yet | -inf | 0 | 0 |
# | block 0: scores 0, 0; values 1, 2 | 0 | 1 + 1 = 2 | 1 + 2 = 3 |
# | the top becomes ln 3: fade by exp(0 - ln 3) = 1/3 | ln 3 | 2/3 | 1 |
# | block 1: weights 1 and 1/3; values 3, 4 | ln 3 | 2/3 + 4/3 = 2 | 1 + 3 + 4/3 = 16/3 |
#
# The result is 16/3 divided by 2, which is 16/6 again.
#
# ### Exercise 1: take one block into the state
#
# Write it for several queries at once: the query heads that share a KV head. Each has its own row of scores, its own
# top and its own sums. They share the values.


# %% tags=["exercise"]
def add_block(state, scores, values):
    """Take one block of keys into the running state of G query heads, and return the new state.

    `state` is (top [G], total [G], acc [G, D]); top is -inf while no key has been seen, and exp(-inf) is 0.
    `scores` [G, n] are the scores of the block's n keys, `values` [n, D] their values.
    1. The new top of each row is the larger of the old top and the row's largest score.
    2. fade = exp(old top - new top); the weights of the block are exp(scores - new top).
    3. total fades and gets the sum of the weights; acc fades and gets weights @ values.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `scores.max(-1).values` has the largest score of each row, and `torch.maximum` takes the larger of two tensors. A
# factor per row is multiplied to a matrix as `fade[:, None]`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def add_block(state, scores, values):
#     """Take one block of keys into the running state of G query heads, and return the new state."""
#     top, total, acc = state
#     new_top = torch.maximum(top, scores.max(-1).values)
#     fade = torch.exp(top - new_top)
#     weights = torch.exp(scores - new_top[:, None])
#     return new_top, total * fade + weights.sum(-1), acc * fade[:, None] + weights @ values
# ```
#
# </details>

# %%
from minipaged.lessons.exercises import paged_kernel as checks

checks.check_add_block(add_block)

# %% [markdown]
# ## Build it: the walk, in PyTorch
#
# Now the walk itself. For each sequence: go through its block table, take the keys and values of one block from the
# pool, compute scores, call `add_block`.
#
# Two details matter.
#
# **Heads.** The default model has 9 query heads and only 3 KV heads (*grouped-query attention*). Query heads 0, 1 and 2
# share KV head 0; heads 3, 4 and 5 share KV head 1; and so on: query head `h` reads KV head `h // G`, with G = 3. So
# `q[seq].view(K, G, D)[j]` are the rows that belong to KV head `j`. The point of grouping is that a key is read
# **once** for all G rows.
#
# **The last block.** It may be part empty. Behind the last token lies whatever was there before, and NaN times 0 is
# NaN. So those slots must not be read, or must be replaced.
#
# ### Exercise 2: walk the blocks
#
# It calls the `add_block` of exercise 1. While that one is open, this one says "not yet" too.


# %% tags=["exercise"]
def walk_blocks(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window):
    """Return the attention of one query token per sequence, [B, H, D] like `q`, without gathering.

    The pools are [N, S, K, D]. Row b of `block_tables` [B, M] has the block ids of sequence b, which has `seq_lens[b]`
    tokens (1 or more); behind its last block the row holds -1. `window` is None in this lesson: all keys are visible.
    For each sequence b and KV head j:
    1. The queries are `q[b].view(K, G, D)[j]`, G rows. Begin with top = -inf [G], total = 0 [G], acc = 0 [G, D].
    2. For block number i: `block_tables[b, i]` is its id; the tokens in it are n = min(S, seq_lens[b] - i * S).
       The keys are `k_pool[id, :n, j]` [n, D]; scores = queries @ keys.T * scale; take them in with `add_block`.
    3. The result, acc / total[:, None], goes to `out[b].view(K, G, D)[j]`. Compute in float32: use `.float()`.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Begin with `num_kv_heads = k_pool.shape[2]` and `out = torch.empty(q.shape, dtype=q.dtype, device=q.device)`. Then
# three loops, one inside the other: sequences, KV heads, blocks. There are `-(-length // S)` blocks. An element of a
# tensor is a tensor: `seq_lens.tolist()` and `int(...)` give plain numbers.
# The empty state can be made by `queries.new_full((group,), -torch.inf)`, `queries.new_zeros(group)` and
# `torch.zeros_like(queries)`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def walk_blocks(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window):
#     """Return the attention of one query token per sequence, [B, H, D] like `q`, without gathering."""
#     num_seqs, num_heads, head_dim = q.shape
#     block_size, num_kv_heads = k_pool.shape[1:3]
#     group = num_heads // num_kv_heads
#     out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
#     for b, length in enumerate(seq_lens.tolist()):
#         for j in range(num_kv_heads):
#             queries = q[b].view(num_kv_heads, group, head_dim)[j].float()
#             state = queries.new_full((group,), -torch.inf), queries.new_zeros(group), torch.zeros_like(queries)
#             for i in range(-(-length // block_size)):
#                 n, block_id = min(block_size, length - i * block_size), int(block_tables[b, i])
#                 keys, values = k_pool[block_id, :n, j].float(), v_pool[block_id, :n, j].float()
#                 state = add_block(state, queries @ keys.T * scale, values)
#             out[b].view(num_kv_heads, group, head_dim)[j] = state[2] / state[1][:, None]
#     return out
# ```
#
# </details>

# %%
checks.check_walk_blocks(walk_blocks)

# %% [markdown]
# Nothing stands in the way of trying it on the real model. Its `paged_attention` is now your function, called once per
# layer in every decode step. (The first token of the answer comes without it. The step that runs the prompt attends to
# the keys it has just computed, and needs no table.)

# %%
ask("What is the capital of France?", "paged", max_tokens=12, paged_attention=walk_blocks)

# %% [markdown]
# ## Triton in four steps
#
# A GPU does not run a loop over sequences and heads. It runs the **body** of the loop many times at once. Triton is a
# way to write that body in Python. (It exists for Linux. Elsewhere, go on with this lesson in a hosted notebook.)
#
# **Step 1: programs.** A Triton kernel is a function that is started many times. Each run is a *program*, and asks who
# it is with `tl.program_id(axis)`. How many there are along each axis is said when the kernel is launched, in square
# brackets: that is the *grid*. A tensor given to a kernel arrives as a pointer to its first element; `tl.store(pointer
# + i, x)` writes element i.
#
# > **Predict.** The kernel below is started on a grid of 3 by 2. How many programs run, and what does `out` hold?

# %%
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def who_am_i(out_ptr):
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    tl.store(out_ptr + kv_head * 2 + seq, 10 * kv_head + seq)


out = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
who_am_i[(3, 2)](out)
print(out.tolist())

# %% [markdown]
# Six programs, each with its own pair of numbers. They run in any order, many at a time, and none of them may wait for
# another.
#
# **Step 2: tiles and masks.** A program does not handle one number at a time. `tl.arange(0, 8)` is eight numbers at
# once, and `tl.load(pointer + tl.arange(0, 8))` loads eight elements. Such a group is a *tile*. Its size must be a
# power of two, and it must be known when the kernel is compiled: `tl.constexpr` marks such a parameter. A *mask* says
# which elements exist: elsewhere nothing is read, and `other` takes the place.
#
# > **Predict.** A row holds the numbers 1 to 6, then two NaN. What is the sum of its tile of 8 with the mask
# > `place < 6`? And without?


# %%
@triton.jit
def sum_tile(x_ptr, out_ptr, count, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr, tl.sum(x, axis=0))


row = torch.tensor([1.0, 2, 3, 4, 5, 6, float("nan"), float("nan")], device=DEVICE)
for count in (6, 8):
    out = torch.zeros(1, device=DEVICE)
    sum_tile[(1,)](row, out, count, TILE=8)
    print(f"the first {count} may be read: {out.item()}")

# %% [markdown]
# **Step 3: where things are.** A kernel knows no shapes, only a pointer. We must compute how far behind the pointer an
# element lies. In a contiguous tensor `[N, S, K, D]` element `[n, s, j, d]` lies at `((n * S + s) * K + j) * D + d`.
# The inner part, `n * S + s`, is the **slot** of lesson 02a.
#
# > **Predict.** A pool of shape `[8, 4, 2, 16]`. Where does the key of block 2, slot 1, KV head 1 begin?

# %%
pool = torch.randn(8, 4, 2, 16)
print("slot", 2 * 4 + 1, "· place", ((2 * 4 + 1) * 2 + 1) * 16, "· PyTorch says", pool[2, 1, 1, 0].storage_offset())

# %% [markdown] given="15"
# **Step 4: a tile through a block table.** Take 16 tokens at once, token 0 to 15 of a sequence. With blocks of 4 they
# lie in four different blocks. So *each token looks up its own block*:
#
# ```text
# token      0  1  2  3  4  5  6  7  8  9 ...        tl.arange
# index      0  0  0  0  1  1  1  1  2  2 ...        token // SLOTS
# block id   7  7  7  7  2  2  2  2  5  5 ...        tl.load(table_ptr + index, mask=..., other=0)
# slot      28 29 30 31  8  9 10 11 20 21 ...        block id * SLOTS + token % SLOTS
# ```
#
# A load may take sixteen different addresses, so this costs one load of block ids and one load of keys. And any block
# size fits any tile. Rows and columns of a tile come together as in NumPy: `rows[:, None] + columns[None, :]`.
#
# That is everything paging adds to a kernel. The exercise is the smallest kernel that needs it: the gather of lesson
# 02a, as a kernel.
#
# A word of warning. A wrong address in a kernel reads or writes somebody else's memory, and it may end the whole Python
# process (in a notebook: "the kernel died"). Mask every load and every store. If it happens, start again from the top.
#
# ### Exercise 3: your first paged kernel


# %% tags=["exercise"]
@triton.jit
def gather_kernel(
    pool_ptr, table_ptr, out_ptr, seq_len,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Program (j, t) copies KV head j of tokens t * TILE_KEYS and on from the pool [N, S, K, D] to the row [L, K, D].

    1. Tokens from `seq_len` on do not exist: `is_there = token < seq_len`. Mask the loads and the store with it.
    2. Load the block id of each token, at `table_ptr + token // SLOTS`. Widen it: `.to(tl.int64)`.
    3. Compute the slots, and from them where the keys lie: as `target`, with the slot in the token's place.
    4. Load the keys, with `mask=is_there[:, None], other=0.0`, and store them at `out_ptr + target`, masked too.
    """
    kv_head = tl.program_id(0)
    token = tl.program_id(1) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, HEAD_DIM)
    target = (token * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The table in step 4 is the code, line by line: `block_id = tl.load(table_ptr + token // SLOTS, mask=is_there,
# other=0)`, then `slot = ...`. The rest is `tl.load(pool_ptr + source, ...)` and `tl.store(out_ptr + target, ...,
# mask=...)`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# @triton.jit
# def gather_kernel(
#     pool_ptr, table_ptr, out_ptr, seq_len,
#     SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
# ):
#     """Program (j, t) copies KV head j of tokens t * TILE_KEYS and on from the pool to the row [L, K, D]."""
#     kv_head = tl.program_id(0)
#     token = tl.program_id(1) * TILE_KEYS + tl.arange(0, TILE_KEYS)
#     dim = tl.arange(0, HEAD_DIM)
#     target = (token * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
#     is_there = token < seq_len
#     block_id = tl.load(table_ptr + token // SLOTS, mask=is_there, other=0).to(tl.int64)
#     slot = block_id * SLOTS + token % SLOTS
#     source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
#     keys = tl.load(pool_ptr + source, mask=is_there[:, None], other=0.0)
#     tl.store(out_ptr + target, keys, mask=is_there[:, None])
# ```
#
# </details>

# %%
checks.check_gather_kernel(gather_kernel)

# %% [markdown] given="131,072 128 31 32"
# Why widen the block id? Addresses grow with the pool. Block 131,072 of 16 slots with 8 KV heads of size 128 begins at
# element 2^31, and a 32-bit integer ends just before. On small pools nobody notices.
#
# ## Build it: the attention kernel
#
# Now the walk of exercise 2 becomes a kernel. The two outer loops turn into the grid: **one program for each KV head
# and each sequence.** The inner loop stays a loop.
#
# Before the loop a program loads its queries: the G query heads of its KV head, as the rows of one tile. Why all G in
# one program? Because then each key is read once for all of them. A matrix unit wants at least 16 rows, so the tile is
# padded to 16 and the rest is masked. The output has the same shape, so one function computes the places for both.


# %%
@triton.jit
def group_places(
    seq, kv_head, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_GROUP: tl.constexpr
):
    """Return where the GROUP query heads of a KV head lie in [B, H, D], and a mask of the rows that exist."""
    row = tl.arange(0, TILE_GROUP)
    dim = tl.arange(0, HEAD_DIM)
    head = (seq * NUM_KV_HEADS + kv_head) * GROUP + row
    return head[:, None] * HEAD_DIM + dim[None, :], (row < GROUP)[:, None]


# %% [markdown]
# The state before the first key is that of `add_block`: top, total and acc. It lives in the registers of the program
# and is never written to memory.


# %%
@triton.jit
def no_keys(TILE_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the state before the first key: top, total, acc."""
    top = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    return top, tl.zeros([TILE_GROUP], tl.float32), tl.zeros([TILE_GROUP, HEAD_DIM], tl.float32)


# %% [markdown]
# And this is `add_block` in Triton. Compare it with yours line by line: `tl.dot` is `@`, and `tl.trans` is `.T`. One
# idea is new. A tile always has all its keys, also where the sequence has ended. Those scores are **replaced** by -inf,
# so their weight is exp(-inf) = 0.
#
# Two details are about number types. `tl.dot` wants both sides in one type, so the weights take that of the values.
# And `"ieee"` asks for full float32 products; a GPU would round the factors first.


# %%
@triton.jit
def add_tile(q, k, v, is_there, scale, top, total, acc):
    """Take a tile of keys [keys, D] into the state (top, total, acc) of some query heads."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    fade = tl.exp(top - new_top)
    weights = tl.exp(scores - new_top[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


# %% [markdown] given="40"
# The picture shows what the loop of one program does for a sequence of 40 tokens in ten blocks of 4, with tiles of 16
# keys. In every turn it looks up the blocks of its tile, loads keys and values from there, and takes them in. (A
# *piece* is a run of tiles that the product's kernel sums on its own. Here there is only one; lesson 04 will need
# several.)

# %%
from minipaged.viz import TableView, draw_tile_walk, draw_tile_walk_svg, view_tile_walk

walk = view_tile_walk(TableView(0, (9, 4, 12, 1, 6, 11, 3, 8, 0, 2), 40), block_size=4, tile_keys=16)
show(draw_tile_walk(walk), draw_tile_walk_svg(walk))

# %% [markdown]
# ### Exercise 4: the paged attention kernel
#
# The frame is there: who am I, my queries, an empty state, the loop, the result. The body of the loop is yours. It is
# the lookup of exercise 3, twice: for keys and for values.


# %% tags=["exercise"]
@triton.jit
def paged_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, tables_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Program (j, b) attends with the query heads of KV head j of sequence b to all tokens of the sequence.

    The body of the loop takes tokens `start` to `start + TILE_KEYS - 1` into the state:
    1. `token = start + tl.arange(0, TILE_KEYS)`, and `is_there = token < seq_len`.
    2. Look up blocks in `table_ptr`, compute `slot` and the places of the keys, as in exercise 3. (Make `dim` again.)
    3. Load the tile of keys from `k_pool_ptr` and that of values from `v_pool_ptr`: the places are the same.
    4. `top, total, acc = add_tile(q, k, v, is_there, scale, top, total, acc)`
    """
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    at, exists = group_places(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP)
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    seq_len, table_ptr = tl.load(seq_lens_ptr + seq), tables_ptr + seq * table_width
    top, total, acc = no_keys(TILE_GROUP, HEAD_DIM)
    for start in range(0, seq_len, TILE_KEYS):
        raise NotYet
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=exists)


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Copy the lines from `is_there` to the load out of your `gather_kernel`. Rename `pool_ptr` to `k_pool_ptr`, write the
# load a second time for `v_pool_ptr`, and end with the line of point 4. Nothing is stored inside the loop.
# `kv_head`, `seq_len` and `table_ptr` are there already; `dim` is not.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# @triton.jit
# def paged_kernel(
#     q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, tables_ptr, seq_lens_ptr, table_width, scale,
#     SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
#     TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr,
# ):
#     """Program (j, b) attends with the query heads of KV head j of sequence b to all tokens of the sequence."""
#     kv_head, seq = tl.program_id(0), tl.program_id(1)
#     at, exists = group_places(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP)
#     q = tl.load(q_ptr + at, mask=exists, other=0.0)
#     seq_len, table_ptr = tl.load(seq_lens_ptr + seq), tables_ptr + seq * table_width
#     top, total, acc = no_keys(TILE_GROUP, HEAD_DIM)
#     dim = tl.arange(0, HEAD_DIM)
#     for start in range(0, seq_len, TILE_KEYS):
#         token = start + tl.arange(0, TILE_KEYS)
#         is_there = token < seq_len
#         block_id = tl.load(table_ptr + token // SLOTS, mask=is_there, other=0).to(tl.int64)
#         slot = block_id * SLOTS + token % SLOTS
#         source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
#         k = tl.load(k_pool_ptr + source, mask=is_there[:, None], other=0.0)
#         v = tl.load(v_pool_ptr + source, mask=is_there[:, None], other=0.0)
#         top, total, acc = add_tile(q, k, v, is_there, scale, top, total, acc)
#     tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=exists)
# ```
#
# </details>

# %%
checks.check_paged_kernel(paged_kernel)

# %% [markdown]
# ## Your version drives the real engine
#
# A **launcher** is the plain Python function around a kernel. It looks at shapes, makes room for the result and chooses
# the grid and the tiles. Usually it launches the kernel itself, with the grid in square brackets as in step 1. Here
# `checks.launch` does that. It adds two things: an open kernel is "not yet", and an error inside your kernel is shown
# as it is.
#
# Note `contiguous()`. The kernel computes places by itself, so a tensor with gaps between its rows would be read
# wrongly, and no error would say so.


# %%
def my_attention(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window):
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    q = q.contiguous()
    out = torch.empty_like(q)
    grid = (num_kv_heads, num_seqs)
    checks.launch(
        paged_kernel, grid, q, k_pool, v_pool, out, block_tables, seq_lens, block_tables.shape[1], scale,
        SLOTS=block_size, NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        TILE_GROUP=16, TILE_KEYS=64,
    )  # fmt: skip
    return out


# %% [markdown]
# Now the chat, with your kernel in every layer. In the interpreter each tile takes milliseconds, so 8 tokens must do.
# The interpreter multiplies 16-bit tiles of the type bfloat16 wrongly, so there the model runs in float32.

# %%
is_gpu = torch.cuda.is_available()
dtype = [] if is_gpu else ["--dtype", "float32"]
ask("What is the capital of France?", "paged", *dtype, max_tokens=30 if is_gpu else 8, paged_attention=my_attention)

# %% [markdown]
# ## From reference to kernel
#
# What the project runs is [`paged_attention_kernel`](../minipaged/paged/kernels.py). You have its skeleton: the same
# grid, the same rows, the same lookup per token. What it has on top:
#
# | there | why |
# |---|---|
# | blocks are looked up one tile ahead | the ids of the next tile arrive while this tile is computed |
# | exp2 in place of exp | GPUs have an instruction for powers of two; log2(e) goes into the scale |
# | head sizes that are no power of two | the tile is padded and masked |
# | a window | some models see only their newest tokens |
# | pieces of the sequence, folded from left to right | several programs may then share a long sequence |
# | zeros for a sequence without tokens | 0 / 0 is NaN |
#
# The [kernel of lesson 01](../minipaged/contiguous/kernels.py) walks the same tiles, and calls the same function to
# take one in. There, a tile begins `start` tokens behind the beginning of the sequence's row; here, each of its tokens
# is looked up. Nothing else differs.
#
# ## What would break if...
#
# **... nothing faded?** Each block gets a softmax of its own, or the sums are added as they are. Three tempting ways,
# on the example from above:

# %%
scores, values = k_pool.view(2, 2), v_pool.view(2, 2)  # one row per block; q = 1, so the keys are the scores
own = (scores.softmax(-1) * values).sum(-1)  # a softmax for each block
weights = torch.exp(scores - scores.max(-1, keepdim=True).values)  # counted from the top of each block
print(f"the last block alone: {own[-1].item():.3f}")
print(f"the mean of the blocks: {own.mean().item():.3f}")
print(f"sums added, nothing faded: {((weights * values).sum() / weights.sum()).item():.3f}")
print(f"right: {right.item():.3f}")

# %% [markdown]
# None of the wrong numbers looks wrong. They lie between the values, and there is no NaN and no error. What would the
# model say? Here is the third way, for the whole of attention.


# %%
def nothing_fades(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window):
    block_size, group = k_pool.shape[1], q.shape[1] // k_pool.shape[2]
    out = torch.empty_like(q)
    for b, length in enumerate(seq_lens.tolist()):
        total = acc = 0
        for i in range(-(-length // block_size)):
            block = [pool[block_tables[b, i], : length - i * block_size].float() for pool in (k_pool, v_pool)]
            keys, values = (rows.repeat_interleave(group, dim=1) for rows in block)  # [n, H, D]
            scores = torch.einsum("hd,nhd->hn", q[b].float(), keys) * scale
            weights = torch.exp(scores - scores.max(-1, keepdim=True).values)  # the top of this block alone
            total, acc = total + weights.sum(-1), acc + torch.einsum("hn,nhd->hd", weights, values)
        out[b] = acc / total[:, None]
    return out


# %%
ask("What is the capital of France?", "paged", max_tokens=12, paged_attention=nothing_fades)

# %% [markdown] given="2,048 2049"
# Real words, no error, and no answer. (The random model, if it stands in, gives no words.) While a sequence has only
# one block, all three ways are right, so a short test sees nothing. `test_paged_attention_agrees_with_exact_attention`
# in [`tests/kernels/test_decode_attention.py`](../tests/kernels/test_decode_attention.py) has cases with many blocks.
#
# **... the block table were converted together with everything else?** Somebody writes `.to(torch.float16)` over all
# inputs of a step.
#
# > **Predict.** A 16-bit float keeps 11 binary digits. What becomes of the block ids 5, 2048 and 2049?

# %%
ids = torch.tensor([5, 2048, 2049])
print(ids.to(torch.float16).int().tolist())

pool = torch.zeros(2050, 1, 1, 1)  # 2,050 blocks of one slot
pool[2049], pool[2048] = 7.0, 100.0  # our token, and somebody else's
one = torch.tensor([1], dtype=torch.int32)
for table in (torch.tensor([[2049]]).int(), torch.tensor([[2049]]).half()):
    out = paged_attention(torch.ones(1, 1, 1), torch.zeros_like(pool), pool, table.int(), one, tier="torch")
    print(f"table given as {table.dtype}: {out.item():g}")

# %% [markdown] given="2049"
# Id 2049 becomes 2048, and the sequence reads another sequence's block. In a test with a small pool all is well: up to
# 2,048 every id is exact. So the launchers take block tables in one integer type only, and refuse anything else:

# %%
from minipaged.paged import kernels

small = make_paged_inputs(AttentionCase("two", (3, 4)), device=DEVICE)
try:
    kernels.paged_attention(*small.args[:3], small.block_tables.half(), small.seq_lens, scale=1.0, window=None)
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# `test_a_block_table_that_is_not_int32_is_refused` in
# [`tests/kernels/test_indices.py`](../tests/kernels/test_indices.py) holds that.
#
# ## Measure: what does paging cost?
#
# Three looks at it. First, the **bits**: the product's kernels of lesson 01 (dense rows) and of this lesson (blocks
# anywhere) get the same tokens in both layouts.

# %%
from minipaged.contiguous.ops import contiguous_attention

for name, lengths, block_size in (("blocks of 16", (15, 16, 17, 33), 16), ("blocks of 5", (4, 5, 6, 11), 5)):
    inputs = make_paged_inputs(AttentionCase(name, lengths, block_size=block_size), device=DEVICE)
    dense = contiguous_attention(inputs.q, *inputs.dense(), inputs.seq_lens, tier="triton")
    paged = paged_attention(*inputs.args, tier="triton")
    print(f"{name}: the same bits as over dense rows: {torch.equal(dense, paged)}")

# %% [markdown] given="128"
# Second, the **bytes**. Take a model with 8 KV heads of size 128 in 16-bit numbers, and blocks of 16. Per block, each
# of the eight programs needs one id of four bytes that it would not need for a dense row. (All tokens of the block ask
# for it, in one load, from one address.)

# %%
SLOTS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
kv_bytes = 2 * SLOTS * NUM_KV_HEADS * HEAD_DIM * 2  # keys and values, 2 bytes each
table_bytes = NUM_KV_HEADS * 4
print(f"a block: {kv_bytes} bytes of keys and values, {table_bytes} of block ids: {table_bytes / kv_bytes:.2%} more")
print(f"a key of one head: {HEAD_DIM * 2} bytes in one piece, in blocks as in a dense row")

# %% [markdown]
# The second line is the deeper reason. A GPU fetches memory in pieces of some dozens of bytes. A key of one head is in
# one piece in both layouts, and the next key of the *same head* is a whole token further on in both. Whether that is
# the neighbouring slot or one far away makes little difference to the memory. What would make one is waiting for the
# id before asking for the key; hence the lookup one tile ahead.
#
# Third, the **time**, on a real GPU. Timings differ from machine to machine, so this lesson measures none. The project
# keeps [its own measurements](../docs/kernels/speed.md) with the machine and the versions. Only ratios are read from
# them here.

# %%
import json
from pathlib import Path

import minipaged

path = Path(minipaged.__file__).parents[1] / "docs" / "benchmarks" / "kernels.json"
measured = json.loads(path.read_text()) if path.exists() else {"cases": []}
us = {case["name"]: case["median_us"] for case in measured["cases"]}
print("measured on", measured["machine"]["gpu"] if us else "nothing here: the measurements come with a checkout")
for size in (8, 16, 64, 256) if us else ():
    times = us[f"paging, blocks of {size}"]
    print(f"blocks of {size} in shuffled order take {times['shuffled'] / times['in order']:.2f} of the time in order")
for name in ("decode 64 x 4,096", "decode 64 x 1,024", "decode 1 x 32,768") if us else ():
    print(f"{name}: paged takes {us[name]['paged'] / us[name]['sdpa']:.2f} of PyTorch's attention over dense rows")

# %% [markdown]
# Blocks in any order cost about as much as blocks side by side. And 64 sequences through block tables take about as
# long as PyTorch's own attention over dense rows, which looks nothing up. Paging is as good as free there.
#
# The last line is not: **one** sequence of 32,768 tokens is far slower. That has nothing to do with paging. Our grid
# has one program for each KV head and sequence, so one sequence keeps a handful of programs busy, and most of the GPU
# has nothing to do. [Lesson 04](04_batching.ipynb) lets several programs share a sequence.
#
# ## Recap
#
# Three things to take along:
#
# 1. A state of (top, total, acc) stands for any number of keys. Each block fades it and adds to it; divide at the end.
# 2. In a kernel, paging is one load more: each token looks up its block, and its slot is
#    `block id * SLOTS + token % SLOTS`. The rest of attention does not know.
# 3. One program takes all query heads of a KV head, so that every key is read once. Whatever does not exist is masked:
#    padded rows, tokens behind the end, the load **and** the store.
#
# Three questions:
#
# 1. Why are the scores of tokens behind the end replaced by -inf? Would it be enough to add -inf to them?
# 2. Two sequences share a block (lesson 03 will do that). Must this kernel change?
# 3. A model has 32 query heads and 8 KV heads, and 4 sequences decode. How many programs are there, and how many rows
#    of each tile of queries are used?
#
# <details>
# <summary>Answers</summary>
#
# 1. If a score were NaN, adding -inf would leave it NaN. Replacing it gives a weight of 0 whatever was there.
# 2. No. Two tables may hold the same id; the kernel only reads.
# 3. 8 times 4 = 32 programs. Each has 32 / 8 = 4 query heads, so 4 of 16 rows.
#
# </details>
#
# What the next lesson fixes: several answers to one prompt hold the prompt's blocks several times.
# [Lesson 03](03_sharing.ipynb) lets them share.
