"""Models of a real shape with random weights: speed can be measured without a download.

Their ``config.json`` files come with this package, as folders that hold nothing else. Weights are made where they are
used and in the dtype they are used in, so that a start takes as long as the GPU needs to draw the numbers.

One of them, ``random``, is no real shape but a tiny one, with the vocabulary and the head groups of the default model:
what runs on that with token ids runs on this too, where nothing can be downloaded.
"""

import os
from pathlib import Path

import torch

from minipaged.errors import UserError
from minipaged.foundation.config import ModelConfig
from minipaged.foundation.model import weight_shapes
from minipaged.shapes import Tensor

SHAPES = Path(__file__).parent / "random_models"
"""One folder for each shape. A folder is a random model because it lies here, and for no other reason."""

SUFFIX = "-random"
SEED = 0


def list_random_models() -> list[str]:
    """Return the names of all shapes.

    Example:
        >>> list_random_models()
        ['llama-3.1-8b-random', 'qwen3-0.6b-random', 'random']
    """
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def find_random_model(name: str) -> Path | None:
    """Return the folder of a shape's config; None for a name that does not ask for one.

    Raises:
        UserError: The name ends as those of all shapes do, and no shape has it.
    """
    names = list_random_models()
    if name in names and not os.path.exists(name):
        return SHAPES / name
    # Other people's models may end like this too: they are folders, or have an owner before a slash.
    if name.endswith(SUFFIX) and "/" not in name and not os.path.exists(name):
        raise UserError(f"no model with random weights is called {name!r}; there is {', '.join(names)}")
    return None


def is_random(folder: Path) -> bool:
    """Return whether a model's folder is one of the shapes."""
    return folder.parent == SHAPES


def make_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Draw every tensor that a checkpoint of this config would hold.

    A matrix keeps the size of what it multiplies, so that nothing overflows and logits have a spread of about 1.
    Norms multiply by 1, and biases add 0. All-zero weights would not do: multiplying them draws less power than real
    numbers, and a GPU runs faster then.

    Invariants:
        The same on every start. Another kind of device or dtype draws other numbers.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            weight.normal_(0.0, shape[1] ** -0.5, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        weights[name] = weight
    return weights


def random_identity(folder: Path) -> str:
    """Return text that tells these weights from all others."""
    return f"{folder.name}, seed {SEED}"
