"""A conversation: what is kept, what is refused, and what is seen of the memory."""

import pytest

from minipaged import UserError
from minipaged.viz import PoolView, TableView
from tests.chat.fake_llm import PIECES, FakeLLM, make_session


def test_pieces_joined_are_the_answer_in_the_history() -> None:
    session = make_session()
    pieces = list(session.respond("Hi there"))
    assert pieces == PIECES
    assert session.messages == [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello 日本 😀!"},
    ]
    assert session.answer is not None
    assert (session.answer.text, session.answer.finish_reason) == ("Hello 日本 😀!", "stop")


def test_every_turn_sends_the_whole_conversation() -> None:
    llm = FakeLLM(["Yes"])
    session = make_session(llm)
    session.set_system("Be brief")
    for text in ("one", "two"):
        list(session.respond(text))
    assert [(m["role"], m["content"]) for m in llm.prompts[-1]] == [
        ("system", "Be brief"),
        ("user", "one"),
        ("assistant", "Yes"),
        ("user", "two"),
    ]


def test_a_stopped_answer_leaves_what_was_said_and_frees_its_blocks() -> None:
    llm = FakeLLM()
    session = make_session(llm)
    pieces = session.respond("Hi")
    assert [next(pieces), next(pieces)] == ["Hello", " "]
    session.stop()
    assert list(pieces) == []
    assert session.messages[-1] == {"role": "assistant", "content": "Hello "}
    assert session.answer is not None
    assert (session.answer.finish_reason, session.answer.num_tokens) == ("abort", 2)
    assert session.answer.memory is not None
    assert session.answer.memory.view.tables[0].num_tokens == 3  # type: ignore[union-attr]
    assert llm.engine.cache.pool.num_free == 8
    assert "".join(session.respond("Go on")) == "Hello 日本 😀!"


def test_closing_the_iterator_stops_the_answer_in_the_same_way() -> None:
    llm = FakeLLM()
    session = make_session(llm)
    pieces = session.respond("Hi")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert session.messages[-1]["content"] == "Hello"
    assert llm.engine.cache.pool.num_free == 8


def test_an_engine_that_fails_leaves_the_conversation_as_it_was() -> None:
    llm = FakeLLM()
    session = make_session(llm)
    list(session.respond("Hi"))
    before = list(session.messages)

    def fail(number: int) -> None:
        raise RuntimeError("out of memory")

    llm.on_token = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        list(session.respond("again"))
    assert session.messages == before
    assert llm.engine.cache.pool.num_free == 8


@pytest.mark.parametrize(("words", "room"), [(10, 2), (11, 1)])
def test_an_answer_ends_where_the_context_does(words: int, room: int) -> None:
    session = make_session(FakeLLM(limit=13))
    assert len(list(session.respond("x " * words))) == room
    assert session.answer is not None
    assert session.answer.finish_reason == "length"
    assert session.answer.is_context_full


@pytest.mark.parametrize("words", [12, 13, 400])
def test_a_message_without_room_for_an_answer_is_refused_and_not_kept(words: int) -> None:
    llm = FakeLLM(["Yes"], limit=13)
    session = make_session(llm)
    with pytest.raises(UserError, match=rf"{words + 1} tokens.* 13; send a shorter message"):
        list(session.respond("x " * words))
    assert session.messages == []
    assert list(session.respond("short")) == ["Yes"]
    with pytest.raises(UserError, match=r"the context is full.*/reset"):
        list(session.respond("x " * words))
    assert len(session.messages) == 2


def test_max_tokens_beyond_the_context_is_cut_to_what_is_left() -> None:
    session = make_session(FakeLLM(limit=5), max_tokens=100)
    assert list(session.respond("Hi")) == PIECES[:3]
    assert session.answer is not None
    assert session.answer.is_context_full


def test_max_tokens_is_not_taken_for_a_full_context() -> None:
    session = make_session(max_tokens=2)
    assert list(session.respond("Hi")) == PIECES[:2]
    assert session.answer is not None
    assert (session.answer.finish_reason, session.answer.is_context_full) == ("length", False)


def test_the_memory_is_seen_just_before_the_blocks_are_given_back() -> None:
    # 3 prompt tokens and 6 generated ones, the last of which needs no slot: 8 slots in 2 blocks.
    session = make_session()
    pieces = session.respond("one two")
    next(pieces)
    memory = session.look()
    assert memory is not None
    assert memory.view == PoolView(8, 4, (TableView(1, (0,), 3),), frozenset(range(1, 8)))
    list(pieces)
    assert session.memory is not None
    assert session.memory.view == PoolView(8, 4, (TableView(1, (0, 1), 8),), frozenset(range(2, 8)))
    assert str(session.memory) == "2/8 blocks · 0 slots wasted"


def test_watching_the_engine_leaves_it_as_it_was() -> None:
    llm = FakeLLM()
    session = make_session(llm)
    list(session.respond("Hi"))
    pieces = session.respond("Hi")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert llm.engine.before_release is None
    llm.stream = lambda prompt, params: (1 // 0 for _ in "x")  # type: ignore[assignment]  # fails before it holds a slot
    with pytest.raises(ZeroDivisionError):
        list(session.respond("Hi"))
    assert llm.engine.before_release is None


def test_the_system_message_can_be_set_changed_and_removed_in_mid_conversation() -> None:
    session = make_session()
    list(session.respond("Hi"))
    session.set_system("A")
    session.set_system("B")
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    assert session.system == "B"
    session.reset()
    assert session.messages == [{"role": "system", "content": "B"}]
    session.set_system(None)
    assert (session.messages, session.system) == ([], None)


def test_half_a_character_from_the_command_line_does_no_harm() -> None:
    session = make_session()
    list(session.respond("caf\udcc3"))
    assert session.messages[0]["content"] == "caf?"
