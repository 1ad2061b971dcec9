"""The engines of the throughput bench, each behind the same three questions: generate, how much memory, what version.

All get token ids, sample at one temperature with no filter, and do not stop at an end token. What is not installed is
refused before anything runs.
"""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from minipaged.bench.memory import peak_resident_bytes
from minipaged.bench.throughput_workloads import MAX_MODEL_LEN, TEMPERATURE
from minipaged.bench.workload import Request
from minipaged.errors import UserError
from minipaged.foundation.random_weights import is_random, make_weights
from minipaged.foundation.weights import SINGLE_FILE, load_config, resolve_model
from minipaged.machine import choose_device, choose_dtype

PACKAGES = {"minipaged": "minipaged", "transformers": "transformers", "vllm": "vllm", "nano-vllm": "nanovllm"}
"""Name of each engine, and the module that must be there."""

CPU_BLOCKS = 64
"""Of 256 tokens each, in the cache of transformers on a CPU."""


class BenchEngine(Protocol):
    """What the bench needs of an engine."""

    vocab_size: int

    @property
    def pool_bytes(self) -> int | None:
        """Return the bytes that are kept for keys and values, None where they are not known."""
        ...

    def generate(self, requests: list[Request]) -> list[int]:
        """Serve all requests and return how many tokens each got."""
        ...

    def hit_tokens(self) -> int:
        """Return how many prompt tokens a prefix cache has found since the start."""
        ...


def check_engine(engine: str, model: str) -> None:
    """Refuse an engine that is not installed, or that cannot run the model.

    Raises:
        UserError: It is not here, needs a GPU, or does not know the architecture.
    """
    if engine not in PACKAGES:
        raise UserError(f"no engine is called {engine!r}; there is {', '.join(PACKAGES)}")
    if importlib.util.find_spec(PACKAGES[engine]) is None:
        raise UserError(f"--engine {engine} needs the package {PACKAGES[engine]}, which is not installed here")
    if engine in ("vllm", "nano-vllm") and not torch.cuda.is_available():
        raise UserError(f"--engine {engine} needs a GPU, and this machine has no CUDA device")
    if engine == "nano-vllm":
        architecture = load_config(resolve_model(model))[0].architecture
        if architecture != "Qwen3ForCausalLM":
            raise UserError(f"--engine nano-vllm runs Qwen3ForCausalLM only, and {model} is a {architecture}")


def engine_version(engine: str) -> str | None:
    """Return the version of an engine's package, None where it has none."""
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return None


def load_engine(engine: str, model: str, device: str | None, dtype: str | None, **options: Any) -> BenchEngine:
    """Start an engine; ``options`` are those of `LLM`."""
    if engine == "minipaged":
        return Minipaged(model, device=device, dtype=dtype, **options)
    where = choose_device(device)
    kind = {"transformers": Transformers, "vllm": Vllm, "nano-vllm": NanoVllm}[engine]
    return kind(resolve_model(model), where, choose_dtype(dtype, where))


class Minipaged:
    """This engine, with every step of ``fast`` unless options say otherwise."""

    def __init__(self, model: str, **options: Any) -> None:
        from minipaged import LLM

        longest = load_config(resolve_model(model))[0].max_model_len
        self.llm = LLM(model, max_model_len=min(MAX_MODEL_LEN, longest), seed=0, **options)
        self.vocab_size = self.llm.config.vocab_size
        num_slots = (self.llm.num_blocks or 0) * self.llm.block_size
        self.pool_bytes = num_slots * self.llm.config.kv_bytes_per_token(self.llm.dtype)

    def generate(self, requests: list[Request]) -> list[int]:
        """Serve all requests and return how many tokens each got."""
        results = self.llm.generate(
            [each.prompt for each in requests], [sampling_params(each) for each in requests], progress=False
        )
        return [len(result.token_ids) for result in results]

    def hit_tokens(self) -> int:
        """Return how many prompt tokens the prefix cache has found."""
        return self.llm.stats()["hit_tokens"]


def sampling_params(request: Request) -> Any:
    """Return the parameters of one request, free of what a model's own generation config would add."""
    from minipaged import SamplingParams

    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.output_length, **neutral)


