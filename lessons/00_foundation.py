# %% [markdown] given="0"
# # 00  Generation without a cache
#
# You know PyTorch, and you know what attention computes. Perhaps you have never looked into a *serving engine*: the
# program that holds a language model and answers many people at once. In these lessons you build one. Each lesson
# adds one idea, and each part that you write runs inside the real engine and answers a real question.
#
# The engine is a ladder. A rung is a small package that runs a model alone and adds one idea to the rung below. This
# is rung 0, [`minipaged/foundation`](../minipaged/foundation/generate.py). Its idea is to have none: to find the next
# token it runs the whole text through the model, at every step, from the first word. That is slow and plainly right,
# so every faster rung is held to its tokens. And if you look closely at its waste, you find the reason for all that
# follows.

# %% [markdown]
# ## Where we are
#
# A model is a pile of matrices. Here is the one that all lessons use, drawn from the tensors that are really loaded.
# `rung` says which engine runs it, and `tier="torch"` that its operations are plain PyTorch.

# %%
import importlib.util
import io
import time
from itertools import pairwise
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged import LLM, SamplingParams, use
from minipaged.foundation import reference
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.lessons.exercises import foundation as checks
from minipaged.viz import DECODE_COLOR, PREFILL_COLOR, draw_timeline, draw_timeline_svg, watch

llm = LLM(lesson_model(), rung="foundation", dtype="float32", tier="torch")
config, weights = llm.config, llm.model.weights

# %%
total = sum(weight.numel() for weight in weights.values())
for part, key in {"embedding": "embed_tokens", "attention": "self_attn", "MLP": "mlp", "norms": "norm.weight"}.items():
    size = sum(weight.numel() for name, weight in weights.items() if key in name)
    print(f"{part:10} {size / 1e6:6.1f} million  {'#' * round(50 * size / total)}")
print(f"{'together':10} {total / 1e6:6.1f} million numbers in {config.num_layers} layers")

# %% [markdown]
# The embedding turns a token id into a row of numbers, its *hidden state*. Every layer changes that row: attention
# lets it look at other tokens, the MLP works on it alone. At the end this model uses its embedding matrix once more,
# backwards: it turns a row into one score for each word of the vocabulary, the *logits*.
#
# Generating is a loop around this. Run the tokens, take the logits of the last one, choose a token, append it, and
# begin again. In the engine one turn of the loop is a *step*: [`Engine.step`](../minipaged/foundation/generate.py).

# %%
prompt = llm.tokenizer.encode("Bread is made of") if llm.tokenizer else [5, 6, 7, 8, 9]
other_prompt = llm.tokenizer.encode("The capital of France is") if llm.tokenizer else [15, 16, 17, 18, 19]


def greedy(num_tokens):
    """Return parameters for exactly so many tokens, always the most likely one."""
    return SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=num_tokens, ignore_eos=True)


answer = llm.generate([prompt], greedy(16))[0]
print(f"{len(prompt)} tokens of prompt, {len(answer.token_ids)} tokens of answer: {answer.text!r}")

# %% [markdown]
# ## The problem, measured
#
# What did these 16 tokens cost? Let us count *rows*. A row is one token that goes once through all layers. It meets
# every weight of every layer once, so rows are a fair price: twice the rows, twice the arithmetic. (Attention grows
# with the length of the text on top of that. In texts as short as ours it is a small part.)
#
# > **Predict.** The prompt has 5 tokens and the answer has 16. How many rows went through the model in all 16 steps
# > together? And how many of them had not been there before? Write both numbers down.
#
# (In a notebook the answers are often on the page already, below the next cell. Write yours down before you scroll.)
#
# To find out we stand in front of the model's forward pass and note how many rows each step brings.

# %%
rows_per_step = []
forward = llm.model.forward


def counting_forward(token_ids, *others):
    """Note the number of rows, then run the model as ever."""
    rows_per_step.append(len(token_ids))
    return forward(token_ids, *others)


