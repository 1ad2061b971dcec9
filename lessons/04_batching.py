# %% [markdown] given="4 2 6 3 1"
# # 04  Batching
#
# A decode step reads all weights of the model, for one sequence or for sixty ([lesson 00](00_foundation.ipynb)). So an
# engine wants many sequences in every step. But requests come when they like and end when they like. This lesson forms
# the batch **anew at every step**: requests join and leave, long prompts are cut into pieces, and when memory runs out
# somebody is sent away and comes back later.
#
# You write the plan of a step, the rows that a ragged kernel reads, the rule for who is sent away, and the choice
# between two ways back. At the end the real engine runs by your plan.
#
# ## Where we are
#
# All rungs so far run **static batches**. A batch is formed, it runs until its longest member has ended, and then the
# next one is formed. Below is the engine of [lesson 03](03_sharing.ipynb) with six requests. Each has a prompt of 4
# tokens. Their answers have 2, 6, 3, 4, 2 and 1 tokens. The pool has room for three of them at a time. A place in the
# batch is called a **seat** here.

# %%
from minipaged import LLM, SamplingParams, UserError, use
from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import NextToken, Plan
from minipaged.batching.preemption import Preemption
from minipaged.batching.scheduler import Scheduler
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.lessons.exercises.batching import check_plan_step, check_rows, check_victim, check_way
from minipaged.viz import draw_timeline, draw_timeline_svg, draw_waste, draw_waste_svg, view_waste, watch

# %%
model = lesson_model()
prompts = [[20 + i, 30 + i, 40 + i, 50 + i] for i in range(6)]
lengths = [2, 6, 3, 4, 2, 1]
params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]

static = LLM(model, rung="sharing", block_size=4, num_blocks=7, dtype="float32")
with watch(static) as timeline:
    static.generate(prompts, params)
view = timeline.view()
show(draw_timeline(view), draw_timeline_svg(view))
print(f"{view.num_steps} steps, {view.num_idle} seats idle")

# %% [markdown]
# A column is a step, that is, one pass through the model. Requests 0, 1 and 2 start together. Request 0 ends after two
# steps and request 2 after three. Request 1 goes on to its sixth, and the seats of the others stay empty. Requests 3, 4
# and 5 wait to the end of the batch, although there has been room again since request 0 ended.
#
# ## The problem, measured
#
# Ten steps with three seats are thirty seats. Twelve of them are idle. Here the longest answer is six times as long as
# the shortest. Real answers differ far more, and then a static batch is mostly idle.
#
# > **Predict.** Let a request enter as soon as a seat is free: the one that ends makes room in the *next* step. There
# > are three seats (`max_num_seqs`), and the order is that of the numbers. How many steps do the six requests take? How
# > many seats are idle?
#
# Draw it on paper before you run the next cell. It is the next engine, with the same model, memory and requests.

# %%
continuous = LLM(model, rung="batching", block_size=4, num_blocks=7, max_num_seqs=3, dtype="float32")
with watch(continuous) as timeline:
    continuous.generate(prompts, params)
view = timeline.view()
show(draw_timeline(view), draw_timeline_svg(view))
print(f"{view.num_steps} steps of 3 seats, {view.num_idle} idle, for {sum(lengths)} tokens of answers")

# %% [markdown] given="2022"
# Six steps, and no seat is ever empty. The answers have 18 tokens, and six steps with three seats give 18. It cannot be
# done in fewer.
#
# ## The idea
#
# Ask "who runs?" before **every step** and not before every batch. This is *iteration-level scheduling*, today mostly
# called *continuous batching*. It came before paging: Orca did it in 2022, over a cache with one dense range for each
# sequence. Paging came after it and lets more requests run at a time; see below.
#
# ```text
#              enter                              end
#   waiting ----------> running -----------------------> done
#      ^                   |
#      +-------------------+  no block left: recompute or swap
# ```
#
# The one who decides is the `Scheduler`. It has two collections, `waiting` and `running`, and the books of the cache.
# It knows neither model nor tensors. At every step it makes a `Plan`: a list of **chunks**. A chunk says which tokens
# of a sequence go through the model, and into which slots. If it ends with the sequence's newest token, it is
# *sampled*: the model gives the next one. The engine carries the plan out and reports those tokens. So we can run the
# real scheduler without a model, with tokens that are made up.


