# %% [markdown] given="4 9 0"
# # 05  Prefix caching: compute a common beginning once
#
# **Where we are.** Since [lesson 04](04_batching.ipynb) requests join and leave at every step. When one leaves, its
# blocks go back to the pool, and the pool forgets what they hold. The next request may begin with the same words. It
# computes them again.
#
# The keys and values of a token depend on that token and on those before it, and on nothing else. So what lies in a
# freed block is still right. This lesson is about finding it again.
#
# We look at the bookkeeping first, without a model. To keep it readable, a word is a token: `ids` gives each new word
# the next number. Blocks have 4 slots. A request of 9 words comes, is computed, and leaves. `Room` is what it asks of
# the cache: sequence 0, 9 slots at once.

# %%
from minipaged.batching.cache import BatchingCache, Room
from minipaged.lessons import NotYet, ask, lesson_model, show
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.viz import draw_pool, draw_pool_svg, view_cache

vocabulary: dict[str, int] = {}


def ids(text):
    return [vocabulary.setdefault(word, len(vocabulary)) for word in text.split()]


# %%
def draw(cache):
    view = view_cache(cache)
    show(draw_pool(view), draw_pool_svg(view))


forgetful = BatchingCache(num_blocks=8, block_size=4)
forgetful.allocate(Room([0], [9], num_common=0, num_output_tokens=1))
draw(forgetful)
forgetful.free(0)
draw(forgetful)

# %% [markdown]
# ## The problem, measured
#
# A guide of a library gets four questions. Each comes with the same system message in front, as chat programs send it.
# We count the tokens of the four prompts, and how many of them are the same in all four.

# %%
from minipaged import LLM, SamplingParams
from minipaged.prefix.radix_tree import num_common

SYSTEM = "You are the guide of a library. It opens at nine and closes at six. It is closed on Mondays. Answer briefly."
QUESTIONS = ["When do you open?", "How long may I stay?", "Is it open on Mondays?", "May I bring my son?"]
MODEL = lesson_model()
llm = LLM(MODEL, rung="batching", num_blocks=64, dtype="float32")


def prompt(question):
    if llm.tokenizer is None:  # the random model has no words: take bytes for tokens
        return list(f"{SYSTEM} {question}".encode())
    return llm.chat_prompt([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])


# %%
def count_computed(llm, prompts, max_tokens=6):
    """Return the results, and how many prompt tokens went through the model."""
    computed = []
    llm.engine.scheduler.listener = lambda event: event.act == "chunk" and computed.append(event.num_tokens)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    llm.engine.scheduler.listener = None
    return results, sum(computed)


prompts = [prompt(question) for question in QUESTIONS]
answers, num_computed = count_computed(llm, prompts)
common = num_common(min(prompts), max(prompts))  # what the first and the last in sorted order share, all share
print("prompt tokens computed by rung batching:", num_computed)
print(f"the first {common} tokens are the same in all {len(prompts)}; needed once: {num_computed - 3 * common}")

# %% [markdown]
# More than half of the work has been done before. Real system messages are longer than this one, and the next turn of
# a chat begins with the whole conversation so far.
#
# ## The idea
#
# **Give a full block a name made of what it holds, and look blocks up by name.**
#
# What must be in the name? Not the block's own tokens alone: `a mat and then` behind `the cat sat on` has other keys
# and values than behind `the dog sat on`. The name must stand for *everything up to the block's last token*. Hashing
# all of that for each block would cost more and more. So a name is made of two things: the tokens of the block, and
# the name of the block before it, its **parent**. The parent's name already stands for everything earlier. That is a
# **hash chain**:
#
# ```text
# h1 = H(root, "the cat sat on")        root -> h1 -> h2       block 0 has the name h1
# h2 = H(h1,   "a mat and then")                               block 1 has the name h2
#                                       "it" is not a full block: no name
# ```
#
# The root is a name too. It stands for the model and its settings, since another model gives other keys and values.
#
# Now the same request on rung `prefix`. `enter` does what the scheduler does with a request, up to the end of its
# prompt: look it up, give it blocks, note that all is computed. You need not read it closely; the parts of it follow.


