"""Timelines of real schedulers and of the static loop."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams
from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import Event, NextToken
from minipaged.batching.preemption import Preemption
from minipaged.batching.scheduler import Scheduler
from minipaged.viz import FREE_GREY, Timeline, TimelineView, draw_timeline, draw_timeline_svg, watch
from minipaged.viz.timeline import Cell, TimelineRow
from tests.tiny_models import make_tiny_model

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [4] * 9, [3] * 12]
LENGTHS = (9, 3, 6, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def watched(folder: Path, rung: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> Timeline:
    """Return the timeline of the prompts on a rung, with room for two reservations at a time."""
    options = {"num_blocks": 16, "block_size": 4, "max_model_len": 24} | options
    if rung == "foundation":
        options = {}
    llm = LLM(str(folder), rung=rung, device="cpu", **options)
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths]
    before = dict(vars(llm.engine))
    with watch(llm) as timeline:
        llm.generate(PROMPTS, params)
    assert {name for name in vars(llm.engine) if name not in before} == set(), "the engine is left as it was"
    return timeline


def texts(view: TimelineView) -> list[str]:
    """Return each row's cells as they stand in a wide drawing."""
    lines = str(draw_timeline(view, width=400)).splitlines()[2 : 2 + len(view.rows)]
    return [" ".join(line.split()[1:]) for line in lines]


# -- the static loop


def test_a_static_batch_shows_idle_seats_until_its_longest_member_has_ended(folder: Path):
    view = watched(folder, "contiguous").view()
    assert texts(view) == [
        "p5 d d d d d d d D",
        "p3 d D _ _ _ _ _ _",
        "w w w w w w w w w p9 d d d d D",
        "w w w w w w w w w p12 D _ _ _ _",
    ]
    assert (view.num_steps, view.num_idle, view.num_waiting, view.num_tokens) == (15, 10, 18, 45)


def test_a_rung_without_a_cache_is_seen_to_compute_everything_again(folder: Path):
    view = watched(folder, "foundation", (3, 1, 2, 1)).view()
    assert texts(view) == ["p5 p6 P7", "P3 _ _", "p9 P10 _", "P12 _ _"]


def test_the_samples_of_a_static_batch_are_one_row_or_one_each(folder: Path):
    llm = LLM(str(folder), rung="sharing", device="cpu", num_blocks=40, block_size=4)
    params = [SamplingParams(max_tokens=4, temperature=1, n=2, seed=1, ignore_eos=True), SamplingParams(max_tokens=6)]
    with watch(llm) as timeline:
        llm.generate(PROMPTS[:2], params)
    assert texts(timeline.view())[0] == "p5 d2 d2 D2 _ _"
    assert texts(timeline.view(by_sequence=True)) == ["p5 d d D _ _", "d d D _ _", texts(timeline.view())[1]]


def test_a_sample_that_ends_before_the_others_is_idle_in_a_row_of_its_own_while_the_request_goes_on(folder: Path):
    def params(**options: Any) -> SamplingParams:
        return SamplingParams(max_tokens=5, temperature=1, n=2, seed=1, ignore_eos=True, **options)

    llm = LLM(str(folder), rung="sharing", device="cpu", num_blocks=40, block_size=4)
    short, long = (result.token_ids for result in llm.generate([PROMPTS[0]], params()))
    assert short[2] not in short[:2] + long
    with watch(llm) as timeline:
        llm.generate([PROMPTS[0]], params(stop_token_ids=[short[2]]))
    assert texts(timeline.view()) == ["p5 d2 d2 d D"]
    assert texts(timeline.view(by_sequence=True)) == ["p5 d D _ _", "d d d D"]


def test_an_abort_ends_a_row_of_the_static_loop(folder: Path):
    llm = LLM(str(folder), rung="paged", device="cpu", num_blocks=16, block_size=4)
    engine = llm.engine
    with watch(engine) as timeline:
        ids = [engine.add_request(prompt, SamplingParams(max_tokens=5, temperature=0)) for prompt in PROMPTS[:2]]
        engine.step()
        engine.step()
        engine.abort(ids[1])
        while engine.has_unfinished():
            engine.step()
    assert texts(timeline.view()) == ["p5 d d d D", "p3 D _ _ _"]


