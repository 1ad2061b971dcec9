"""Several samples of one prompt: shared blocks in the engine, and every sample as it would be alone."""

import json
from pathlib import Path

import pytest

from minipaged import LLM, SamplingParams, UserError, use
from minipaged.foundation.sampling import InvalidLogitsError
from tests.sharing.engines import Watched, watched
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("windowed"), "mistral", sliding_window=8)


def prompt_of(num_tokens: int) -> list[int]:
    return [(7 * i + 3) % 250 for i in range(num_tokens)]


def warm(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 42} | options))


def alone(folder: Path, prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    """Return the tokens of one sample with this seed, on rung 0, which has no cache."""
    llm = LLM(folder, rung="foundation", dtype="float32", device="cpu")
    plain = {
        name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos", "stop_token_ids", "stop")
    }
    return llm.generate([prompt], SamplingParams(seed=seed, **plain))[0].token_ids


# -- blocks


def test_four_samples_share_a_full_block_and_copy_the_last_one_three_times(folder: Path):
    w = watched(folder, block_size=16, num_blocks=20)
    w.llm.engine.add_request(prompt_of(18), warm(n=4))
    w.llm.engine.step()
    assert w.llm.stats()["used_blocks"] == 2 and w.llm.stats()["copies"] == 0
    w.llm.engine.step()
    tables = list(w.llm.engine.cache.tables.values())
    full = tables[0].block_ids[0]
    assert [table.block_ids[0] for table in tables] == [full] * 4
    assert w.llm.engine.cache.pool.num_references(full) == 4
    assert len({table.block_ids[1] for table in tables}) == 4
    assert w.llm.stats()["used_blocks"] == 5 and w.llm.stats()["copies"] == 3
    w.run()
    assert w.llm.stats()["copies"] == 3


def test_four_samples_of_two_full_blocks_copy_nothing(folder: Path):
    w = watched(folder, block_size=16, num_blocks=20)
    w.llm.engine.add_request(prompt_of(32), warm(n=4))
    w.llm.engine.step()
    w.llm.engine.step()
    assert w.llm.stats()["used_blocks"] == 6 and w.llm.stats()["copies"] == 0
    w.run()
    assert w.llm.stats()["copies"] == 0


def test_three_samples_of_forty_tokens_peak_at_five_blocks_against_nine(folder: Path):
    w = watched(folder, block_size=16, num_blocks=20)
    w.generate([prompt_of(40)], warm(n=3))
    assert w.peak == (5, 9) and w.llm.stats()["copies"] == 2


def test_the_copies_of_a_step_are_one_launch_for_all_layers(folder: Path):
    calls = []

    def copy(pool, pairs):
        calls.append((pool.ndim, len(pairs)))
        pool[:, :, pairs[:, 1]] = pool[:, :, pairs[:, 0]]

    with use(copy_blocks=copy):
        watched(folder, block_size=16, num_blocks=20).generate([prompt_of(18)] * 2, warm(n=4))
    assert calls == [(6, 6)]


# -- every sample is a solo run


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_every_child_equals_a_solo_run_with_its_seed(folder: Path, block_size: int):
    w = watched(folder, block_size=block_size, num_blocks=400 // block_size)
    prompts = [prompt_of(n) for n in (1, 4, 5, 15, 16, 17)]
    results = w.generate(prompts, warm(n=3))
    assert [result.index for result in results] == [0, 1, 2] * 6
    for result in results:
        assert result.token_ids == alone(folder, result.prompt_token_ids, warm(), result.seed)
        assert result.finish_reason == "length" and result.score is None
    for first in range(0, 18, 3):
        children = results[first : first + 3]
        assert children[0].seed == 42 and len({child.seed for child in children}) == 3
        assert len({tuple(child.token_ids) for child in children}) == 3
    copies = 2 * sum(n % block_size > 0 for n in (1, 4, 5, 15, 16, 17))
    assert w.llm.stats()["copies"] == copies and (copies > 0) == (block_size > 1)


@pytest.mark.parametrize("num_prompt_tokens", [6, 8, 11])
def test_two_samples_under_a_sliding_window_equal_solo_runs(windowed_folder: Path, num_prompt_tokens: int):
    w = watched(windowed_folder, block_size=4, num_blocks=40)
    prompt, params = prompt_of(num_prompt_tokens), warm(max_tokens=20)
    results = w.generate([prompt], warm(n=2, max_tokens=20))
    assert [len(result.token_ids) for result in results] == [20, 20]
    for result in results:
        assert result.token_ids == alone(windowed_folder, prompt, params, result.seed)
    assert w.llm.stats()["copies"] == (1 if num_prompt_tokens % 4 else 0)


def test_children_end_at_different_lengths_and_leave_their_siblings_alone(folder: Path):
    prompt = prompt_of(18)
    free = watched(folder, num_blocks=40).generate([prompt], warm(n=4, max_tokens=24, temperature=3.0))
    ends = [free[0].token_ids[2], free[1].token_ids[9]]
    w = watched(folder, num_blocks=40)
    params = warm(n=4, max_tokens=24, temperature=3.0, stop_token_ids=ends)
    results = w.generate([prompt], params)
    assert len({len(result.token_ids) for result in results}) >= 3, "choose other end tokens"
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        assert result.token_ids == alone(folder, prompt, params, result.seed)
    used = [each.num_blocks_used for each in w.accounts]
    assert min(used[3:-1]) < max(used), "those that end early give their blocks back at once"


def test_an_abort_midway_drops_the_family_and_a_second_one_does_nothing(folder: Path):
    w = watched(folder, num_blocks=40)
    expected = watched(folder, num_blocks=40).generate([prompt_of(19)], warm(n=3, seed=5))
    dropped = w.llm.engine.add_request(prompt_of(18), warm(n=4))
    w.llm.engine.add_request(prompt_of(19), warm(n=3, seed=5))
    for _ in range(3):
        w.llm.engine.step()
    results = w.llm.engine.abort(dropped)
    w.llm.engine.cache.check()
    assert [(r.index, r.finish_reason, len(r.token_ids)) for r in results] == [(i, "abort", 3) for i in range(4)]
    before = w.llm.stats()
    assert w.llm.engine.abort(dropped) == [] and w.llm.stats() == before
    left = [output.result for output in w.run() if output.result]
    assert [r.token_ids for r in sorted(left, key=lambda r: r.index)] == [r.token_ids for r in expected]
    assert w.llm.engine.abort(dropped) == []
    w.assert_idle()


@pytest.mark.parametrize("when", ["waiting", "admitted", "running"])
@pytest.mark.parametrize("kind", ["samples", "best-of", "beams"])
def test_an_abort_frees_everything_in_every_state(folder: Path, kind: str, when: str):
    asked = {"samples": {"n": 3}, "best-of": {"n": 2, "best_of": 3}, "beams": {"n": 2, "beam_width": 3}}[kind]
    w = watched(folder, num_blocks=8, block_size=4)
    if when == "waiting":
        w.llm.engine.add_request(prompt_of(5), warm(max_tokens=24))  # takes most of the pool
    request = w.llm.engine.add_request(prompt_of(6), warm(**asked))
    if when == "admitted":
        w.llm.engine._form_batch()
    for _ in range({"waiting": 2, "admitted": 0, "running": 3}[when]):
        w.llm.engine.step()
    results = w.llm.engine.abort(request)
    expected = {"samples": 3, "best-of": 2, "beams": 2}[kind] if when == "running" else 1
    if when == "admitted" and kind != "beams":  # the sequence that will fork stands for all samples
        expected = asked["n"]
    assert [result.finish_reason for result in results] == ["abort"] * expected
    if when == "running":
        assert [result.text for result in results] == [w.llm.tokenizer.decode(r.token_ids) for r in results]
        assert [result.index for result in results] == list(range(expected))
    w.run()


# -- seeds, best_of


def test_the_samples_of_a_seed_are_the_same_in_any_company(folder: Path):
    params = SamplingParams(temperature=0.8, n=3, seed=42, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.8, max_tokens=11, ignore_eos=True)
    w = watched(folder, num_blocks=80, block_size=4)
    runs = [[r.token_ids for r in w.generate([prompt_of(9)], params)] for _ in range(2)]
    for company in (unseeded, warm(seed=7, n=2), warm(seed=42), SamplingParams(beam_width=3, n=2, max_tokens=9)):
        first = w.generate([prompt_of(9), prompt_of(6)], [params, company])
        last = w.generate([prompt_of(6), prompt_of(9)], [company, params])
        runs += [[r.token_ids for r in first[:3]], [r.token_ids for r in last[-3:]]]
    assert len(runs) == 10 and all(run == runs[0] for run in runs)
    assert len({tuple(token_ids) for token_ids in runs[0]}) == 3


def test_greedy_samples_are_all_the_same(folder: Path):
    results = watched(folder, num_blocks=40).generate([prompt_of(9)], warm(temperature=0, n=3))
    assert len({tuple(result.token_ids) for result in results}) == 1


@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (2, 5), (3, 3)])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_best_of_returns_the_samples_of_the_best_mean_logprob(folder: Path, n: int, best_of: int, logprobs: int | None):
    w = watched(folder, num_blocks=80)
    every = w.generate([prompt_of(9)], warm(n=best_of, logprobs=0, stop_token_ids=range(0, 250, 9)))
    means = [sum(each.logprob for each in r.logprobs) / len(r.logprobs) for r in every]
    assert len(set(means)) == best_of
    order = sorted(range(best_of), key=lambda i: -means[i])
    if best_of == n:
        order.sort()  # nothing to choose: the samples as they are
    params = warm(n=n, best_of=best_of, logprobs=logprobs, stop_token_ids=range(0, 250, 9))
    best = w.generate([prompt_of(9)], params)
    assert [(r.token_ids, r.seed) for r in best] == [(every[i].token_ids, every[i].seed) for i in order[:n]]
    assert [r.index for r in best] == list(range(n))
    assert all((r.logprobs is None) == (logprobs is None) for r in best)
    if best_of > n:
        assert [r.score for r in best] == pytest.approx([means[i] for i in order[:n]])


