"""Where an answer ends, through `LLM` on every rung, streamed and not: end tokens and stop strings.

A stub in the place of the model's forward pass forces the tokens.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minipaged import LLM, SamplingParams
from minipaged.llm import RUNGS
from tests.tiny_models import make_tiny_model

PIECES = {300: "go ", 301: "HA", 302: "LT", 303: "! more", 304: "LO"}
END = 9
OTHER = 88  # "X": the second best token everywhere


@pytest.fixture(scope="module")
def forced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose tokens are single bytes and `PIECES`, and whose tokenizer ends answers with `END`."""
    folder = make_tiny_model(tmp_path_factory.mktemp("forced"), "llama", with_tokenizer=True, vocab_size=310)
    settings = json.loads((folder / "tokenizer.json").read_text())
    vocab = {text: token_id for text, token_id in settings["model"]["vocab"].items() if token_id < 256}
    vocab |= {piece.replace(" ", "Ġ"): token_id for token_id, piece in PIECES.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = next(text for text, token_id in vocab.items() if token_id == END)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def force(llm: LLM, prompt_length: int, ids: list[int]) -> LLM:
    """Put a stub in the place of the model: it makes each of ``ids`` the best token in turn, and `OTHER` the next."""

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, logits_at: Any = None) -> torch.Tensor:
        newest = positions if logits_at is None else positions[logits_at]
        logits = torch.zeros(len(newest), llm.config.vocab_size)
        logits[:, OTHER] = 5.0
        for row, position in enumerate(newest.tolist()):
            logits[row, ids[position + 1 - prompt_length]] = 10.0
        return logits

    llm.model.forward = forward
    return llm


Run = Callable[..., tuple[list[int], str, str]]


@pytest.fixture(params=RUNGS)
def answer(request: pytest.FixtureRequest, forced_folder: Path) -> Run:
    """Return a function that generates with forced ids, streamed and not, and returns ids, text and finish reason."""
    shape = {} if request.param == "foundation" else {"num_blocks": 8, "max_model_len": 64}

    def run(ids: list[int], *, folder: Path = forced_folder, prompt: str = "ab", **params: Any):
        llm = LLM(folder, rung=request.param, dtype="float32", device="cpu", **shape)
        prompt_ids = llm.tokenizer.encode(prompt)
        force(llm, len(prompt_ids), ids)
        params = SamplingParams(**{"temperature": 0, "max_tokens": len(ids), **params})
        result = llm.generate(prompt, params)[0]
        chunks = list(llm.stream(prompt, params))
        run.deltas = [chunk.text for chunk in chunks]
        assert "".join(run.deltas) == result.text == chunks[-1].result.text
        assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == result.finish_reason
        assert not llm.engine.has_unfinished() and llm.stats()["used_blocks"] == 0
        return result.token_ids, result.text, result.finish_reason

    return run


A, B, C, D = 65, 66, 67, 68


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "ends"),
    [
        (None, [7, 9], (7, 9)),
        (None, 7, (7, 9)),  # a single id adds to the tokenizer's own
        (11, [7], (7, 9, 11)),
        ([7, 11], None, (7, 9, 11)),  # no generation_config.json
    ],
)
def test_an_answer_ends_at_every_end_token_that_any_file_names(
    answer: Run, forced_folder: Path, tmp_path: Path, config_eos: Any, generation_eos: Any, ends: tuple[int, ...]
):
    folder = shutil.copytree(forced_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": config_eos}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    for end in ends:
        assert answer([A, B, end, C], folder=folder) == ([A, B, end], "AB", "stop")
    others = [token_id for token_id in (5, 7, 9, 11, 13) if token_id not in ends]
    assert answer([A, *others, B], folder=folder)[0] == [A, *others, B]


@pytest.fixture(scope="module")
def two_ends(forced_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model that ends answers with 7 and 9."""
    folder = shutil.copytree(forced_folder, tmp_path_factory.mktemp("ends") / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return folder


def test_ignore_eos_runs_past_all_end_tokens_but_not_past_those_of_the_request(answer: Run, two_ends: Path):
    ids = [A, 7, B, 9, C, 11, D]
    assert answer(ids, folder=two_ends, ignore_eos=True)[::2] == (ids, "length")
    assert answer(ids, folder=two_ends, ignore_eos=True, stop_token_ids=[11])[::2] == (ids[:6], "stop")


@pytest.mark.parametrize("end", [7, 9, 11])
def test_no_end_token_is_chosen_before_min_tokens_and_the_first_one_after_ends(answer: Run, two_ends: Path, end: int):
    stops = {"stop_token_ids": [11]}  # those of the request follow the same rule
    assert answer([A, end, end, B], folder=two_ends, **stops) == ([A, end], "A", "stop")
    assert answer([A, end, end, B], folder=two_ends, min_tokens=2, **stops) == ([A, OTHER, end], "AX", "stop")
    assert answer([end, end, end, B], folder=two_ends, min_tokens=3, **stops) == ([OTHER] * 3 + [B], "XXXB", "length")


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(answer: Run):
    assert answer([300, 301, 302, 303, A], stop=["HALT!"]) == ([300, 301, 302, 303], "go ", "stop")
    assert not any("H" in delta for delta in answer.deltas)


def test_a_stop_string_that_is_to_be_included_ends_the_text(answer: Run):
    included = answer([300, 301, 302, 303, A], stop=["HALT!"], include_stop_str_in_output=True)
    assert included == ([300, 301, 302, 303], "go HALT!", "stop")


def test_a_stop_string_that_only_begins_is_released_in_order(answer: Run):
    assert answer([300, 301, 304], stop=["HALT!"]) == ([300, 301, 304], "go HALO", "length")
    assert answer.deltas[0] == "go " and answer.deltas[1] == "", "what could begin a stop string waits"
    assert answer([300, 301], stop=["HALT!"]) == ([300, 301], "go HA", "length")


@pytest.mark.parametrize("stops", [["HALT!", "HALT"], ["HALT", "HALT!"]])
def test_of_two_stop_strings_the_one_that_is_complete_first_wins(answer: Run, stops: list[str]):
    assert answer([300, 301, 302, 303], stop=stops) == ([300, 301, 302], "go ", "stop")
    included = answer([300, 301, 302, 303], stop=stops, include_stop_str_in_output=True)
    assert included == ([300, 301, 302], "go HALT", "stop")


def test_a_stop_string_in_the_prompt_ends_nothing(answer: Run):
    assert answer([300, 301, 304], prompt="HALT! HALT", stop=["HALT!", "T go"]) == (
        [300, 301, 304],
        "go HALO",
        "length",
    )