with patch.object(llm.model, "forward", counting_forward), watch(llm) as timeline:
    llm.generate([prompt], greedy(16))
num_rows, num_new = sum(rows_per_step), max(rows_per_step)
print(
    f"{num_rows} rows, {num_new} of them new: {num_rows - num_new} rows, {1 - num_new / num_rows:.0%}, were repetition"
)

# %% [markdown] given="6 7"
# The first step runs the 5 tokens of the prompt. The second runs these and the new one, 6 rows, and so on up to 20.
# The 16th token of the answer is never run: it is chosen in the last step, and then we stop. So 5 + 6 + ... + 20 =
# 200 rows for 20 different tokens. **Nine rows of ten repeat what was computed a moment before.** The engine's own
# timeline says it too. `p7` is a *prefill* of 7 tokens: whole texts through the model. On this rung there is nothing
# else.

# %%
show(draw_timeline(timeline.view()), draw_timeline_svg(timeline.view()))

# %% [markdown]
# And here is each of the 200 rows as one mark:

# %%
for step, (num_old, num_now) in enumerate(pairwise([0, *rows_per_step]), start=1):
    print(f"step {step:2}  {'.' * num_old}{'#' * (num_now - num_old)}")
print("# new   . computed again")

# %% [markdown]
# The dots fill a triangle, and a triangle grows with the square of its side. Twice the answer is more than twice the
# dots. At the size of a real request the share of the work that is new gets very small.

# %%
for num_prompt, num_output in ((5, 16), (5, 32), (1000, 1000)):
    lengths = range(num_prompt, num_prompt + num_output)
    print(f"{num_prompt:5} + {num_output:5} tokens: {sum(lengths):9,} rows for {max(lengths):5,} tokens "
          f"= {sum(lengths) / max(lengths):.0f} times the work")  # fmt: skip

# %% [markdown]
# A page in and a page out, and all but one row in 750 is repetition. Nobody serves like this. But before we cut the
# repetition away we should be sure that it *is* repetition.
#
# > **Predict.** The model ran the prompt in step 1. In step 2 it ran the same 5 tokens and one more behind them.
# > Compare the key that token 3 has in the last layer in step 1 with the one that it has in step 2. Are they the
# > same? Mind that on the way to the last layer it has been through the attention of all others, where tokens look at
# > each other.

# %% [markdown]
# ## The idea: who looks at whom
#
# Almost everything in the decoder works on each row alone: the norms, the matrix products, the MLP. There is a single
# place where rows meet, and there they look only to the left:
#
# ```text
#                token 0    token 1    token 2    token 3
# norm, q k v       |          |          |          |       each row alone
# attention         |<---------+          |          |       tokens meet here, and only here:
#                   |<---------+----------+          |       each looks at itself and to the left
#                   |<---------+----------+----------+
# norm, MLP         |          |          |          |       each row alone
# ```
#
# So token 3 cannot know what comes behind it, in any layer. This is what *causal* means. Its position does not change
# either, for positions are counted from the front. And since rows meet in one place alone, the model's
# [`forward`](../minipaged/foundation/model.py) takes that place as an argument, `attend(layer, q, k, v)`. The model
# does not know which sequence a row belongs to, nor where keys are kept. Every rung of the ladder brings another
# `attend`.
#
# To look inside we put our own function in attention's place. `use(...)` does that for any part of the engine, while
# its block runs. Ours only listens, then calls the real one:

# %%
keys = []


def listening_attention(q, k, v, query_starts, *, scale, window):
    """Keep the keys, and attend as ever."""
    keys.append(k)
    return reference.causal_attention(q, k, v, query_starts, scale=scale, window=window)


with use(causal_attention=listening_attention):
    llm.generate([prompt], greedy(2))
first, second = keys[config.num_layers - 1], keys[-1]  # the last layer's, in both steps
print("keys of the last layer: step 1", tuple(first.shape), "  step 2", tuple(second.shape))
print("the old rows are the same:", torch.allclose(first, second[: len(prompt)], rtol=1e-4, atol=1e-4))

