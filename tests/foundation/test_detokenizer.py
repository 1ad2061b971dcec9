"""Text that comes token by token: characters, spaces and stop strings, over three kinds of tokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from minipaged.foundation.detokenizer import TextStream, find_byte_token_ids
from minipaged.foundation.sampling import SamplingParams

GREETING = "Hello world! naïve 日本語 😀 नमस्ते 삼겹살"
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


def make_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Trained on one script of each width, so that merges cut through characters of the others.
    tokenizer.train_from_iterator(["hello world, the naïve façade 日本の人 😀😁😂 नमस्कार"] * 3, trainer)
    return tokenizer


def make_byte_fallback() -> Tokenizer:
    pieces = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"Helowrd!naive日本. ", "▁h", "lo", "▁n", "ll", "▁日", "▁w", "or"]
    merges = [("▁", "▁"), ("▁", "h"), ("l", "o"), ("▁", "n"), ("l", "l"), ("▁", "日"), ("▁", "w"), ("o", "r")]
    pieces = [*dict.fromkeys(["h", *pieces])]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def make_metaspace() -> Tokenizer:
    pieces = [*SPECIALS, "<unk>", "▁", "▁he", "llo", "▁world", "日", "本", "!", "😀", *"helowrd"]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


TOKENIZERS = {"bytes": make_byte_level(), "fallback": make_byte_fallback(), "metaspace": make_metaspace()}
BYTE_TOKEN_IDS = find_byte_token_ids(TOKENIZERS["fallback"].token_to_id)


def make_decode(kind: str, skip_special_tokens: bool = True) -> Callable[[list[int]], str]:
    return lambda ids: TOKENIZERS[kind].decode(ids, skip_special_tokens=skip_special_tokens)


def make_stream(kind: str, skip_special_tokens: bool = True, **params: Any) -> TextStream:
    byte_token_ids = BYTE_TOKEN_IDS if kind == "fallback" else ()
    return TextStream(make_decode(kind, skip_special_tokens), SamplingParams(**params), byte_token_ids)


def run(stream: TextStream, ids: Sequence[int], step: int = 1) -> list[str]:
    pieces = [stream.push(list(ids[start : start + step])) for start in range(0, len(ids), step)]
    return [*pieces, stream.flush()]


def stream_of(*pieces: str, **params: Any) -> TextStream:
    """Return a stream whose token i has the text ``pieces[i]``."""
    return TextStream(lambda ids: "".join(pieces[token_id] for token_id in ids), SamplingParams(**params))


# ids from the whole vocabulary, and often from the part whose characters are broken
def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    token_id = st.integers(0, TOKENIZERS[kind].get_vocab_size() - 1)
    if kind == "fallback":
        multibyte = sorted(BYTE_TOKEN_IDS)
        valid = [[multibyte[byte] for byte in text.encode()] for text in ("\n", "A", "é", "日", "😀", " ")]
        several = st.one_of(token_id.map(lambda value: [value]), st.sampled_from(valid))
        return st.lists(several, max_size=40).map(lambda parts: [value for part in parts for value in part])
    return st.lists(token_id, max_size=60)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@pytest.mark.parametrize("step", range(1, 8))
def test_a_text_of_many_scripts_streams_without_broken_characters(kind: str, step: int) -> None:
    ids = TOKENIZERS[kind].encode(GREETING, add_special_tokens=False).ids
    assert len(ids) > len(GREETING.split())
    pieces = run(make_stream(kind), ids, step)
    assert "".join(pieces) == GREETING == make_decode(kind)(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 8 / step


def test_a_broken_character_waits_only_until_it_is_whole() -> None:
    backend = TOKENIZERS["bytes"]
    words = backend.pre_tokenizer.pre_tokenize_str("क😀x")
    ids = [backend.token_to_id(byte) for word, _ in words for byte in word]
    assert len(ids) == 8
    assert run(make_stream("bytes"), ids) == ["", "", "क", "", "", "", "😀", "x", ""]


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_stream_as_they_decode(kind: str, skip: bool) -> None:
    @settings(max_examples=250, deadline=None, derandomize=True)
    @given(ids=ids_of(kind), steps=st.lists(st.integers(1, 7), min_size=1))
    def check(ids: list[int], steps: list[int]) -> None:
        stream, pieces, position, turn = make_stream(kind, skip), [], 0, 0
        while position < len(ids):
            step = steps[turn % len(steps)]
            pieces.append(stream.push(ids[position : position + step]))
            position, turn = position + step, turn + 1
        pieces.append(stream.flush())
        assert "".join(pieces) == make_decode(kind, skip)(ids) == stream.text
        assert stream.num_tokens == len(ids)

    check()


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_long_run_of_bytes_that_mean_nothing_comes_out(kind: str) -> None:
    token = "<0xFF>" if kind == "fallback" else "ÿ"
    bad = TOKENIZERS[kind].token_to_id(token)
    stream = make_stream(kind)
    pieces = [stream.push(bad) for _ in range(60)]
    assert len("".join(pieces)) >= 56
    ids = [bad] * 60 + TOKENIZERS[kind].encode("hello", add_special_tokens=False).ids
    pieces += [stream.push(token_id) for token_id in ids[60:]]
    assert "".join(pieces) == make_decode(kind)(ids)
    assert stream.flush() == ""


def test_bytes_that_mean_nothing_do_not_let_the_window_grow() -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return make_decode("bytes")(ids)

    bad = [TOKENIZERS["bytes"].token_to_id(byte) for byte in ("ÿ", "æ", "ð")]
    ids = [bad[turn * turn % 3] for turn in range(200)]
    assert "".join(run(TextStream(decode, SamplingParams()), ids)) == make_decode("bytes")(ids)
    assert max(sizes) <= 40


def test_an_incomplete_character_comes_out_with_the_next_text_or_at_the_end() -> None:
    for kind, first in (("bytes", "æ"), ("fallback", "<0xE6>")):
        ids = [
            TOKENIZERS[kind].token_to_id(first),
            *TOKENIZERS[kind].encode("lo", add_special_tokens=False).ids,
        ]
        stream = make_stream(kind)
        assert stream.push(ids[0]) == ""
        assert "".join(stream.push(token_id) for token_id in ids[1:]) == make_decode(kind)(ids)
        stream = make_stream(kind)
        assert stream.push(ids[0]) + stream.flush() == stream.text == "\ufffd"


def test_a_long_valid_run_of_byte_tokens_is_released_before_it_ends() -> None:
    newline = TOKENIZERS["fallback"].token_to_id("<0x0A>")
    word = TOKENIZERS["fallback"].encode("hello", add_special_tokens=False).ids
    runs = [[newline] * length for length in (260, 300)]
    for ids in [[*start, *run_of_bytes, *word] for start in ([], word) for run_of_bytes in runs]:
        stream = make_stream("fallback")
        pieces = [stream.push(token_id) for token_id in ids[:250]]
        assert len("".join(pieces)) > 150
        pieces += [*(stream.push(token_id) for token_id in ids[250:]), stream.flush()]
        assert "".join(pieces) == make_decode("fallback")(ids)


def test_sentencepiece_words_keep_their_spaces_and_hidden_tokens_take_none() -> None:
    backend = TOKENIZERS["metaspace"]
    world, special = backend.token_to_id("▁world"), backend.token_to_id("<s>")
    for skip in (True, False):
        ids = [special, world, special, special, world, world]
        pieces = run(make_stream("metaspace", skip), ids)
        assert "".join(pieces) == make_decode("metaspace", skip)(ids)
    assert run(make_stream("metaspace"), [world, special, world]) == ["world", "", " world", ""]


def test_the_end_token_adds_no_text() -> None:
    stream = stream_of("a", "b", "END")
    assert [stream.push(0), stream.push(2, is_end_token=True), stream.flush()] == ["a", "", ""]
    stream = stream_of("a", "b", "END")
    assert stream.push([0, 1, 2], is_end_token=True) == "ab"
    assert (stream.text, stream.stopped, stream.num_tokens) == ("ab", False, 2)


def test_without_a_tokenizer_the_text_is_empty() -> None:
    stream = TextStream(None, SamplingParams(stop="a"))
    assert [stream.push(5), stream.push([6, 7]), stream.flush(), stream.text] == ["", "", "", ""]
    assert stream.num_tokens == 3


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_token_decodes_few_ids_however_long_the_text(kind: str) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return make_decode(kind)(ids)

    hidden = TOKENIZERS[kind].token_to_id("</s>")
    ids = TOKENIZERS[kind].encode(GREETING, add_special_tokens=False).ids
    stream = TextStream(decode, SamplingParams(stop="never"), BYTE_TOKEN_IDS if kind == "fallback" else ())
    decoded_by_round: list[int] = []
    for _ in range(20):
        sizes.clear()
        for token_id in [*ids, *[hidden] * 50]:
            stream.push(token_id)
        assert max(sizes) <= 40
        decoded_by_round.append(sum(sizes))
    assert max(decoded_by_round[1:]) <= 1.2 * min(decoded_by_round[1:])
    assert stream.text + stream.flush() == make_decode(kind)((ids + [hidden] * 50) * 20)


# Stop strings: pieces, arguments, released pieces, whether it stopped.
STOPS: dict[str, tuple[list[str], dict[str, Any], list[str], bool]] = {
    "over three tokens": (["go ", "HA", "LT", "! more"], {"stop": ["HALT!"]}, ["go ", "", "", ""], True),
    "included": (
        ["go ", "HA", "LT", "! more"],
        {"stop": ["HALT!"], "include_stop_str_in_output": True},
        ["go ", "", "", "HALT!"],
        True,
    ),
    "not completed": (["go ", "HA", "LO"], {"stop": ["HALT!"]}, ["go ", "", "HALO", ""], False),
    "begun at the end": (["go ", "HA"], {"stop": ["HALT!"]}, ["go ", "", "HA"], False),
    "inside one token": (["say HALT! more"], {"stop": "HALT!"}, ["say "], True),
    "overlapping begin": (["aab", "aab", "aac"], {"stop": "aabaac"}, ["", "aab", ""], True),
    "prefix of another": (["x", "HAL", "T!"], {"stop": ["HALT!", "HAL"]}, ["x", "", ""], True),
    "longer one alone": (["xHALT", "y"], {"stop": ["HALT!", "ALT?"]}, ["x", "HALTy", ""], False),
    "earliest wins": (["one two one"], {"stop": ["two", "one"]}, [""], True),
    "earliest end wins": (["abcd"], {"stop": ["abcd", "bc"]}, ["a"], True),
    "same end, longer": (["xabc"], {"stop": ["bc", "abc"]}, ["x"], True),
    "no stop": (["a", "b"], {}, ["a", "b", ""], False),
    "nothing after it": (["aHALT!", "more"], {"stop": "HALT!"}, ["a", "", ""], True),
    "a line break": (["a", "\n", "b"], {"stop": "\n"}, ["a", "", "", ""], True),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_string_ends_the_text(name: str) -> None:
    pieces, params, expected, stopped = STOPS[name]
    stream = stream_of(*pieces, **params)
    released = run(stream, range(len(pieces)))
    assert released[: len(expected)] == expected
    assert not any(released[len(expected) :])
    assert stream.stopped is stopped
    assert stream.text == "".join(expected)


@pytest.mark.parametrize(
    ("min_tokens", "text", "num_tokens"),
    [(0, "a", 2), (2, "a", 2), (3, "aXb", 4), (4, "aXb", 4), (5, "aXbXc", 5), (6, "aXbXc", 6)],
)
def test_a_stop_string_counts_from_the_token_of_min_tokens_on(min_tokens: int, text: str, num_tokens: int) -> None:
    stream = stream_of("a", "X", "b", "X", "c", "X", stop="X", min_tokens=min_tokens)
    run(stream, range(4 if num_tokens < 5 else 5))
    assert stream.text == text
    if num_tokens < 5:
        assert stream.num_tokens == num_tokens


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts() -> None:
    stream = stream_of("aH", "AL", "T", "!", stop="HALT", min_tokens=3)
    run(stream, range(4))
    assert (stream.text, stream.stopped) == ("a", True)
    stream = stream_of("aH", "AL", "T", "!", stop="HALT", min_tokens=4)
    run(stream, range(4))
    assert (stream.text, stream.stopped) == ("aHALT!", False)


def test_a_stop_string_in_byte_tokens_matches_at_once() -> None:
    backend = TOKENIZERS["fallback"]
    ids = [*backend.encode("hello", add_special_tokens=False).ids, backend.token_to_id("<0x0A>")]
    stream = make_stream("fallback", stop="\n")
    released = "".join(stream.push(token_id) for token_id in ids)
    assert (released, stream.stopped, stream.num_tokens) == ("hello", True, len(ids))
    stream = make_stream("fallback", stop="\n", min_tokens=len(ids) + 1)
    assert "".join(run(stream, ids * 2)) == "hello\n hello"
    assert stream.num_tokens == 2 * len(ids)


def test_half_a_character_is_no_match_for_a_replacement_character_as_stop_string() -> None:
    for kind in ("bytes", "fallback"):
        ids = TOKENIZERS[kind].encode(GREETING, add_special_tokens=False).ids
        stream = make_stream(kind, stop="\ufffd")
        assert "".join(run(stream, ids)) == GREETING
        assert not stream.stopped


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where a reader going through the text letter by letter first sees a whole stop string."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab日", max_size=4), max_size=12),
    stops=st.lists(st.text("ab日", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    step=st.integers(1, 7),
)
def test_random_stop_strings_cut_the_text_where_an_oracle_cuts_it(
    pieces: list[str], stops: list[str], include: bool, step: int
) -> None:
    stream = stream_of(*pieces, stop=stops, include_stop_str_in_output=include)
    released = run(stream, range(len(pieces)), step)
    text = "".join(pieces)
    match = first_stop(text, stops)
    expected = text if match is None else text[: match[1] if include else match[0]]
    assert "".join(released) == stream.text == expected
    assert stream.stopped is (match is not None)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=ids_of("bytes"), stop=st.sampled_from(["e", "日", " w", "\ufffd", "😀"]), step=st.integers(1, 7))
def test_the_step_does_not_change_the_text_or_the_token_that_stops(ids: list[int], stop: str, step: int) -> None:
    one_by_one, together = make_stream("bytes", stop=stop), make_stream("bytes", stop=stop)
    assert "".join(run(one_by_one, ids)) == "".join(run(together, ids, step))
    assert one_by_one.num_tokens == together.num_tokens
    if stop != "\ufffd":
        match = first_stop(make_decode("bytes")(ids), [stop])
        assert one_by_one.stopped is (match is not None)
        assert one_by_one.text == make_decode("bytes")(ids)[: match[0] if match else None]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    stop=st.text("ab", min_size=1, max_size=4),
    min_tokens=st.integers(0, 12),
)
def test_min_tokens_and_random_stop_strings_equal_an_oracle(pieces: list[str], stop: str, min_tokens: int) -> None:
    stream = stream_of(*pieces, stop=stop, min_tokens=min_tokens)
    run(stream, range(len(pieces)))
    text, exempt = "".join(pieces), len("".join(pieces[: max(0, min_tokens - 1)]))
    ends = [end for end in range(exempt + 1, len(text) + 1) if text[:end].endswith(stop)]
    assert stream.text == (text[: ends[0] - len(stop)] if ends else text)
