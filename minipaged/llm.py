"""The facade: a model, a rung of the ladder, and prompts in, text out."""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minipaged.arguments import (
    Prompt,
    as_batch,
    as_params,
    check_cache_options,
    check_engine_options,
    check_limit,
    check_prompt_type,
    owned_params,
)
from minipaged.batching.generate import Engine as BatchingEngine
from minipaged.contiguous.generate import Engine as ContiguousEngine
from minipaged.errors import UserError
from minipaged.fast.engine import FastEngine, fast_engine
from minipaged.fast.steps import Steps, choose_steps
from minipaged.foundation.config import token_ids_of
from minipaged.foundation.detokenizer import find_byte_token_ids
from minipaged.foundation.generate import MAX_PREFILL_TOKENS
from minipaged.foundation.generate import Engine as FoundationEngine
from minipaged.foundation.packing import can_pack
from minipaged.foundation.sequence import Result, StepOutput
from minipaged.foundation.tokenizer import load_tokenizer
from minipaged.foundation.weights import load_config, load_model, resolve_model, weights_identity
from minipaged.garbage import collector_at_rest
from minipaged.machine import choose_device, choose_dtype, choose_tier, default_num_batched_tokens, default_num_blocks
from minipaged.paged.generate import Engine as PagedEngine
from minipaged.prefix.generate import Engine as PrefixEngine
from minipaged.prefix.params import SamplingParams
from minipaged.progress import Progress, progress_bar
from minipaged.sharing.generate import Engine as SharingEngine
from minipaged.tiers import Tier, check_tier
from minipaged.tiers import use as use

ENGINES = {
    engine.rung: engine
    for engine in (FoundationEngine, ContiguousEngine, PagedEngine, SharingEngine, BatchingEngine, PrefixEngine)
}
"""The engine of every rung that exists, lowest first."""