# %% [markdown]
# The same numbers, but for rounding. The shape is `[T, K, D]`: tokens, KV heads, size of a head. These are the
# letters of the whole project ([`shapes.py`](../minipaged/shapes.py)).
#
# Now look at what attention *takes*. The new row brings its own query. Of the old rows it needs keys and values and
# nothing else: not their queries, not their MLP, not their logits. And the old keys and values never change. Keep
# them, and a step needs one row. That is the next lesson. The rest of this one is about what it will be worth, and
# why.

# %% [markdown]
# ## By hand
#
# An engine runs many sequences in one pass. They have different lengths, so one might pad them to a rectangle. This
# engine does not: it lays all rows one behind the other along one axis T and says where each sequence begins.
# `query_starts = [0, 2, 3]` is a sequence of rows 0 and 1, and another that is row 2 alone.
#
# > **Predict.** Three rows with values 2, 4 and 9, and `query_starts = [0, 2, 3]`. All scores are 0, so every visible
# > key weighs the same. Which three numbers does causal attention give?

# %%
values = torch.tensor([2.0, 4.0, 9.0]).view(3, 1, 1)  # [T, K, D]
zeros = torch.zeros(3, 1, 1)
two_sequences = torch.tensor([0, 2, 3], dtype=torch.int32)
print(reference.causal_attention(zeros, zeros, values, two_sequences).flatten().tolist())

# %% [markdown]
# Row 0 sees itself: 2. Row 1 sees rows 0 and 1: (2 + 4) / 2 = 3. Row 2 begins a sequence and sees itself: 9.
#
# One more thing is special. This model has more query heads than KV heads:

# %%
print(f"{config.num_heads} query heads, {config.num_kv_heads} KV heads, {config.head_dim} numbers a head")

# %% [markdown]
# Nine queries, three keys and values: three query heads share one KV head. This is *grouped-query attention*
# ([GQA](https://arxiv.org/abs/2305.13245)). Query head h reads KV head `h // 3`: heads 0, 1, 2 read head 0, heads 3,
# 4, 5 read head 1. Not `h % 3`; checkpoints are trained for the first. The models are made so for a reason that has
# nothing to do with quality, and the next lesson shows it in bytes.

# %% [markdown]
# ## Build it
#
# Your turn. An exercise is a cell that raises `NotYet`; replace that line. The cell below it compares your function
# with the engine's own and says for which input it differs. Everything runs in the meantime too; unsolved parts say
# "not yet".
#
# First put what you saw above into one line.


# %% tags=["exercise"]
def my_rows(num_prompt_tokens, num_output_tokens):
    """Return how many rows an engine without a cache sends through its model for one answer.

    A step runs all tokens that there are and chooses one more. The engine stops when it has chosen the last one.
    For a prompt of 3 and an answer of 4 that is 3 + 4 + 5 + 6 = 18.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The first step runs `num_prompt_tokens` rows. How many does the last one run? And how many steps are there?
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_rows(num_prompt_tokens, num_output_tokens):
#     return sum(num_prompt_tokens + step for step in range(num_output_tokens))
# ```
#
# </details>

# %%
checks.check_rows(my_rows)

# %% [markdown] given="12.5 3.54 0.85 11.31"
# Now two operations of the decoder. The first works on each row alone. RMSNorm divides a row by its *root mean
# square* and multiplies each column by a weight. For the row `[3, 4]` the mean of the squares is (9 + 16) / 2 = 12.5
# and its root 3.54, so with weights `[1, 10]` the result is `[0.85, 11.31]`. A tiny `eps` is added under the root, so
# that nobody divides by zero.
#
# In this decoder every norm but the first stands behind an addition: the output of a sublayer is added to the
# *residual*, the sum is normed for the next sublayer, and the sum itself is kept as the next residual. So the engine's
# operation can do both.


# %% tags=["exercise"]
def my_rms_norm(x, weight, eps, *, residual=None):
    """Norm each row of x [T, E].

    Without a residual: return x / sqrt(mean of the squares of the row + eps) * weight.
    With a residual [T, E]: add it to x first. Return two tensors, the normed sum and the sum.
    Compute the norm in fp32 (`.float()`), and return the dtype of x. Do not change x or residual.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `wide.pow(2).mean(-1, keepdim=True)` keeps the last axis, so that it divides row by row. `torch.rsqrt` is one over
