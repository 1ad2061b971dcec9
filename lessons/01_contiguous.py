# %% [markdown]
# # 01  One dense reservation per sequence
#
# [Lesson 00](00_foundation.ipynb) ended with a discovery and a wish. The discovery: of an old token, a new one needs
# key and value and nothing else, and these never change. The wish: many sequences in one batch, because a second one
# is almost free.
#
# So we keep keys and values: the *KV cache*. That takes a few lines, and cuts the arithmetic of even a short answer by
# ten. The rest of this lesson is about the bill. A cache needs memory, memory needs a plan, and the first plan that
# comes to mind leaves most of the memory empty. Once you have seen where the emptiness comes from, paging explains
# itself.

# %% [markdown] given="1 32"
# ## Where we are
#
# Rung 1, [`minipaged/contiguous`](../minipaged/contiguous/__init__.py). Its memory is one long row of *slots*, the
# *arena*. A slot holds key and value of one token, for all layers. Each sequence gets one dense range of slots. Here
# is the real arena of an engine with two sequences in it, caught in the moment in which the first of them ends. We
# allow at most 32 tokens a sequence, so that the picture stays small.

# %%
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from minipaged import LLM, SamplingParams, use, viz
from minipaged.bench.workload import draw_lengths
from minipaged.contiguous import reference
from minipaged.contiguous.arena import RESERVATIONS, Arena
from minipaged.foundation.model import weight_shapes
from minipaged.foundation.random_weights import SHAPES
from minipaged.foundation.weights import load_config
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.lessons.exercises import contiguous as checks

# %%
options = {"dtype": "float32", "tier": "torch", "max_model_len": 32}
llm = LLM(lesson_model(), rung="contiguous", num_blocks=8, block_size=16, **options)
texts = ["Bread is made of", "The capital of France is", "Water is", "One and one", "The moon"]
prompts = [llm.tokenizer.encode(text) if llm.tokenizer else list(range(5, 10)) for text in texts]


def greedy(num_tokens):
    """Return parameters for exactly so many tokens, always the most likely one."""
    return SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=num_tokens, ignore_eos=True)


moments = []
llm.engine.before_release = lambda seq: moments.append(viz.view_cache(llm.engine.cache))
llm.generate(prompts[:2], [greedy(12), greedy(6)])
llm.engine.before_release = None
show(viz.draw_arena(moments[0]), viz.draw_arena_svg(moments[0]))

# %% [markdown] given="8 16"
# 128 slots, half of them given away, and 20 hold something. Remember this picture.
#
# (Why `num_blocks=8` and `block_size=16`, on a rung without blocks? The size of the memory is given in the same way
# on every rung, so that rungs can be compared: 8 x 16 = 128 slots.)

# %% [markdown] given="200 5 16"
# ## The cache: 200 rows become 20
#
# In lesson 00 a prompt of 5 tokens and an answer of 16 sent 200 rows through the model.
#
# > **Predict.** How many rows does the same request send through the model if keys and values are kept? Count the
# > prompt, then one row for each later step.

# %%
no_cache = LLM(lesson_model(), rung="foundation", **options)


def count_rows(engine, prompt, num_tokens):
    """Return how many rows went through the model in each step, and the result."""
    rows, forward = [], engine.model.forward

    def counting_forward(token_ids, *others):
        rows.append(len(token_ids))
        return forward(token_ids, *others)

    with patch.object(engine.model, "forward", counting_forward):
        result = engine.generate([prompt], greedy(num_tokens))[0]
    return rows, result


# %%
for engine in (no_cache, llm):
    rows, result = count_rows(engine, prompts[0], 16)
    speed = result.metrics.tokens_per_second
    print(f"{engine.rung}: {sum(rows)} rows, {rows[0]} in step 1 and {sum(rows[1:])} in the {len(rows) - 1} others;")
    print(f"  tokens {result.token_ids[:6]} ... at {speed:.1f} tokens/s")

# %% [markdown]
# 5 + 15 = 20 rows: every token once, but for the last, which is chosen and never run. And the same tokens, as there
# must be.
#
# Look at the speed too. There is ten times less arithmetic, and how much faster is it? By far less than ten times
# here. Lesson 00 says why: a step with one row waits for the weights, and they are read in every step, with a cache
# or without. What the cache removes is arithmetic. To use what it leaves free, other sequences must come in.
#
# On the engine's timeline one sees the two phases that lesson 00 spoke of: `p5` is a prefill of 5 tokens, every `d`
# is the decode of one.

