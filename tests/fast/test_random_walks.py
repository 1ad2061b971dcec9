"""Requests of all kinds come, are dropped and run out of blocks at random: all are told what the rung tells them."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minipaged import SamplingParams
from tests.batching.engines import Watched, sent_away
from tests.fast.engines import check_seats, fast_engine, told
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

NUM_REQUESTS = 10


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"sliding_window": 6} if request.param == "mistral" else {}
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param, with_tokenizer=True, **sizes)


def draw_options(rng: Random) -> dict[str, Any]:
    """Draw an engine with tiny limits, in which a request of 4 sequences still fits."""
    max_num_seqs = rng.randint(4, 12)
    return {
        "block_size": (block_size := rng.choice([1, 4, 16])),
        "num_blocks": {1: rng.randint(56, 64), 4: rng.randint(16, 18), 16: rng.randint(8, 9)}[block_size],
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 3, 20, 500]),
        "preemption": rng.choice(["recompute", "swap"]),
        **rng.choice([{"rung": "batching"}, {"prefix_cache": "hash"}, {"prefix_cache": "radix"}]),
    }


def draw_request(rng: Random, beginnings: list[list[int]], is_late: bool) -> tuple[list[int], SamplingParams]:
    """Draw a prompt that may begin as others do, and what is asked for; ``is_late`` asks for nothing that must wait."""
    prompt = rng.choice(beginnings)[: rng.randint(1, 16)] + [rng.randrange(256) for _ in range(rng.randint(0, 3))]
    kind = rng.choice(["lone", "lone", "samples"] if is_late else ["lone", "lone", "samples", "best of", "beams"])
    params: dict[str, Any] = {"max_tokens": rng.randint(3, 14), "ignore_eos": True, "seed": rng.randrange(1000)}
    params["stop_token_ids"] = rng.sample(range(256), rng.choice([0, 0, 12]))
    if kind == "beams":
        return prompt, SamplingParams(n=2, beam_width=rng.randint(2, 4), **params)
    if kind != "lone":
        params |= {"n": 2, "best_of": 3} if kind == "best of" else {"n": rng.randint(2, 4)}
    needs: dict[str, Any] = rng.choice([{}, {"top_k": 20}, {"min_p": 0.02}])
    if not is_late:
        needs = rng.choice([needs, {"logprobs": 2}, {"min_tokens": 3}, {"repetition_penalty": 1.2}])
    stop = rng.choice([(), (), "e", "ab"])
    return prompt, SamplingParams(
        temperature=rng.choice([0, 0.8, 1.2]), stop=stop, priority=rng.randrange(3), **(params | needs)
    )


def walk(folder: Path, rng: Random, steps: str, events: Counter[str]) -> None:
    """Serve some requests and drop some of them, and hold all results against those of the rung alone."""
    options = draw_options(rng)
    beginnings = [[rng.randrange(256) for _ in range(16)] for _ in range(2)]
    is_late = rng.random() < 0.6
    requests = [draw_request(rng, beginnings, is_late) for _ in range(NUM_REQUESTS)]
    expected = answers_of_the_rung(folder, requests, options)
    w = fast_engine(folder, steps, **options)
    with sent_away(lambda group: group.is_decoding and rng.random() < 0.03):
        ends, dropped = serve(w, rng, requests)
    events["aborted"] += len(dropped)
    for place, (_, params) in enumerate(requests):
        own = sorted(ends[place], key=lambda result: result.index)
        if place not in dropped:
            assert [told(result) for result in own] == expected[place]
            events["whole requests"] += 1
        elif params.beam_width is None and params.best_of is None:
            assert [result.index for result in own] == list(range(params.n)), "each sample ends once"
            for result, whole in zip(own, expected[place], strict=True):
                assert result.token_ids == whole[0][: len(result.token_ids)]
                assert result.finish_reason == "abort" or told(result) == whole
        events.update(result.finish_reason for result in own)
    stats = w.engine.stats()
    events.update({name: stats.get(name, 0) for name in ("preemptions", "swaps", "copies", "hit_tokens", "late_steps")})


def answers_of_the_rung(folder: Path, requests: list[Any], options: dict[str, Any]) -> list[list[Any]]:
    """Return what each request is told without steps, when nobody is dropped."""
    plain = fast_engine(folder, "none", **options)
    results = iter(plain.generate([prompt for prompt, _ in requests], [params for _, params in requests]))
    return [[told(next(results)) for _ in range(params.n)] for _, params in requests]


def serve(w: Watched, rng: Random, requests: list[Any]) -> tuple[list[list[Any]], set[int]]:
    """Return the results of each request in the order of their ends, and which requests somebody dropped."""
    queue = list(range(len(requests)))
    ends: list[list[Any]] = [[] for _ in requests]
    place_of: dict[int, int] = {}  # by request id
    dropped: set[int] = set()
    while queue or w.engine.has_unfinished():
        act = rng.random()
        if queue and act < 0.5:
            place = queue.pop(0)
            place_of[w.add(*requests[place])] = place
        elif place_of and act < 0.53:
            request_id, place = rng.choice(list(place_of.items()))
            params = requests[place][1]
            has_indices = params.beam_width is None and params.best_of is None
            aborted = w.engine.abort(
                request_id, index=rng.choice([None, rng.randrange(params.n)]) if has_indices else None
            )
            ends[place] += aborted
            dropped |= {place} if aborted else set()
            w.check()
            check_seats(w)
        else:
            for output in w.engine.step():
                ends[place_of[output.request_id]] += [output.result] if output.result else []
    w.assert_idle()
    return ends, dropped


@pytest.mark.parametrize("steps", ["+device_batch", "overlap", "all"])
def test_random_requests_with_random_aborts_are_told_what_the_rung_tells(folder: Path, steps: str, num_operations: int):
    events: Counter[str] = Counter()
    num_walks = max(8, num_operations // 1000)
    for seed in range(num_walks):
        walk(folder, Random(f"{steps} {seed}"), steps, events)
    names = {"aborted", "whole requests", "preemptions", "swaps", "copies", "hit_tokens", "stop", "length", "abort"}
    names |= {"late_steps"} if steps != "+device_batch" else set()
    assert all(events[name] >= 3 for name in names), events