# the square root.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_rms_norm(x, weight, eps, *, residual=None):
#     if residual is not None:
#         x = x + residual
#     wide = x.float()
#     normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
#     return normed if residual is None else (normed, x)
# ```
#
# </details>

# %%
checks.check_rms_norm(my_rms_norm)

# %% [markdown]
# And the operation in which rows meet. Write it the plain way: a loop over sequences, a matrix of scores, a mask, a
# softmax. In PyTorch it is about ten lines. (Some models let a row see only the newest keys, a *window* of them. Ours
# has none, but the engine runs those too.)


# %% tags=["exercise"]
def my_causal_attention(q, k, v, query_starts, *, scale, window):
    """Let each row attend to itself and the rows before it in its own sequence.

    q is [T, H, D], k and v are [T, K, D], and query head h reads KV head h // (H // K). Sequence b is the rows
    query_starts[b] to query_starts[b + 1] - 1. A score is query times key times scale. With a window (a number, or None
    for none) row i sees key j only if i - window < j. Return [T, H, D] in the dtype of q; compute in fp32.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Put heads first: `q[start:end].float().transpose(0, 1)` is `[H, L, D]`. `repeat_interleave(H // K, dim=0)` makes H
# heads of K, in the order that is wanted. `torch.ones(L, L).tril()` is 1 where row i may see key j, and `.triu(1 -
# window)` of it cuts off what is too far away. Fill the rest of the scores with `-inf` before the softmax.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_causal_attention(q, k, v, query_starts, *, scale, window):
#     group = q.shape[1] // k.shape[1]
#     out = torch.empty_like(q)
#     for start, end in zip(query_starts[:-1].tolist(), query_starts[1:].tolist()):
#         queries = q[start:end].float().transpose(0, 1)  # [H, L, D]
#         keys, values = (x[start:end].float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
#         visible = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril()
#         if window is not None:
#             visible = visible.triu(1 - window)
#         scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))  # [H, L, L]
#         out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
#     return out
# ```
#
# </details>

# %%
checks.check_causal_attention(my_causal_attention)

# %% [markdown]
# ## Your version drives the real chat
#
# `ask` starts the chat that `python -m minipaged.chat` starts in a terminal, on the rung that we name, with your
# functions in their places. Each step norms twice in every layer and once at the end, and attends in every layer:
# your code runs some ninety times a token. A short answer will do, for on this rung each token costs the whole
# conversation.

# %%
ask("What is the capital of France?", "foundation", max_tokens=8,
    rms_norm=my_rms_norm, causal_attention=my_causal_attention)  # fmt: skip

# %% [markdown]
# ## From reference to kernel
#
# Every operation exists twice. [`reference.py`](../minipaged/foundation/reference.py) is plain PyTorch, made to be
# read; it is what your functions were compared with. [`kernels.py`](../minipaged/foundation/kernels.py) is the same
# in Triton, for a GPU. [`ops.py`](../minipaged/foundation/ops.py) says what the operation means and chooses between
# the two. Tests hold them together.
#
# Why write a kernel for something as simple as a norm? Not for the arithmetic. PyTorch runs one small operation after
# the other, and each reads its input from memory and writes its output back. Let us count that traffic. A dispatch
# mode sees every operation that PyTorch runs, with its real tensors.


# %%
class Traffic(TorchDispatchMode):
    """Count the numbers that operations read and write. A view moves nothing."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.moved += sum(x.numel() for x in (*args, out) if isinstance(x, torch.Tensor))
        return out