# %%
with viz.watch(llm) as timeline:
    llm.generate(prompts[:1], greedy(16))
show(viz.draw_timeline(timeline.view()), viz.draw_timeline_svg(timeline.view()))

# %% [markdown]
# ## The idea
#
# In [`generate.py`](../minipaged/contiguous/generate.py) the change is small. The model calls `attend(layer, q, k,
# v)` as before. In a decode step there is one row per sequence, and `attend` does two things:
#
# 1. **write** the new key and value into the sequence's next slot;
# 2. **attend** with the new query over all slots that the sequence has written.
#
# ```text
#    slot     0   1   2   3   4   5   6   7  |  8   9  10  11  12  13  14  15
#    before   A0  A1  A2  A3  A4  .   .   .  |  B0  B1  .   .   .   .   .   .
#    write                        A5         |          B2
#    attend   |<-----------------A5          |  |<------B2
# ```
#
# Writes come first, so the length that attention gets counts the new token too. All layers of the arena are one
# tensor:

# %%
print("[layers, 2, N, S, K, D] =", list(llm.engine.kv.shape))

# %% [markdown]
# Layers; keys and values; on this rung one block (N = 1) of all slots (S = 128); KV heads; size of a head. Paging
# will only change N and S.

# %% [markdown]
# ## By hand: one new token over a dense row
#
# > **Predict.** A row has three slots. Two are written, with values 1 and 3 and equal scores. The third was never
# > written and holds NaN, as fresh memory may. What does the newest token get?

# %%
q, k = torch.zeros(1, 1, 1), torch.zeros(1, 3, 1, 1)  # [B, H, D] and [B, L, K, D]
v = torch.tensor([1.0, 3.0, float("nan")]).view(1, 3, 1, 1)
seq_lens = torch.tensor([2], dtype=torch.int32)
print(reference.contiguous_attention(q, k, v, seq_lens, scale=1.0, window=None).item())

# %% [markdown]
# (1 + 3) / 2 = 2. The third slot must not be looked at, not even with a weight of zero. You will see why further
# down.
#
# ## Build it: the cache's attention
#
# Compare it with the attention of lesson 00. There is no triangle any more: one query per sequence, and all that is
# written is visible to it. Keys and values come as rows of the arena, one row per sequence, longer than what is
# written.