RUNGS = tuple(ENGINES)


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; ``index`` says of which sample. ``result`` is set on the last one of a sample."""

    text: str
    token_ids: list[int]
    result: Result | None = None
    index: int = 0

    @property
    def finish_reason(self) -> str | None:
        """Return why the answer ended, None while it goes on."""
        return self.result.finish_reason if self.result else None


class LLM:
    """Load a model and generate text on a rung of the ladder.

    Args:
        model: ``"smollm2"`` (SmolLM2-135M-Instruct, made ready on first use), a local folder, a Hugging Face hub id,
            or a shape with random weights, such as ``"qwen3-0.6b-random"``. Only safetensors weights are read, and
            no code that comes with a model is run.
        rung: A name of `RUNGS`; None is the highest.
        tier: ``"torch"``, ``"triton"`` or None: Triton on a CUDA device, PyTorch elsewhere.
        block_size: Slots in a block, from 1.
        num_blocks: Blocks of the cache. ``num_blocks * block_size`` is its memory in slots on every rung that has a
            cache. None takes 90 % of the free memory on a GPU, less room for one prefill, and 1 GiB on a CPU; never
            more than 256 sequences of full length need.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or a torch.dtype. None is bfloat16 where the device
            computes in it natively; elsewhere float16 on a GPU and float32 on a CPU.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None is CUDA where there is one.
        seed: Makes the seeds of requests that bring none, so that a whole run can be repeated.
        max_model_len: Most tokens of a sequence; None is the model's own limit. A higher one is refused.
        revision: The hub revision of the model.
        reservation: What a sequence reserves on rung ``contiguous``: ``"max"`` (the default), ``"pow2"`` or
            ``"oracle"``; the last two take a request's ``max_tokens`` for the true length of its output. The rungs
            from ``batching`` up have it too, with ``cache="contiguous"``.
        cache: What the scheduler works over, from rung ``batching`` up: ``"paged"`` (the default) or
            ``"contiguous"``.
        max_num_seqs: Most sequences that run at a time, from rung ``batching`` up; None is 256, or
            ``max_num_batched_tokens`` where that is smaller.
        max_num_batched_tokens: Most tokens of one step there; None is 8192, and 16384 on a GPU of 64 GiB or more.
        preemption: What happens there to a request that is sent away when blocks run out: ``"recompute"``,
            ``"swap"`` or ``"auto"`` (the default), which takes what is quicker. Where nothing is computed yet or
            the swap space is full, ``"swap"`` computes again too.
        prefix_cache: How rung ``prefix`` finds blocks again: ``"hash"`` (the default) by digests of whole blocks,
            ``"radix"`` in a tree, to the token; None does not.
        eviction_policy: Which cached block rung ``prefix`` gives up first: ``"lru"`` (the default), the one that
            was used longest ago.
        fused: From rung ``batching`` up: packed weights and fused kernels. This and the next three are the steps of
            `minipaged.fast`; None takes them where they pay, which is with Triton on a GPU.
        graphs: Decode steps of a few fixed sizes, recorded as CUDA graphs; on a CPU the sizes alone.
        device_batch: Block tables stay on the GPU, and tokens are chosen there.
        overlap: A step is planned while the one before it runs. Needs ``device_batch``.
        enforce_eager: No CUDA graphs.

    Raises:
        UserError: Something of this cannot be had. The message names it and the limit.

    Example:
        >>> llm = LLM("smollm2")  # doctest: +SKIP
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1))[0].text
        ... # doctest: +SKIP
        ' Paris'
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        rung: str | None = None,
        tier: Tier = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        revision: str | None = None,
        reservation: str | None = None,
        cache: str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        preemption: str | None = None,
        prefix_cache: str | None = "hash",
        eviction_policy: str | None = None,
        fused: bool | None = None,
        graphs: bool | None = None,
        device_batch: bool | None = None,
        overlap: bool | None = None,
        enforce_eager: bool = False,
    ):
        self.rung = check_rung(rung)
        check_tier(tier)
        chosen = check_engine_options(
            self.rung,
            RUNGS,
            {
                "cache": cache,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "preemption": preemption,
                "prefix_cache": prefix_cache,
                "eviction_policy": eviction_policy,
            },
        )
        check_cache_options(self.rung, block_size, num_blocks, reservation, cache)
        if seed is not None:
            SamplingParams(seed=seed)  # the one place that knows a seed's range
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        if RUNGS.index(self.rung) >= RUNGS.index("batching"):
            chosen.setdefault("max_num_batched_tokens", default_num_batched_tokens(self.device))
        with Progress(sys.stderr) as progress:
            folder = resolve_model(model, revision, progress)
        self.config, generation_config = load_config(folder)
        self.max_model_len = check_limit(max_model_len, self.config)
        self.tokenizer = load_tokenizer(folder)
        tier = choose_tier(tier, self.device, self.dtype, self.config)
        steps = self._choose_steps(
            {"fused": fused, "graphs": graphs, "device_batch": device_batch, "overlap": overlap},
            enforce_eager,
            cache,
            is_triton=self.device.type == "cuda" and tier != "torch",
        )
        self.model = load_model(
            folder,
            dtype=self.dtype,
            device=self.device,
            tier=tier,
            is_packed=can_pack(self.dtype, self.device) and not steps.fused,
        )
        if num_blocks is None and self.rung != "foundation":
            num_blocks = default_num_blocks(
                self.config,
                self.dtype,
                self.device,
                block_size,
                self.max_model_len,
                chosen.get("max_num_batched_tokens", MAX_PREFILL_TOKENS),
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        options: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "generation_config": generation_config,
            "seed": seed,
            **self._text_options(generation_config),
        }
        if num_blocks is not None:
            options |= {"num_blocks": num_blocks, "block_size": block_size, "reservation": reservation or "max"}
        if RUNGS.index(self.rung) >= RUNGS.index("prefix"):
            options["weights_identity"] = weights_identity(folder)
        engine_type: Any = ENGINES[self.rung]
        if steps:
            engine_type = fast_engine(engine_type, steps)
        self.engine = engine_type(self.model, engine_type.options_type(**options, **chosen))
        if isinstance(self.engine, FastEngine):
            with Progress(sys.stderr) as progress:
                self.engine.warm_up(progress)
        self._mail: dict[int, list[StepOutput]] = {}  # by open request: outputs that its caller has not taken yet
        self._arrived: set[int] = set()  # open requests that have some

    def _choose_steps(
        self, wanted: dict[str, bool | None], enforce_eager: bool, cache: str | None, is_triton: bool
    ) -> Steps:
        """Return the steps of `minipaged.fast` that the engine takes."""
        reason = None
        if RUNGS.index(self.rung) < RUNGS.index("batching"):
            reason = f"rung {self.rung!r} runs static batches; the rungs from 'batching' up have it"
        elif cache == "contiguous":
            reason = "the contiguous cache has no block tables; cache 'paged' has them"
        if wanted["graphs"] and self.device.type == "cuda" and not is_triton:
            raise UserError("graphs cannot be had: the PyTorch tier waits for the GPU, which a CUDA graph cannot hold")
        return choose_steps(wanted, enforce_eager, reason, pays=is_triton)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Result]:
        """Generate for one or many prompts and return their results in the order of the prompts.

        Args:
            prompts: A string, a list of token ids, or a list of such.
            sampling_params: For all prompts, or one for each.
            progress: Show a bar on stderr; None shows it for more than a few prompts on a terminal.

        Raises:
            UserError: A prompt cannot be served. Nothing has been generated then, and the engine works on.

        Cost:
            Python's collector of cycles rests meanwhile. The engine leaves none; cycles that a replaced part or another
            thread makes stay until the call ends.
        """
        batch = as_batch(prompts)
        params = as_params(sampling_params, len(batch))
        for each in params:
            self._check_params(each)
        ids = [self._encode(prompt) for prompt in batch]
        for prompt, each in zip(ids, params, strict=True):
            self.engine.check_prompt(prompt, each)
        results: dict[int, list[Result]] = {}
        try:
            for prompt, each in zip(ids, params, strict=True):
                results[self._submit(prompt, each)] = []
            num_open = len(results)
            with collector_at_rest(), progress_bar(num_open, progress) as advance:
                while num_open and not self._is_over(results):
                    for output in self._take_outputs(results):
                        done = results[output.request_id]
                        if output.result:
                            done.append(output.result)
                        if output.is_last:
                            num_open -= 1
                            advance(sum(len(result.token_ids) for result in done))
        finally:
            for request_id in results:
                self._withdraw(request_id)
        return [result for done in results.values() for result in sorted(done, key=lambda r: r.index)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Generate for one prompt and yield the answer in pieces as it comes.

        Several streams may be open at once: whoever asks for the next piece runs the engine for all of them. Closing
        the iterator drops the request and frees what it holds.

        Args:
            prompt: A string or a list of token ids.
            sampling_params: How to choose tokens; pieces of several samples come mixed, each with its ``index``.

        Raises:
            UserError: The prompt cannot be served; raised when the first piece is asked for.
        """
        params = as_params(sampling_params, 1)[0]
        self._check_params(params)
        request_id = self._submit(self._encode(prompt), params)
        try:
            while not self._is_over([request_id]):
                for output in self._take_outputs([request_id]):
                    yield Chunk(output.text, output.token_ids, output.result, output.index)
                    if output.is_last:
                        return
        finally:
            self._withdraw(request_id)

    def chat(self, messages: Sequence[dict[str, Any]], sampling_params: SamplingParams | None = None) -> list[Result]:
        """Answer a conversation with the model's chat template; return one result per sample.

        Args:
            messages: The turns so far, each ``{"role": ..., "content": ...}``.
            sampling_params: How to choose tokens.

        Raises:
            UserError: The model has no tokenizer or no template, or the template refuses the messages.
        """
        return self.generate([self.chat_prompt(messages)], sampling_params)

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, up to the place where the answer begins."""
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it cannot chat; give prompts as token ids")
        if not isinstance(messages, list | tuple):
            raise UserError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)

    def __repr__(self) -> str:
        """Say what runs: the rung, where and how, and the steps of speed that are taken."""
        steps = self.engine.steps.taken if isinstance(self.engine, FastEngine) else ()
        memory = "" if self.num_blocks is None else f", {self.num_blocks} blocks of {self.block_size} slots"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<LLM on rung {self.rung}: {dtype} on {self.device}{memory}, steps: {', '.join(steps) or 'none'}>"

    def stats(self) -> dict[str, int]:
        """Return the engine's counters since its start, and its blocks now."""
        return self.engine.stats()

    def _submit(self, prompt: list[int], params: SamplingParams) -> int:
        request_id = self.engine.add_request(prompt, params)
        self._mail[request_id] = []
        return request_id

    def _withdraw(self, request_id: int) -> None:
        """Drop a request, if it has not ended, and its mail."""
        self.engine.abort(request_id)
        self._mail.pop(request_id, None)
        self._arrived.discard(request_id)

    def _take_outputs(self, request_ids: Collection[int]) -> list[StepOutput]:
        """Return what has come for some requests; run a step for everybody if there is nothing yet."""
        if self._arrived.isdisjoint(request_ids):
            for output in self.engine.step():
                if output.request_id in self._mail:
                    self._mail[output.request_id].append(output)
                    self._arrived.add(output.request_id)
        taken = []
        for request_id in sorted(each for each in self._arrived if each in request_ids):
            taken += self._mail[request_id]
            self._mail[request_id] = []
            self._arrived.remove(request_id)
        return taken

    def _is_over(self, request_ids: Collection[int]) -> bool:
        """Return whether nothing more can come: somebody has aborted the requests at the engine itself."""
        return not self.engine.has_unfinished() and self._arrived.isdisjoint(request_ids)

    def _text_options(self, generation_config: dict[str, Any]) -> dict[str, Any]:
        """Return what the engine has to know of the tokenizer: how to decode, and which tokens are special to it."""
        eos = {*self.config.eos_token_ids, *token_ids_of(generation_config.get("eos_token_id"))}
        if self.tokenizer is None:
            return {"eos_token_ids": frozenset(eos)}
        return {
            "decode": self.tokenizer.decode,
            "byte_token_ids": find_byte_token_ids(self.tokenizer.backend.token_to_id),
            "eos_token_ids": frozenset(eos | self.tokenizer.eos_token_ids),
        }

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what only a higher rung can do."""
        for name, value, owner in owned_params(params):
            if RUNGS.index(owner) > RUNGS.index(self.rung):
                raise UserError(f"rung {self.rung!r} does not know {name} ({value!r} was given); rung {owner!r} has it")
        if params.stop and self.tokenizer is None:
            raise UserError("this model has no tokenizer, so stop strings can never appear; give stop_token_ids")

    def _encode(self, prompt: Prompt) -> list[int]:
        check_prompt_type(prompt)
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer; give the prompt as token ids, not as text")
        return self.tokenizer.encode(prompt)


def check_rung(rung: str | None) -> str:
    """Return the rung's name, the highest for None."""
    if rung is None:
        return RUNGS[-1]
    if rung not in RUNGS:
        raise UserError(f"no rung is called {rung!r}; the rungs are {', '.join(RUNGS)}")
    return rung