# %%
x, residual = torch.randn(2, 64, config.hidden_size)
with torch.no_grad(), Traffic() as traffic:
    reference.rms_norm(x, torch.ones(config.hidden_size), 1e-5, residual=residual)
print(f"{x.numel():,} numbers are normed; the reference moves {traffic.moved / x.numel():.0f} times as many")
print("a kernel can do with 4 times: read x and residual, write the normed rows and the sum")

# %% [markdown]
# The kernel keeps a row in registers from the first read to the last write. That is the whole trick, and it is most
# of the trick of the other kernels too: **on a GPU, time is memory traffic until proven otherwise.** We will prove it
# otherwise in a moment, in one case. First something breaks.

# %% [markdown]
# ## What would break if...
#
# ... attention forgot where a sequence begins? Rows of all sequences lie behind each other. One triangle over the
# whole axis is a very natural mistake: with one sequence, which is what one tries first, nothing is wrong. The
# sabotage is one expression: `query_starts[[0, -1]]` keeps the first start and the end, and drops those between.


# %%
def leaking_attention(q, k, v, query_starts, *, scale, window):
    """Take all rows for one sequence."""
    return reference.causal_attention(q, k, v, query_starts[[0, -1]], scale=scale, window=window)


def answers(prompts):
    """Return the texts of some answers, or the ids where there is no text."""
    return [repr(result.text or result.token_ids) for result in llm.generate(prompts, greedy(6))]


print("right, in company:  ", answers([other_prompt, prompt])[1])
with use(causal_attention=leaking_attention):
    print("sabotaged, alone:   ", answers([prompt])[0])
    print("sabotaged, company: ", answers([other_prompt, prompt])[1])

# %% [markdown]
# Alone the sabotaged engine is right. In company it answers with one eye on somebody else's prompt. On a server that
# is not only wrong, it is a leak: a stranger's words shape your answer. And no shape is wrong, nothing crashes.
#
# The test that catches it is `test_rows_are_bit_equal_alone_and_in_a_batch` in
# [`tests/foundation/test_ops.py`](../tests/foundation/test_ops.py). It demands that attention gives a sequence the
# same bits alone and in company. You will meet this demand on every rung: **a neighbour must not change your answer.**
# (Rounding is a finer point. A library's matrix product may add in another order when the batch has another size.
# Where two tokens are nearly equal, that can decide between them. It says nothing about the neighbour; a leak does.)

# %% [markdown]
# ## Measure: why the first token is different
#
# Suppose we keep keys and values, as the next lesson does. Then an answer has two phases, and they differ in rows:
#
# - **prefill**: the first step. All rows of the prompt in one pass, which gives the first token.
# - **decode**: every later step. One new row, which gives one new token.
#
# > **Predict.** A pass with 1 row takes some time on this machine. How many times longer does a pass with 16 rows
# > take? It has 16 times the arithmetic.


# %%
def seconds(num_rows):
    """Return the shorter time of two passes with that many rows."""
    token_ids = torch.arange(num_rows, device=llm.device) % config.vocab_size
    starts = torch.tensor([0, num_rows], dtype=torch.int32, device=llm.device)
    attend = lambda layer, q, k, v: reference.causal_attention_sdpa(q, k, v, starts)  # noqa: E731
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        llm.model.forward(token_ids, token_ids, attend)[0, 0].item()
        times.append(time.perf_counter() - begin)
    return min(times)


# %%
with torch.inference_mode():
    one_row = seconds(1)
    for num_rows in (1, 4, 16, 64):
        took = seconds(num_rows) if num_rows > 1 else one_row
        print(f"{num_rows:3} rows: {1000 * took:6.1f} ms, {took / one_row:5.1f} times one row")

