"""What is launched before the first request: the kernels that it will need, and nothing that leaves a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import SamplingParams
from minipaged.fast.warm_up import kernel_calls, run_side_by_side
from tests.fast.engines import fast_engine
from tests.tiny_models import make_tiny_model

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a GPU to be absent: kernels are compiled where there is one"
)
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_the_calls_launch_every_kernel_that_prompts_and_decode_steps_need(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
):
    from triton.runtime import interpreter

    launched: set[str] = set()
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        launched.add(self.fn.__name__)
        launch(self, *args, **options)

    folder = make_tiny_model(tmp_path, architecture, **SIZES)
    w = fast_engine(folder, "all", tier="triton", block_size=4, max_model_len=16, num_blocks=16, max_num_seqs=4)
    engine: Any = w.engine
    engine.fused.is_skinny = True  # as on a GPU
    engine.kv.zero_()  # what is read of nobody's blocks means nothing, but numpy warns of infinities
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    with torch.inference_mode(), engine._at_rest():
        for call in kernel_calls(engine):
            call()
    before, launched = launched, set()
    params = [SamplingParams(temperature=1, top_p=top_p, max_tokens=3) for top_p in (1, 0.5)]
    w.generate([[5, 9, 200, 31, 7, 8], [77, 3]], params)
    assert launched and launched - before == set()


@pytest.mark.parametrize("steps", ["graphs", "all", "all but fused"])
def test_the_calls_leave_cache_and_batch_as_they_were(tmp_path: Path, steps: str):
    engine: Any = fast_engine(make_tiny_model(tmp_path, "qwen3", **SIZES), steps, num_blocks=8, block_size=4).engine
    watched = [engine.kv, engine.batch.chosen, engine.batch.block_tables, *vars(engine.inputs).values()]
    tensors = [each for each in watched if isinstance(each, torch.Tensor)]
    engine.kv.fill_(3)
    before = [each.clone() for each in tensors]
    with engine._at_rest():
        run_side_by_side(kernel_calls(engine))
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_an_error_in_a_call_is_not_lost():
    with pytest.raises(ZeroDivisionError):
        run_side_by_side([lambda: 1, lambda: 1 // 0])


def test_calls_run_on_the_gpu_that_is_current_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    run_side_by_side([lambda: None, lambda: None])
    assert chosen == [1, 1]