# %% tags=["exercise"]
def my_contiguous_attention(q, k, v, seq_lens, *, scale, window):
    """Let the newest token of each sequence attend to its row.

    q is [B, H, D]; k and v are [B, L, K, D]; query head h reads KV head h // (H // K). Row b is written up to
    seq_lens[b], the new token included; behind that it may hold NaN. A length of 0 gives zeros. A score is query times
    key times scale. With a window (a number, or None for none) only the last window tokens are visible.
    Return [B, H, D] in the dtype of q; compute in fp32.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Loop over the batch. `k[b, :length]` ends the row where its tokens end, so nothing behind them is ever read, and
# `keys[-window:]` keeps the newest. Then `repeat_interleave(H // K, dim=1)` makes `[L, H, D]` of `[L, K, D]`, and
# `torch.einsum("hd,lhd->hl", query, keys)` gives the scores.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_contiguous_attention(q, k, v, seq_lens, *, scale, window):
#     out = torch.zeros_like(q)
#     group = q.shape[1] // k.shape[2]
#     for b, length in enumerate(seq_lens.tolist()):
#         if length == 0:
#             continue
#         first = 0 if window is None else max(0, length - window)
#         keys, values = (x[b, first:length].float().repeat_interleave(group, dim=1) for x in (k, v))  # [L, H, D]
#         weights = (torch.einsum("hd,lhd->hl", q[b].float(), keys) * scale).softmax(-1)
#         out[b] = torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)
#     return out
# ```
#
# </details>

# %%
checks.check_contiguous_attention(my_contiguous_attention)

# %% [markdown]
# ## The problem, measured: what a token costs
#
# We have bought work with memory. What is the price of one slot?
#
# > **Predict.** Our model has 30 layers, 9 query heads, 3 KV heads and heads of 64 numbers. It runs in fp32, 4 bytes
# > a number. How many bytes does one token keep in the cache?

# %%
num_slots = llm.engine.cache.num_slots
num_bytes = llm.engine.kv.numel() * llm.engine.kv.element_size() // num_slots
print(f"{num_bytes:,} bytes a slot, from the tensor itself: {num_bytes / 1024:.0f} KiB")
own = llm.config
print(f"2 (key and value) x {own.num_layers} layers x {own.num_kv_heads} KV heads x {own.head_dim} numbers x 4 bytes "
      f"= {2 * own.num_layers * own.num_kv_heads * own.head_dim * 4:,}")  # fmt: skip

# %% [markdown]
# For a token, that is for four letters or so, 45 KiB. In bf16 it is half.
#
# The usual formula says `2 x layers x model width x bytes`. It dates from models in which every query head had a key
# and a value of its own. Let us see what it says of this model and two others; only their `config.json` is needed.

# %%
configs = {name: load_config(SHAPES / name)[0] for name in ("qwen3-0.6b-random", "llama-3.1-8b-random")}
print("bytes a token in bf16     by width  by query heads  by KV heads")
for name, config in {"this lesson's": llm.config, **configs}.items():
    per_head = 2 * config.num_layers * config.head_dim * 2
    by_width = 2 * config.num_layers * config.hidden_size * 2
    print(f"{name:22} {by_width:11,} {config.num_heads * per_head:15,} {config.num_kv_heads * per_head:12,}")

# %% [markdown] given="32 5120 819200 800"
# Only the last column is right. (Its first number is half of what we just saw, since bf16 has half the bytes.) For
# Llama the usual formula is wrong by a factor of 4: 32 query heads share 8 KV heads. That is what grouped queries are
# *for*. They shrink the cache, and with it whatever depends on it.
#
# Qwen3 has a surprise: there the usual formula is right, by accident. Its heads are twice as wide as the model's
# width divided by their number, and two of them share one KV head, so the two mistakes cancel. Do not trust a formula
# that never asks for the number of KV heads and the size of a head. (Some newer models keep one compressed row a token
# in place of keys and values. They have a formula of their own.)
#
# For comparison, OPT-13B, one of the models in the [PagedAttention paper](https://arxiv.org/abs/2309.06180), has 40
# layers, a width of 5120 and no grouped queries. There the usual formula holds: 2 x 40 x 5120 x 2 = 819,200 bytes, 800
# KB a token.


# %% tags=["exercise"]
def my_kv_bytes_per_token(config, dtype):
    """Return the bytes that keys and values of one token take over all layers.

    config has num_layers, num_heads, num_kv_heads, head_dim and hidden_size; dtype.itemsize is the bytes of a number.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Five factors. Two of the names in the docstring are not among them.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_kv_bytes_per_token(config, dtype):
#     return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
# ```
#
# </details>

# %%
checks.check_kv_bytes(my_kv_bytes_per_token)

# %% [markdown]
# ## Where to put it, when nobody knows how long
#
# A sequence needs a dense range, so its size must be chosen when the request arrives. How long will the answer be?
# Nobody knows: it ends when the model says so. The only size that is always enough is the longest that is allowed.
# Ask the real chat of this rung a short question, and look at its memory:

# %%
ask("What is the capital of France?", "contiguous", "--show-blocks", max_tokens=20)

# %% [markdown] given="141"
# The whole conversation, question and answer and what the chat template puts around them, fills 44 slots. It keeps
# 8,192, all that this chat has, so a second conversation would have to wait for the end of the first. Now with a large
# model on a large machine:
#
# > **Predict.** Llama 3.1 8B allows 131,072 tokens and costs 131,072 bytes a token. How much memory does one
# > reservation take? An H200 has 141 GB, and the weights take 16 of them. How many sequences fit? (Lesson 00: it
# > takes more than 200 rows to keep the machine's arithmetic busy.)

# %%
llama = configs["llama-3.1-8b-random"]
per_token = llama.kv_bytes_per_token(torch.bfloat16)
per_sequence = llama.max_model_len * per_token
free_bytes = 141e9 - 16e9
print(f"one sequence reserves {per_sequence / 2**30:.0f} GiB, so {free_bytes // per_sequence:.0f} sequences fit")
print(f"with 500 tokens each, {free_bytes // (500 * per_token):,.0f} sequences would fit")

