"""From a name to a model: find the folder, check the files, map the tensors.

Only ``safetensors`` files are read: a pickle can run any code, and a hub repository is a stranger's. Everything
that could be wrong with a checkpoint is found here, before the first token, and named.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minipaged.errors import UserError
from minipaged.foundation.config import ModelConfig, token_ids_of
from minipaged.foundation.json_files import naming, read_json
from minipaged.foundation.model import DecoderModel, weight_shapes
from minipaged.foundation.packing import pack
from minipaged.foundation.random_weights import find_random_model, is_random, make_weights, random_identity
from minipaged.shapes import Tensor
from minipaged.tiers import Tier

DEFAULT_MODEL = "smollm2"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DOWNLOADED_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
SKIPPED_FILES = ["*/*", "consolidated*"]
"""Other formats of the same weights: subfolders, and Mistral's own files."""

Progress = Callable[[str], None] | None


def resolve_model(name: str | os.PathLike[str], revision: str | None = None, show_progress: Progress = None) -> Path:
    """Return the local folder of a model, downloading it if need be.

    Args:
        name: "smollm2" for the default model, a folder, a Hugging Face hub id such as "Qwen/Qwen3-0.6B", or a shape
            with random weights such as "qwen3-0.6b-random".
        revision: Branch, tag or commit of a hub repository.
        show_progress: Called with a line of text as the preparation goes on.

    Raises:
        UserError: There is no such folder, shape or repository, or it cannot be reached.
    """
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"model must be {DEFAULT_MODEL!r}, a folder, or a Hugging Face hub id, not {shown(name)}")
    shape = find_random_model(name)
    try:
        folder = shape or Path(name).expanduser()
        is_hub_id = name != DEFAULT_MODEL and not folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission, or ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the model folder {shown(name)} cannot be looked up ({reason})") from error
    if revision is not None and not is_hub_id:
        raise UserError(f"revision {revision!r} applies to models of the Hugging Face hub, and {name!r} is local")
    if name == DEFAULT_MODEL:
        from minipaged.foundation.default_model import ensure_default_model

        return ensure_default_model(show_progress)
    if folder.is_dir():
        return folder
    if name.lower().endswith((".gguf", ".bin", ".pt", ".pth", ".safetensors")) or folder.is_file():
        raise UserError(f"{name} is a single file; give a folder with config.json and safetensors files, or a hub id")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII):
        raise UserError(f"there is no folder {name}")
    return _download(name, revision, show_progress)


def _download(repo_id: str, revision: str | None, show_progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if show_progress is not None:
        show_progress(f"fetching {repo_id} from the Hugging Face hub")
    options: dict[str, Any] = {"allow_patterns": DOWNLOADED_FILES, "ignore_patterns": SKIPPED_FILES}
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, **options))
    except GatedRepoError as error:
        problem, cause = "asks for consent on its page first, then `hf auth login`", error
    except RevisionNotFoundError as error:
        problem, cause = f"has no revision {revision!r}", error
    except RepositoryNotFoundError as error:
        problem, cause = "is neither a local folder nor a public repository of the Hugging Face hub", error
    except Exception as error:  # the client's network errors have no common class
        problem, cause = "is no local folder, and could not be fetched from the Hugging Face hub", error
    raise UserError(f"{repo_id} {problem} ({type(cause).__name__})") from cause


def load_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model's config, and its ``generation_config.json`` as a dict, empty if there is none.

    Raises:
        UserError: ``config.json`` is missing, one of the two is no JSON object, or the config is not supported.
    """
    content = read_json(folder / "config.json")
    with naming(folder / "config.json"):
        config = ModelConfig.from_dict(content)
    generation_path = folder / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    token_ids_of(generation_config.get("eos_token_id"), f"{generation_path.name}: eos_token_id")
    return config, generation_config


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tier: Tier = None,
    is_packed: bool = False,
) -> DecoderModel:
    """Load a checkpoint.

    Args:
        is_packed: Lay the matrices out for this processor's instructions; see `minipaged.foundation.packing`.

    Invariants:
        The names loaded are the names `weight_shapes` expects, each once and of the expected shape.

    Cost:
        On the CPU a tensor stored in ``dtype`` stays a view of the mapped file and is read when first used: no
        copy. Otherwise one tensor at a time is converted or moved.

    Raises:
        UserError: A file or tensor is missing, cut short, unexpected, or of the wrong shape; it is named.
    """
    folder = Path(folder)
    config, _ = load_config(folder)
    if is_random(folder):
        weights = make_weights(config, dtype, torch.device(device))
        return DecoderModel(config, _packed(weights) if is_packed else weights, tier)
    expected = weight_shapes(config)
    files = find_tensors(folder)
    _check_names(expected, files, config.tie_word_embeddings)
    weights = {}
    for path in sorted({files[name] for name in expected}):
        with _open(path) as shard:
            for name in (name for name in expected if files[name] == path):
                tensor = _convert(name, shard.get_tensor(name), expected[name], dtype, torch.device(device))
                weights[name] = pack(tensor) if is_packed else tensor
    assert weights.keys() == expected.keys()
    if is_packed:
        _unpack_embedding(weights, files, dtype)
    return DecoderModel(config, weights, tier)


def _packed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pack all but the embedding, whose rows are looked up; a tied output matrix becomes a packed copy of it."""
    name = "model.embed_tokens.weight"
    weights.setdefault("lm_head.weight", weights[name])
    return {key: tensor if key == name else pack(tensor) for key, tensor in weights.items()}