# %%
def enter(cache, seq_id, text, salt=""):
    tokens = ids(text)
    lengths, limits = [len(tokens)], [len(tokens) - 1]  # slots that it needs; tokens that may be found
    room = PrefixRoom(
        [seq_id], lengths, num_common=0, num_output_tokens=1, token_ids=[tokens], salt=salt, limits=limits
    )
    (num_found,) = cache.allocate(room)
    cache.take_copies()  # a real engine copies these blocks now; see the radix tree below
    cache.note_computed(seq_id, len(tokens), tokens)
    cache.release_pins()  # what was copied need not be kept for that any longer
    return num_found


cache = PrefixCache(num_blocks=8, block_size=4, window=None, index=HashChain("model", 4), policy=LRU())
print("tokens found:", enter(cache, 0, "the cat sat on a mat and then it"))
cache.free(0)
draw(cache)

# %% [markdown]
# The memory is the same as before. Only the books differ: two of the free blocks are **cached**. Nobody uses them, so
# they count as free, and the pool takes them when it has no others. Until then they can be found. This is what the
# index holds, with the beginning of each name:

# %%
from minipaged.viz import draw_index, draw_index_svg, view_index


def text_of(token_ids):
    words = list(vocabulary)
    return " ".join(words[each] for each in token_ids)


def draw_names(cache):
    view = view_index(cache)
    show(draw_index(view, text_of=text_of), draw_index_svg(view, text_of=text_of))


draw_names(cache)

# %% [markdown] given="9 10"
# > **Predict.** Blocks of 4 tokens. Each of these prompts is sent for the second time, when all its full blocks are
# > cached. How many tokens are found of a prompt of 9 tokens? Of 10? Of 8? (For the last one, think of what the first
# > step has to return.)

# %%
for length in (9, 10, 8):
    fresh = PrefixCache(num_blocks=8, block_size=4, window=None, index=HashChain("model", 4), policy=LRU())
    text = " ".join(f"word{i}" for i in range(length))
    enter(fresh, 0, text)
    fresh.free(0)
    print(f"{length} tokens: {enter(fresh, 1, text)} found")

# %% [markdown]
# Blocks are shared as wholes, so 9 and 10 tokens give 8. Of 8 tokens only 4 are found, though both blocks are there: a
# step returns the logits of the **last** token, and logits are not kept in the cache. At least one token must go
# through the model. With whole blocks, that means the last block is computed again.

# %% [markdown] given="32 23 12 123"
# ## By hand
#
# Let us make a name. The product uses SHA-256 of the parent's name followed by the token ids, each as a number of 32
# bits. The width matters: written as text, `[1, 23]` and `[12, 3]` would both be `123`.

# %%
import hashlib
import struct

from minipaged.prefix.block_key import block_key, root_key

root = root_key("model")
h1 = hashlib.sha256(root + struct.pack("<4I", *ids("the cat sat on"))).digest()
h2 = hashlib.sha256(h1 + struct.pack("<4I", *ids("a mat and then"))).digest()
print("by hand:    ", h1.hex()[:8], h2.hex()[:8])
print("the product:", *(key.hex()[:8] for key in cache.index.entries))
print("[1, 23] as bytes:", struct.pack("<2I", 1, 23).hex(" "), "  [12, 3]:", struct.pack("<2I", 12, 3).hex(" "))

# %% [markdown]
# ## Exercise 1: the name of a block