# %% [markdown] given="161 25"
# **Seven.** One reservation is larger than all weights of the model, and most conversations use a few hundred tokens
# of it. Between seven and 1,907 lies all that paging is about.
#
# One can set a lower limit, and then long requests are refused. One can also guess better. The engine knows three
# policies, and two of them know the future, at least in part. They are here to tell ignorance from other losses:
#
# | policy | a sequence reserves |
# |---|---|
# | `max` | the longest length there is |
# | `pow2` | its prompt, and the next power of two of its output's true length |
# | `oracle` | its prompt and its output, to the token |
#
# A real engine can only do the first. Let us put one request under each of them: a prompt of 161 tokens, an answer of
# 25, and a limit of 2,048. The moment is right after the prefill. No model is needed: the arena is plain bookkeeping.

# %%
arenas = {policy: Arena(num_slots=2048, max_model_len=2048, reservation=policy) for policy in RESERVATIONS}
for policy, arena in arenas.items():
    arena.allocate(0, num_prompt_tokens=161, num_output_tokens=25)
    print(policy, arena.waste({0: 25}))

# %% [markdown] given="186 256"
# The words for what is not a token's state:
#
# - **reserved**: empty now, and this sequence will use it. At the end it was no waste, but until then nobody else can
#   have it.
# - **internal**: inside the reservation, and never used. Under `max` 1,862 slots, for 186 that ever hold a token.
# - **external**: outside the reservation, and lost to everybody by the allocator's rounding. `oracle` asks for 186
#   slots and gets 256. (Textbooks on memory would call this internal too. The
#   [PagedAttention paper](https://arxiv.org/abs/2309.06180) counts what the allocator loses as external, and so do we.)
#
# Nobody knows the second from the first while the answer runs; the books can tell them apart because we give them the
# true length. They count a slot for each token of the answer, the last one too, though it is never run: one slot is not
# worth a special case. Turn the words into code, and you will not mix them up again.


