"""The smallest model that runs, for benches that count and do not care what is said."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from minipaged.foundation.model import weight_shapes
from minipaged.foundation.weights import SINGLE_FILE, load_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def save_random_model(folder: Path, max_model_len: int) -> None:
    """Write a Llama of one layer with random weights, for sequences of ``max_model_len`` tokens, into a folder."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": max_model_len}))
    config, _ = load_config(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in weight_shapes(config).items()}
    save_file(weights, folder / SINGLE_FILE, metadata={"format": "pt"})


@contextmanager
def model_at(name: str, max_model_len: int) -> Iterator[str]:
    """Yield the name of a model as `LLM` takes it; ``random`` is the smallest model, in a folder for so long."""
    if name != "random":
        yield name
        return
    with TemporaryDirectory() as folder:
        save_random_model(Path(folder), max_model_len)
        yield folder