# %% tags=["exercise"]
def my_block_key(parent: bytes, token_ids) -> bytes:
    """Return the name of a full block: 32 bytes.

    It is the SHA-256 digest of the parent's name, followed by each token id as 4 bytes, lowest byte first.
    `struct.pack("<3I", 7, 2, 5)` gives the bytes of three numbers; the 3 must be the number of ids that there are.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The format for `n` numbers is `f"<{n}I"`, and `struct.pack` takes the numbers one by one: `*token_ids`. Put the
# parent's bytes in front and hash all of it at once.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_block_key(parent, token_ids):
#     return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.prefix import check_block_key

check_block_key(my_block_key)

# %% [markdown]
# ## Exercise 2: walk along the names
#
# A prompt comes. Which cached blocks does it begin with? Make the name of its first block and look it up. If it is
# there, make the name of the second one, and so on, up to the first name that is missing.


# %% tags=["exercise"]
def my_find_blocks(names: dict[bytes, int], root: bytes, token_ids: list[int], block_size: int) -> list[int]:
    """Return the ids of the cached blocks that a prompt begins with, in order.

    Args:
        names: Block id by name, for every cached block.
        root: The parent of the first block.
        token_ids: The prompt.
        block_size: Tokens of a full block.

    Names come from `block_key(parent, token_ids)`. Stop at the first name that is not there. Whatever is cached, at
    least the last token of the prompt must be left to compute.
    """
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# A block that starts at `start` may be taken if it ends before the last token, so if
# `start + block_size <= len(token_ids) - 1`. So `start` runs over `range(0, len(token_ids) - block_size, block_size)`.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def my_find_blocks(names, root, token_ids, block_size):
#     found, name = [], root
#     for start in range(0, len(token_ids) - block_size, block_size):
#         name = block_key(name, token_ids[start : start + block_size])
#         if name not in names:
#             break
#         found.append(names[name])
#     return found
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.prefix import check_find_blocks

check_find_blocks(my_find_blocks)

# %% [markdown]
# ## A request finds its blocks
#
# The product's walk is `HashChain.match` in [hash_chain.py](../minipaged/prefix/hash_chain.py). What happens with the
# blocks that it finds is in [cache.py](../minipaged/prefix/cache.py): they are put at the beginning of the new block
# table and get one more reference each, as in [lesson 03](03_sharing.ipynb). Here two requests begin like the first
# one. One of them goes its own way in the second block.

# %%
print("tokens found:", enter(cache, 1, "the cat sat on a dog and then it"))
print("tokens found:", enter(cache, 2, "the cat sat on a mat and then we all went home"))
draw(cache)
for seq_id, table in cache.tables.items():
    print(f"sequence {seq_id}: block table {table.block_ids}")

# %% [markdown]
# Both share block 0. Nobody copied anything, and nobody will: a full block is never written again.
#
# ## Eviction
#
# Sooner or later no block is free but cached ones. Then the pool asks a **policy** which of them to give up, takes its
# name out of the index, and hands it to the new owner. The policy sees only blocks that nobody uses. The product's is
# `LRU`: the block that has been unused for the longest time goes first. Now both requests end, and three others come,
# each in need of two blocks.

# %%
cache.free(1)
cache.free(2)
draw(cache)
for i in range(3):
    enter(cache, 10 + i, " ".join(f"new{i}{k}" for k in range(5)))
    idle = [block_id for block_id in range(8) if cache.pool.is_idle(block_id)]
    print(f"newcomer {i}: evicted so far {cache.pool.num_evictions}, still cached of the old ones {idle}")

# %% [markdown]
# Blocks 3 and 5 are gone: the ends of the two requests. The beginnings are still there. A request gives its blocks back
# from the last one to the first, so to LRU the end has been unused for longer. That is on purpose. A beginning can
# serve many others. And a block cannot be found while its parent is missing, since the walk stops at the gap.
#
# ## Exercise 3: a clock
#
# LRU writes down every use. Operating systems often take something cheaper, the **clock**. The blocks stand in a
# circle, and each has a mark that says "used lately". A hand goes round:
#
# ```text
#          [0] marked                 evict: the hand is at block 0
#     [3]        [1] not marked         block 0 is marked: take its mark, go on
#  marked  [2] marked                   block 1 is not: give it up. The hand stays behind it, at block 2.
# ```
#
# A marked block gets a second chance, and loses it if the hand comes by again before anybody has used it. The hand
# keeps its place between two evictions. Remember that: it is the one thing that people get wrong.


# %% tags=["exercise"]
class MyClock:
    """Choose the block to give up as a clock does. The circle is the order of the block ids."""

    def __init__(self):
        self.is_marked = {}  # by block id: whether it was used since the hand came by
        self.hand = 0  # the smallest id that the hand has not passed in this round

    def add(self, block_id):  # its last user has left: it may be given up from now on
        self.is_marked[block_id] = True

    def remove(self, block_id):  # somebody uses it again
        del self.is_marked[block_id]

    def __len__(self):
        return len(self.is_marked)

    def evict(self):
        """Return the block to give up, and take it out of `is_marked`.

        Look at the block with the smallest id from `hand` on, or, if there is none, the smallest id of all. Move the
        hand behind it (its id + 1). If it is marked, take the mark away and look at the next one. If not, that is it.
        """
        raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `min([each for each in self.is_marked if each >= self.hand] or self.is_marked)` is the block under the hand: an empty
# list is false, so `or` goes on to all ids. Put it into a `while True`. The loop ends: a second round meets no mark.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# class MyClock:
#     def __init__(self):
#         self.is_marked = {}
#         self.hand = 0
#
#     def add(self, block_id):
#         self.is_marked[block_id] = True
#
#     def remove(self, block_id):
#         del self.is_marked[block_id]
#
#     def __len__(self):
#         return len(self.is_marked)
#
#     def evict(self):
#         while True:
#             block_id = min([each for each in self.is_marked if each >= self.hand] or self.is_marked)
#             self.hand = block_id + 1
#             if not self.is_marked[block_id]:
#                 del self.is_marked[block_id]
#                 return block_id
#             self.is_marked[block_id] = False
# ```
#
# </details>

# %%
from minipaged.lessons.exercises.prefix import check_clock

check_clock(MyClock)

# %% [markdown]
# ## A radix tree behind the same interface
#
# The hash chain knows whole blocks only. A tree of tokens can do a little more. Its nodes are blocks, a child follows
# its parent, and `RadixTree` walks down while a child holds exactly the next 4 tokens. Where that ends, one child may
# still *begin* as the prompt goes on. Its block cannot be shared, because the new request will write something else
# behind that beginning. So it is **copied**, and the request goes on in the copy.

# %%
from minipaged.prefix.radix_tree import RadixTree

for index in (HashChain("model", 4), RadixTree(4)):
    both = PrefixCache(num_blocks=8, block_size=4, window=None, index=index, policy=LRU())
    enter(both, 0, "the cat sat on a mat and then it")
    found = enter(both, 1, "the cat sat on a mat under the roof")
    print(f"{type(index).__name__}: found {found} tokens, copied blocks {both.num_copies}, {both.tables[1].block_ids}")
draw_names(both)

# %% [markdown] given="2312.07104"
# The tree found two words more, `a mat`, at the price of copying one block. What it finds need not end at the edge of a
# block, so a prompt that is sent again is found but for its last token. SGLang's cache is a radix tree
# ([arXiv 2312.07104](https://arxiv.org/abs/2312.07104)). Its edges hold runs of tokens of any length, and its blocks
# have one token unless told otherwise, so it has nothing to copy. vLLM's is a hash chain. Here both stand behind one
# interface, [index.py](../minipaged/prefix/index.py), and `prefix_cache="radix"` chooses. The chain is the simpler
# one: names are made from the prompt's tokens alone, whatever else is cached.
#
# ## A system prompt computed once
#
# Back to the library's guide, on the real model. First one question after the other, then all four at the same moment.

# %%
llm = LLM(MODEL, rung="prefix", num_blocks=64, dtype="float32")
for number, each in enumerate(prompts):
    (result,), num_computed_now = count_computed(llm, [each])
    is_same = result.token_ids == answers[number].token_ids
    print(f"{len(each)} tokens, {result.metrics.num_hit_tokens} found, {num_computed_now} computed, {is_same = }")

# %%
llm = LLM(MODEL, rung="prefix", num_blocks=64, dtype="float32")
events = []
llm.engine.scheduler.listener = events.append
llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
for event in events[:9]:
    print(f"step {event.step}: request {event.request_id} {event.act} {event.num_tokens or ''} {event.reason}")
print("computed:", sum(event.num_tokens for event in events if event.act == "chunk"), "instead of", num_computed)

# %% [markdown]
# All four came together, and nothing was cached. A block is found only when it is **written**: whoever reads it sooner
# reads rubbish. So without help all four would have computed the same beginning. The scheduler lets the others wait
# one step instead, because it sees that somebody is about to write the very block that they need next. (vLLM enters a
# block when the step is planned. That is safe there within one step too: each layer writes all keys before it reads.)
#
# ## Salts, and what a stopwatch gives away
#
# Sharing can be heard. A prompt that is answered sooner than it should was sent before, by somebody. Take a hospital
# whose patients' files were sent to the model this morning, and a stranger who guesses:

# %%
FILE = "Mrs Smith of Kent has been given the drug called X for her heart"


def num_to_compute(letter, hospital, stranger):
    cache = PrefixCache(num_blocks=8, block_size=4, window=None, index=HashChain("model", 4), policy=LRU())
    enter(cache, 0, FILE, hospital)
    cache.free(0)
    guess = f"Mrs Smith of Kent has been given the drug called {letter} for her"
    return len(ids(guess)) - enter(cache, 1, guess, stranger)


for salts in (("", ""), ("hospital", "stranger")):
    print("salts", salts, {letter: num_to_compute(letter, *salts) for letter in "AXB"})

# %% [markdown]
# The numbers are tokens that the stranger's guess still has to compute, out of 13. A wrong letter leaves 5 and the
# right one leaves 1. Each token of prefill takes time, so the stranger needs nothing but a watch. With a **salt**
# nothing is found across salts. The salt is hashed into the root, and the root is in every name behind it. It is no
# encryption, and it costs: a system prompt is computed once per salt. [prefix_salts.md](../docs/prefix_salts.md) says
# what it does not do.
#
# How loud is it? The same prompt twice on the real model, and once more under another salt:

# %%
long_prompt = (prompts[0] * 4)[:200]
for salt in ("hospital", "hospital", "stranger"):
    params = SamplingParams(temperature=0, max_tokens=1, cache_salt=salt)
    metrics = llm.generate([long_prompt], params)[0].metrics
    time = f"first token after {1000 * metrics.time_to_first_token:.0f} ms"
    print(f"salt {salt}: {metrics.num_hit_tokens} of {len(long_prompt)} tokens found, {time}")

# %% [markdown]
# ## A forced collision
#
# What if two blocks get the same name? With SHA-256 nobody has ever managed that. But vLLM's first names were made with
# Python's own `hash`, which can be foreseen: somebody could build a prompt that found another one's blocks. So let us
# force it: a function that gives *all* blocks one name.
#
# `HashChain` does not take a name's word for it. It compares the tokens of the block, and asks whether the parent is
# the entry that it has just accepted. `TrustingChain` below does what the lesson has said so far and no more: it goes
# by the name.

# %%
from minipaged import use
from minipaged.prefix.index import Match


class TrustingChain(HashChain):
    def match(self, token_ids, salt, limit, memo=None):
        place, block_ids = self.root(salt), []
        for start in range(0, limit - self.block_size + 1, self.block_size):
            entry = self.entries.get(self._key(place.key, tuple(token_ids[start : start + self.block_size])))
            if entry is None:
                break
            block_ids.append(entry.block_id)
            place = entry
        return Match(place, block_ids)


# %%
with use(block_key=lambda parent, token_ids: b"the same for all"):
    for kind in (HashChain, TrustingChain):
        collided = PrefixCache(num_blocks=8, block_size=4, window=None, index=kind("model", 4), policy=LRU())
        enter(collided, 0, "the cat sat on a")
        found = enter(collided, 1, "the dog ran to me")
        print(f"{kind.__name__}: {found} tokens of another text found")

# %% [markdown]
# Where tokens are compared, a collision costs a hit. Where the name is trusted, the request reads the keys and values
# of another text, and nobody notices.
#
# ## Attention over a shared prefix
#
# So far sharing saved prefill and memory. But in every decode step each sequence still reads the keys and values of the
# common beginning for itself. Attention over two sets of keys can be put together from attention over each, if each
# side also says how large its sum of exponentials was: that is `merge_states` of rung `batching`. So:
# attend to the common beginning **once for all**, with the queries of all sequences as the rows of one matrix product;
# attend to the rest for each; merge.
#
# By hand, with all scores 0, so that a result is the mean of the values: the beginning holds 1, 2, 3, 4. One sequence
# goes on with 5, another with 8 and 9.

# %%
import torch

from minipaged.batching.ops import merge_states


def mean_of(*values):
    """Return attention over keys with score 0, and the logarithm of its sum of exponentials."""
    return torch.tensor(values).mean().view(1, 1, 1), torch.tensor(float(len(values))).log().view(1, 1)


prefix = mean_of(1.0, 2.0, 3.0, 4.0)
for suffix in ([5.0], [8.0, 9.0]):
    merged, _ = merge_states(*prefix, *mean_of(*suffix))
    whole, _ = mean_of(1.0, 2.0, 3.0, 4.0, *suffix)
    print(f"1 2 3 4 and {suffix}: merged {merged.item():.2f}, all at once {whole.item():.2f}")

# %% [markdown] given="1,024 2402.05099"
# The idea is known as Hydragen ([arXiv 2402.05099](https://arxiv.org/abs/2402.05099)), and vLLM has it as cascade
# attention. In the engine the scheduler puts rows side by side whose tables begin with the same blocks, and shares what
# they have in common in pieces of 1,024 tokens. A tiny random model is enough to see it run:

# %%
tiny = LLM("random", rung="prefix", num_blocks=96, dtype="float32")
document = [i % 1000 for i in range(1040)]
asked = [document + [2000 + i] * 5 for i in range(4)]
tiny.generate(asked, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
layers, steps = tiny.config.num_layers, 3
print("calls of shared_prefix_attention:", tiny.stats()["shared_prefix_launches"], f"= {layers} layers x {steps} steps")
rows = [len(each) + 1 for each in asked]
print("keys read in the first decode step, each row alone:", sum(rows))
print("with the first 1,024 read once:", 1024 + sum(length - 1024 for length in rows))

# %% [markdown]
# The answers do not change by that. `tests/prefix/test_ops.py` holds the operation against plain paged attention.
#
# ## Your version in the real engine
#
# Now your names and your clock take the places of the product's. The pool has two blocks more
# than one conversation needs, too few for all of them, so the clock has something to do.

# %%
from minipaged.paged.block_table import num_blocks_for

num_blocks = num_blocks_for(max(map(len, prompts)) + 6, block_size=16) + 2
try:
    with use(block_key=my_block_key, eviction_policy=MyClock):
        yours = LLM(MODEL, rung="prefix", num_blocks=num_blocks, dtype="float32")
        for number, each in enumerate(prompts + prompts):
            result = yours.generate([each], SamplingParams(temperature=0, max_tokens=6))[0]
            is_same = result.token_ids == answers[number % 4].token_ids
            print(f"{result.metrics.num_hit_tokens} found, {result.metrics.num_evictions} evicted, {is_same = }")
except NotYet:
    print("not yet: this needs my_block_key and MyClock")

# %% [markdown]
# And the chat itself:

# %%
ask("What is the capital of France?", "prefix", block_key=my_block_key, eviction_policy=MyClock)

# %% [markdown]
# ## Reference to kernel
#
# Finding blocks is plain Python on the CPU. It needs no kernel. Reading them does: the readable form of
# `shared_prefix_attention` is in [reference.py](../minipaged/prefix/reference.py), and it is short. The definition is
# one line, plain paged attention, because groups change nothing about the result. The Triton kernel is in
# [kernels.py](../minipaged/prefix/kernels.py). It cuts sums at the same places as the decode kernel of lesson 04, which
# is why a shared prefix comes in pieces of 1,024 tokens, and why its results are those of the other kernel **bit for
# bit**. Otherwise an answer would depend on who else is in the batch.
#
# ## What would break if...
#
# **... a name left out its parent?** One argument less, and many prompts seem to hit more often. Alice and Bob both
# send a text that goes on with the same sentences. Bob's first block is cached, from an earlier question of his. With
# the index that believes names, and names without a parent:

# %%
from unittest.mock import patch


def without_parent(parent, token_ids):
    return block_key(b"", token_ids)  # the sabotage: it should be block_key(parent, token_ids)


def encode(text):
    return list(text.encode()) if llm.tokenizer is None else llm.tokenizer.encode(text)


ALICE = encode("I live in Paris. I love Paris. Every day I walk in the streets of Paris.")[:16]
BOB = encode("I live in a city. I love it. Every day I walk in the streets of it.")[:16]
BOTH = encode(" I am standing in the centre of my city now and look around. There are many people here. The name of "
              "the city in which I am standing at this moment is the city of")  # fmt: skip


# %%
def tell(llm):
    for text, max_tokens in ((ALICE + BOTH, 1), (BOB + encode(" What can I do there?"), 1), (BOB + BOTH, 5)):
        result = llm.generate([text], SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    return f"{result.metrics.num_hit_tokens} tokens found for Bob, answer: {result.text or result.token_ids}"


print("right:   ", tell(LLM(MODEL, num_blocks=64, dtype="float32")))
with use(block_key=without_parent), patch("minipaged.prefix.generate.HashChain", TrustingChain):
    print("sabotage:", tell(LLM(MODEL, num_blocks=64, dtype="float32")))

# %% [markdown]
# Bob never said where he lives. His answer comes from blocks that were computed behind *Alice's* text. Nothing crashed,
# and the numbers even look better. `test_different_beginnings_have_different_keys` in `tests/prefix/test_block_key.py`
# catches the short name. That the chain compares what it finds is held by
# `test_a_digest_that_gives_every_block_one_key_costs_hits_and_no_wrong_answer` in `tests/prefix/test_generate.py`.
#
# **... all of a prompt were found?** In [scheduler.py](../minipaged/prefix/scheduler.py) a request says up to where it
# may be found: one token less than it has. Without that, a prompt of exactly two blocks comes for the second time:

# %%
from dataclasses import replace

from minipaged.prefix.scheduler import PrefixGroup

honest_room = PrefixGroup.room


def greedy_room(group):
    room = honest_room(group)
    return replace(room, limits=room.lengths)  # the sabotage: no token is left to compute


# %%
two_blocks = list(range(5000, 5032))
with patch.object(PrefixGroup, "room", greedy_room):
    tiny.generate([two_blocks], SamplingParams(max_tokens=1))
    try:
        tiny.generate([two_blocks], SamplingParams(max_tokens=1))
    except RuntimeError as error:
        print("the second time:", str(error)[:60], "...")

# %% [markdown]
# The prompt had nothing left to compute, so attention was called with 0 rows. That is an error, and one that real
# engines had. In one of them the repair was worse than the fault: the last token was computed again *behind* itself,
# so it stood twice in the cache, and the answer was a little wrong.
# `test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_token` in `tests/prefix/test_generate.py` looks at
# both: the rows that are computed, and the length of the table.

# %% [markdown]
# **... the clock began at its first block each time?** It is one line:

# %%
from minipaged.lessons.exercises.prefix import ReferenceClock


class RestartingClock(ReferenceClock):
    def evict(self):
        self.hand = 0  # the sabotage
        return super().evict()


def give_up(clock, num_blocks, num_times):
    for block_id in range(num_blocks):
        clock.add(block_id)
    for _ in range(num_times):
        evicted = clock.evict()
        clock.add(evicted)
        yield evicted


# %% [markdown]
# > **Predict.** 4 blocks, all marked. 8 times: evict one, and it comes back at once with new content, marked. The right
# > clock gives up 0 1 2 3 0 1 2 3. Which ones does the restarting clock give up?

# %%
print("clock:     ", *give_up(ReferenceClock(), 4, 8))
print("restarting:", *give_up(RestartingClock(), 4, 8))
order = list(give_up(RestartingClock(), 16, 40_000))
print(f"16 blocks: block 15 is given up for the first time at eviction {order.index(15) + 1:,}")

# %% [markdown]
# The restarting hand counts in binary. Block 0 goes every second time, and each further block half as often as the one
# before it. The last blocks keep what they have for ages, useful or not, while new content is thrown out at once.
# `check_clock` above refuses it, and it stands in `tests/lessons/wrong/prefix.py` among the wrong answers that must be
# refused.
#
# ## Measure
#
# What does that cost? A pool of 17 blocks is full of old texts that nobody wants any more. Now 8 new texts, which would
# all fit, are asked for in turn, 6 rounds. The first round can find nothing.


# %%
def count_hits(policy, rounds=6):
    cache = PrefixCache(num_blocks=17, block_size=4, window=None, index=HashChain("model", 4), policy=policy)
    texts = [" ".join(f"text{i}-{k}" for k in range(9)) for i in range(30)]
    total = 0
    for text in texts[8:] + texts[:8] * rounds:
        total += enter(cache, 0, text)
        cache.free(0)
    return total


possible = 8 * 8 * 5  # 8 texts, 8 tokens of each in full blocks, 5 rounds
for policy in (LRU(), ReferenceClock(), RestartingClock()):
    print(f"{type(policy).__name__:>16}: {count_hits(policy):>3} of {possible} tokens found")

# %% [markdown]
# And the whole of it on a real workload, with the same system message in front of each request. The figures below are
# read from [prefix.json](../docs/benchmarks/prefix.json) as they were measured when it was committed, on the machine
# that stands in its first lines. `python -m minipaged.bench prefix` measures them on yours.

# %%
import json
import statistics
from pathlib import Path

import minipaged

path = Path(minipaged.__file__).parents[1] / "docs" / "benchmarks" / "prefix.json"
record = json.loads(path.read_text()) if path.exists() else {}
for workload in ("without_hits", "system_prompt") if record else ():
    medians = {name: statistics.median(own["seconds"]) for name, own in record[workload].items()}
    for name in ("hash", "radix"):
        print(f"{workload}: {name} is {medians['None'] / medians[name]:.2f} times as fast as no prefix cache")
if not record:
    print("this installation has no measurements beside it; python -m minipaged.bench prefix makes them")

# %% [markdown]
# ## Recap
#
# **Three takeaways**
#
# - What lies in a freed block stays right. A name that covers the block's tokens *and everything before them* finds it
#   again, and a cached block that nobody uses takes nobody's room, because it counts as free.
# - At least one token of every prompt is computed. Blocks are found only when they are written, and given up from the
#   end of a sequence.
# - A shared cache tells who was here before. Salts decide who may find what; comparing tokens decides that a name is
#   not believed.
#
# **Three questions**
#
# <details>
# <summary>Is it harmful if a block stays cached when its parent has been evicted? Is it useful?</summary>
#
# Harmless, since its content is still right for its name. Useless, since a walk stops at the first missing name, so
# nobody gets to it. It is idle and will be evicted in its turn. If the parent is computed again, the hash chain makes a
# new entry, and the child hangs on the old one; the product compares entries, not only names, so the child stays
# unreachable. An index that goes by names alone finds it again.
#
# </details>
#
# <details>
# <summary>Why may a part-full block be found by the tree but not by the chain, and why must it be copied?</summary>
#
# A name covers a whole block, so two prompts that differ in its last token have nothing in common there. A tree
# compares tokens. The rest of the block will hold other tokens for the new request, and two sequences cannot write
# different things into one slot: it needs a block of its own.
#
# </details>
#
# <details>
# <summary>With blocks of 16 the stranger has a harder time. Why? And what does that cost everybody else?</summary>
#
# A guess is rewarded only when all 16 tokens of a block are right. But everybody's hits are then rounded down to
# multiples of 16 as well, and so are the savings.
#
# </details>
#
# **What comes next.** The ladder goes on with smaller numbers in the cache and more memory behind it. Before that,
# [lesson 09](09_engine.ipynb) follows one request through all that you have built.
