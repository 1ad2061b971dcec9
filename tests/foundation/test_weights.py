"""Checkpoints: tied and untied, sharded and single, and every way in which one can be incomplete."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minipaged.errors import UserError
from minipaged.foundation import weights
from minipaged.foundation.config import ModelConfig
from minipaged.foundation.model import DecoderModel, weight_shapes
from minipaged.foundation.ops import causal_attention
from minipaged.foundation.weights import load_config, load_model
from tests.tiny_models import make_tiny_model

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an untied model, a tied one, and the untied one in three shards."""
    folder = tmp_path_factory.mktemp("originals")
    single = make_tiny_model(folder / "single")
    shards = folder / "shards"
    shutil.copytree(single, shards)
    tensors = load_file(shards / SINGLE)
    (shards / SINGLE).unlink()
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, shards / shard)
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tied = make_tiny_model(folder / "tied", tie_word_embeddings=True)
    return {"single": single, "shards": shards, "tied": tied}


@pytest.fixture
def copy_of(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(originals[name], tmp_path / name))


def load(folder: Path) -> DecoderModel:
    return load_model(folder, dtype=torch.float32)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], file: str = SINGLE) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    edit(tensors)
    save_file(tensors, folder / file)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def logits_of(model: DecoderModel, tokens: list[int]) -> torch.Tensor:
    starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return model.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), lambda _, q, k, v: causal_attention(q, k, v, starts)
    )


def assert_20_greedy_tokens_equal_transformers(folder: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = theirs.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    assert len(ids) == 23
    assert len(set(ids.tolist())) > 10, "the text repeats itself: too weak a test"
    ours = logits_of(load(folder), ids.tolist())[2:-1].argmax(dim=-1)
    assert ours.tolist() == ids[3:].tolist()


def test_a_tied_model_without_an_output_matrix_uses_the_embedding_and_holds_it_once(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("tied")
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    model = load(folder)
    assert model.output_matrix.data_ptr() == model.embedding.data_ptr()
    assert "lm_head.weight" not in model.weights
    assert_20_greedy_tokens_equal_transformers(folder)


def test_a_tied_model_ignores_a_stored_output_matrix(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("tied")
    expected = logits_of(load(folder), [1, 2, 3])
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": torch.randn(272, 64)}))
    assert torch.equal(logits_of(load(folder), [1, 2, 3]), expected)


def test_a_tied_model_that_stores_its_embedding_twice_answers_as_transformers(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("tied")
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_20_greedy_tokens_equal_transformers(folder)


def test_an_untied_model_uses_its_own_output_matrix(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    assert_20_greedy_tokens_equal_transformers(folder)
    before = logits_of(load(folder), [1, 2, 3])
    edit_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    torch.testing.assert_close(logits_of(load(folder), [1, 2, 3]), 2 * before)


def test_an_untied_model_without_an_output_matrix_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"has no tensor lm_head\.weight"):
        load(folder)


def test_a_model_that_does_not_say_whether_it_is_tied_is_untied(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    edit_json(folder / "config.json", lambda c: c.pop("tie_word_embeddings"))
    assert_20_greedy_tokens_equal_transformers(folder)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load(folder)


def test_a_sharded_model_equals_the_single_file_and_takes_each_name_once(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    convert = weights._convert
    monkeypatch.setattr(weights, "_convert", lambda name, *rest: loaded.append(name) or convert(name, *rest))
    sharded = load(originals["shards"])
    assert sorted(loaded) == sorted(weight_shapes(sharded.config))
    single = load(originals["single"])
    assert sharded.weights.keys() == single.weights.keys()
    assert all(torch.equal(sharded.weights[name], single.weights[name]) for name in single.weights)


def shard_with(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def break_shards(kind: str, folder: Path) -> str:
    """Damage a sharded model in one way and return what the message must name."""
    norm = "model.norm.weight"
    index = folder / INDEX
    shard = shard_with(folder, norm)
    if kind == "a missing shard":
        shard.unlink()
        return shard.name
    if kind == "a truncated shard":
        shard.write_bytes(shard.read_bytes()[:-10])
        return shard.name
    if kind == "an empty shard":
        shard.write_bytes(b"")
        return shard.name
    if kind == "a shard of rubbish":
        shard.write_bytes(b"<html>not found</html>" * 10)
        return shard.name
    if kind == "a tensor that no shard holds":
        edit_json(index, lambda c: c["weight_map"].update({"model.ghost.weight": shard.name}))
        return "model.ghost.weight"
    if kind == "a tensor in another shard than the index says":
        other = next(path.name for path in sorted(folder.glob("*.safetensors")) if path != shard)
        edit_json(index, lambda c: c["weight_map"].update({norm: other}))
        return norm
    if kind == "a tensor in two shards":
        other = next(path.name for path in sorted(folder.glob("*.safetensors")) if path != shard)
        edit_tensors(folder, lambda t: t.update({norm: torch.ones(64)}), other)
        return norm
    if kind == "a shard outside the folder":
        edit_json(index, lambda c: c["weight_map"].update({norm: "../other.safetensors"}))
        return r"\.\./other\.safetensors"
    assert kind == "a pickle as shard"
    edit_json(index, lambda c: c["weight_map"].update({norm: "pytorch_model.bin"}))
    return r"pytorch_model\.bin"


@pytest.mark.parametrize(
    "kind",
    [
        "a missing shard",
        "a truncated shard",
        "an empty shard",
        "a shard of rubbish",
        "a tensor that no shard holds",
        "a tensor in another shard than the index says",
        "a tensor in two shards",
        "a shard outside the folder",
        "a pickle as shard",
    ],
)
def test_broken_shards_are_refused_by_name(kind: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("shards")
    name = break_shards(kind, folder)
    with pytest.raises(UserError, match=name):
        load(folder)


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        "no tensor model.layers.1.mlp.up_proj.weight$",
    ),
    "two missing": (
        lambda t: [t.pop(f"model.layers.{i}.self_attn.q_proj.weight") for i in range(2)],
        "no tensor model.layers.0.self_attn.q_proj.weight and 1 more",
    ),
    "wrong shape": (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 64)}),
        r"k_proj.weight has shape \[16, 64\], and the config makes it \[32, 64\]",
    ),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}),
        r"up_proj.weight has shape \[64, 96\]",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "a tensor model.layers.0.self_attn.q_proj.bias that a model of this config does not use",
    ),
    "a layer too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
        "model.layers.2.input_layernorm.weight",
    ),
    "quantized": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)}),
        r"up_proj.weight is torch\.int8; only float32",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_wrong_tensors_are_refused_by_name(fault: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    edit, message = TENSOR_FAULTS[fault]
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_stored_rotary_tables_are_tolerated_and_not_used(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    expected = logits_of(load(folder), [1, 2, 3])
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.full((8,), float("nan"))}))
    assert torch.equal(logits_of(load(folder), [1, 2, 3]), expected)


