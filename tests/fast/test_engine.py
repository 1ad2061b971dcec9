"""What a request is told does not depend on the steps: tokens that come late, end on time and are dropped in time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams, UserError, use
from minipaged.batching.reference import ragged_paged_attention
from minipaged.fast.reference import silu_mul_packed
from minipaged.foundation.reference import rms_norm, rotary, silu_mul
from minipaged.foundation.sampler.reference import sample_tokens
from minipaged.paged.reference import write_slots
from tests.batching.engines import Watched, greedy, prompt_of, tokens_of
from tests.fast.engines import COMBINATIONS, check_seats, check_steps, fast_engine, told
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

PROMPTS = [prompt_of(n, seed=n) for n in (9, 1, 22, 6, 4)]
STEPS = ("+device_batch", "overlap", "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def free(folder: Path) -> list[Any]:
    """Return answers that nothing ends early."""
    return fast_engine(folder, "none").generate(PROMPTS, [warm(i) for i in range(len(PROMPTS))])


def warm(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": seed} | options))


def both(folder: Path, steps: str, params: list[Any], **options: Any) -> tuple[list[Any], list[Any], Watched]:
    """Return the results of the rung and those with some steps, which must be told the same."""
    shape = {"block_size": 4, "num_blocks": 128} | options
    plain = fast_engine(folder, "none", **shape).generate(PROMPTS, params)
    w = fast_engine(folder, steps, **shape)
    results = w.generate(PROMPTS, params)
    assert [told(each) for each in results] == [told(each) for each in plain]
    check_seats(w)
    return plain, results, w


# -- ends


@pytest.mark.parametrize("steps", STEPS)
def test_a_stop_string_in_pieces_ends_an_answer_where_it_ends_without_steps(folder: Path, free: list, steps: str):
    for is_shown in (False, True):
        stops = [each.text[place : place + 3] for place, each in enumerate(free, start=1)]
        params = [warm(i, stop=[stop], include_stop_str_in_output=is_shown) for i, stop in enumerate(stops)]
        plain, _, w = both(folder, steps, params)
        assert [each.finish_reason for each in plain] == ["stop"] * len(plain)
        assert len({len(each.token_ids) for each in plain}) > 2, "they must end at different steps"
        check_steps(w, steps)


@pytest.mark.parametrize("steps", STEPS)
def test_end_tokens_and_limits_end_answers_where_they_end_without_steps(folder: Path, free: list, steps: str):
    params = [
        warm(0, stop_token_ids=[free[0].token_ids[0]]),  # the first token, while the second is computed
        warm(1, max_tokens=1),
        warm(2, stop_token_ids=[free[2].token_ids[5]], max_tokens=6),  # both at once
        warm(3, max_tokens=2),
        warm(4, stop_token_ids=[free[4].token_ids[-1]]),
    ]
    plain, _, w = both(folder, steps, params)
    assert [each.finish_reason for each in plain] == ["stop", "length", "stop", "length", "stop"]
    check_steps(w, steps)


@pytest.mark.parametrize("steps", STEPS)
def test_the_pool_and_the_model_end_answers_where_they_end_without_steps(folder: Path, steps: str):
    for options in ({"num_blocks": 8}, {"max_model_len": 26}):
        params = [warm(i, max_tokens=None) for i in range(len(PROMPTS))]
        plain, _, w = both(folder, steps, params, **options)
        assert {each.finish_reason for each in plain} == {"length"}
        assert len(plain[2].token_ids) == (4 if "max_model_len" in options else 11)
        assert w.preemptions > 0 or "max_model_len" in options


# -- what needs the host

NEEDY = {
    "min_tokens": {"min_tokens": 7},
    "logprobs": {"logprobs": 3},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.7},
    "samples": {"n": 3},
    "best-of": {"n": 2, "best_of": 3},
    "beams": {"n": 2, "beam_width": 3, "temperature": None},
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", NEEDY)
def test_requests_that_need_the_host_are_told_the_same_alone_and_among_others(
    folder: Path, free: list, kind: str, steps: str
):
    stops = {"stop_token_ids": [free[0].token_ids[2], free[1].token_ids[3]]} if kind != "beams" else {}
    others = [warm(i, top_k=30, top_p=0.95) if i % 2 else warm(i, **stops) for i in range(len(PROMPTS))]
    for own in ({0, 1, 2, 3, 4}, {1}, {0, 3}):
        params = [warm(i, **(stops | NEEDY[kind])) if i in own else each for i, each in enumerate(others)]
        both(folder, steps, params, max_num_batched_tokens=16)


@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_only_steps_that_need_the_host_wait(folder: Path, steps: str):
    w = fast_engine(folder, steps)
    w.generate(PROMPTS[:1], warm(0, min_tokens=4, max_tokens=10))
    # Its newest token is on its way when the host counts, so the fifth step waits too.
    assert w.engine.stats()["late_steps"] == 10 - 4
    w.generate(PROMPTS[:1], warm(0, n=2, max_tokens=10))
    assert w.engine.stats()["late_steps"] == 6 + 9, "only the step that forks waits"


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.05}, {"temperature": 0}])
def test_settings_of_a_seat_are_those_of_who_sits_there(folder: Path, filters: dict):
    params = [warm(i, **(filters if i % 2 else {}), max_tokens=3 + 2 * i) for i in range(len(PROMPTS))]
    both(folder, "all", params, max_num_seqs=2)


# -- streams and looks at the cache


@pytest.mark.parametrize("steps", STEPS)
def test_streams_give_the_text_of_the_results_piece_by_piece(folder: Path, free: list, steps: str):
    w = fast_engine(folder, steps)
    params = [warm(i, stop=[free[0].text[6:8]]) for i in range(2)]
    streams = [w.llm.stream(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
    chunks: list[list[Any]] = [[next(stream)] for stream in streams]
    for stream, own in zip(streams, chunks, strict=True):
        own += stream
    plain = fast_engine(folder, "none").generate(PROMPTS[:2], params)
    for own, expected in zip(chunks, plain, strict=True):
        assert "".join(chunk.text for chunk in own) == expected.text
        assert [token for chunk in own for token in chunk.token_ids] == expected.token_ids
        assert len(own) > 1 and told(own[-1].result) == told(expected)
    w.assert_idle()


@pytest.mark.parametrize("kind", [None, "radix"])
@pytest.mark.parametrize("steps", STEPS)
def test_a_look_before_a_release_sees_the_cache_as_without_steps(tmp_path: Path, steps: str, kind: str | None):
    folder = make_tiny_model(tmp_path, "mistral", sliding_window=6)  # whose blocks are given back on the way

    def looks(steps: str) -> list[Any]:
        w = fast_engine(folder, steps, prefix_cache=kind, block_size=4, num_blocks=64)
        seen: list[Any] = []

        def look(seq: Any) -> None:
            tables = w.engine.cache.tables.items()
            books = [(key, list(each.block_ids), each.num_tokens, each.num_released) for key, each in tables]
            seen.append((seq.seq_id, list(seq.output_token_ids), books))

        w.engine.before_release = look
        w.generate(PROMPTS, [warm(i, max_tokens=2 + 2 * i, n=1 + i % 2) for i in range(len(PROMPTS))])
        w.engine.before_release = None
        w.generate(PROMPTS[:1], warm(0))
        assert (w.engine.stats().get("late_steps", 0) > 0) == ("overlap" in COMBINATIONS[steps])
        return seen

    assert looks(steps) == looks("none")


# -- parts that a reader replaces


REPLACED: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "silu_mul": silu_mul,
    "write_slots": write_slots,
    "ragged_paged_attention": ragged_paged_attention,
    "sample_tokens": sample_tokens,
    "silu_mul_packed": silu_mul_packed,
}


@pytest.mark.parametrize("steps", ["+device_batch", "all"])
@pytest.mark.parametrize("part", REPLACED)
def test_a_part_in_a_readers_hands_is_called_and_no_step_swallows_it(folder: Path, part: str, steps: str):
    expected = tokens_of(fast_engine(folder, "none").generate(PROMPTS, greedy(6)))
    w = fast_engine(folder, steps)
    runs: list[int] = []
    num_calls = 0

    def spy(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return REPLACED[part](*args, **kwargs)

    for is_replaced in (False, True, False):
        before = w.engine.stats()["fixed_size_steps"], num_calls
        with use(**({part: spy} if is_replaced else {})):
            assert tokens_of(w.generate(PROMPTS, greedy(6))) == expected
        runs.append(w.engine.stats()["fixed_size_steps"] - before[0])
        assert (num_calls > before[1]) == is_replaced
    assert runs[0] > 0 and runs[1] == 0 and runs[2] > 0
    layers, norms = w.engine.model.config.num_layers, 2
    if part == "rms_norm":
        assert num_calls % (layers * norms + 1) == 0, "every norm of a pass, and no other"


def test_a_part_that_is_replaced_in_the_middle_of_an_answer_changes_no_token(folder: Path):
    expected = tokens_of(fast_engine(folder, "none").generate(PROMPTS, greedy(12)))
    w = fast_engine(folder, "all", block_size=4)
    requests = [w.add(prompt, greedy(12)) for prompt in PROMPTS]
    outputs = w.steps(4)
    with use(rms_norm=rms_norm, sample_tokens=sample_tokens):
        outputs += w.steps(5)
    outputs += w.run()
    results = {output.request_id: output.result for output in outputs if output.result}
    assert [results[request].token_ids for request in requests] == expected


# -- which steps there are

REFUSED = [
    ({"rung": "paged", "fused": True}, "fused cannot be had: rung 'paged' runs static batches"),
    ({"rung": "sharing", "overlap": True}, "overlap cannot be had: rung 'sharing'"),
    ({"cache": "contiguous", "graphs": True}, "graphs cannot be had: the contiguous cache has no block tables"),
    ({"graphs": True, "enforce_eager": True}, "graphs and enforce_eager exclude each other"),
    ({"overlap": True, "device_batch": False}, "overlap needs device_batch"),
    ({"fused": "yes"}, "fused must be True or False, not 'yes'"),
    ({"enforce_eager": 2}, "enforce_eager must be True or False, not 2"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_steps_that_cannot_be_had_are_refused_in_one_sentence(folder: Path, options: dict, sentence: str):
    with pytest.raises(UserError) as error:
        LLM(folder, device="cpu", dtype="float32", num_blocks=16, **options)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


def test_on_a_cpu_no_step_is_taken_that_nobody_asks_for(folder: Path):
    for options in ({}, {"enforce_eager": True}, {"fused": False, "overlap": False}):
        llm = LLM(folder, device="cpu", dtype="float32", num_blocks=16, **options)
        assert not hasattr(llm.engine, "steps")
    llm = LLM(folder, device="cpu", dtype="float32", num_blocks=16, overlap=True)
    assert vars(llm.engine.steps) == {"fused": False, "graphs": False, "device_batch": True, "overlap": True}


def test_packed_weights_are_the_models_own_and_are_kept_once(folder: Path):
    plain, packed = (fast_engine(folder, steps).engine.model for steps in ("none", "fused"))
    assert plain.weights.keys() == packed.weights.keys()
    assert all(torch.equal(packed.weights[name], weight) for name, weight in plain.weights.items())
    layer = packed.layers[1]
    memory = {each.weight.untyped_storage().data_ptr() for each in (layer.q_proj, layer.k_proj, layer.v_proj)}
    assert len(memory) == 1 and packed.weights["model.layers.1.self_attn.k_proj.weight"] is layer.k_proj.weight
