"""Packed matrices: the same product, one copy in memory, and only where they pay."""

from pathlib import Path

import pytest
import torch

from minipaged.foundation.packing import can_pack, pack, packed_linear
from minipaged.foundation.weights import load_model
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    """Return a matrix, or skip: this processor may not multiply bfloat16."""
    if not can_pack(torch.bfloat16, CPU):
        pytest.skip("needs a GPU or a CPU with bfloat16")
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_a_packed_matrix_gives_the_same_product(weight: torch.Tensor, num_rows: int) -> None:
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.arange(48).bfloat16()
    for b in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(packed_linear(x, pack(weight), b).double(), expected, rtol=8e-3, atol=8e-3)


def test_packing_keeps_every_number(weight: torch.Tensor) -> None:
    assert pack(weight).shape == weight.shape
    assert torch.equal(pack(weight).to_dense(), weight)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_packed_model_gives_the_logits_of_the_plain_one(weight: torch.Tensor, tmp_path: Path, is_tied: bool) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", tie_word_embeddings=is_tied)
    token_ids = torch.tensor([5, 9, 200, 3])

    def run(is_packed: bool) -> torch.Tensor:
        model = load_model(folder, dtype=torch.bfloat16, is_packed=is_packed)
        assert model.output_matrix.is_mkldnn is is_packed
        return model.forward(token_ids, torch.arange(4), lambda layer, q, k, v: q, None).float()

    plain, packed = run(False), run(True)
    assert (plain - packed).abs().max() <= 0.05 * plain.abs().max()