# %% [markdown]
# Far less than 16 times. So a pass with one row spends its time on something that 16 rows share. What they share is
# above all the weights: whatever the number of rows, each weight is fetched from memory once. (In a model as small as
# ours, Python's own work for each operation is a part of it too.) Let us count both sides, arithmetic and fetched
# numbers, for every matrix product of a pass.
#
# We need no weights for that. On PyTorch's *meta* device tensors have a shape and no content. So we can count for a
# model that may well be too large for this machine: a Llama with 8 billion weights, run by the same code as ours.


# %%
class Products(TorchDispatchMode):
    """Count the arithmetic of matrix products with weights, and the numbers that they read and write."""

    flops = moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            x, weight = args[:2]
            self.flops += 2 * out.numel() * x.shape[-1]  # a multiplication and an addition
            self.moved += x.numel() + weight.numel() + out.numel()
        return out


# %%
from minipaged.foundation.model import DecoderModel, weight_shapes
from minipaged.foundation.random_weights import SHAPES
from minipaged.foundation.weights import load_config

big_config, _ = load_config(SHAPES / "llama-3.1-8b-random")
shapes = weight_shapes(big_config).items()
big_model = DecoderModel(big_config, {name: torch.empty(shape, device="meta") for name, shape in shapes}, tier="torch")


def count(num_rows):
    """Run that many rows through the big model on the meta device and return what was counted."""
    rows = torch.empty(num_rows, dtype=torch.long, device="meta")
    with torch.no_grad(), Products() as counted:
        big_model.forward(rows, rows, lambda layer, q, k, v: q)  # attention is left out: it has no weights
    return counted


# %% [markdown]
# Arithmetic for each byte moved is called *arithmetic intensity*. In bf16 a number has 2 bytes.
#
# A machine has an intensity too: what it can compute while one byte arrives. These are the numbers in the data sheet
# of an H200, for products of dense matrices in bf16:

# %%
PEAK, BANDWIDTH = 989e12, 4.8e12  # operations and bytes per second
ridge = PEAK / BANDWIDTH
print(f"{PEAK / 1e12:.0f} and {BANDWIDTH / 1e12} trillion: the ridge is at {ridge:.0f} operations a byte")

# %% [markdown]
# It can do 989 trillion operations a second, and fetch 4.8 trillion bytes. A pass with less than 206 operations a byte
# waits for memory: it is *memory-bound*. A pass with more waits for arithmetic: *compute-bound*.
#
# > **Predict.** What is the intensity of a pass with 1 row? Every weight is 2 bytes and takes part in one
# > multiplication and one addition. So which share of an H200's arithmetic can such a pass use at best?

# %%
intensities = {}
print("rows  operations a byte  best share of the peak")
for num_rows in (1, 4, 16, 64, 256, 1024):
    counted = count(num_rows)
    intensities[num_rows] = counted.flops / (2 * counted.moved)
    share = min(1.0, intensities[num_rows] / ridge)
    print(f"{num_rows:4}  {intensities[num_rows]:17.1f}  {share:6.1%} {'#' * round(40 * share)}")

# %% [markdown]
# One row: one operation a byte, half a percent of the machine. The rest of it waits. This is no fault of the code, and
# no kernel can mend it: **decode of one sequence is memory-bound**, and a prompt of a few hundred tokens or more is
# **compute-bound**. The usual picture of it is the *roofline*. The slanted part is the memory, the flat part the
# arithmetic, and no pass gets above the roof.


# %%
def roof(intensity):
    """Return the most operations per second that a pass of this intensity can get, in units of 10^12."""
    return min(PEAK, BANDWIDTH * intensity) / 1e12


