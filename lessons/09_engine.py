# %% [markdown]
# # 09  The whole engine
#
# **Where we are.** You have climbed from [a decoder that recomputes everything](00_foundation.ipynb) to [blocks that
# are found again by what they hold](05_prefix.ipynb). Each rung added one idea. This lesson looks at all of them at
# once: what they are worth together, how one request travels through the code, what makes the engine fast on a GPU,
# where other engines chose otherwise, and when none of it helps. (The numbers 06 to 08 are kept for rungs to come.)
#
# Here is the memory of the top rung in the middle of its work. Three requests with a common beginning are running, and
# one that has ended left its blocks behind. The model is tiny and random, because nothing here depends on what is said.

# %%
from minipaged import LLM, SamplingParams, use
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.viz import draw_pool, draw_pool_svg, draw_timeline, draw_timeline_svg, view_cache, watch


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def draw(llm):
    view = view_cache(llm.engine.cache)
    show(draw_pool(view), draw_pool_svg(view))


# %%
llm = LLM("random", num_blocks=24, block_size=8, dtype="float32")
llm.generate([list(range(300, 320))], greedy(1))
for request in range(3):
    llm.engine.add_request(list(range(100, 116)) + [1000 * request + i for i in range(5 + 6 * request)], greedy(6))
for _ in range(3):
    llm.engine.step()
draw(llm)
while llm.engine.has_unfinished():
    llm.engine.step()

# %% [markdown] given="100"
# ## The problem, measured
#
# What is the ladder worth? Four requests with 100 common tokens in front, answers of different lengths, the same memory
# on every rung that has any. We count how many tokens go through the model, and in how many passes. All rungs give the
# same answers; the cell checks it.

# %%
from minipaged.llm import RUNGS

common = list(range(100, 200))
prompts = [common + [1000 + 50 * i + k for k in range(10 + 5 * i)] for i in range(4)]
params = [greedy(4 + 2 * i) for i in range(4)]


def count_passes(rung):
    memory = {} if rung == "foundation" else {"num_blocks": 32}
    llm = LLM("random", rung=rung, max_model_len=256, dtype="float32", **memory)
    forward, sizes = llm.model.forward, []
    llm.model.forward = lambda token_ids, *rest: (sizes.append(len(token_ids)), forward(token_ids, *rest))[1]
    answers = [result.token_ids for result in llm.generate(prompts, params)]
    at_once = max((size for size in sizes if size <= 4), default=4)  # a decode step has one token of each request
    return answers, sum(sizes), len(sizes), at_once


# %%
oracle, num_computed_without, *_ = count_passes("foundation")
for rung in RUNGS:
    answers, num_tokens, num_passes, at_once = count_passes(rung)
    print(f"{rung:<11} {num_tokens:>5} tokens in {num_passes} passes, {at_once} requests at once, ", end="")
    print("answers equal:", answers == oracle)
print(f"the first rung computes {num_computed_without / num_tokens:.0f} times as many tokens as the last")

# %% [markdown]
# Read it as a story. The cache takes most of the tokens away (`contiguous`), but its reservations leave room for 2
# requests. Paging fits 3 into the same memory. It needs more passes all the same, because batches are still static:
# the fourth request waits for all three, then runs alone. `sharing` has nothing to share here. `batching` needs fewer
# passes: requests enter as soon as there is room for what they have *now*, and prompts share a pass with those that
# decode. `prefix` computes the common beginning once; the others wait one step for it. No rung changed the answer.
#
# ## One request, eight steps
#
# Now the real model, and one question. This is the way that it goes:
#
# ```text
#  1 text to ids     the chat template and the tokenizer           foundation/tokenizer.py
#  2 queue           add_request: checks, a Sequence, the queue    batching/generate.py
#  3 plan            who computes what in this step; blocks        batching/scheduler.py, prefix/cache.py
#  4 rows            the plan as tensors                           batching/rows.py
#  5 forward         per layer: write K and V, then attend         foundation/model.py, paged/ops.py, batching/ops.py
#  6 choose          logits to one token per sequence              foundation/sampling.py
#  7 update          books: what is computed, what is full, text   batching/scheduler.py, prefix/cache.py
#  8 leave           blocks go back, and stay findable             batching/group.py, prefix/caching_pool.py
# ```
#
# Steps 3 to 7 are one call of `engine.step()`, and come again for every token of the answer. The engine is
# `LLM.engine`. Its steps of speed are off here (more about them below), so that we see the rungs' own code.

