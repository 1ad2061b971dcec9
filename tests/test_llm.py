"""The facade: options, results, refusals, and what is left in the cache after each of them."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams, UserError
from minipaged.garbage import collector_at_rest
from minipaged.llm import RUNGS
from tests.tiny_models import make_tiny_model

CACHED_RUNGS = [rung for rung in RUNGS if rung != "foundation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bare"), "llama")


def tiny(folder: Path, rung: str | None = "paged", **options) -> LLM:
    options = {"dtype": "float32", "device": "cpu"} | options
    return LLM(folder, rung=rung, **options)


def idle(llm: LLM) -> bool:
    """Check the books and return whether every slot is free again."""
    stats = llm.stats()
    if llm.rung != "foundation":
        llm.engine.cache.check()
        assert llm.engine.cache.waste().token_states == 0
    return stats["free_blocks"] == stats["num_blocks"] and stats["used_blocks"] == 0


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_results_come_in_the_order_of_prompts_with_all_fields(folder: Path):
    llm = tiny(folder)
    prompts = ["Hello", [1, 2, 3], "a"]
    results = llm.generate(prompts, [GREEDY, GREEDY, SamplingParams(temperature=1, max_tokens=2, logprobs=3)])
    assert [r.prompt_token_ids for r in results] == [
        llm.tokenizer.encode("Hello"),
        [1, 2, 3],
        llm.tokenizer.encode("a"),
    ]
    assert [len(r.token_ids) for r in results[:2]] == [8, 8]
    assert {r.index for r in results} == {0}
    assert results[0].finish_reason == "length"
    assert results[0].logprobs is None and len(results[2].logprobs) == len(results[2].token_ids)
    assert results[2].logprobs[0].token_id == results[2].token_ids[0] and len(results[2].logprobs[0].top) == 3
    metrics = results[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (5, 8)
    assert 0 < metrics.time_to_first_token <= metrics.total_time and metrics.tokens_per_second > 0
    assert idle(llm)


def test_a_single_string_and_a_single_list_of_ids_are_one_prompt(folder: Path):
    llm = tiny(folder)
    assert len(llm.generate("Hello", GREEDY)) == len(llm.generate([1, 2, 3], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("rung", RUNGS)
def test_streamed_pieces_join_to_the_result(folder: Path, rung: str):
    llm = tiny(folder, rung)
    chunks = list(llm.stream("Hello", GREEDY))
    result = llm.generate("Hello", GREEDY)[0]
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + ["length"]
    assert chunks[-1].result.token_ids == result.token_ids
    assert idle(llm)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_closed_stream_frees_everything(folder: Path, rung: str):
    llm = tiny(folder, rung)
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    stream.close()
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("rung", RUNGS)
def test_abort_works_in_every_state_and_a_second_one_does_nothing(folder: Path, rung: str):
    llm = tiny(folder, rung, **({} if rung == "foundation" else {"num_blocks": 2, "block_size": 8}))
    running, waiting = (llm.engine.add_request([1, 2, 3, 4, 5], GREEDY) for _ in range(2))
    llm.engine.step()
    llm.engine.step()
    dropped = llm.engine.abort(waiting)
    assert [result.finish_reason for result in dropped] == ["abort"]
    stopped = llm.engine.abort(running)
    assert [(result.finish_reason, len(result.token_ids)) for result in stopped] == [("abort", 2)]
    assert llm.engine.abort(running) == [] and llm.engine.abort(12345) == []
    assert idle(llm) and not llm.engine.has_unfinished() and llm.engine.step() == []


def test_a_fault_in_one_call_leaves_the_engine_usable(folder: Path):
    llm = tiny(folder)
    forward, calls = llm.model.forward, iter(range(100))

    def break_once(*args):
        if next(calls) == 2:
            raise RuntimeError("injected")
        return forward(*args)

    llm.model.forward = break_once
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate(["Hello", "World"], GREEDY)
    assert idle(llm)
    assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("rung", CACHED_RUNGS)
def test_a_prompt_over_the_pool_is_refused_at_once_and_the_next_one_runs(folder: Path, rung: str):
    llm = tiny(folder, rung, num_blocks=10, block_size=16)
    room = 128 if rung == "contiguous" else 160  # a dense range of 160 slots must be a power of two
    numbers = rf"200 tokens; the cache has room for {room} of one sequence \(num_blocks 10 x block_size 16\)"
    with pytest.raises(UserError, match=numbers):
        llm.generate([[1] * 20, [1] * 200], GREEDY)
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate([[1] * 20], GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("rung", CACHED_RUNGS)
def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length(folder: Path, rung: str):
    llm = tiny(folder, rung, num_blocks=10, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    steps = 0
    original = llm.engine.step

    def step():
        nonlocal steps
        steps += 1
        return original()

    llm.engine.step = step
    num_prompt = 68 if rung == "contiguous" else 100  # its longest dense range has 128 slots
    result = llm.generate([[1] * num_prompt], params)[0]
    assert (len(result.token_ids), result.finish_reason) == (61, "length")  # 100 + 61 - 1 = 160 slots
    assert steps <= 62
    assert idle(llm)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(12, 52, 52), (12, 53, 52), (12, None, 52), (63, 9, 1)]
)
def test_the_limit_cuts_answers(folder: Path, rung: str, num_prompt: int, max_tokens: int | None, expected: int):
    llm = tiny(folder, rung, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    result = llm.generate([[1] * num_prompt], params)[0]
    assert (len(result.token_ids), result.finish_reason) == (expected, "length")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([-1], "-1 is not an id of the vocabulary, 0 to 271"),
        ([272], "272 is not an id of the vocabulary"),
        ([2**63], "is not an id of the vocabulary"),
        ([1.5], "1.5 is not an id of the vocabulary"),
        ([1] * 64, r"64 tokens; at most 63 fit with one token of answer into the limit of 64"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_works_on(folder: Path, rung: str, prompt, message: str):
    llm = tiny(folder, rung, max_model_len=64)
    with pytest.raises(UserError, match=message):
        llm.generate([[1], prompt], GREEDY)
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate([[1]], GREEDY)) == 1


def test_a_model_without_tokenizer_takes_ids_and_refuses_text(bare_folder: Path):
    llm = tiny(bare_folder)
    result = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert result.text == "" and len(result.token_ids) == 8
    with pytest.raises(UserError, match="no tokenizer"):
        llm.generate("Hello", GREEDY)
    with pytest.raises(UserError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rung": "attic"}, "no rung is called 'attic'; the rungs are foundation, contiguous, paged, sharing"),
        ({"tier": "cuda"}, "tier must be 'torch', 'triton' or None, not 'cuda'"),
        ({"block_size": 0}, "block_size must be a whole number from 1, not 0"),
        ({"block_size": 2.5}, "block_size must be a whole number from 1"),
        ({"num_blocks": 0}, "num_blocks must be a whole number from 1, not 0"),
        ({"num_blocks": 2**46}, "needs .* GiB"),
        ({"num_blocks": 10**30}, "block_size x num_blocks may be at most 1125899906842624 slots"),
        ({"block_size": 10**30}, "block_size x num_blocks may be at most"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; use float32, bfloat16, float16"),
        ({"dtype": "float16"}, "float16 is not supported on the CPU; use float32 or bfloat16"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
        ({"device": "cuda:99"}, "this machine has"),
        ({"max_model_len": 257}, "max_model_len must be 2 to 256, the model's own limit, not 257"),
        ({"max_model_len": 1}, "max_model_len must be 2 to 256"),
        ({"seed": -1}, "seed"),
        (
            {"rung": "foundation", "num_blocks": 4},
            "rung 'foundation' has no cache, so no num_blocks; rung 'contiguous' has it",
        ),
        ({"rung": "foundation", "block_size": 4}, "rung 'foundation' has no cache, so no block_size"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(folder: Path, options: dict, message: str):
    with pytest.raises(UserError, match=message) as refusal:
        tiny(folder, **options)
    assert "\n" not in str(refusal.value)


def test_the_default_rung_is_the_highest(folder: Path):
    assert tiny(folder, rung=None).rung == RUNGS[-1]


def test_an_end_token_ends_the_answer_and_stays_out_of_the_text(folder: Path):
    llm = tiny(folder)
    free = llm.generate("Hello", GREEDY)[0].token_ids
    end = free[3]
    first = free.index(end)
    stopped = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[end]))[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free[: first + 1]
    assert stopped.text == llm.tokenizer.decode(free[:first])


def test_end_tokens_come_from_tokenizer_config_and_generation_config_together(tmp_path: Path):
    import json

    make_tiny_model(tmp_path, "llama", with_tokenizer=True, eos_token_id=[7, 9])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    llm = tiny(tmp_path)
    assert llm.engine.options.eos_token_ids == {7, 9, 11, 258}  # 258 is the tokenizer's <|im_end|>
    free = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].token_ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[2], 11]}))
    stopped = tiny(tmp_path).generate([[1, 2]], SamplingParams(temperature=0, max_tokens=6))[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free[: free.index(free[2]) + 1]


def test_an_explicit_zero_temperature_wins_over_the_models_own(tmp_path: Path):
    import json

    make_tiny_model(tmp_path, "llama")
    greedy = tiny(tmp_path).generate([[1, 2]], GREEDY)[0].token_ids
    config = {"do_sample": True, "temperature": 5.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    llm = tiny(tmp_path)
    assert llm.generate([[1, 2]], GREEDY)[0].token_ids == greedy
    warm = llm.generate([[1, 2]], SamplingParams(max_tokens=8, ignore_eos=True, seed=1))[0].token_ids
    assert warm != greedy


def test_a_seed_of_the_engine_repeats_a_whole_run(folder: Path):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = [[r.token_ids for r in tiny(folder, seed=3).generate(["a", "a", "b"], params)] for _ in range(2)]
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    results = tiny(folder).generate(["a", "a"], params)
    assert results[0].seed != results[1].seed, "a request without a seed draws its own"
    again = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=results[0].seed)
    assert tiny(folder).generate("a", again)[0].token_ids == results[0].token_ids


def test_params_and_prompts_must_match_in_number(folder: Path):
    with pytest.raises(UserError, match="2 sampling parameters were given for 1 prompts"):
        tiny(folder).generate(["a"], [GREEDY, GREEDY])


def test_more_prompts_than_the_pool_holds_all_finish(folder: Path):
    llm = tiny(folder, num_blocks=3, block_size=4)
    results = llm.generate([[i + 1] * (i % 5 + 1) for i in range(20)], GREEDY)
    assert [len(result.token_ids) for result in results] == [8 if i % 5 < 5 else 0 for i in range(20)]
    assert idle(llm)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_collector_rests_only_while_answers_are_generated(folder: Path, is_broken: bool):
    llm, states = tiny(folder), []
    step = llm.engine.step

    def watched() -> list[Any]:
        states.append(gc.isenabled())
        if is_broken:
            raise RuntimeError("broken")
        return step()

    llm.engine.step = watched
    with pytest.raises(RuntimeError, match="broken") if is_broken else nullcontext():
        llm.generate(["Hello"], GREEDY)
    assert states and not any(states) and gc.isenabled()


def test_a_collector_that_was_off_stays_off(folder: Path):
    gc.disable()
    try:
        tiny(folder).generate(["Hello"], GREEDY)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("rung", RUNGS)
def test_steps_leave_no_cycles_behind(folder: Path, rung: str):
    llm, counts = tiny(folder, rung=rung), []
    for length in (4, 4, 60):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        counts.append(gc.collect())
    assert counts[2] <= counts[1], "56 steps more leave nothing more for the collector"


def test_the_waste_of_a_running_sequence_is_counted(folder: Path):
    llm = tiny(folder, num_blocks=8, block_size=16)
    llm.engine.add_request([1] * 17, GREEDY)
    llm.engine.step()
    waste = llm.engine.cache.waste()
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (17, 0, 15, 0)
    assert llm.stats()["used_blocks"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_rung_runs_on_a_gpu(folder: Path, rung: str, dtype: str):
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = LLM(folder, rung=rung, dtype=dtype, device="cuda")
    results = llm.generate(["Hello", "World", [1] * 40], GREEDY)
    assert [len(result.token_ids) for result in results] == [8, 8, 8]
    if dtype == "float32":
        on_cpu = tiny(folder, rung).generate(["Hello", "World", [1] * 40], GREEDY)
        assert [r.token_ids for r in results] == [r.token_ids for r in on_cpu]
    assert idle(llm)


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_every_reservation_policy_gives_the_same_tokens(folder: Path, reservation: str, poisoned_caches: None):
    prompts = [[i + 1] * (3 * i % 17 + 1) for i in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=i % 5 + 3, ignore_eos=True) for i in range(9)]
    expected = [result.token_ids for result in tiny(folder, "foundation").generate(prompts, params)]
    llm = tiny(folder, "contiguous", num_blocks=20, block_size=16, max_model_len=100, reservation=reservation)
    sizes = set()
    original = llm.engine.step

    def step():
        outputs = original()
        llm.engine.cache.check()
        sizes.update(own.length for own in llm.engine.cache.ranges.values())
        return outputs

    llm.engine.step = step
    assert [result.token_ids for result in llm.generate(prompts, params)] == expected
    assert idle(llm) and len(sizes) >= (1 if reservation == "max" else 3), "ranges of several sizes ran together"


def test_an_option_of_another_rung_is_refused_naming_the_rung_that_has_it(folder: Path):
    with pytest.raises(UserError, match="rung 'paged' reserves nothing, so no reservation; rung 'contiguous' has it"):
        tiny(folder, "paged", reservation="max")
    with pytest.raises(UserError, match="reservation must be one of max, pow2, oracle, not 'guess'"):
        tiny(folder, "contiguous", reservation="guess")
    with pytest.raises(UserError, match=r"rung 'paged' does not know n \(2 was given\); rung 'sharing' has it"):
        tiny(folder, "paged").generate("a", SamplingParams(n=2))
    with pytest.raises(UserError, match="rung 'foundation' does not know best_of"):
        next(tiny(folder, "foundation").stream("a", SamplingParams(best_of=2)))


def test_a_stream_of_several_samples_says_whose_piece_each_is(folder: Path):
    llm = tiny(folder, None)
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, ignore_eos=True)
    chunks = list(llm.stream("Hello", params))
    for result in llm.generate("Hello", params):
        own = [chunk for chunk in chunks if chunk.index == result.index]
        assert "".join(chunk.text for chunk in own) == result.text
        assert own[-1].result.token_ids == result.token_ids
    assert {chunk.index for chunk in chunks} == {0, 1, 2} and idle(llm)


@pytest.mark.parametrize("rung", RUNGS)
def test_streams_and_calls_that_overlap_all_get_their_own_answers(folder: Path, rung: str):
    llm = tiny(folder, rung)
    alone = {prompt: llm.generate(prompt, GREEDY)[0].text for prompt in ("Hello", "World", "abc", "d")}
    first, second = llm.stream("Hello", GREEDY), llm.stream("World", GREEDY)
    texts = {"Hello": next(first).text, "World": next(second).text}
    assert llm.generate("abc", GREEDY)[0].text == alone["abc"]
    late = llm.stream("d", GREEDY)
    texts["d"] = next(late).text
    for name, stream in (("World", second), ("Hello", first), ("d", late)):
        texts[name] += "".join(chunk.text for chunk in stream)
        assert texts[name] == alone[name]
    assert idle(llm) and not llm._mail


@pytest.mark.parametrize("rung", RUNGS)
def test_a_fault_in_a_step_ends_the_whole_batch_and_tells_every_caller(folder: Path, rung: str):
    llm = tiny(folder, rung)
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    forward = llm.model.forward
    llm.model.forward = lambda *args: (_ for _ in ()).throw(RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate("World", GREEDY)
    llm.model.forward = forward
    rest = list(stream)
    assert [chunk.finish_reason for chunk in rest] == ["abort"] and len(rest[0].result.token_ids) == 1
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate("World", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("place", ["fork", "append", "take_copies", "free"])
def test_an_interrupt_in_the_bookkeeping_leaks_nothing(folder: Path, place: str):
    llm = tiny(folder, None, block_size=4, num_blocks=32)
    original, calls = getattr(llm.engine.cache, place), iter(range(10**6))

    def interrupt_once(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return original(*args)

    setattr(llm.engine.cache, place, interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "World"], SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True))
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 8


def test_aborting_best_of_gives_what_was_asked_for(folder: Path):
    llm = tiny(folder, None)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(n=1, best_of=3, temperature=1.0, max_tokens=9))
    llm.engine.step()
    results = llm.engine.abort(request)
    assert [(r.index, r.finish_reason, r.logprobs) for r in results] == [(0, "abort", None)]
    assert idle(llm)


@pytest.mark.parametrize("bad", [{"temperature": 0}, 3, [None]])
def test_sampling_params_of_another_type_are_refused(folder: Path, bad):
    with pytest.raises(UserError, match="sampling_params must be SamplingParams or a list of them"):
        tiny(folder).generate("a", bad)


def test_chat_returns_one_result_per_sample(folder: Path):
    llm = tiny(folder, None)
    results = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(n=2, temperature=1.0, max_tokens=3))
    assert [result.index for result in results] == [0, 1]


def test_a_readers_pool_takes_its_place_when_the_llm_is_made(folder: Path):
    from minipaged import use
    from minipaged.paged.block_pool import BlockPool

    class CountingPool(BlockPool):
        taken = 0

        def allocate(self) -> int:
            CountingPool.taken += 1
            return super().allocate()

    with use(block_pool=CountingPool):
        llm = tiny(folder, "paged")
    llm.generate([[1] * 17], GREEDY)
    assert CountingPool.taken == 2


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"a": 1}, {1, 2}, torch.tensor([1, 2]), [b"abc"], [None]])
def test_prompts_of_another_type_are_refused(folder: Path, prompts):
    llm = tiny(folder)
    with pytest.raises(UserError, match="prompt"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(UserError, match="messages must be a list of dicts"):
        llm.chat(None)
    with pytest.raises(UserError, match="0 sampling parameters were given for 1 prompts"):
        next(llm.stream("a", []))
    assert idle(llm) and not llm.engine.has_unfinished()


def test_nan_in_the_middle_of_a_batch_leaks_nothing(folder: Path):
    llm = tiny(folder, None)
    forward = llm.model.forward

    def with_nan(*args):
        logits = forward(*args)
        logits[-1] = float("nan")
        return logits

    llm.model.forward = with_nan
    params = [SamplingParams(temperature=0, max_tokens=1), SamplingParams(beam_width=2, max_tokens=4)]
    with pytest.raises(RuntimeError):
        llm.generate([[1, 2], [3, 1]], params)
    llm.model.forward = forward
    assert idle(llm) and not llm.engine.has_unfinished()
    assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("rung", RUNGS)
def test_a_request_that_is_aborted_at_the_engine_ends_its_stream(folder: Path, rung: str):
    llm = LLM(folder, rung=rung, dtype="float32", device="cpu")
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    (request_id,) = llm._mail
    llm.engine.abort(request_id)
    assert list(stream) == []


def test_stop_strings_want_a_tokenizer(folder: Path, tmp_path: Path):
    llm = LLM(make_tiny_model(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(UserError, match="no tokenizer, so stop strings can never appear; give stop_token_ids"):
        llm.generate([[1, 2]], SamplingParams(stop="end"))
    assert llm.generate([[1, 2]], SamplingParams(stop_token_ids=(3,), max_tokens=2))
    assert tiny(folder).generate(["Hello"], SamplingParams(stop="end", max_tokens=2))


def test_an_llm_says_what_runs(folder: Path):
    llm = tiny(folder, rung="prefix", num_blocks=8, block_size=4, graphs=True)
    assert repr(llm) == "<LLM on rung prefix: float32 on cpu, 8 blocks of 4 slots, steps: graphs>"
    assert repr(tiny(folder, rung="foundation")) == "<LLM on rung foundation: float32 on cpu, steps: none>"


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_blocks_that_are_given_up_leave_no_cycles_behind(folder: Path, kind: str):
    llm = tiny(folder, rung="prefix", num_blocks=24, block_size=4, prefix_cache=kind, preemption="recompute")
    prompts, counts = [[*range(1, 11), 11 + i] for i in range(3)], []
    for length in (4, 4, 40, 40):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        counts.append(gc.collect())
    assert llm.stats()["evictions"] > 0 and counts[-1] == 0


def test_the_collector_rests_until_the_last_is_done():
    first, second = collector_at_rest(), collector_at_rest()
    first.__enter__()
    second.__enter__()  # from another thread, say
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