def draw_roofline():
    """Return the roof and the passes below it as a picture."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.5, 3.2), layout="constrained")).subplots()
    axes.loglog(ends := [0.5, ridge, 3000], [roof(x) for x in ends], color="#333333")
    for num_rows, x in intensities.items():
        axes.plot(x, roof(x), "o", color=DECODE_COLOR if x < ridge else PREFILL_COLOR)
        axes.annotate(f"  {num_rows}", (x, roof(x)), va="top")
    axes.set(xlabel="operations per byte (points: rows in a pass)", ylabel="10^12 operations per second")
    figure.savefig(picture := io.StringIO(), format="svg", metadata={"Date": None})
    return picture.getvalue()


# %%
has_matplotlib = importlib.util.find_spec("matplotlib") is not None
show("As text the roofline is the bars above: each is the height of the roof over its rows.",
     draw_roofline() if has_matplotlib else None)  # fmt: skip

# %% [markdown]
# Now the punch line. The rows of a pass need not belong to one sequence. A decode step with 256 *different*
# sequences, one new row each, is as intense as a prompt of 256 tokens, because the weights do not ask whose row it
# is. **A second sequence in the batch is almost free, and so are the next two hundred.** That is why engines batch.
#
# What stops us, then? Every sequence in the batch must keep its keys and values, or it pays the triangle above. How
# many sequences fit is a question of memory. And that memory is what the rest of these lessons is about.
#
# (One thing in a step is not shared: attention reads each sequence's own keys and values. The next lesson counts
# them.)
#
# (And notice how rung 0 fits into the picture. Each of its steps has as many rows as the text has tokens, so with a few
# hundred tokens every step is compute-bound. It keeps the machine busy with work that was done before. A busy GPU is
# not a useful GPU.)
#
# The last exercise puts the count for one matrix into a formula.


# %% tags=["exercise"]
def my_intensity(num_rows, num_in, num_out, bytes_per_number):
    """Return operations per byte of one matrix product.

    Rows [num_rows, num_in] meet a matrix [num_out, num_in] and give [num_rows, num_out]. Each number of the result is a
    sum of num_in products; count a multiplication and an addition for each. Rows and matrix are read once, the result
    is written once.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The result has `num_rows * num_out` numbers. Add up the three tensors for the numbers that move.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_intensity(num_rows, num_in, num_out, bytes_per_number):
#     operations = 2 * num_rows * num_in * num_out
#     moved = num_rows * num_in + num_in * num_out + num_rows * num_out
#     return operations / (moved * bytes_per_number)
# ```
#
# </details>

# %%
checks.check_intensity(my_intensity)

# %% [markdown]
# ## Recap
#
# 1. Without a cache the work of an answer is a triangle: each step runs every token again, though causal attention
#    means that old rows never change.
# 2. Of an old row a new one needs only key and value, in every layer. Attention is the one place where rows meet.
# 3. A pass reads all weights once. With few rows it waits for memory (decode), with hundreds it waits for arithmetic
#    (prefill). Batches make decode worth its traffic, and memory for keys and values limits the batch.
#
# **Questions**
#
# <details>
# <summary>A prompt of 10 tokens, an answer of 1. How much of the work on this rung is repetition?</summary>
#
# None. There is one step, and each of its rows is new. The triangle begins with the second token. For a task that only
# needs one token, such as a yes or a no, keeping keys and values saves nothing, unless the next prompt begins in the
# same way: that is [lesson 05](05_prefix.ipynb).
#
# </details>
#
# <details>
# <summary>Why does the engine ask for the logits of the last row alone in a prefill?</summary>
#
# The next token follows from the last row. Logits of the others would say what comes after tokens whose successor we
# know. In a small model the output matrix is the largest of all, so leaving them out saves a good part of the work.
#
# </details>
#
# <details>
# <summary>One sequence decodes at half a percent of an H200's arithmetic. Would twice the arithmetic help?</summary>
#
# No. The pass waits for the weights to arrive. Twice the *bandwidth* would help, or weights of half the size (8 bits
# in place of 16), or a second sequence that uses the weights while they are there.
#
# </details>
#
# **Next:** [01  One dense reservation per sequence](01_contiguous.ipynb) keeps keys and values. 200 rows become 20.
# And at once there is a new problem: where to put them, when nobody knows how long an answer will be.