# %%
def next_token(chunk) -> NextToken:
    """Make up the token that a model would give the sequence."""
    num_outputs = len(chunk.member.token_ids) + 1 - chunk.group.num_prompt_tokens
    return NextToken(chunk.member.seq_id, 7, is_last=num_outputs == chunk.group.max_output_tokens)


# %%
def play(scheduler: Scheduler, requests: list[tuple[int, int, int]]):
    """Run requests of (step in which it comes, prompt tokens, answer tokens) to their end; return what happened."""
    with watch(scheduler) as timeline:
        while scheduler.has_unfinished or scheduler.num_arrived < len(requests):
            for i, (step, prompt, answer) in enumerate(requests):
                if step == scheduler.num_steps + 1:
                    scheduler.add(i, i, [1] * prompt, max_output_tokens=answer)
            plan = scheduler.schedule()
            scheduler.update(plan, [next_token(chunk) for chunk in plan.chunks if chunk.is_sampled])
    return timeline.view()


# %% [markdown]
# ## By hand
#
# A step has a **token budget**, `max_num_batched_tokens`. Tokens of prompts and tokens of answers count alike, because
# to the model's large matrices they are alike: each is one row. The rules, in this order:
#
# 1. Whoever decodes gets one token.
# 2. Prompts that have entered go on, with what is left of the budget. So a prompt may take several chunks.
# 3. New requests enter, first come, first served, while there are seats, tokens and blocks.
#
# The last token of a prompt gives the first token of the answer, in the same step.
#
# > **Predict.** A budget of 5 tokens a step. Request 0 has a prompt of 3 tokens and an answer of 4, request 1 has 5 and
# > 2, request 2 has 6 and 2. Fill in a table: a row for each request, a column for each step, `p` for tokens of the
# > prompt and `d` for a token of the answer. How many steps are there?

# %%
scheduler = Scheduler(BatchingCache(num_blocks=20, block_size=4), max_num_batched_tokens=5)
view = play(scheduler, [(1, 3, 4), (1, 5, 2), (1, 6, 2)])
show(draw_timeline(view), draw_timeline_svg(view))

# %% [markdown] given="40 100 16"
# Step one: the whole prompt of request 0, and two tokens of the next one's. Step two: request 0 decodes, request 1 gets
# its other three, and request 2 enters with the one token that is left. Whoever decodes never waits for a long prompt.
# Those behind it in the queue do.
#
# ## Why prompts are cut
#
# The more tokens a step has, the longer it takes. Somebody is reading the answer of request 0, token by token, when
# request 1 comes in step 3 with a prompt of 40 tokens.
#
# > **Predict.** How many tokens has the largest step with a budget of 100? With a budget of 16? And how many steps
# > does the long prompt take then?

# %%
for budget in (100, 16):
    scheduler = Scheduler(BatchingCache(num_blocks=40, block_size=4), max_num_batched_tokens=budget)
    view = play(scheduler, [(1, 4, 6), (3, 40, 2)])
    columns = zip(*(row.cells for row in view.rows), strict=True)
    by_step = [sum(cell.num_tokens for cell in column if cell) for column in columns]
    show(draw_timeline(view), draw_timeline_svg(view))
    print(f"budget {budget}: tokens by step {by_step}, the largest step has {max(by_step)}")

# %% [markdown]
# With the large budget, the reader of request 0 waits for a step of 41 tokens. With the small one, no step is larger
# than 16, and request 0 gets a token at every one of them. Request 1 pays with more steps until its own first token.
# That trade is what the budget is for. ([Sarathi-Serve](https://arxiv.org/abs/2403.02310) is the paper on it.)
#
# ## Padding saves no blocks
#
# A habit from training: pad all prompts of a batch to one length. One could hope that paging makes padding cheap, or
# even that equal lengths save blocks.
#
# > **Predict.** Three prompts of 5, 9 and 16 tokens, blocks of 4. How many blocks do they take as they are, and how
# > many padded to the longest?


# %%
def cost(lengths: list[int]) -> str:
    scheduler = Scheduler(BatchingCache(num_blocks=20, block_size=4))
    for i, length in enumerate(lengths):
        scheduler.add(i, i, [1] * length, max_output_tokens=2)
    plan = scheduler.schedule()
    return f"{plan.num_tokens} rows to compute, {20 - scheduler.cache.pool.num_free} blocks"


