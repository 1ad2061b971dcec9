"""Several continuations as a user sees them: the commands and the option, what is refused, what is drawn."""

from pathlib import Path

import pytest

from minipaged import UserError
from minipaged.chat.__main__ import main
from minipaged.chat.screen import _last_words
from tests.chat.fake_llm import make_repl, run
from tests.chat.test_screen import make_terminal
from tests.chat.tiny_llm import TEXT_OF_21_BYTES, load, make_session, plain_repl

# -- what is refused


def test_a_lower_rung_names_the_one_that_can() -> None:
    repl, out = make_repl()  # on rung paged
    assert run(repl, out, "/fork 3 Hi") == "rung 'paged' makes one answer at a time; rung 'sharing' can fork\n"
    assert repl.session.messages == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/fork", "needs a number"),
        ("/fork three", "needs a number"),
        ("/fork 1", "2 to 256 continuations, not 1"),
        ("/fork 257 Hi", "2 to 256 continuations, not 257"),
        ("/fork 2", "there is no message yet"),
        ("/keep", "needs the number"),
        ("/keep -1", "needs the number"),
        ("/keep 0", "nothing to choose from"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(folder: Path, line: str, words: str) -> None:
    repl, out = plain_repl(make_session(folder))
    text = run(repl, out, line)
    assert words in text
    assert text.count("\n") == 1
    assert repl.session.messages == []


def test_a_pool_too_small_is_refused_with_its_numbers_and_a_smaller_fork_works(folder: Path) -> None:
    session = make_session(folder, load(folder, num_blocks=5))
    # Two blocks are the prompt's full ones. The other three are one for each of three, and none for each of four.
    with pytest.raises(
        UserError, match=r"4 continuations: behind 40 tokens, its 5 blocks of 16 .* for 41 of one alone"
    ):
        list(session.fork(4, TEXT_OF_21_BYTES))
    assert session.messages == []
    list(session.fork(3, TEXT_OF_21_BYTES))
    assert [answer.num_tokens for answer in session.answers] == [8, 8, 8]
    assert session.llm.stats()["free_blocks"] == 5


def test_a_full_context_is_refused_with_its_numbers(folder: Path) -> None:
    session = make_session(folder, load(folder, max_model_len=40))
    with pytest.raises(UserError, match="has 40 tokens, and prompt and answer together may have 40; send a shorter"):
        list(session.fork(3, TEXT_OF_21_BYTES))


@pytest.mark.parametrize(
    ("options", "max_tokens", "words"),
    [
        ({"num_blocks": 5}, None, "The pool of 5 blocks has room for 9 tokens of each"),
        ({"max_model_len": 44}, None, "The context of 44 tokens is full"),
        ({}, 2, "3 were cut after 2 tokens, as --max-tokens says."),
    ],
)
def test_what_cuts_the_continuations_is_named(
    folder: Path, options: dict[str, int], max_tokens: int | None, words: str
) -> None:
    repl, out = plain_repl(make_session(folder, load(folder, **options), max_tokens=max_tokens))
    assert words in run(repl, out, f"/fork 3 {TEXT_OF_21_BYTES}")


# -- what is shown


def test_plain_text_has_the_continuations_the_drawing_and_the_line_in_this_order(folder: Path) -> None:
    repl, out = plain_repl(make_session(folder))
    text = run(repl, out, f"/fork 3 {TEXT_OF_21_BYTES}")
    places = [
        text.index(part)
        for part in (
            "-- 0, sequence A: 8 tokens, seed 42\n",
            "-- 1, sequence B: 8 tokens, seed ",
            "-- 2, sequence C: 8 tokens, seed ",
            "pool: 12 blocks of 16 slots, 5 used, 7 free",
            "0 ################   1 ################   2 CCCCCCCCCCCCCCC_",
            "3 block tables",
            "5 blocks in use · 9 without sharing · 4 saved · 2 copies made",
            "24 tokens · ",
            "/keep K",
        )
    ]
    assert places == sorted(places)
    assert max(map(len, text[places[3] :].splitlines())) <= 80


def test_blocks_shows_the_picture_of_the_fork_again_and_keep_says_what_it_did(folder: Path) -> None:
    repl, out = plain_repl(make_session(folder))
    shown = run(repl, out, f"/fork 3 {TEXT_OF_21_BYTES}")
    heading, picture = run(repl, out, "/blocks").split("\n", 1)
    picture, cached = picture.rstrip("\n").rsplit("\n", 1)
    assert cached.startswith("2 blocks are cached now")
    assert "while all continuations" in heading
    assert picture in shown
    assert run(repl, out, "/keep 2") == "Continuation 2 is in the conversation.\n"
    assert repl.session.messages[-1]["content"] == repl.session.answers[2].text


def test_a_terminal_shows_all_continuations_live_over_the_pool(folder: Path) -> None:
    screen, out = make_terminal(height=40)
    answers = screen.show_fork(make_session(folder), 3, TEXT_OF_21_BYTES)
    live, after = out.getvalue().split("\x1b[?25h")
    for num_tokens in range(40, 47):  # with the last token the slots are given back
        assert f"A: {num_tokens} tokens" in live
    assert "saved" in live
    assert "################" in live
    for index, answer in enumerate(answers):
        assert f"-- {index}, sequence {'ABC'[index]}: 8 tokens, seed {answer.seed}" in after
    assert "5 blocks in use · 9 without sharing · 4 saved · 2 copies made" in after


@pytest.mark.parametrize("n", [2, 3, 20])
def test_the_live_picture_of_a_fork_fits_the_terminal(folder: Path, n: int) -> None:
    screen, _ = make_terminal(height=40)
    session = make_session(folder, load(folder, num_blocks=200))
    for _ in session.fork(n, "x"):
        lines = screen.console.render_lines(screen._live_fork(["text"] * n, session))
        assert len(lines) <= 40


def test_the_last_words_fit_a_line_whatever_their_width() -> None:
    assert _last_words("0: ", "one\ntwo  three", 12) == "0: two three"
    assert _last_words("0: ", "日本語" * 10, 10) == "0: 日本語"
    assert _last_words("10: ", "", 10) == "10: "


# -- the option


def test_the_option_answers_once_with_several_continuations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder), "--dtype", "float32", "--max-tokens", "4", "--prompt", "Hi", "--seed", "3"]
    assert main([*arguments, "--fork", "3"]) == 0
    shown = capsys.readouterr()
    assert [line.split(":")[0] for line in shown.out.splitlines() if line.startswith("-- ")] == [
        "-- 0, sequence A",
        "-- 1, sequence B",
        "-- 2, sequence C",
    ]
    assert "3 block tables" in shown.err
    assert "without sharing" in shown.err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--fork", "1"], "2 to 256"), (["--fork", "3", "--rung", "contiguous"], "rung 'sharing' can fork")],
)
def test_the_option_is_refused_before_a_model_is_loaded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "/no/such/folder", "--prompt", "Hi", *options]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