# %%
MODEL = lesson_model()
slow = {"fused": False, "graphs": False, "device_batch": False, "overlap": False}
llm = LLM(MODEL, num_blocks=12, dtype="float32", **slow)
engine = llm.engine


# %%
from minipaged.prefix.radix_tree import num_common


def chat_ids(question):
    if llm.tokenizer is None:  # the random model has no words: take bytes for tokens
        return list(f"You are a helpful assistant. {question}".encode())
    return llm.chat_prompt([{"role": "user", "content": question}])


before, prompt = chat_ids("What is the capital of Spain?"), chat_ids("What is the capital of France?")
llm.generate([before], greedy(1))  # somebody was here before
print(f"{len(prompt)} tokens, the first {num_common(prompt, before)} as in the question about Spain")
print("the last ten:", prompt[-10:])

# %% [markdown]
# > **Predict.** The prompt above comes to an engine that has just answered the same question about Spain. Blocks have
# > 16 slots, and the answer will have 5 tokens. How many tokens are found in the cache? How many does the first step
# > compute? When all is done, how many tokens have keys and values, and in how many blocks? (The last token of an
# > answer is chosen and never computed.)

# %%
events = []
engine.scheduler.listener = events.append
request_id = engine.add_request(prompt, greedy(5))  # step 2
print("waiting:", engine.scheduler.num_waiting, " running:", len(engine.scheduler.running))
match = engine.cache.index.match(prompt, "", limit=len(prompt) - 1)
found, num_cached = 16 * len(match.block_ids), len(prompt) + 5 - 1
print(f"found {found}, computed in the first step {len(prompt) - found}")
print(f"at the end {num_cached} tokens in {-(-num_cached // 16)} blocks")

# %% [markdown]
# Only whole blocks are found, so the tokens behind the last whole common block are computed, though some of them are
# the same in both questions.
#
# ### The first step, with its trace
#
# To see the inside of `engine.step()` we use two tools. `use(...)` lets us put a **spy** in the place of a part: it
# notes what it is given and calls the product's own code. And Python's own profile hook tells which functions are
# called. We list those that matter, in the order of their first call, with a number where there are several.

# %%
from minipaged.batching.reference import ragged_paged_attention_sdpa

seen = {}


def spy_plan(scheduler):
    seen["plan"] = type(scheduler).plan_step(scheduler)
    return seen["plan"]


def spy_attention(q, k_pool, v_pool, block_tables, query_starts, seq_lens, *, scale, window):
    seen.update(q=q, block_tables=block_tables, query_starts=query_starts, seq_lens=seq_lens)
    tables = (block_tables, query_starts, seq_lens)
    return ragged_paged_attention_sdpa(q, k_pool, v_pool, *tables, scale=scale, window=window)


# %%
import sys
from collections import Counter
from pathlib import Path

import minipaged

WATCHED = {
    *("add_request", "schedule", "plan_step", "can_admit", "match", "allocate", "append", "of", "forward", "sample"),
    *("write_slots", "ragged_paged_attention", "push", "update", "note_computed", "insert", "free"),
}
PACKAGE = str(Path(minipaged.__file__).parent)
calls = Counter()


