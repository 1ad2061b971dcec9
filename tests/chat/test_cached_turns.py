"""What the chat says of the prefix cache: the hits of a later turn, and the blocks that are kept."""

from pathlib import Path

import pytest

from tests.chat.fake_llm import run
from tests.chat.tiny_llm import TEXT_OF_21_BYTES, load, make_session, plain_repl


@pytest.mark.parametrize(
    ("options", "has_hits"),
    [({}, True), ({"prefix_cache": "radix"}, True), ({"prefix_cache": None}, False), ({"rung": "batching"}, False)],
)
def test_the_second_turn_reports_what_it_found_in_the_cache(folder: Path, options: dict, has_hits: bool) -> None:
    repl, out = plain_repl(make_session(folder, load(folder, num_blocks=24, **options)))
    assert "from the cache" not in run(repl, out, TEXT_OF_21_BYTES)
    second = run(repl, out, "and?")
    # The first prompt had 40 tokens. The answer's bytes may be told as other tokens in the second one.
    answer = repl.session.answer
    assert (answer.num_hit_tokens >= 32) == has_hits and (answer.num_hit_tokens == 0) != has_hits
    told = f"{answer.num_hit_tokens} of {answer.num_prompt_tokens} prompt tokens from the cache"
    assert (told in second) == has_hits


def test_blocks_of_an_earlier_conversation_are_drawn_as_cached(folder: Path) -> None:
    repl, out = plain_repl(make_session(folder))
    run(repl, out, TEXT_OF_21_BYTES)
    run(repl, out, "/reset")
    run(repl, out, TEXT_OF_21_BYTES.upper())
    drawn = run(repl, out, "/blocks")
    # Both prompts begin with the template's 12 tokens, less than a block. The first conversation left 2 full blocks.
    assert "free (2 of them cached)" in drawn and "= free, content cached" in drawn
    assert "4 blocks are cached now, for a later prompt that begins in the same way." in drawn
