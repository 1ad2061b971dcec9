"""The copy of whole blocks, in plain PyTorch."""

import pytest
import torch

from minipaged import use
from minipaged.sharing.ops import copy_blocks

PAIRS = {
    "none": [],
    "one": [(2, 5)],
    "one-source-for-two": [(2, 5), (2, 0)],
    "several": [(1, 6), (2, 4), (3, 0)],
    "first-and-last": [(0, 6)],
    "onto-itself": [(3, 3)],
}


def random_pool(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("planes", [(), (3, 2)], ids=["one-plane", "all-layers"])
@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("case", PAIRS)
def test_targets_get_the_bits_of_their_sources_and_nothing_else_changes(
    case: str, block_size: int, planes: tuple[int, ...], dtype: torch.dtype
):
    pool = random_pool(*planes, 7, block_size, 2, 3, dtype=dtype)
    expected = pool.clone()
    for source, target in PAIRS[case]:
        expected[..., target, :, :, :] = pool[..., source, :, :, :]
    copy_blocks(pool, torch.tensor(PAIRS[case], dtype=torch.int64).view(-1, 2), tier="torch")
    assert torch.equal(pool, expected)


def test_unwritten_slots_are_copied_as_they_are():
    pool = random_pool(3, 4, 1, 2)
    pool[0, 2:] = float("nan")
    copy_blocks(pool, torch.tensor([[0, 1]]), tier="torch")
    assert torch.equal(pool[1, :2], pool[0, :2]) and pool[1, 2:].isnan().all()


@pytest.mark.parametrize(
    ("pool_shape", "pairs_shape"), [((3, 4, 1), (1, 2)), ((3, 4, 1, 2), (2,)), ((3, 4, 1, 2), (1, 3))]
)
def test_wrong_shapes_are_refused(pool_shape: tuple[int, ...], pairs_shape: tuple[int, ...]):
    with pytest.raises(AssertionError):
        copy_blocks(torch.zeros(pool_shape), torch.zeros(pairs_shape, dtype=torch.int64), tier="torch")


def test_the_copy_can_be_replaced():
    calls = []
    with use(copy_blocks=lambda pool, pairs: calls.append(pairs.tolist())):
        copy_blocks(torch.zeros(3, 4, 1, 2), torch.tensor([[0, 1]]))
    assert calls == [[[0, 1]]]