class Transformers:
    """The continuous batching of transformers, with its defaults."""

    pool_bytes = None

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        auto: Any = transformers.AutoModelForCausalLM
        with device:  # weights are made there, or loaded there
            if is_random(folder):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
            else:
                model = auto.from_pretrained(folder, dtype=dtype)
        self.vocab_size = model.config.vocab_size
        settings = transformers.GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        # Without a number it takes nearly all memory, which on a CPU is that of everybody else too.
        own = transformers.ContinuousBatchingConfig(num_blocks=CPU_BLOCKS) if device.type == "cpu" else None
        self._stack = ExitStack()  # closes with the process
        manager = model.to(device).continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=own
        )
        self.manager = self._stack.enter_context(manager)

    def generate(self, requests: list[Request]) -> list[int]:
        """Serve all requests and return how many tokens each got."""
        add = self.manager.add_request
        ids = [add(each.prompt, max_new_tokens=each.output_length, eos_token_id=-1) for each in requests]
        found: dict[str, int] = {}
        while len(found) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = len(result.generated_tokens)
            elif result is None and not self.manager.is_running():
                raise UserError("transformers stopped before it had served all requests")
        return [found[request_id] for request_id in ids]

    def hit_tokens(self) -> int:
        """Return 0: it is not counted."""
        return 0


class Vllm:
    """The offline interface of vLLM, without its prefix cache: random prompts find nothing."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        config, _ = load_config(folder)
        self.vocab_size = config.vocab_size
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy" if is_random(folder) else "auto",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=min(MAX_MODEL_LEN, config.max_model_len),
            enable_prefix_caching=False,
            seed=0,
        )
        cache = self.llm.llm_engine.vllm_config.cache_config
        num_slots = (cache.num_gpu_blocks or 0) * cache.block_size
        self.pool_bytes = num_slots * config.kv_bytes_per_token(dtype) or None

    def generate(self, requests: list[Request]) -> list[int]:
        """Serve all requests and return how many tokens each got."""
        from vllm import SamplingParams  # type: ignore[import-not-found]

        same = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=each.output_length, **same) for each in requests]
        prompts = [{"prompt_token_ids": each.prompt} for each in requests]
        return [len(done.outputs[0].token_ids) for done in self.llm.generate(prompts, params, use_tqdm=False)]

    def hit_tokens(self) -> int:
        """Return 0: its prefix cache is off."""
        return 0


class NanoVllm:
    """nano-vllm with its defaults. Its prefix cache is always on."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from nanovllm import LLM  # type: ignore[import-not-found]

        config, _ = load_config(folder)
        self.vocab_size = config.vocab_size
        longest = min(MAX_MODEL_LEN, config.max_model_len)
        self.llm = LLM(str(folder), enforce_eager=False, max_model_len=longest)
        pool = getattr(self.llm.model_runner, "kv_cache", None)
        self.pool_bytes = None if pool is None else pool.nbytes

    def generate(self, requests: list[Request]) -> list[int]:
        """Serve all requests and return how many tokens each got."""
        from nanovllm import SamplingParams  # type: ignore[import-not-found]

        same = {"temperature": TEMPERATURE, "ignore_eos": True}
        params = [SamplingParams(max_tokens=each.output_length, **same) for each in requests]
        results = self.llm.generate([each.prompt for each in requests], params, use_tqdm=False)
        return [len(result["token_ids"]) for result in results]

    def hit_tokens(self) -> int:
        """Return 0: it is not counted."""
        return 0


@contextmanager
def model_for(engine: str, model: str) -> Iterator[str]:
    """Yield what the engine can load: nano-vllm reads files only, so a shape's weights are written into some."""
    folder = resolve_model(model) if engine == "nano-vllm" else None
    if folder is None or not is_random(folder):
        yield model
        return
    with TemporaryDirectory() as written:
        save_checkpoint(folder, Path(written))
        yield written


def save_checkpoint(shape: Path, folder: Path) -> None:
    """Write a shape's config, random weights in bfloat16, and a tokenizer that knows one token."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    config, _ = load_config(shape)
    tokenizer: Any = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    (folder / "config.json").write_text((shape / "config.json").read_text())
    save_file(make_weights(config, torch.bfloat16, torch.device("cpu")), folder / SINGLE_FILE, {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )


def time_run(engine: BenchEngine, requests: list[Request]) -> float:
    """Serve all requests and return the seconds; refuse a run that did not produce what was asked for."""
    start = time.perf_counter()
    lengths = engine.generate(requests)
    seconds = time.perf_counter() - start
    if lengths != [each.output_length for each in requests]:
        raise UserError(f"the engine returned {sum(lengths)} tokens in place of {sum_outputs(requests)}")
    return seconds


def sum_outputs(requests: list[Request]) -> int:
    """Return how many tokens all requests ask for."""
    return sum(each.output_length for each in requests)


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes of the GPU that are taken, by whatever process, or the most that was in RAM on a CPU.

    Allocators of GPU memory keep what they have had, so after a run this is the most that it took. What torch
    counts would leave out graphs, contexts and engines in a process of their own.
    """
    if device.type == "cpu":
        return peak_resident_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