def test_best_of_lets_nothing_out_before_all_samples_have_ended(folder: Path):
    w = watched(folder, num_blocks=40)
    w.llm.engine.add_request(prompt_of(9), warm(n=2, best_of=3, max_tokens=5))
    outputs = [w.llm.engine.step() for _ in range(5)]
    assert [len(each) for each in outputs] == [0, 0, 0, 0, 2]
    assert [(o.index, o.is_last, o.text) for o in outputs[-1]] == [
        (i, i == 1, o.result.text) for i, o in enumerate(outputs[-1])
    ]


def test_the_streams_of_several_samples_join_to_their_results(folder: Path):
    w = watched(folder, num_blocks=40)
    w.llm.engine.add_request(prompt_of(9), warm(n=3))
    outputs = w.run()
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        assert [output.result is not None for output in own] == [False] * 7 + [True]
        assert "".join(output.text for output in own) == own[-1].result.text
        assert [i for output in own for i in output.token_ids] == own[-1].result.token_ids
    assert [output.is_last for output in outputs] == [False] * 23 + [True]


# -- small pools


@pytest.mark.parametrize(
    ("num_prompt_tokens", "n", "num_blocks", "expected"),
    [
        (18, 4, 5, 8),  # 1 shared block, 4 of their own
        (18, 4, 4, 1),  # no room for four blocks to write in
        (18, 4, 2, 1),
        (32, 4, 6, 8),
        (32, 4, 5, 1),
        (40, 3, 5, 8),
        (40, 3, 4, 1),
        (15, 2, 2, 2),  # each fills its copy of the one block: slot 16, and the last token needs none
        (15, 2, 4, 8),
        (16, 2, 3, 8),
        (9, 1, 1, 8),
    ],
)
def test_a_pool_gives_each_sample_an_equal_part_and_cuts_what_is_longer(
    folder: Path, num_prompt_tokens: int, n: int, num_blocks: int, expected: int
):
    w = watched(folder, num_blocks=num_blocks, block_size=16)
    results = w.generate([prompt_of(num_prompt_tokens)], warm(n=n))
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [(expected, "length")] * n
    assert w.peak[0] <= num_blocks
    for result in results:
        assert result.token_ids == alone(folder, result.prompt_token_ids, warm(max_tokens=expected), result.seed)