# %% tags=["exercise"]
def my_waste(own, output_length):
    """Split the slots of one sequence's range: return (token_states, reserved, internal, external).

    own.length is the size of the range and own.num_reserved what was asked for, the rest is rounding. Of the prompt's
    own.num_prompt_tokens and the answer's output_length tokens, own.num_tokens are written now. In the end all of
    them count as written, the last one too; they fit into what was asked for.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Draw the range as a line and mark four places on it: written now, written in the end, asked for, given. The answer
# is the four distances, from left to right.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_waste(own, output_length):
#     in_the_end = own.num_prompt_tokens + output_length
#     return (
#         own.num_tokens,
#         in_the_end - own.num_tokens,
#         own.num_reserved - in_the_end,
#         own.length - own.num_reserved,
#     )
# ```
#
# </details>

# %%
checks.check_waste(my_waste)

# %% [markdown] given="338 16384 100"
# Now a full house. A chat service has many requests: most are short, some very long. `draw_lengths` makes a queue
# like it, with prompts of 161 tokens and answers of 338 on average. We let in whoever fits into 16,384 slots, in the
# order of arrival, and look when every answer is half written.
#
# > **Predict.** Under `max` with a limit of 2,048, how many sequences fit into 16,384 slots? And of 100 slots, how
# > many hold a token then? Guess before you look.


# %%
def fill(policy, num_slots=16384, limit=2048):
    """Let requests in until one does not fit, and write half of each answer. Return the arena and the true lengths."""
    arena, lengths = Arena(num_slots, limit, policy), {}
    for seq_id, (num_prompt, num_output) in enumerate(draw_lengths(256, longest=limit)):
        if not arena.can_admit(num_prompt, num_output):
            break
        arena.allocate(seq_id, num_prompt, num_output)
        lengths[seq_id] = num_output
        for _ in range(num_output // 2):
            arena.append(seq_id)
    return arena, lengths


houses = {policy: fill(policy) for policy in RESERVATIONS}

# %%
views = {policy: viz.view_waste(arena, lengths) for policy, (arena, lengths) in houses.items()}
show(viz.draw_waste(views), viz.draw_waste_svg(views))
for policy, view in views.items():
    num_seqs = len(houses[policy][0].seq_ids)
    print(f"{policy:7} {num_seqs:3} sequences, {view.token_states / view.num_slots:4.0%} of all slots hold a token")

# %% [markdown] given="100 88"
# Under `max` eight sequences fit, as 16,384 / 2,048 must be, and 12 of 100 slots hold something. The other 88 are
# paid for and empty. Of the batch that lesson 00 asked for, little is left.
#
# Now look at the last line, it is the surprise. The `oracle` knows every answer's length *to the token*, and still
# more than half of the memory is empty. What is reserved for later is one part of that, rounding the other. **Even
# perfect knowledge of the future does not fill a memory of dense ranges.** So guessing better is not the way out.
#
# ## By hand: free and yet of no use
#
# Why does the allocator round at all? Ranges of one size s lie at multiples of s, so that the arena can be seen as
# rows `[num_slots / s, s]`, and attention reads it where it lies. And without rounding there would be gaps of all
# sizes. With it there still are gaps, of a second kind. Four sequences with 4 slots each fill an arena of 16; two of
# them end.
#
# > **Predict.** A and C have ended, so 8 slots are free. A request wants 8 slots. Does it fit? And if B ends too?

# %%
arena = Arena(num_slots=16, max_model_len=8, reservation="oracle")
for seq_id in range(4):
    arena.allocate(seq_id, num_prompt_tokens=3, num_output_tokens=1)
arena.free(0)
arena.free(2)
view = viz.view_arena(arena.num_slots, arena.ranges)
show(viz.draw_arena(view), viz.draw_arena_svg(view))
print("8 slots are wanted:", arena.can_admit(num_prompt_tokens=7, num_output_tokens=1))
arena.free(1)
print("and when B has ended:", arena.can_admit(num_prompt_tokens=7, num_output_tokens=1))

# %% [markdown]
# Eight slots are free and eight are wanted, but not *these* eight, not in a row. This is external fragmentation as
# textbooks have it. When B ends too, its range joins with A's, and slots 0 to 7 are one again.
#
# One could move D into A's old place and so join the gaps. But with long sequences that copies gigabytes, while
# everybody waits. So this rung lives with the gaps and keeps them large: a
# [`BuddyAllocator`](../minipaged/contiguous/buddy.py) gives out powers of two, each at a multiple of its size, and
# joins free neighbours again. The paper assumes the same of an engine that it compares with.

# %% [markdown]
# ## Build it: an allocator
#
# The engine's allocator keeps lists of free ranges and needs one step per doubling. Yours may be simpler: it knows
# only which ranges are taken, and looks through the places where the new one could lie.


# %% tags=["exercise"]
class MyAllocator:
    """Give out ranges of slots. The size of a range is a power of two, and it starts at a multiple of its size."""

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.allocated = {}  # start -> size of every range that is taken

    def find(self, size):
        """Return a multiple of `size` at which `size` slots lie inside the arena and share none with a taken range.

        `size` is a power of two already. If there are several such places, any will do; if there is none, return None.
        """
        raise NotYet

    def can_allocate(self, num_slots):
        """Return whether a range for that many slots is free."""
        return self.find(1 << (num_slots - 1).bit_length()) is not None

    def allocate(self, num_slots):
        """Take a range, rounded up to a power of two, and return its start; None if there is none."""
        size = 1 << (num_slots - 1).bit_length()
        if (start := self.find(size)) is not None:
            self.allocated[start] = size
        return start

    def free(self, start):
        """Give a range back."""
        del self.allocated[start]


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `range(0, self.num_slots - size + 1, size)` is all places. Two ranges share no slot if one ends before the other
# begins: `start + size <= other` or `other + length <= start`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class MyAllocator:
#     """Give out ranges of slots. The size of a range is a power of two, and it starts at a multiple of its size."""
#
#     def __init__(self, num_slots):
#         self.num_slots = num_slots
#         self.allocated = {}  # start -> size of every range that is taken
#
#     def find(self, size):
#         """Return where a range of `size` slots is free."""
#         for start in range(0, self.num_slots - size + 1, size):
#             if all(start + size <= other or other + length <= start for other, length in self.allocated.items()):
#                 return start
#         return None
#
#     def can_allocate(self, num_slots):
#         """Return whether a range for that many slots is free."""
#         return self.find(1 << (num_slots - 1).bit_length()) is not None
#
#     def allocate(self, num_slots):
#         """Take a range, rounded up to a power of two, and return its start; None if there is none."""
#         size = 1 << (num_slots - 1).bit_length()
#         if (start := self.find(size)) is not None:
#             self.allocated[start] = size
#         return start
#
#     def free(self, start):
#         """Give a range back."""
#         del self.allocated[start]
# ```
#
# </details>

# %%
checks.check_allocator(MyAllocator)

# %% [markdown] given="32"
# ## The other waste: time
#
# Memory is not all that lies idle. This rung runs *static batches*: a batch is formed, runs until its longest answer
# has ended, and then the next is formed. It is how one would do it by hand, and how engines did it for long.
#
# Five requests. Their answers have 2, 4, 4, 16 and 3 tokens. Our arena of 128 slots has four ranges of 32, so four of
# them form the batch, and the fifth waits.
#
# > **Predict.** The batch runs for 16 steps, so it has 4 x 16 = 64 seats. How many of them are idle: kept for
# > somebody who has finished? And in which step does the fifth request get its first token?

# %%
with viz.watch(llm) as timeline:
    llm.generate(prompts, [greedy(num_tokens) for num_tokens in (2, 4, 4, 16, 3)])
view = timeline.view()
show(viz.draw_timeline(view, width=100), viz.draw_timeline_svg(view))
print(f"{view.num_idle} of 64 seats were idle, and one request waited for {view.num_waiting} steps")

# %% [markdown]
# 38 of 64: more than half, and the fifth request sat before an empty chair from step 3 on. Its first token comes in
# step 17. A finished sequence does free its *slots* at once here. But nobody may sit down before the batch has ended.
#
# The cure is to let requests join and leave at every step. It came with an engine named Orca, a year before paging,
# and does not need it; [lesson 04](04_batching.ipynb) is about it. First memory: without it there is nothing to
# schedule.

# %% [markdown]
# ## Your version drives the real chat
#
# The same question as before, now with your attention, and with your allocator in the arena. The answer must be the
# same, and so must the drawing: one sequence that has the whole arena.

# %%
ask("What is the capital of France?", "contiguous", "--show-blocks", max_tokens=20,
    contiguous_attention=my_contiguous_attention, allocator=MyAllocator)  # fmt: skip

# %% [markdown] given="1000 32"
# ## From reference to kernel
#
# Your loop is [`reference.py`](../minipaged/contiguous/reference.py). The
# [kernel](../minipaged/contiguous/kernels.py) starts one *program* for each KV head of each sequence. It loads the
# query heads that share the KV head, walks over the row in tiles of keys, and ends where the sequence ends. K and V
# are read once for all queries of the group.
#
# How good can it get? In lesson 00 the intensity of a matrix product grew with the rows of the batch, because all
# rows share the weights. Who shares the keys of a sequence?
#
# > **Predict.** One decode step of one sequence with 1,000 tokens in the cache, heads as in Llama 3.1: 32 query
# > heads, 8 KV heads. How many operations are there for each byte of keys and values, in bf16? And if 200 sequences
# > are in the batch?


# %%
def attention_intensity(num_heads, num_kv_heads, head_dim, num_seqs, num_tokens=1000):
    """Count attention in one step, and return operations per byte of keys and values in bf16."""
    q = torch.empty(num_seqs, num_heads, head_dim, device="meta")
    kv = torch.empty(num_seqs, num_tokens, num_kv_heads, head_dim, device="meta")
    with FlopCounterMode(display=False) as counter:
        reference.contiguous_attention(q, kv, kv, torch.full((num_seqs,), num_tokens), scale=1.0, window=None)
    return counter.get_total_flops() / (2 * 2 * kv.numel())


print("operations a byte        1 sequence  200 sequences")
models = {"this lesson's": llm.config, **configs}
shapes = {name: (each.num_heads, each.num_kv_heads, each.head_dim) for name, each in models.items()}
for name, shape in {**shapes, "without groups": (32, 32, 128)}.items():
    print(f"{name:22} {attention_intensity(*shape, 1):12.1f} {attention_intensity(*shape, 200):14.1f}")

# %% [markdown] given="206"
# Four, the number of query heads that share a KV head, and with 200 sequences it is four as well: every sequence
# brings its own keys. So attention in decode is memory-bound in a batch of any size, far below the 206 of the machine,
# and grouped queries help twice: the cache is smaller, and what is read is used more often.
#
# The good side of this: a kernel that only has to wait for memory has time for other things. It can look up where a
# key lies, for example. Keep that in mind for lesson 02b.

# %% [markdown]
# ## What would break if...
#
# ... attention did not stop where the sequence ends? Batched code likes rectangles: compute scores for the whole row,
# give what lies behind the end the weight 0, multiply. A weight of 0 cannot hurt. Or can it? This is a whole
# implementation, in which the last line reads all of `values`:


# %%
def careless_attention(q, k, v, seq_lens, *, scale, window):
    """Hide what lies behind the end with weights of 0."""
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[2], dim=2) for x in (k, v))  # [B, L, H, D]
    hidden = torch.arange(k.shape[1], device=q.device) >= seq_lens[:, None]  # [B, L]
    scores = torch.einsum("bhd,blhd->bhl", q, keys) * scale
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhl,blhd->bhd", weights, values)


with use(contiguous_attention=careless_attention):
    for content in (0.0, float("nan")):
        llm.engine.kv.fill_(content)  # what was in the memory before we came
        try:
            print(f"memory held {content}: tokens {llm.generate(prompts[:1], greedy(4))[0].token_ids}")
        except RuntimeError as error:
            print(f"memory held {content}: {error}")

# %% [markdown]
# With zeros in the memory the answer is right. With NaN it is not, for 0 x NaN is NaN. Fresh memory often holds
# zeros, so the code works on your machine, and on the server too, until it runs in memory in which somebody's NaN has
# been. This bug has been found in real engines, and comes back with new kernels.
#
# The test that catches it is `test_contiguous_attention_equals_the_loop_bit_for_bit` in
# [`tests/paged/test_ops.py`](../tests/paged/test_ops.py): its rows hold NaN behind every end. The tests of whole
# engines do the same to every slot that nobody owns. Memory that nobody wrote is **poison, not zero**.

# %% [markdown]
# ## Measure: what a decode step reads
#
# A decode step reads the weights once, and of the cache every slot that holds a token of the batch. Which is more?

# %%
weight_bytes = 2 * sum(torch.Size(shape).numel() for shape in weight_shapes(llama).values())
print(f"Llama 3.1 8B in bf16: {weight_bytes / 1e9:.1f} GB of weights, for any batch")
for num_seqs, num_tokens in ((1, 500), (64, 500), (64, 4096), (200, 4096)):
    cache_bytes = num_seqs * num_tokens * per_token
    print(f"{num_seqs:4} sequences of {num_tokens:5,} tokens: {cache_bytes / 1e9:6.1f} GB of keys and values")

# %% [markdown] given="32 3000 952"
# With one short sequence the cache is next to nothing. With many long ones it is more than the model. It is then not
# only the largest thing in memory, but also what a decode step spends most of its time on.
#
# ## Recap
#
# 1. Keep keys and values, and a decode step runs one row a sequence: 20 rows in place of 200, and the same tokens.
# 2. A token costs `2 x layers x KV heads x head size x bytes`. The number of query heads and the width of the model
#    are not in it.
# 3. Dense ranges leave memory empty in three ways. Reserved: used later, not now. Internal: given, but never used.
#    External: lost to everybody. A better guess helps, but even one that knows the future leaves more than half empty.
#
# **Questions**
#
# <details>
# <summary>32 query heads share 8 KV heads. Somebody makes it 4. What becomes of cache and attention?</summary>
#
# A token costs half as many bytes, so twice the tokens fit. Eight query heads share what is read, so there are 8
# operations a byte in place of 4. It is still far below what the machine could do.
#
# </details>
#
# <details>
# <summary>The limit is 2,048 and the arena has 3,000 slots. How many sequences can run under max?</summary>
#
# One. A range has 2,048 slots and lies at a multiple of 2,048; the other 952 slots are never used by anybody. That is
# external waste before the first request has come.
#
# </details>
#
# <details>
# <summary>Why does the oracle not save us? It knows every length.</summary>
#
# It must still take the whole range when the sequence enters, so what will be written late is empty for long. And a
# range must be dense, so sizes are rounded and gaps between ranges do not add up. Only one who takes memory *when a
# token comes*, and in pieces that need not lie side by side, gets rid of both.
#
# </details>
#
# **Next:** [02a  Paged storage](02a_paged_storage.ipynb) cuts the arena into small blocks of one size, and gives a
# sequence a block when it needs one, wherever it lies. Of the three kinds of waste two are gone, and of the third a
# part of the last block is left.