def tracer(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in WATCHED and code.co_filename.startswith(PACKAGE):
        calls["/".join(Path(code.co_filename).parts[-2:]), code.co_qualname] += 1


# %%
def traced_step():
    calls.clear()
    sys.setprofile(tracer)
    try:
        outputs = engine.step()
    finally:
        sys.setprofile(None)
    for (file, name), count in calls.items():
        print(f"{file:<26} {name:<28} {count if count > 1 else ''}")
    return outputs


with use(plan_step=spy_plan, ragged_paged_attention=spy_attention):
    (output,) = traced_step()

# %% [markdown]
# That is the whole engine at work, once. `write_slots` and `ragged_paged_attention` come once per decoder layer. The
# index is asked twice: when the scheduler weighs whether the request fits, and when it enters. And where one name
# stands in several files, you see the ladder itself: each rung adds its step, then calls the rung below.
#
# Let us look at what passed through the hands of the spies. The **plan** (step 3) is plain numbers:

# %%
(chunk,) = seen["plan"].chunks
print(f"compute tokens {chunk.start} to {chunk.stop - 1} of sequence {chunk.member.seq_id}")
print("slots for their keys and values:", chunk.slots)
print("block table:", engine.cache.tables[chunk.member.seq_id].block_ids, " sampled:", chunk.is_sampled)

# %% [markdown]
# A slot is a place in the pool: block id times block size plus the place in the block. The tokens before the first one
# of the plan are in the table too, but nobody computes them: they were found.
#
# The **rows** (step 4) are the same as tensors. This is all that attention gets to know, in every layer (step 5):

# %%
print("q:", list(seen["q"].shape), "= [new tokens, query heads, head dim]")
print("block_tables:", seen["block_tables"].tolist())
print("query_starts:", seen["query_starts"].tolist(), " seq_lens:", seen["seq_lens"].tolist())

# %% [markdown]
# `query_starts` says which rows of `q` belong to which sequence. `seq_lens` counts all tokens with keys and values, the
# new ones included, because writes come before attention. From the two, attention knows where each query stands.
#
# Then a token was **chosen** (step 6), and the books were **updated** (step 7): the blocks that are full now got their
# names. The answer's first token came out:

# %%
print("token", output.token_ids, "text", repr(output.text))
draw(llm)

# %% [markdown]
# ### The other steps
#
# Now the request decodes. Same functions, one token. The table gets a slot at a time, and a new block when the last one
# is full.

# %%
with use(plan_step=spy_plan):
    traced_step()

# %%
engine.before_release = lambda seq: print("leaving with", engine.cache.tables[seq.seq_id].num_tokens, "cached tokens")
while engine.has_unfinished():
    (output,) = engine.step()
    tables = [(table.num_tokens, table.block_ids) for table in engine.cache.tables.values()]
    print("token", output.token_ids, repr(output.text), "table", tables[0] if tables else "gone")
engine.before_release = engine.scheduler.listener = None
print("finished:", output.result.finish_reason, "  found:", output.result.metrics.num_hit_tokens)
draw(llm)

# %% [markdown]
# Step 8: the request has left. Its full blocks stay in the index, free for whoever needs memory and ready for whoever
# begins alike. And the scheduler told its story while all that happened:

# %%
for event in events:
    print(f"step {event.step}: {event.act:<7} tokens {event.num_tokens}  {event.reason}")

# %% [markdown]
# ## Exercise 1: attention of a mixed batch
#
# The one operation that all rungs lead to. The rows of `q` belong to several sequences: some bring a whole prompt, some
# a piece of one, some a single token. Each sequence has its own table. By hand: a sequence has 9 tokens in the cache,
# and 3 of them are new. Its queries stand at positions 6, 7 and 8. The first sees the keys 0 to 6, the last sees all 9.


# %% tags=["exercise"]
def my_attention(q, k_pool, v_pool, block_tables, query_starts, seq_lens, *, scale, window):
    """Return the attention of every query token, [T, H, D].

    Sequence b owns the rows `query_starts[b]` to `query_starts[b + 1] - 1` of q [T, H, D]. It has `seq_lens[b]` tokens
    in the cache, the new ones included. Token number i of it lies in block `block_tables[b, i // S]` of the pools
    [N, S, K, D], at place i % S. Query i of n stands at position `seq_len - n + i` and sees the keys up to there.

    There are G = H // K query heads for each KV head: query head h reads KV head h // G. Scores are q times k times
    `scale`. Slots behind a sequence's last token may hold anything, NaN too, so cut them off. `window` is None here.
    The chat may run in bfloat16: compute in float32, `q.float()` and so on, and return the dtype of q.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# One sequence at a time. `k_pool[block_ids]` gathers its blocks, [blocks, S, K, D]; `.flatten(0, 1)[:length]` makes one
# row of tokens of them. `.repeat_interleave(G, 1)` gives each query head its keys. The mask: key j is hidden from a
# query at position p if j > p.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# import torch
#
#
# def my_attention(q, k_pool, v_pool, block_tables, query_starts, seq_lens, *, scale, window):
#     out = torch.zeros_like(q)
#     S, G = k_pool.shape[1], q.shape[1] // k_pool.shape[2]
#     for b, length in enumerate(seq_lens.tolist()):
#         start, end = query_starts[b : b + 2].tolist()
#         block_ids = block_tables[b, : -(-length // S)].long()
#         gathered = (pool[block_ids].flatten(0, 1)[:length] for pool in (k_pool, v_pool))
#         k, v = (each.float().repeat_interleave(G, 1) for each in gathered)
#         scores = torch.einsum("thd,lhd->htl", q[start:end].float(), k) * scale
#         position = torch.arange(length - (end - start), length, device=q.device)
#         is_hidden = torch.arange(length, device=q.device) > position[:, None]
#         weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
#         out[start:end] = torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
#     return out
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.engine import check_attention

check_attention(my_attention)

# %% [markdown]
# ## Exercise 2: another plan of a step
#
# Rung `batching` lets everybody decode in every step, and prompts take the tokens that are left. Many engines began
# otherwise, and some still do it unless told not to, SGLang among them: **a step is either prompts or decoding**. It is
# simpler, since one step needs one kind of attention. Write that plan, then look at what it costs.
#
# The scheduler's parts are at your service. `scheduler.running` are the groups that have entered; a group that has not
# finished its prompt has `is_decoding == False`. Each part adds chunks to a plan, as far as the step's budget of tokens
# goes:
#
# - `scheduler.plan_prefill(group, plan)` goes on with one group's prompt,
# - `scheduler.plan_admission(plan)` lets requests enter from the queue, and starts on their prompts,
# - `scheduler.plan_decode(plan)` gives one token to everybody who decodes.
#
# An empty plan looks like this:

# %%
from minipaged.batching.plan import Plan

print(Plan())


# %% tags=["exercise"]
def my_plan_step(scheduler):
    """Return the `Plan` of one step: prompts alone, or decoding alone.

    Begin with `Plan()`, which is empty. Go on with the prompts that have entered, in the order of `scheduler.running`.
    Then let others enter. If all that has put no chunk into `plan.chunks`, decode.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Make the list of groups first, `[group for group in scheduler.running if not group.is_decoding]`, because a part may
# change `running`. `plan.chunks` is an empty list as long as there is nothing to compute.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_plan_step(scheduler):
#     plan = Plan()
#     for group in [group for group in scheduler.running if not group.is_decoding]:
#         scheduler.plan_prefill(group, plan)
#     scheduler.plan_admission(plan)
#     if not plan.chunks:
#         scheduler.plan_decode(plan)
#     return plan
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.engine import check_plan, prefill_alone

check_plan(my_plan_step)

# %% [markdown]
# What does it cost? Two requests are decoding when a prompt of 40 tokens comes. A step may compute 16 tokens. Above the
# product's plan, below prompts alone:


# %%
def serve_a_late_comer(**parts):
    llm = LLM("random", rung="batching", num_blocks=32, max_num_batched_tokens=16, dtype="float32")
    engine = llm.engine
    with use(**parts), watch(llm) as timeline:
        engine.add_request(list(range(100, 110)), greedy(8))
        engine.add_request(list(range(200, 206)), greedy(8))
        for _ in range(3):
            engine.step()
        engine.add_request(list(range(300, 340)), greedy(8))
        while engine.has_unfinished():
            engine.step()
    return timeline.view()


# %%
for parts in ({}, {"plan_step": prefill_alone}):
    view = serve_a_late_comer(**parts)
    show(draw_timeline(view), draw_timeline_svg(view))

# %% [markdown]
# The same number of steps, but the two that were answering stand still while the long prompt is computed: 6 idle cells.
# Whoever reads their answers sees the text stop. That is what **chunked prefill** beside decoding is for. And the late
# comer gains nothing from having its steps to itself: its first token comes in the same step either way.
#
# ## Exercise 3: who is sent away
#
# When no block is left, somebody has to go, and compute again later what it had. The product sends away the *newest*
# request. Would it not be better to send the one whose work is the cheapest to do again?


# %% tags=["exercise"]
def my_choose_victim(groups):
    """Return the group to send away.

    `groups` are in the order of their turn. The first one is the one that needs a block: it must not go, unless it is
    the only one. Of the others take the one with the smallest `group.num_tokens_computed()`; of several, the last.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `groups[1:] or groups` leaves the first one out where that is possible. `min` returns the first of several equal ones,
# so give it the list in reverse.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_choose_victim(groups):
#     others = groups[1:] or groups
#     return min(reversed(others), key=lambda group: group.num_tokens_computed())
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.engine import check_victim

check_victim(my_choose_victim)

# %% [markdown]
# Is that rule better? The scheduler needs no model to tell: it plans over numbers. `replay` is the loop of the engine
# with the forward pass left out, and every token is a 1.

# %%
from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import NextToken
from minipaged.batching.preemption import Preemption
from minipaged.batching.scheduler import Scheduler


def next_tokens(plan, outputs):
    for chunk in plan.chunks:
        if chunk.is_sampled:
            group, member = chunk.group, chunk.member
            num_outputs = len(member.token_ids) - group.num_prompt_tokens + 1
            yield NextToken(member.seq_id, 1, is_last=num_outputs == outputs[group.request_id])


# %%
def replay(cache, lengths, outputs, **parts):
    scheduler = Scheduler(cache, preemption=Preemption("recompute"))
    for number, length in enumerate(lengths):
        scheduler.add(number, number, [1] * length, max_output_tokens=outputs[number])
    num_computed = 0
    with use(**parts):
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            num_computed += plan.num_tokens
            scheduler.update(plan, list(next_tokens(plan, outputs)))
    num_needed = sum(lengths) + sum(outputs) - len(outputs)  # the last token of an answer is not computed
    return scheduler.num_steps, scheduler.num_preemptions, num_computed - num_needed


# %% [markdown] given="32 100"
# > **Predict.** Three requests of 32, 10 and 100 tokens fill the pool, and the first one needs a block. "Newest" sends
# > away the one with 100 tokens, "cheapest" the one with 10. Each answer has 10 tokens. Which rule computes less again?
# > And if each answer has 30?

# %%
from minipaged.lessons.exercises.engine import cheapest

for length in (10, 30):
    for name, parts in (("newest", {}), ("cheapest", {"choose_victim": cheapest})):
        _, times, again = replay(BatchingCache(10, 16), [32, 10, 100], [length] * 3, **parts)
        print(f"answers of {length} tokens, {name:>8} first: {again:>3} computed again, {times} sent away")

# %% [markdown]
# Both can be the better one. Cheap requests hold few blocks. If the trouble passes soon, giving up a few is enough. If
# it does not, the large one is sent away all the same, a little later, and both have to compute again. The product
# takes the newest for another reason: whoever came first is never sent away, so everybody gets done some day.
#
# ## Your engine
#
# All three parts of yours in the real chat, on the top rung:

# %%
parts = {"ragged_paged_attention": my_attention, "plan_step": my_plan_step, "choose_victim": my_choose_victim}
ask("What is the capital of France?", "prefix", **parts)

# %% [markdown]
# And under pressure: many requests at once, in a pool that is too small for them. The tokens must be those of the
# product.


# %%
def under_pressure(**parts):
    llm = LLM("random", num_blocks=10, max_num_batched_tokens=64, preemption="recompute", dtype="float32")
    with use(**parts):
        results = llm.generate([[1000 * i + k for k in range(12 + 7 * i)] for i in range(5)], greedy(20))
    return [result.token_ids for result in results], llm.stats()["preemptions"]


try:
    yours, num_preemptions = under_pressure(**parts)
    print("same tokens:", yours == under_pressure()[0], "  sent away:", num_preemptions, "times")
except NotYet:
    print("not yet: this needs all three")

# %% [markdown]
# ## What makes it fast
#
# The rungs say what is computed. On a GPU that is not enough. Python needs longer to launch the kernels of a small
# model's decode step than the GPU needs to run them, so the GPU waits. `minipaged/fast/` stands above the rungs, and no
# rung knows it. It changes when and how, in four steps, each with a switch:
#
# | step | what it saves |
# |---|---|
# | `fused` | products: q, k and v are one matrix, gate and up another; what stands between is one kernel |
# | `graphs` | launches: a decode step is recorded once and replayed as a whole, in a few fixed batch sizes |
# | `device_batch` | transfers: block tables stay on the GPU, a step sends four numbers a row; tokens are chosen there |
# | `overlap` | waiting: step 2 is planned while step 1 computes, since a plan needs no token, only that there is one |
#
# On a CPU they save nothing, so they are off. But they run there when asked for, without graphs and streams, and that
# is how the tests hold them. We count matrix products, and compare tokens:

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class CountProducts(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_products += "linear" in str(func) or "mm" in str(func)
        return func(*args, **(kwargs or {}))


# %%
same = []
for steps in ((), ("fused",), ("device_batch", "overlap"), tuple(slow)):
    fast = LLM("random", num_blocks=32, dtype="float32", **{name: name in steps for name in slow})
    with CountProducts() as counted:
        results = fast.generate([[1, 2, 3, 4, 5]] * 3, greedy(6))
    same.append([result.token_ids for result in results])
    stats = {name: count for name, count in fast.stats().items() if name.endswith("_steps")}
    print(f"{' + '.join(steps) or 'none':<40} products: {counted.num_products:>3}  {stats}")
print("same tokens:", all(each == same[0] for each in same))

# %% [markdown]
# Per pass that is 4 layers of 7 products and the last one, 29, against 4 layers of 4 and the last one, 17. A **late**
# step is one whose tokens the host hears of after it has planned the next one. One of **fixed size** is a decode step
# that a graph could replay; the first step computes prompts, so it is none. What each step of speed is worth in time
# has to be measured on a GPU. The next cell reads the committed measurement, with many sequences at once.

# %%
import json

path = Path(minipaged.__file__).parents[1] / "docs" / "benchmarks" / "fast.json"
record = json.loads(path.read_text()) if path.exists() else {"rows": []}
if record["rows"]:
    print(record["machine"].get("gpu"), record["settings"]["model"], "output tokens/s, each row adds a step")
for before, row in zip(record["rows"], record["rows"][1:], strict=False):
    to_before, to_none = (row["median"] / other["median"] for other in (before, record["rows"][0]))
    print(f"{row['steps']:<16} {to_before:.2f} times the row before, {to_none:.2f} times none")
if not record["rows"]:
    print("this installation has no measurement beside it; on a GPU, python -m minipaged.bench fast makes one")

# %% [markdown] given="32 256"
# Each row holds for this order only: what a step saves depends on what the steps above it have left. Launches were
# what the GPU waited for most, so graphs are worth most. With them gone, the Python between two steps stands out, and
# overlap hides it. [fast.md](../docs/fast.md) has the reasons, and the workload.
#
# ## Where other engines chose otherwise
#
# None of these choices is *the* right one. As far as their sources and documentation say, by default:
#
# | engine | block size | how a beginning is found | when memory runs out |
# |---|---|---|---|
# | minipaged | 16, or any | hash chain, or a tree of blocks | the newest goes: recompute or swap |
# | vLLM (V1) | 16 | hash chain; tables are append-only | preempts; recompute only |
# | SGLang | 1 | radix tree, to the token | takes running requests back; recompute |
# | TensorRT-LLM | 32 | tree of blocks; part-full ones too | cannot: the longest answer is reserved |
# | TGI | 1, 16 or 256, by kernel | radix tree, with some kernels | cannot: the longest answer is reserved |
# | transformers | 256 | hash chain; equal blocks are merged | the newest goes: offload or recompute |
#
# (The last line is its continuous batching.) They differ in sampling too. minipaged forks a sequence and copies on
# write. transformers forks as well, and copies the part-full block at once. vLLM's V1 makes one request of each sample,
# and lets them share through the prefix cache.
#
# Three of these choices can be tried here.
#
# **Append-only or merge?** Two requests may fill equal blocks at the same time. One can keep both, or point one table
# at the other's block and free its own. vLLM keeps both: a table that never changes in the middle is simpler to hold on
# a GPU. transformers merges. minipaged makes the second request *wait* for the block that the first is writing, so that
# doubles are rare, and where one is made all the same it keeps both, as vLLM does.
#
# **Block size.** A small block wastes less and hits more. A large one has shorter tables and fewer look-ups. The same
# requests:


# %%
def with_block_size(block_size):
    llm = LLM("random", num_blocks=1024 // block_size, block_size=block_size, dtype="float32")
    for each, param in zip(prompts, params, strict=True):
        llm.engine.add_request(each, param)
    longest = empty = 0
    while llm.engine.has_unfinished():
        llm.engine.step()
        tables = llm.engine.cache.tables.values()
        longest = max([longest, *(len(table.block_ids) for table in tables)])
        empty = max(empty, sum(len(table.block_ids) * block_size - table.num_tokens for table in tables))
    return llm.stats()["hit_tokens"], longest, empty


# %%
for block_size in (1, 16, 256):
    hits, longest, empty = with_block_size(block_size)
    print(f"S = {block_size:>3}: {hits} tokens found, tables of up to {longest} entries, up to {empty} slots empty")

# %% [markdown] given="128"
# **Reserve or preempt?** Reserving for the longest answer means that nobody is ever sent away, and that fewer run at a
# time. How much that costs depends on how far answers stay below the limit. The same memory, the same requests, each
# with a limit of 128 tokens in all. (A dense range of 128 stands in for 8 blocks of 16: it is the amount that counts.)

# %%
lengths = [10 + 4 * i for i in range(16)]
outputs = [8 + 5 * (i % 8) for i in range(16)]
for name, cache in (("preempt", BatchingCache(16, 16)), ("reserve the longest", ArenaCache(256, 128, "max"))):
    steps, times, again = replay(cache, lengths, outputs)
    print(f"{name:>20}: {steps} steps, {times} sent away, {again} tokens computed again")

# %% [markdown]
# ## When paging does not help
#
# Paging is bookkeeping. It pays by letting more requests run in the same memory. Where that is worth nothing, it can
# only cost. So we run three cases, each beside a cache of dense ranges under the *same* scheduler that **knows how long
# every answer will be** and reserves just that (`reservation="oracle"`). No real engine has such an oracle. It is the
# best that contiguous memory could do.

# %%
import time


def time_of(model, num_blocks, prompts, max_tokens, **options):
    llm = LLM(model, rung="batching", num_blocks=num_blocks, dtype="float32", **options)
    times = []
    for _ in range(3):  # the first run also warms up
        steps, start = llm.engine.scheduler.num_steps, time.perf_counter()
        llm.generate(prompts, greedy(max_tokens))
        times.append(time.perf_counter() - start)
    return min(times), llm.engine.scheduler.num_steps - steps


# %%
def compare(name, *case):
    paged, oracle = time_of(*case), time_of(*case, cache="contiguous", reservation="oracle")
    print(f"{name:<14} paged / oracle: steps {paged[1]} / {oracle[1]} = {paged[1] / oracle[1]:.2f}, ", end="")
    print(f"time on this machine {paged[0] / oracle[0]:.2f}")


one, several = [list(range(500, 524))], [list(range(500 + i, 524 + i)) for i in range(8)]
compare("one user", MODEL, 8, one, 9)
compare("a tiny model", "random", 64, several, 8)
compare("equal lengths", "random", 8, several, 8)
caches = BatchingCache(16, 16), ArenaCache(256, 128, "oracle")
paged, oracle = (replay(cache, lengths, outputs)[0] for cache in caches)
print(f"mixed lengths  paged / oracle: steps {paged} / {oracle} = {paged / oracle:.2f}")

# %% [markdown] given="32"
# - **One user.** There is nobody to share the memory with. As many steps, and the table is looked up for nothing.
# - **A tiny model.** Memory is plenty and everybody runs at once either way. Bookkeeping is a larger part of a step the
#   smaller the model is.
# - **Equal lengths.** Prompts of 24 and answers of 8 tokens fill ranges of 32 exactly. Nothing is left over between
#   them, and nothing is reserved in vain. This is the dream of every contiguous cache.
#
# In all three the ratio of the steps is 1.00: paging gains nothing. In the last line lengths are **mixed**, and even
# with an oracle the dense ranges need more steps. A range is held from the first token on, though it fills only with
# the last one. It has to be found *in one piece*, and the allocator rounds its size up. And the times? At this size
# they go up and down with whatever else the machine does. Run the cell again to see by how much.
#
# One more thing never needs paging: a batch that you make yourself, offline, sorted by length. If nobody comes and
# nobody leaves, there is no hole to fill.
#
# ## Reference to kernel
#
# Everything in this lesson ran on the PyTorch tier if you have no GPU. On one, the same `engine.step()` calls Triton
# kernels: `write_slots` in [paged/kernels.py](../minipaged/paged/kernels.py), attention in
# [batching/kernels.py](../minipaged/batching/kernels.py), the sampler in
# [foundation/sampler/kernels.py](../minipaged/foundation/sampler/kernels.py). [kernels](../docs/kernels/index.md) says
# how to read them, [loses.md](../docs/benchmarks/loses.md) where they lose. Your `my_attention` and the kernel take the
# same arguments. That is the whole idea of the ladder: what you can read and what runs fast are the same function.
#
# ## What would break if...
#
# **... a request that comes back forgot its own answer?** One line in
# [group.py](../minipaged/batching/group.py) says how many tokens a request computes when it enters: all that it has,
# prompt *and* output. Somebody thought of the first time only, and wrote the length of the prompt:

# %%
from dataclasses import replace
from unittest.mock import patch

from minipaged.batching.group import Group

honest_room = Group.room


def forgetful_room(group):
    return replace(honest_room(group), lengths=[group.num_prompt_tokens])  # the sabotage


# %%
def two_that_do_not_fit():
    llm = LLM("random", rung="batching", num_blocks=7, preemption="recompute", dtype="float32")
    results = llm.generate([list(range(36)), list(range(500, 536))], greedy(30))
    return [result.token_ids for result in results], llm.stats()["preemptions"]


right, _ = two_that_do_not_fit()
with patch.object(Group, "room", forgetful_room):
    wrong, times = two_that_do_not_fit()
for number in (0, 1):
    pairs = enumerate(zip(right[number], wrong[number], strict=True))
    first = next((place for place, (a, b) in pairs if a != b), "none")
    print(f"request {number}: {len(wrong[number])} tokens, the first wrong one: {first}; {times} sent away")

# %% [markdown]
# Nothing crashes. Both answers have the right number of tokens. Only the one that was sent away goes wrong from some
# place on, and only when memory is short. Such faults are found by comparing tokens, never by looking. Here that is
# `test_two_streams_that_cannot_both_finish_lose_nothing_and_repeat_nothing` in `tests/batching/test_generate.py`, and
# `test_those_who_are_sent_away_get_the_same_tokens` in `tests/test_ladder_batching.py`.
#
# **... attention came before the write?** Two lines in the wrong order. The newest token then attends to a slot in
# which its own key does not stand yet, but whatever was there before:

# %%
from minipaged.batching.generate import Engine


def attend_then_write(engine, rows, read):
    def attend(layer, q, k, v):
        out = read(layer, q)  # the sabotage: this line stands behind the next one
        engine.write(layer, k, v, rows.slots)
        return out

    return attend


# %%
def tokens_in_a_clean_pool():
    llm = LLM(MODEL, num_blocks=8, dtype="float32", **slow)
    llm.engine.kv.zero_()  # so that what "was there before" is the same on every machine
    return llm.generate([prompt], greedy(5))[0].token_ids


right = tokens_in_a_clean_pool()
with patch.object(Engine, "attend_rows", attend_then_write):
    wrong = tokens_in_a_clean_pool()
print("right:", right, " wrong:", wrong)

# %% [markdown]
# `test_every_rung_gives_the_tokens_of_transformers` in `tests/test_ladder.py` catches it. All slots that
# no sequence owns hold NaN in the tests, so whoever reads one gets caught even where the old content would have been
# right by chance.
#
# ## Measure
#
# Four benches tell more than this page, each with one command: `python -m minipaged.bench ladder` (one workload on
# every rung at the same memory), `throughput` (whole workloads beside other engines), `kernels` (every operation beside
# its peers) and `profile` (where the time of a step goes). Their results are in
# [docs/benchmarks](../docs/benchmarks/index.md).
#
# ## Recap
#
# **Three takeaways**
#
# - A serving engine is a loop of plan, rows, forward, choose, update. Plans and books are plain Python over numbers;
#   only the forward pass and the choice touch tensors.
# - The rungs change *what* is computed and where it lies. The steps of speed change *when*. Tokens stay the same
#   through all of it, and the tests hold exactly that.
# - Paging pays where requests of unknown, different lengths compete for memory. With one user, a tiny model or equal
#   lengths it gains nothing.
#
# **Three questions**
#
# <details>
# <summary>Why can the next step be planned before the token of this one is known?</summary>
#
# A plan needs lengths, blocks and slots. Every running sequence will be one token longer, whichever token it is. Only
# the embedding needs the token itself, and that is looked up on the GPU. What can go wrong is that the sequence has
# just ended; then one row is computed for nothing.
#
# </details>
#
# <details>
# <summary>Why does a graph need fixed batch sizes, and what do the rows do that belong to nobody?</summary>
#
# A graph replays the same launches with the same addresses. So a batch is filled up to one of a few sizes. Rows that
# belong to nobody have length 0, so attention does nothing for them, and the slot -1, so nothing is written.
#
# </details>
#
# <details>
# <summary>You serve one team, prompts of all lengths, long common system messages. Which rungs matter?</summary>
#
# All lengths and several users: paging and continuous batching. Long common beginnings: the prefix cache, with one salt
# for the team. Sharing matters as soon as somebody asks for several samples.
#
# </details>
#
# **What comes next.** Three rungs are still to come: numbers of 8 bits in the cache, blocks that wait in slower memory,
# and several GPUs. Until then there are the [docs](../docs/index.md), the code, and whatever you would do otherwise.
# Every part of it goes by name: `minipaged.tiers.parts()` lists them.
