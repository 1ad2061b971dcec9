"""Names of blocks: a digest of all tokens so far, the same everywhere, and different wherever K and V would be."""

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minipaged import use
from minipaged.foundation.config import ModelConfig
from minipaged.prefix.block_key import block_key, root_key
from minipaged.prefix.generate import Engine, EngineOptions
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.radix_tree import RadixTree

ROOT = root_key("model")
BLOCK = list(range(100, 116))


def test_a_key_is_the_digest_of_the_parent_and_the_ids_as_32_bit_numbers_lowest_byte_first():
    data = ROOT + b"\x01\0\0\0" + b"\xff\xff\xff\xff" + b"\x00\x01\0\0"
    assert block_key(ROOT, [1, 2**32 - 1, 256]) == hashlib.sha256(data).digest()
    assert block_key(ROOT, (1, 2**32 - 1, 256)) == block_key(ROOT, [1, 2**32 - 1, 256])


GOLDEN = {
    "root": "7e43cb0548dda3ded96c23f55dd1c5ebf467e7d24cbe7b52d5a634b21dc38657",
    "salted root": "56dc3081bdb22bd345741cf328074b1470bbad8db67ba306795bed59c7a2d281",
    "first block": "ffa53ce21b2203e5fd69750ddbd93a0e3215b8545e57a7144bb8f026c0adac45",
    "second block": "151752ae15358dd03ce3eaaa9c229edaca644a01466defc5e378eae8d111e55d",
}

PRINT_KEYS = """
from minipaged.prefix.block_key import block_key, root_key
root = root_key("model")
first = block_key(root, range(16))
print(root.hex(), root_key("model", "a").hex(), first.hex(), block_key(first, [7, 9]).hex())
"""


def test_another_process_with_other_hashes_gives_the_same_keys(run_python: Any):
    result = run_python("-c", PRINT_KEYS, PYTHONHASHSEED="77")
    assert result.stdout.split() == list(GOLDEN.values()), result.stderr


def test_keys_are_those_of_yesterday():
    first = block_key(ROOT, range(16))
    keys = [ROOT, root_key("model", "a"), first, block_key(first, [7, 9])]
    assert [key.hex() for key in keys] == list(GOLDEN.values())


def other_ids() -> list[int]:
    """Return ids that a polynomial of base 31 cannot tell from `BLOCK`."""
    return [BLOCK[0], BLOCK[1] + 31, BLOCK[2] - 1, *BLOCK[3:]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (block_key(ROOT, BLOCK), block_key(ROOT, other_ids())),
        (block_key(ROOT, BLOCK), block_key(ROOT, BLOCK[::-1])),
        (block_key(block_key(ROOT, [1]), BLOCK), block_key(block_key(ROOT, [2]), BLOCK)),
        (block_key(ROOT, [1, 23]), block_key(ROOT, [12, 3])),
        (block_key(ROOT, [1, 0]), block_key(ROOT, [1])),
        (block_key(ROOT, [256]), block_key(ROOT, [1])),
        (block_key(ROOT, [0, 1]), block_key(ROOT, [1 << 8, 0])),
        (block_key(ROOT, [2**31]), block_key(ROOT, [0])),
        (block_key(block_key(ROOT, [1]), [2]), block_key(ROOT, [1, 2])),
        (block_key(root_key("model", "a"), BLOCK), block_key(root_key("model", "b"), BLOCK)),
        (block_key(root_key("model", "a"), BLOCK), block_key(ROOT, BLOCK)),
        (root_key("model", "a"), root_key("modela")),
        (root_key("model", "ab"), root_key("modela", "b")),
        (root_key("a"), root_key("", "a")),
        (root_key("model", "\udc80"), root_key("model", "?")),
    ],
)
def test_different_beginnings_have_different_keys(one: bytes, other: bytes):
    assert one != other and len(one) == len(other) == 32


def test_no_salt_is_the_empty_salt():
    assert root_key("model") == root_key("model", "")


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_is_no_32_bit_number_has_no_key(token_id: int):
    with pytest.raises(struct.error):
        block_key(ROOT, [token_id])


def test_the_tree_tells_ids_apart_that_python_hashes_alike():
    tree = RadixTree(block_size=2)
    assert hash((5, -1)) == hash((5, -2))
    tree.insert(tree.root(""), [5, -1], 7)
    assert tree.match([5, -2, 0], "", 2).block_ids == [] and tree.match([5, -1, 0], "", 2).block_ids == [7]


# -- what the root of all keys covers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def namespace(weights: str = "w", dtype: torch.dtype = torch.float32, block_size: int = 16, **config: Any) -> str:
    model = SimpleNamespace(config=ModelConfig.from_dict(LLAMA | config), dtype=dtype)
    engine: Any = SimpleNamespace(
        model=model, options=EngineOptions(max_model_len=64, num_blocks=8, weights_identity=weights)
    )
    index = Engine._make_index(engine, block_size)
    assert isinstance(index, HashChain)
    return index.namespace


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"dtype": torch.float16},
        {"block_size": 32},
        {"num_hidden_layers": 3},
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_keys_and_values_changes_the_root(change: dict[str, Any]):
    assert namespace() == namespace()
    assert root_key(namespace(**change)) != root_key(namespace())


def test_a_namespace_is_the_same_text_in_every_process():
    assert " at 0x" not in namespace() and "object" not in namespace()


# -- a digest that gives everything one key


def test_a_chain_with_one_key_for_all_blocks_finds_what_is_right_or_nothing():
    with use(block_key=lambda parent, token_ids: b"one"):
        chain = HashChain("model", block_size=2)
        first, gone = chain.insert(chain.root(""), [1, 2], 7)
        assert gone == [] and chain.match([1, 2, 3], "", 2).block_ids == [7]
        second, gone = chain.insert(first, [3, 4], 5)
        assert gone == [7] and 7 not in chain and 5 in chain
        chain.check()
        for tokens in ([1, 2, 3, 4, 5], [3, 4, 5], [9, 9, 9]):
            assert chain.match(tokens, "", len(tokens) - 1).block_ids == []
        assert chain.insert(first, [8, 8], 6) == (first, []), "what follows a forgotten block cannot be reached"
        assert chain.insert(second, [8, 8], 6)[1] == [5]
        assert chain.insert(chain.root("a"), [1, 2], 3)[1] == [6]
        assert chain.match([1, 2, 3], "", 2).block_ids == [] and chain.match([1, 2, 3], "a", 2).block_ids == [3]
        chain.check()