def test_a_prompt_over_the_pool_is_refused_with_its_numbers_and_the_engine_works_on(folder: Path):
    w = watched(folder, num_blocks=10, block_size=16)
    for params in (warm(), warm(n=3), warm(beam_width=3)):
        with pytest.raises(UserError, match=r"200 tokens; the cache has room for 160 .*10 x block_size 16"):
            w.generate([prompt_of(200)], params)
        w.assert_idle()
    assert len(w.generate([prompt_of(20)], warm(n=3))) == 3


def test_families_that_fill_the_pool_alone_run_one_after_the_other(folder: Path):
    w = watched(folder, num_blocks=5, block_size=16)
    prompts = [prompt_of(18), prompt_of(18)[::-1], prompt_of(32), prompt_of(5)]
    params = [warm(n=4), warm(n=4), warm(n=3), warm(beam_width=4)]
    results = w.generate(prompts, params)
    assert len(results) == 4 + 4 + 3 + 1 and {len(r.token_ids) for r in results} == {8}
    assert w.peak[0] == 5


def test_a_batch_never_holds_more_sequences_than_its_limit(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from minipaged.sharing import generate

    monkeypatch.setattr(generate, "MAX_BATCH", 5)
    w = watched(folder, num_blocks=80)
    sizes = []
    choose = w.llm.engine.choose
    w.llm.engine.choose = lambda batch, logits: (choose(batch, logits), sizes.append(len(w.llm.engine.running)))[0]
    results = w.generate([prompt_of(5)] * 4, [warm(n=3), warm(n=2), warm(n=4), warm(beam_width=2)])
    assert len(results) == 10 and max(sizes) == 5


# -- what would break without the copy


def test_samples_that_write_into_a_shared_block_are_not_those_of_solo_runs(folder: Path):
    prompt, params = prompt_of(18), warm(n=4)
    expected = [alone(folder, prompt, warm(), seed) for seed in seeds_of(folder, prompt, params)]
    with use(prepare_write=lambda cache, seq_id: None):
        results = watched(folder, num_blocks=20).generate([prompt], params)
    assert [r.token_ids for r in results] != expected, "a missing copy-on-write would go unseen"


def seeds_of(folder: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    return [result.seed for result in watched(folder, num_blocks=20).generate([prompt], params)]


def test_a_copy_that_is_not_made_leaves_unwritten_slots_to_read(folder: Path):
    w = watched(folder, num_blocks=20)
    with use(copy_blocks=lambda pool, pairs: None), pytest.raises(InvalidLogitsError):
        w.generate([prompt_of(18)], warm(n=4))
    w.assert_idle()
    assert len(w.generate([prompt_of(18)], warm(n=4))) == 4


def test_a_step_that_fails_before_its_copies_leaves_none_for_the_next_request(folder: Path):
    w = watched(folder, num_blocks=6)
    expected = [r.token_ids for r in w.generate([prompt_of(40)], warm(n=2))]

    def fail(cache, seq_id):
        if cache.pending_copies:
            raise RuntimeError("injected")
        type(cache).prepare_write(cache, seq_id)

    with use(prepare_write=fail), pytest.raises(RuntimeError, match="injected"):
        w.generate([prompt_of(18)], warm(n=4))
    w.assert_idle()
    assert w.llm.engine.cache.pending_copies == []
    assert [r.token_ids for r in w.generate([prompt_of(40)], warm(n=2))] == expected


# -- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 256, not 0"),
        ({"n": -1}, "n must be a whole number from 1 to 256, not -1"),
        ({"n": 1_000_000}, "n must be a whole number from 1 to 256, not 1000000"),
        ({"n": True}, "n must be a whole number"),
        ({"n": 1.0}, "n must be a whole number"),
        ({"n": None}, "n must be a whole number"),
        ({"best_of": 0}, "best_of must be a whole number from 1 to 256, not 0"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n, which is 3, not 2"),
        ({"beam_width": 0}, "beam_width must be a whole number from 1 to 256, not 0"),
        ({"n": 3, "beam_width": 2}, "beam_width must be at least n, which is 3, not 2"),
        ({"beam_width": 2, "best_of": 2}, "best_of and beam_width exclude each other"),
        ({"beam_width": 2, "stop": "x"}, "stop and beam_width exclude each other"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs and beam_width exclude each other"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be True, False or 'never', not 'always'"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping must be True, False or 'never', not 1"),
        ({"beam_width": 2, "early_stopping": None}, "early_stopping must be True, False or 'never', not None"),
        ({"beam_width": 2, "length_penalty": 21}, "length_penalty must be a number from -20 to 20, not 21"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be a number from -20 to 20, not nan"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty must be a number"),
        ({"length_penalty": 2.0}, "length_penalty belongs to beam search, so it needs a beam_width"),
        ({"early_stopping": True}, "early_stopping belongs to beam search, so it needs a beam_width"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(options: dict, message: str):
    with pytest.raises(UserError, match=message) as refusal:
        SamplingParams(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"best_of": 2}, {"beam_width": 2}, {"beam_width": 2, "early_stopping": "never"}],
    ids=json.dumps,
)
@pytest.mark.parametrize("rung", ["foundation", "contiguous", "paged"])
def test_lower_rungs_refuse_what_only_this_one_can_do(folder: Path, rung: str, options: dict):
    w = LLM(folder, rung=rung, dtype="float32", device="cpu")
    name = next(iter(options))
    with pytest.raises(UserError, match=rf"rung '{rung}' does not know {name} \(2 was given\); rung 'sharing' has it"):
        w.generate([prompt_of(3)], SamplingParams(**options))


def test_the_watch_notices_a_leak(folder: Path):
    w: Watched = watched(folder, num_blocks=20)
    w.llm.engine.cache.pool.allocate()
    with pytest.raises(AssertionError):
        w.generate([prompt_of(3)], warm())