def _unpack_embedding(weights: dict[str, Tensor], files: dict[str, Path], dtype: torch.dtype) -> None:
    """Give the embedding back its rows, which are looked up, and keep it packed where it is the output matrix too.

    The rows are mapped from the file: only those of tokens that occur are ever read, so there are no two copies.
    """
    name = "model.embed_tokens.weight"
    weights.setdefault("lm_head.weight", weights[name])
    with _open(files[name]) as shard:
        weights[name] = shard.get_tensor(name).to(dtype)


def find_tensors(folder: Path) -> dict[str, Path]:
    """Return which file holds each tensor, after checking that all files an index names are whole and agree.

    The files say what they hold; the index is only checked against them, since an index can outlive its shards.

    Raises:
        UserError: There are no weights, a shard is missing or cut short, a tensor is in two files, or the index
            names one that its file does not hold.
    """
    index_names: dict[str, str] = {}
    if (folder / SINGLE_FILE).exists():
        shards = [SINGLE_FILE]
    elif (folder / INDEX_FILE).exists():
        index_names = read_json(folder / INDEX_FILE).get("weight_map", {})
        if not isinstance(index_names, dict):
            raise UserError(f"{INDEX_FILE}: weight_map must be an object, not {shown(index_names)}")
        for shard in index_names.values():
            _shard_path(folder, shard)
        shards = sorted(set(index_names.values()))
    else:
        raise UserError(_no_weights(folder))
    held: dict[str, Path] = {}
    for shard in shards:
        path = _shard_path(folder, shard)
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (the file object is no mapping)
                if name in held:
                    raise UserError(f"tensor {name} is in both {held[name].name} and {shard}")
                held[name] = path
    for name, shard in index_names.items():
        if name not in held or held[name].name != shard:
            raise UserError(f"{INDEX_FILE} says that {shard} holds tensor {name}, and it does not")
    return held


def weights_identity(folder: Path) -> str:
    """Return text that changes when the weights do: name, size and time of every file that holds some."""
    if is_random(folder):
        return random_identity(folder)
    files = sorted(set(find_tensors(folder).values()))
    return ";".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return f"{folder} has only {pickles[0]}, which can run code when read; only safetensors files are loaded"
    return f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}"


def _shard_path(folder: Path, shard: Any) -> Path:
    if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise UserError(f"{INDEX_FILE} names {shown(shard)}, which is not a safetensors file of the same folder")
    if not (folder / shard).exists():
        raise UserError(f"{shard}, named by {INDEX_FILE}, is missing from {folder}; download it again")
    return folder / shard


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Map a safetensors file, and name it in any complaint about its content."""
    if path.is_dir():
        raise UserError(f"{path} must be a file, and is a folder; {_remedy(path.parent)}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); {_remedy(path.parent)}") from error


def _remedy(folder: Path) -> str:
    from minipaged.foundation.default_model import FOLDER_NAME, cache_folder

    if folder == cache_folder() / FOLDER_NAME:
        return f"delete the folder {folder}, and the next start makes the default model again"
    return "download it again"


def _check_names(expected: dict[str, tuple[int, ...]], files: dict[str, Path], is_tied: bool) -> None:
    missing = [name for name in expected if name not in files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"the checkpoint has no tensor {missing[0]}{more}")
    for name in sorted(files.keys() - expected.keys()):
        # Old checkpoints store the rotary table; some tied ones the output matrix, which equals the embedding.
        is_known_extra = name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
        if not is_known_extra:
            raise UserError(f"the checkpoint has a tensor {name} that a model of this config does not use")


def _convert(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise UserError(f"tensor {name} has shape {list(tensor.shape)}, and the config makes it {list(shape)}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UserError(f"tensor {name} is {tensor.dtype}; only float32, bfloat16 and float16 weights are supported")
    return tensor.to(device=device, dtype=dtype)