print("as they are:", cost([5, 9, 16]))
print("padded:     ", cost([16, 16, 16]))

# %% [markdown] given="64 32"
# Padding costs rows *and* blocks, and saves none. A batch here is **ragged**: the tokens of all chunks stand in one
# long row, one after the other, and nobody is padded. How attention copes with that comes below.
#
# ## What paging adds
#
# The scheduler works over any cache. Over the arena of [lesson 01](01_contiguous.ipynb), where every sequence reserves
# one dense range, it works as Orca did. Over the block pool it works as vLLM does. The same memory of 64 slots, the
# same six requests with prompts of 4 tokens; the model's limit is 32 tokens.


# %%
def most_at_once(view) -> int:
    """Return how many rows the fullest step computes."""
    columns = zip(*(row.cells for row in view.rows), strict=True)
    return max(sum(bool(cell and cell.num_tokens) for cell in column) for column in columns)


six = [(1, 4, length) for length in lengths]
arena, pool = ArenaCache(num_slots=64, max_model_len=32), BatchingCache(num_blocks=16, block_size=4)
for name, cache in (("arena", arena), ("pool", pool)):
    view = play(Scheduler(cache), six)
    print(f"{name}: {view.num_steps} steps, at most {most_at_once(view)} at once")

# %% [markdown]
# Same scheduler, same memory. The arena has room for two, because each reserves the longest length there is. Where did
# the slots go? Let two requests enter on both and look at the memory.

# %%
views = {}
for name, cache in (("arena", ArenaCache(64, 32)), ("pool", BatchingCache(16, 4))):
    scheduler = Scheduler(cache)
    for request_id in (0, 1):
        scheduler.add(request_id, request_id, [1] * 5, max_output_tokens=6)
    scheduler.schedule()
    views[name] = view_waste(cache, {0: 6, 1: 6})
show(draw_waste(views), draw_waste_svg(views))

# %% [markdown]
# Both hold ten tokens. The arena has all its slots taken for them: 12 wait for answers that will come, and 42 will
# never be used. The pool gives blocks to tokens that exist. That is also a **bet**: a request enters when the blocks of
# its *prompt* are free, and nobody knows how long its answer will be. [Lesson 03](03_sharing.ipynb) promised every
# request its worst case. Here nothing is promised, so more can enter, and one day the pool is empty in the middle of an
# answer. What happens then comes after your plan of a step.
#
# ## Build it: the plan of a step
#
# Three parts of the scheduler do the work; each adds to the plan what it decides:
#
# | call | what it does |
# |---|---|
# | `scheduler.plan_decode(plan)` | one token for every sequence that decodes; sends requests away if blocks run out |
# | `scheduler.plan_prefill(group, plan)` | as much of one request's prompt as the step has tokens left |
# | `scheduler.plan_admission(plan)` | lets waiting requests enter, in their order, and gives them their first chunk |
#
# `scheduler.running` holds the requests that have entered, in the order of their turn, and `group.is_decoding` says
# whether a request has its prompt behind it. (A request is called a *group* here: it may have several samples.)
#
# What is left for you is the order, and one trap. When a request has just been sent away, its blocks are free for a
# moment. If others entered in the same step, they would take the blocks that those who run need next.


