"""Sequences for tests of sampling, and a second way to choose their tokens."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from minipaged.foundation.philox import gumbel_noise, seed_tensor
from minipaged.foundation.sampling import SamplingParams, sample


@dataclass
class Sequence:
    params: SamplingParams
    seed: int = 42
    prompt_token_ids: list[int] = field(default_factory=lambda: [0])
    output_token_ids: list[int] = field(default_factory=list)
    end_token_ids: frozenset[int] = frozenset()


def sequence(seed: int = 42, output: Any = (), prompt: Any = (0,), end: Any = (), **params: Any) -> Sequence:
    resolved = SamplingParams(**params).resolve({})
    return Sequence(resolved, seed, list(prompt), list(output), frozenset(end))


def choose(logits: Any, *sequences: Sequence) -> list[int]:
    return [token.token_id for token in sample(torch.as_tensor(logits), sequences)]


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def oracle(logits: torch.Tensor, seq: Sequence) -> int:
    """Choose one row's token with Python lists and double precision."""
    p = seq.params
    values = logits.double().tolist()
    for token_id in {*seq.prompt_token_ids, *seq.output_token_ids}:
        value = values[token_id]
        values[token_id] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
    for token_id in set(seq.output_token_ids):
        count = seq.output_token_ids.count(token_id)
        values[token_id] -= p.presence_penalty + p.frequency_penalty * count
    if len(seq.output_token_ids) < p.min_tokens:
        for token_id in seq.end_token_ids:
            values[token_id] = -math.inf
    if p.temperature == 0:
        return values.index(max(values))
    best = max(values)
    scores = [(value - best) / p.temperature for value in values]
    kept = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if p.top_k > 0:
        kept = kept[: p.top_k]
    if p.top_p < 1:
        total = sum(math.exp(scores[token_id]) for token_id in kept)
        before, nucleus = 0.0, []
        for token_id in kept:
            if before < p.top_p * total:
                nucleus.append(token_id)
            before += math.exp(scores[token_id])
        kept = nucleus
    kept = [token_id for token_id in kept if math.exp(scores[token_id]) >= p.min_p]
    noise = gumbel_noise(seed_tensor([seq.seed]), torch.tensor([len(seq.output_token_ids)]), len(scores), "cpu")[
        0
    ].tolist()
    return max(sorted(kept), key=lambda token_id: scores[token_id] + noise[token_id])
