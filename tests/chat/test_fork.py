"""Several continuations of a conversation over one prompt: what they share, what is kept, what ends them."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from minipaged import SamplingParams, UserError
from minipaged.viz import PoolView
from tests.chat.fake_llm import run
from tests.chat.tiny_llm import TEXT_OF_21_BYTES, at_step, forked, load, make_session, plain_repl

# -- what is shared


def test_three_continuations_of_40_tokens_use_5_blocks_and_not_9(folder: Path) -> None:
    # Blocks 0 and 1 are full. Block 2 holds 8 tokens of the prompt: two of three copy it before they write there.
    session = forked(folder)
    memory = session.memory
    assert memory is not None
    assert isinstance(memory.view, PoolView)
    assert [table.num_tokens for table in memory.view.tables] == [47, 47, 47]
    assert [table.block_ids[:2] for table in memory.view.tables] == [(0, 1)] * 3
    assert len({table.block_ids[2] for table in memory.view.tables}) == 3
    assert memory.sharing_line == "5 blocks in use · 9 without sharing · 4 saved · 2 copies made"
    assert session.llm.stats()["free_blocks"] == 12


def test_each_fork_counts_its_own_copies(folder: Path) -> None:
    session = forked(folder)
    list(session.fork(3))
    assert session.memory is not None
    assert session.memory.sharing_line == "5 blocks in use · 9 without sharing · 4 saved · 2 copies made"
    assert session.llm.stats()["copies"] == 4
    list(session.fork(2))
    assert session.memory.sharing_line == "4 blocks in use · 6 without sharing · 2 saved · 1 copy made"


def test_the_picture_is_taken_while_all_continuations_live(folder: Path) -> None:
    llm = load(folder)
    token_ids = [
        r.token_ids
        for r in llm.generate(
            llm.chat_prompt([{"role": "user", "content": TEXT_OF_21_BYTES}]),
            SamplingParams(n=3, temperature=0.8, seed=42, max_tokens=8, ignore_eos=True),
        )
    ]
    only_in_1 = next(i for i, t in enumerate(token_ids[1]) if t not in token_ids[0] + token_ids[2])
    session = make_session(folder, llm, stop_token_ids=[token_ids[1][only_in_1]])
    list(session.fork(3, TEXT_OF_21_BYTES))
    assert [answer.num_tokens for answer in session.answers] == [8, only_in_1 + 1, 8]
    assert session.memory is not None
    tables = session.memory.view.tables  # type: ignore[union-attr]
    assert [table.num_tokens for table in tables] == [40 + only_in_1] * 3


def test_one_answer_has_no_line_about_sharing(folder: Path) -> None:
    session = make_session(folder)
    list(session.respond("Hi"))
    assert session.memory is not None
    assert session.memory.sharing is not None
    assert session.memory.sharing_line is None


def test_the_engine_says_when_slots_go_back_whatever_ends_the_sequence(folder: Path) -> None:
    llm = load(folder)
    seen: list[int] = []
    llm.engine.before_release = lambda seq: seen.append(llm.engine.cache.tables[seq.seq_id].num_tokens)  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    llm.generate([[1, 2, 3]], replace(params, n=2))
    assert seen == [6, 6]  # 3 of the prompt and 3 of 4 tokens: the last needs no slot
    llm.generate([[1, 2, 3]], replace(params, beam_width=2))
    assert seen[2:] == [6, 6]
    llm.engine.add_request([1, 2, 3], replace(params, n=2))
    llm.engine.step()
    llm.engine.abort(2)
    assert seen[4:] == [3, 3]
    assert llm.stats()["free_blocks"] == 12


# -- what is said


def test_every_continuation_is_what_its_seed_makes_alone(folder: Path) -> None:
    session = forked(folder, seed=None)
    assert len({answer.seed for answer in session.answers}) == 3
    for answer in session.answers:
        alone = make_session(
            folder, load(folder, rung="foundation", num_blocks=None), temperature=0.8, seed=answer.seed
        )
        assert "".join(alone.respond(TEXT_OF_21_BYTES)) == answer.text


def test_pieces_joined_are_the_continuations_and_the_first_is_in_the_history(folder: Path) -> None:
    session = make_session(folder)
    steps = list(session.fork(3, "Hi"))
    assert len(steps) == 8
    texts = ["".join(pieces) for pieces in zip(*steps, strict=True)]
    assert texts == [answer.text for answer in session.answers]
    assert [message["content"] for message in session.messages] == ["Hi", texts[0]]


def test_keep_puts_another_continuation_into_the_history_until_the_next_answer(folder: Path) -> None:
    session = forked(folder)
    texts = [answer.text for answer in session.answers]
    for index in (2, 0, 1):
        session.keep(index)
        assert session.messages[-1] == {"role": "assistant", "content": texts[index]}
        assert session.answer is session.answers[index]
    for index in (-1, 3):
        with pytest.raises(UserError, match=f"from 0 to 2, not {index}"):
            session.keep(index)
    list(session.respond("and now?"))
    with pytest.raises(UserError, match="nothing to choose from"):
        session.keep(0)


def test_without_text_the_last_message_is_answered_anew(folder: Path) -> None:
    session = make_session(folder, load(folder, num_blocks=30))
    list(session.respond("one"))
    list(session.respond("two"))
    before = list(session.messages)
    list(session.fork(2))
    assert session.messages[:-1] == before[:-1]
    assert session.messages[-1]["content"] == session.answers[0].text != before[-1]["content"]


@pytest.mark.parametrize(("own", "used"), [(0, 0.8), (None, 0.8), (1.5, 1.5)])
def test_a_greedy_chat_forks_at_a_temperature_that_makes_a_difference(
    folder: Path, own: float | None, used: float
) -> None:
    llm = load(folder)
    llm.engine.options = replace(llm.engine.options, generation_config={"do_sample": False})
    session = make_session(folder, llm, temperature=own)
    repl, out = plain_repl(session)
    text = run(repl, out, "/fork 2 Hi")
    assert session.last_params.temperature == used
    assert session.params.temperature == own
    assert f"temperature {used}" in text
    assert ("(at 0, all 2 would be equal)" in text) == (used == 0.8)


def test_the_model_s_own_temperature_is_the_chat_s(folder: Path) -> None:
    llm = load(folder)
    llm.engine.options = replace(llm.engine.options, generation_config={"temperature": 0.6})
    session = make_session(folder, llm, temperature=None)
    list(session.fork(2, "Hi"))
    assert session.last_params.temperature == 0.6
    assert session.has_chat_temperature


# -- what ends it


def test_ctrl_c_stops_all_continuations_and_keeps_what_was_said(folder: Path) -> None:
    session = make_session(folder)
    at_step(session.llm, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    repl, out = plain_repl(session)
    assert "stopped" in run(repl, out, f"/fork 3 {TEXT_OF_21_BYTES}")
    assert [(answer.num_tokens, answer.finish_reason) for answer in session.answers] == [(3, "abort")] * 3
    assert session.messages[-1]["content"] == session.answers[0].text
    assert "5 blocks in use · 9 without sharing" in out.getvalue()
    assert session.llm.stats()["free_blocks"] == 12


def test_an_engine_that_fails_leaves_the_conversation_and_the_pool_as_they_were(folder: Path) -> None:
    session = forked(folder)
    before, answers = list(session.messages), session.answers

    def fail() -> None:
        raise RuntimeError("out of memory")

    at_step(session.llm, 3, fail)
    repl, out = plain_repl(session)
    assert run(repl, out, "/fork 4") == "out of memory\n"
    assert (session.messages, session.answers) == (before, answers)
    assert session.llm.stats()["free_blocks"] == 12
    assert session.llm.engine.before_release is None