def test_weights_of_the_stored_dtype_are_views_of_the_mapped_file(originals: dict[str, Path]) -> None:
    def mapped_ranges() -> list[range]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [line.split()[0].split("-") for line in lines if str(originals["single"]) in line]
        return [range(int(start, 16), int(end, 16)) for start, end in ends]

    if not Path("/proc/self/maps").exists():
        assert load(originals["single"]).dtype == torch.float32
        return
    model = load(originals["single"])
    ranges = mapped_ranges()
    assert ranges
    assert all(any(w.data_ptr() in place for place in ranges) for w in model.weights.values())


def test_weights_are_converted_to_the_dtype_asked_for(originals: dict[str, Path]) -> None:
    stored = load_file(originals["single"] / SINGLE)
    model = load_model(originals["single"], dtype=torch.bfloat16, device="cpu", tier="torch")
    assert (model.dtype, model.device.type, model.tier) == (torch.bfloat16, "cpu", "torch")
    assert all(torch.equal(weight, stored[name].bfloat16()) for name, weight in model.weights.items())


def test_a_folder_with_a_pickle_alone_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has only pytorch_model\.bin.*only safetensors"):
        load(folder)


def test_a_folder_without_weights_or_config_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    (folder / SINGLE).unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read as JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a JSON object"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json, so it is no model folder"):
        load(folder)


def test_the_generation_config_is_empty_where_there_is_none(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("single")
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    config, generation_config = load_config(folder)
    assert isinstance(config, ModelConfig)
    assert generation_config == {"temperature": 0.3}
    (folder / "generation_config.json").unlink()
    assert load_config(folder)[1] == {}