# %% tags=["exercise"]
def my_plan_step(scheduler: Scheduler) -> Plan:
    """Make an empty `Plan()`, let the scheduler's parts fill it, and return it.

    First everybody who decodes. Then each request of `scheduler.running` that does not decode yet goes on with its
    prompt. Then others enter, unless a request was sent away in this step: `running` is shorter then than at first.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Note `len(scheduler.running)` before you call anything. Only `plan_decode` can make it smaller, and only
# `plan_admission` larger.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_plan_step(scheduler: Scheduler) -> Plan:
#     plan = Plan()
#     num_running = len(scheduler.running)
#     scheduler.plan_decode(plan)
#     for group in scheduler.running:
#         if not group.is_decoding:
#             scheduler.plan_prefill(group, plan)
#     if len(scheduler.running) == num_running:
#         scheduler.plan_admission(plan)
#     return plan
# ```
#
# </details>

# %%
check_plan_step(my_plan_step)

# %% [markdown]
# ## Build it: the rows of a step
#
# A plan mixes chunks of any length: ten tokens of one prompt, one token each of three answers. They go through the
# model as one flat list of tokens. Most of a decoder does not care; it looks at each token alone. Attention has to know
# where each piece begins and which keys it may see. Four lists say it:
#
# | list | length | what |
# |---|---|---|
# | `positions` | a number for each token | its place in its own sequence |
# | `slots` | a number for each token | where its key and value go in the pool |
# | `query_starts` | one more than there are pieces | where each piece begins in the flat list, and the last one ends |
# | `seq_lens` | a number for each piece | how many tokens its sequence has in the cache, the new ones included |


# %% tags=["exercise"]
def my_rows(pieces: list[tuple[int, int, list[int]]], block_size: int):
    """Return (positions, slots, query_starts, seq_lens) of a step, as four lists.

    A piece is (start, stop, block_ids): tokens `start` to `stop - 1` of a sequence go through the model, and
    `block_ids` is the sequence's block table. Token i lies in the table's block `i // block_size`, at place
    `i % block_size`; slots count over the whole pool, so block 7 of size 4 has slots 28 to 31.
    """
    raise NotYet


# %% [markdown] given="20"
# <details>
# <summary>Hint</summary>
#
# For `[(4, 6, [7, 2]), (0, 1, [5])]` in blocks of 4: positions `[4, 5, 0]`, slots `[8, 9, 20]`, query starts
# `[0, 2, 3]`, lengths `[6, 1]`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_rows(pieces: list[tuple[int, int, list[int]]], block_size: int):
#     positions, slots, query_starts, seq_lens = [], [], [0], []
#     for start, stop, block_ids in pieces:
#         for i in range(start, stop):
#             positions.append(i)
#             slots.append(block_ids[i // block_size] * block_size + i % block_size)
#         query_starts.append(len(positions))
#         seq_lens.append(stop)
#     return positions, slots, query_starts, seq_lens
# ```
#
# </details>

# %%
check_rows(my_rows)

# %% [markdown]
# Now attention over such rows, in numbers that you can check. All scores are equal (the queries are zero), so the
# result of a row is the mean of the values that it sees. Sequence A has the values 2, 4, 6, 8 in block 7 and 10, 12 in
# block 2. Its last two tokens are a chunk. Sequence B has one token, with the value 9, in block 5: it decodes.
#
# > **Predict.** The three results.

# %%
import torch

from minipaged.batching.ops import ragged_paged_attention

v_pool = torch.full((8, 4, 1, 1), float("nan"))  # what nobody has written must not matter
v_pool[7, :, 0, 0], v_pool[2, :2, 0, 0] = torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.tensor([10.0, 12.0])
v_pool[5, 0] = 9.0
q, k_pool = torch.zeros(3, 1, 1), torch.zeros(8, 4, 1, 1)
tables, query_starts, seq_lens = (torch.tensor(x).int() for x in ([[7, 2], [5, -1]], [0, 2, 3], [6, 1]))
out = ragged_paged_attention(q, k_pool, v_pool, tables, query_starts, seq_lens, tier="torch")
print([round(x, 2) for x in out.flatten().tolist()])

# %% [markdown] given="14"
# Query `i` of `n` stands at position `seq_len - n + i` and sees everything up to there. The first token of the chunk
# sees five values and the second six. A chunk is causal **inside** and sees all of its sequence **before** it. So a
# prompt gives the same result however it is cut, but for rounding. One call serves prompts, chunks and decodes.
#
# ## When the pool is empty
#
# Back to the bet. Two requests with prompts of 7 tokens and answers of 8, and a pool of 5 blocks of 4 slots. Each
# prompt takes 2 blocks, so both enter. In the end each wants to have 14 tokens, which is 4 blocks.
#
# > **Predict.** The prompts are computed in step one, and step two writes the eighth token of both. In which step does
# > somebody find no block? Who should be sent away? And in which step can the one that was sent away come back?


# %%
def five_blocks(policy: str) -> Scheduler:
    return Scheduler(BatchingCache(num_blocks=5, block_size=4), preemption=Preemption(policy))


scheduler = five_blocks("recompute")
view = play(scheduler, [(1, 7, 8), (1, 7, 8)])
show(draw_timeline(view), draw_timeline_svg(view))
print(f"{scheduler.num_preemptions} preemption, {view.num_tokens} tokens computed")

# %% [markdown]
# In step 3, request 0 takes the last free block for its ninth token. Request 1 needs one too and there is none. This is
# **preemption**: request 1 loses all its blocks and goes back into the queue. It keeps its *tokens*, which are only
# numbers, so its reader loses nothing and waits. It comes back when request 0 has ended, as a prompt of 9 tokens: seven
# of its own and the two that it has already said. Then it goes on.
#
# Three rules make this safe:
#
# - **The newest goes.** The request that came first is never sent away while others run, so it ends, and then the next
#   one is first. Everybody gets done.
# - **It comes back at its old place** in the queue, and only if everybody can still grow by a block after that.
#   Otherwise it would be sent away again at once.
# - **All or nothing.** A request's samples leave and return together. They share blocks, so sending one away would free
#   little.
#
# ## Build it: who is sent away
#
# The rule is a part of its own, `choose_victim`. It gets those among whom to choose. Requests that already have their
# slot for this step are not among them.


# %% tags=["exercise"]
def my_choose_victim(groups: list):
    """Return the group to send away: the one whose turn comes last.

    `groups` is in the order of turns: lower `group.priority` numbers first, and older requests first among equals.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The list is sorted already. Which end is it?
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_choose_victim(groups: list):
#     return groups[-1]
# ```
#
# </details>