def test_a_loop_that_breaks_leaves_the_engine_unwatched(folder: Path):
    llm = LLM(str(folder), rung="paged", device="cpu", num_blocks=16, block_size=4)
    with pytest.raises(KeyboardInterrupt), watch(llm) as timeline:
        raise KeyboardInterrupt
    llm.generate([1, 2], SamplingParams(max_tokens=2))
    assert timeline.view().rows == ()
    assert draw_timeline(timeline.view()) and draw_timeline_svg(timeline.view())


# -- the scheduler


def run(scheduler: Scheduler, lengths: dict[int, int]) -> None:
    """Run plans to the end without a model; each request generates so many tokens."""
    left = dict(lengths)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        tokens = []
        for chunk in plan.chunks:
            if chunk.is_sampled:
                seq_id = chunk.member.seq_id
                left[seq_id] -= 1
                tokens.append(NextToken(seq_id, 5, is_last=left[seq_id] == 0))
        scheduler.update(plan, tokens)


def scheduler_of(num_blocks: int, policy: Any, budget: int = 8) -> Scheduler:
    cache = BatchingCache(num_blocks=num_blocks, block_size=4)
    return Scheduler(cache, max_num_batched_tokens=budget, preemption=Preemption(policy))


def queue(scheduler: Scheduler, lengths: tuple[int, ...] = LENGTHS) -> dict[int, int]:
    for request_id, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        scheduler.add(request_id, request_id, prompt, length)
    return dict(enumerate(lengths))


@pytest.mark.parametrize(("policy", "away"), [("swap", "x s s D"), ("recompute", "x w w p6 P6")])
def test_a_request_that_is_sent_away_waits_or_lies_in_the_swap_space_until_it_is_back(policy: str, away: str):
    scheduler = scheduler_of(9, policy)
    with watch(scheduler) as timeline:
        run(scheduler, queue(scheduler))
    view = timeline.view()
    assert texts(view)[0] == "p5 d d d d d d d D"
    assert texts(view)[3].startswith("w w w p6 p6 x")
    assert texts(view)[3].split("p6 p6 ")[1][:5] == away[:5]
    assert view.count("preempt") == scheduler.num_preemptions == 1
    assert view.count("swapped") == (2 if policy == "swap" else 0)


def test_one_that_comes_back_and_computes_nothing_yet_has_its_seat_again():
    timeline = Timeline()
    for step, acts in enumerate((["chunk"], ["preempt", "swap"], [], ["resume", "swap"], ["decode"]), start=1):
        timeline(Event(step, "wait", 9))  # somebody else
        for act in acts:
            timeline(Event(step, act, 0, num_tokens=int(act in ("chunk", "decode"))))  # type: ignore[arg-type]
    assert texts(timeline.view())[0] == "p1 x s _ d"


def test_everybody_in_the_queue_waits_not_only_its_head():
    scheduler = scheduler_of(4, "recompute")
    with watch(scheduler) as timeline:
        run(scheduler, queue(scheduler))
    arrived = [row.cells[0] for row in timeline.view().rows]
    assert [cell.kind for cell in arrived if cell] == ["prefill", "prefill", "wait", "wait"]
    alone = Timeline()
    for event in timeline.events:
        alone(event)
    assert alone.view().rows[3].cells[0] is None, "no event says so"


def test_a_prompt_that_gets_no_tokens_of_a_step_is_idle_in_its_seat():
    scheduler = scheduler_of(40, "recompute", budget=4)
    scheduler.add(0, 0, [1] * 13, 1, priority=1)
    with watch(scheduler) as timeline:
        scheduler.update(scheduler.schedule(), [])
        scheduler.add(1, 1, [2] * 9, 1)  # it goes first from the moment that it has entered
        run(scheduler, {0: 1, 1: 1})
    view = timeline.view()
    assert texts(view) == ["p4 p4 p3 _ _ P2", "w p1 p4 P4"]
    assert (view.num_idle, view.num_waiting) == (2, 1)


def test_a_listener_that_was_there_is_still_called_and_comes_back():
    scheduler = scheduler_of(20, "recompute")
    heard: list[Event] = []
    scheduler.listener = heard.append
    with watch(scheduler) as timeline:
        run(scheduler, queue(scheduler))
    assert timeline.events == heard
    assert scheduler.listener == heard.append


