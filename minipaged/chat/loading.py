"""From the chat's options to a loaded model, if wanted beside the first prompt."""

import argparse
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged.chat.interrupts import cleaning_up
from minipaged.progress import Progress

if TYPE_CHECKING:
    from minipaged.chat.session import ChatSession
    from minipaged.llm import LLM


def load_session(options: argparse.Namespace) -> "ChatSession":
    """Load the model and begin a conversation.

    Raises:
        UserError: An option is out of range, or the model cannot be had or cannot chat.
    """
    session = begin_session(options, load_llm)
    # A model without a template: say so now.
    session.llm.chat_prompt([*session.messages, {"role": "user", "content": "Hello"}])
    return session


def begin_session(options: argparse.Namespace, load: Callable[..., "LLM"]) -> "ChatSession":
    """Begin a conversation with the model that ``load`` returns for the options and their rung."""
    from minipaged import SamplingParams
    from minipaged.chat.session import ChatSession, check_fork
    from minipaged.llm import check_rung

    if options.fork is not None:
        check_fork(options.fork, check_rung(options.rung))
    params = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, seed=options.seed, max_tokens=options.max_tokens
    )
    llm = load(options, options.rung)
    advice = llm.engine.options.generation_config
    if params.temperature is None and advice.get("temperature") is None and not advice.get("do_sample"):
        params = replace(params, temperature=0)  # nobody asked for chance
    return ChatSession(llm, params, options.system)


def load_llm(options: argparse.Namespace, rung: str | None, needs_text: bool = True) -> "LLM":
    """Load the model on a rung, with a cache for one conversation of full length unless the options say otherwise.

    Raises:
        UserError: An option is out of range, or the model cannot be had, or it has no tokenizer and ``needs_text``.
    """
    from minipaged.errors import UserError
    from minipaged.foundation.random_weights import is_random
    from minipaged.foundation.weights import resolve_model
    from minipaged.llm import LLM, check_rung

    rung = check_rung(rung)
    with Progress(sys.stderr) as progress, cleaning_up():
        folder = resolve_model(options.model, options.revision, progress)
    if needs_text and is_random(folder):  # said before gigabytes of weights are drawn
        raise UserError(f"{options.model} has random weights and no tokenizer, so it cannot chat; benches can run it")
    num_blocks = options.num_blocks
    if num_blocks is None and rung != "foundation":
        num_blocks = _num_blocks_for_one(options, folder, rung)
    return LLM(
        folder,
        rung=rung,
        tier=options.tier,
        block_size=options.block_size,
        num_blocks=num_blocks,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        fused=options.fused,
        graphs=options.graphs,
        device_batch=options.device_batch,
        overlap=options.overlap,
        enforce_eager=options.enforce_eager,
    )


def without_cache_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options for rung foundation, which refuses those of a cache."""
    return argparse.Namespace(**{**vars(options), "num_blocks": None, "block_size": 16})


def _num_blocks_for_one(options: argparse.Namespace, folder: Path, rung: str) -> int | None:
    """Return the blocks of one conversation at the model's limit: a small pool is one that can be drawn.

    None where that is more than an `LLM` would take by itself.
    """
    from minipaged.foundation.weights import load_config
    from minipaged.machine import choose_device, choose_dtype, default_num_blocks

    config, _ = load_config(folder)
    limit = options.max_model_len or config.max_model_len
    if rung == "contiguous":
        limit = 1 << max(0, limit - 1).bit_length()  # this rung hands out powers of two
    block_size = max(1, options.block_size)  # what is out of range is refused by the LLM, in its own words
    device = choose_device(options.device)
    num_blocks = max(1, -(-limit // block_size))
    most = default_num_blocks(config, choose_dtype(options.dtype, device), device, block_size, limit)
    return num_blocks if num_blocks <= most else None


def is_at_hand(model: str) -> bool:
    """Return whether loading needs no network, after making the default model ready if it is asked for.

    Raises:
        UserError: The default model cannot be had.
    """
    if model != "smollm2":
        return Path(model).expanduser().is_dir()
    from minipaged.foundation.default_model import ensure_default_model

    with Progress(sys.stderr) as progress, cleaning_up():
        ensure_default_model(progress)
    return True


class Loading(threading.Thread):
    """Loads beside the first prompt: most of the time goes into importing torch, and typing takes longer."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(name="loading", daemon=True)
        self.error: BaseException | None = None
        self._options = options
        self._session: ChatSession | None = None

    def run(self) -> None:
        """Load, and keep what went wrong for `wait`."""
        try:
            self._session = load_session(self._options)
        except BaseException as error:  # raised again where it can be shown
            self.error = error

    def wait(self) -> "ChatSession":
        """Return the session when it is there, or raise what kept it from being there."""
        with Progress(sys.stderr) as progress:
            if self.is_alive():
                progress("loading the model")
            self.join()
        if self.error is not None:
            raise self.error
        assert self._session is not None
        return self._session