# %%
check_victim(my_choose_victim)

# %% [markdown]
# ## Recompute or swap
#
# What was sent away must get its keys and values back. There are two ways. **Recompute** throws the blocks away and
# runs the tokens through the model again. **Swap** copies the blocks to CPU memory, and back into other blocks later.
#
# > **Predict.** Request 1 had computed 8 tokens when it was sent away. The run above computed 36 tokens in all. How
# > many does it compute with swap? How many blocks move?

# %%
for policy in ("recompute", "swap"):
    scheduler = five_blocks(policy)
    events = []
    scheduler.listener = events.append
    view = play(scheduler, [(1, 7, 8), (1, 7, 8)])
    print(f"{policy}: {view.num_tokens} tokens computed;", [event.reason for event in events if event.act == "swap"])

# %% [markdown]
# Recompute pays for every **token**, swap for every **block**, twice. Which one is cheaper depends on the model and the
# machine. A prefill is fast on a GPU, and the bus to the CPU is slow. But large models take long for a token. So our
# engine's policy "auto" compares the two. (vLLM had both ways at first; today it only recomputes.) Write the
# comparison.


# %% tags=["exercise"]
def my_way(num_tokens: int, num_blocks: int, seconds_per_token: float, seconds_per_block: float, places_left: int):
    """Return "swap" or "recompute", whichever takes less time; "recompute" if it is the same.

    `num_tokens` is what the request would compute again, `num_blocks` what it would move; `seconds_per_block` is for
    moving one block out *and* in again. The swap space has room for `places_left` more blocks. If the request has
    more, "recompute".
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The case that cannot swap comes first. Then compare `num_blocks * seconds_per_block` with the same for tokens.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_way(num_tokens: int, num_blocks: int, seconds_per_token: float, seconds_per_block: float, places_left: int):
#     if num_blocks > places_left:
#         return "recompute"
#     return "swap" if num_blocks * seconds_per_block < num_tokens * seconds_per_token else "recompute"
# ```
#
# </details>

# %%
check_way(my_way)

# %% [markdown]
# ## Your version in the real engine
#
# First the chat, by your plan and with your rule. The budget of a step is not small there, so the prompt is one chunk.

# %%
ask("What is the capital of France?", "batching", "--num-blocks", "16", max_tokens=12, plan_step=my_plan_step,
    choose_victim=my_choose_victim)  # fmt: skip

# %% [markdown]
# In the chat one request runs at a time, so nobody is ever in anybody's way. To see your rule for who is sent away,
# give the engine three prompts and too little memory. The wrapper below writes down whom your function chose. The
# answers must be those of an engine that has memory enough.

# %%
texts = ["The capital of France is", "The largest planet is", "Water boils at"]
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def small_engine(num_blocks: int) -> LLM:
    return LLM(model, rung="batching", block_size=4, num_blocks=num_blocks, preemption="recompute", dtype="float32")


def as_prompts(llm: LLM) -> list:
    return texts if llm.tokenizer else [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]


large = small_engine(num_blocks=64)
expected = [result.token_ids for result in large.generate(as_prompts(large), greedy)]
print("memory enough:", large.stats()["preemptions"], "preemptions")

# %%
asked = []


def watched_victim(groups: list):
    victim = my_choose_victim(groups)
    asked.append(f"of requests {[group.request_id for group in groups]}, {victim.request_id} goes")
    return victim


# %%
small = small_engine(num_blocks=10)
try:
    with use(plan_step=my_plan_step, choose_victim=watched_victim):
        results = small.generate(as_prompts(small), greedy)
    print(asked, small.stats()["preemptions"], "preemption")
    print("same tokens:", [result.token_ids for result in results] == expected)
except NotYet:
    print("not yet: my_plan_step and my_choose_victim")

# %% [markdown]
# If you have solved both: somebody was sent away in the middle of an answer, and the answers are the same, token by
# token. Preemption changes when things are computed, and not what.
#
# ## Reference to kernel
#
# [`batching/reference.py`](../minipaged/batching/reference.py) has the loop that you can read: sequence by sequence,
# gather the keys through the block table, mask, softmax. In [`batching/kernels.py`](../minipaged/batching/kernels.py)
# it is done by kernels. A step has two kinds of rows that want different programs:
#
# - **one query** (decode): a program for each sequence and KV head, as in [lesson 02b](02b_paged_kernel.ipynb), or
#   several that share a sequence where there are few;
# - **two or more queries** (a prompt or a chunk): a program for each *tile* of queries, which reads each key once for
#   all of them.
#
# Which sequence is of which kind stands in `query_starts`, on the GPU. So both kinds of program start for all of them,
# and one that finds no work ends at once. Here they are on a chunk and two decodes, beside the loop.

# %%
import os

from minipaged.batching.reference import ragged_paged_attention as loop
from minipaged.triton_support import require_triton

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
torch.manual_seed(0)
q = torch.randn(5, 4, 16, device=device)  # a chunk of 3 tokens and two decodes, 4 query heads
pools = torch.randn(2, 8, 4, 2, 16, device=device)  # 8 blocks of 4 slots, 2 KV heads
tables = torch.tensor([[7, 2, 5], [0, -1, -1], [3, 1, -1]], device=device).int()
query_starts, seq_lens = (torch.tensor(x, device=device).int() for x in ([0, 3, 4, 5], [9, 2, 6]))

# %%
right = loop(q, *pools, tables, query_starts, seq_lens, scale=0.25, window=None)
try:
    require_triton(device)
    out = ragged_paged_attention(q, *pools, tables, query_starts, seq_lens, tier="triton")
    print("kernels equal the loop:", torch.allclose(out, right, atol=1e-5))
except UserError as error:
    print(error)

# %% [markdown] given="37"
# ## What would break if...
#
# **... the oldest were sent away?** It holds the most blocks, so that looks clever. Below, request 0 wants to say 30
# tokens in a pool of 12 blocks, and new requests keep coming.
#
# > **Predict.** If it is never sent away, request 0 needs 30 steps and computes 37 tokens: its prompt of 8, and all of
# > its answer but the last. How many steps and tokens are they if always the oldest is sent away? Guess.


# %%
def keep_busy(scheduler: Scheduler) -> None:
    """Let a new request come whenever nobody waits, until request 0 has ended."""
    while 0 in scheduler.groups:
        if not scheduler.num_waiting:
            new = scheduler.num_arrived
            scheduler.add(new, new, [1] * 8, max_output_tokens=12)
        plan = scheduler.schedule()
        scheduler.update(plan, [next_token(chunk) for chunk in plan.chunks if chunk.is_sampled])


# %%
def serve_first(choose_victim) -> str:
    cache = BatchingCache(num_blocks=12, block_size=4)
    scheduler = Scheduler(cache, max_num_seqs=8, preemption=Preemption("recompute"))
    scheduler.add(0, 0, [1] * 8, max_output_tokens=30)
    with use(choose_victim=choose_victim), watch(scheduler) as timeline:
        keep_busy(scheduler)
    own = [event for event in timeline.events if event.request_id == 0]
    num_times, num_tokens = sum(event.act == "preempt" for event in own), sum(event.num_tokens for event in own)
    return f"{scheduler.num_steps} steps, sent away {num_times} times, {num_tokens} tokens"


# %%
print("newest goes:", serve_first(lambda groups: groups[-1]))
print("oldest goes:", serve_first(lambda groups: groups[0]))

# %% [markdown]
# Twice the steps, and more than three times the tokens, for one request. The engine is busy all the time, with things
# it had computed before. The test is `test_the_newest_goes_first_and_the_oldest_never` in
# `tests/batching/test_preemption.py`.
#
# **... a request came back without its answer?** Recompute has to run the prompt *and* what was said since. An engine
# once ran the prompt alone. One line does it here: a request's room is the length of its prompt.

# %%
from dataclasses import replace
from unittest.mock import patch

from minipaged.batching.group import Group

room = Group.room
with patch.object(Group, "room", lambda group: replace(room(group), lengths=[group.num_prompt_tokens])):
    results = small.generate(as_prompts(small), greedy)
for result, token_ids in zip(results, expected, strict=True):
    print(result.token_ids == token_ids, repr(result.text or result.token_ids))

# %% [markdown] given="128 24"
# The one that was sent away forgot what it had said, and said it again. No error, no crash. Compared with a run that
# had memory enough, it is seen at once: `test_two_streams_that_cannot_both_finish_lose_nothing_and_repeat_nothing` in
# `tests/batching/test_generate.py`.
#
# ## Measure
#
# Four machines with the same memory of 128 slots and the same queue of 24 requests: static batches over the arena, as
# FasterTransformer had them; the scheduler over the arena, as in Orca; the same with an oracle that knows the length of
# every answer; the scheduler over blocks, as in vLLM. Static batching is a `plan_step` too: nobody enters while anybody
# runs. The arena rounds what it reserves up to a power of two, so the limit of 40 tokens takes 64 slots.


# %%
def static_plan_step(scheduler: Scheduler) -> Plan:
    plan = Plan()
    was_empty = not scheduler.running
    scheduler.plan_decode(plan)
    if was_empty:
        scheduler.plan_admission(plan)
    return plan


def measure(cache, **parts) -> str:
    with use(**parts):
        view = play(Scheduler(cache), queue)
    return f"{view.num_steps:5} {most_at_once(view):13} {view.num_tokens / view.num_steps:15.2f}"


# %%
rng = torch.Generator().manual_seed(0)
sizes = [torch.randint(1, 25, (2,), generator=rng).tolist() for _ in range(24)]
queue = [(1, 1 + prompt // 2, answer) for prompt, answer in sizes]
print(f"{'':30} steps  most at once  tokens a step")
print(f"{'static, arena':30}", measure(ArenaCache(128, 40), plan_step=static_plan_step))
print(f"{'continuous, arena':30}", measure(ArenaCache(128, 40)))
print(f"{'continuous, arena, oracle':30}", measure(ArenaCache(128, 40, "oracle")))
print(f"{'continuous, blocks':30}", measure(BatchingCache(32, 4)))

# %% [markdown]
# A step reads all weights of the model once, whoever is in it. As long as that is what a step costs, fewer steps mean a
# faster engine. Asking at every step who runs helps. More rows in every step help more, and that is a matter of memory.
# The third line knows what no engine can know. Blocks are better still, with nothing known: even a reservation that is
# just right is held from the first step on, when it is still empty, and its size is rounded up.
#
# ## Recap
#
# Three takeaways:
#
# 1. The batch is formed at every step. Nobody waits for the longest, and a seat is filled as soon as it is free.
# 2. A step has a token budget. Decodes come first; prompts take what is left, in chunks.
# 3. Entering is a bet on memory. When it is lost, the newest is sent away. Its answer stays what it would have been.
#
# Three questions:
#
# <details>
# <summary>Why may nobody enter in a step in which somebody was sent away?</summary>
#
# The blocks that became free are there because those who run need to grow. A newcomer would take them, and the next one
# would be sent away in the next step.
#
# </details>
#
# <details>
# <summary>Over the arena, nobody is ever sent away. Why is it slower all the same?</summary>
#
# Each request reserves its longest possible length, so few enter at a time. A step with few rows reads the same
# weights as one with many.
#
# </details>
#
# <details>
# <summary>A request comes back by recompute. Can its answer differ from the one it would have given?</summary>
#
# Its tokens and its noise are kept, so only rounding can: tokens that had been decoded one by one are computed as one
# chunk. In fp32 the choice stays the same, but for near ties. By swap it has the same bits.
#
# </details>
#
# **What the next rung fixes.** Every request computes its whole prompt, even if another one has just computed the same
# system prompt, and every turn of a chat computes the turns before it again. [Lesson 05](05_prefix.ipynb) finds blocks
# again by what is in them.