def test_the_timeline_counts_what_the_plans_compute():
    scheduler = scheduler_of(9, "recompute")
    planned: Counter[int] = Counter()
    schedule = scheduler.schedule

    def noted() -> Any:
        plan = schedule()
        planned[scheduler.num_steps] += plan.num_tokens
        return plan

    scheduler.schedule = noted  # type: ignore[method-assign]
    with watch(scheduler) as timeline:
        run(scheduler, queue(scheduler))
    view = timeline.view()
    drawn = [sum(cell.num_tokens for row in view.rows if (cell := row.cells[i])) for i in range(view.num_steps)]
    assert drawn == [planned[step] for step in range(1, view.num_steps + 1)]


@pytest.mark.parametrize("rung", ["batching", "prefix"])
def test_static_and_continuous_batching_of_the_same_requests_compute_the_same_in_fewer_steps(folder: Path, rung: str):
    static, continuous = watched(folder, "contiguous").view(), watched(folder, rung).view()
    assert static.num_tokens == continuous.num_tokens
    assert continuous.num_steps < static.num_steps
    assert continuous.num_idle == 0 < static.num_idle


def test_the_samples_of_a_request_have_rows_of_their_own_when_they_are_asked_for(folder: Path):
    llm = LLM(str(folder), rung="batching", device="cpu", num_blocks=40, block_size=4)
    params = SamplingParams(max_tokens=3, temperature=1, n=3, seed=1, ignore_eos=True)
    with watch(llm) as timeline:
        llm.generate([[1, 2, 3]], params)
    assert texts(timeline.view()) == ["p3 d3 D3"]
    assert texts(timeline.view(by_sequence=True)) == ["p3 d D", "d D", "d D"]


def test_an_abort_ends_a_row_whether_it_runs_or_waits():
    scheduler = scheduler_of(4, "recompute")
    with watch(scheduler) as timeline:
        lengths = queue(scheduler)
        plan = scheduler.schedule()
        scheduler.update(plan, [NextToken(chunk.member.seq_id, 5) for chunk in plan.chunks if chunk.is_sampled])
        lengths[0] -= 1
        lengths[1] -= 1
        scheduler.abort(1)
        scheduler.abort(3)
        run(scheduler, lengths)
    assert [texts(timeline.view())[i] for i in (1, 3)] == ["P3", "W"]


# -- the drawings

LONG = TimelineView(
    tuple(
        TimelineRow(i, None, tuple(Cell("prefill", 1234) if step == i else Cell("decode", 1) for step in range(150)))
        for i in range(3)
    )
)


def test_a_timeline_that_is_too_long_has_one_character_a_step_and_goes_on_below():
    lines = str(draw_timeline(LONG, width=80)).splitlines()
    assert max(map(len, lines)) <= 80
    bands = [line for line in lines if line.startswith("request")]
    assert [band.split()[1] for band in bands] == ["1", "71", "141"]
    assert lines[2] == "      0  p" + "d" * 69
    assert "".join(line[9:] for line in lines if line.startswith("      0")) == "p" + "d" * 149


@pytest.mark.parametrize("width", [1, 30, 80, 300])
def test_a_timeline_takes_any_width(width: int):
    for view in (LONG, TimelineView(())):
        assert draw_timeline(view, width).lines
        assert draw_timeline(view, width).rich().plain.splitlines()[0].startswith("timeline: ")


def test_the_legend_explains_the_marks_that_occur_and_no_others():
    text = str(draw_timeline(LONG))
    assert "p prefill   d decode" in text
    assert "idle:" not in text and "capitals" not in text
    swapped = TimelineView((TimelineRow(0, None, (Cell("swapped"), Cell("preempt"), Cell("decode", 1, True))),))
    assert "s swapped out" in str(draw_timeline(swapped)) and "capitals" in str(draw_timeline(swapped))


def grey_rect(width: int) -> str:
    return f'width="{width}" height="18" fill="{FREE_GREY}"'


def test_idle_cells_are_grey_in_svg_and_nothing_else_is():
    cells = (Cell("prefill", 4), Cell("decode", 1, True), *[Cell("idle")] * 3, Cell("wait"), Cell("idle"))
    picture = draw_timeline_svg(TimelineView((TimelineRow(0, None, cells),)))
    assert [width for width in (36, 72, 108) for _ in range(picture.count(grey_rect(width)))] == [36, 108]
    assert picture.count(f'fill="{FREE_GREY}"') == 2 + 1  # and the legend
    assert FREE_GREY not in draw_timeline_svg(LONG)
