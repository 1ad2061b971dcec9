"""A timeline of a running engine: of a scheduler's events, or of what the static loop calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from minipaged.viz.timeline import Timeline

if TYPE_CHECKING:
    from minipaged.batching.plan import Act, Event


@contextmanager
def watch(engine: Any) -> Iterator[Timeline]:
    """Record a timeline while the body runs.

    Args:
        engine: An `LLM`, its engine, or a `Scheduler`.

    Example:
        >>> with watch(llm) as timeline:  # doctest: +SKIP
        ...     llm.generate(["The sky is", "Once upon a time"])
        >>> print(draw_timeline(timeline.view()))  # doctest: +SKIP
    """
    engine = getattr(engine, "engine", engine)
    scheduler = engine if hasattr(engine, "plan_step") else getattr(engine, "scheduler", None)
    if scheduler is None:
        with _StaticLoop(engine).watching() as timeline:
            yield timeline
        return
    timeline, other = Timeline(scheduler), scheduler.listener

    def listen(event: "Event") -> None:
        timeline(event)
        if other is not None:
            other(event)

    scheduler.listener = listen
    try:
        yield timeline
    finally:
        scheduler.listener = other


class _StaticLoop:
    """Makes events of the rungs below the scheduler: it stands before four methods of an engine and looks.

    ``ended`` are the sequences of the running batch that have ended: their seats stay empty until it has.
    """

    def __init__(self, engine: Any) -> None:
        from minipaged.batching.plan import Event  # not before it is needed: it loads torch

        self.event = Event
        self.engine = engine
        self.timeline = Timeline()
        self.num_steps = 0
        self.ended: list[Any] = []
        self.ended_now: list[Any] = []
        self.has_prefilled = False

    @contextmanager
    def watching(self) -> Iterator[Timeline]:
        before = dict(vars(self.engine))
        for name in ("step", "prefill", "decode", "give_back"):
            setattr(self.engine, name, partial(getattr(self, name), getattr(self.engine, name)))
        try:
            yield self.timeline
        finally:
            self.settle()
            for name in ("step", "prefill", "decode", "give_back"):
                delattr(self.engine, name)
                if name in before:
                    setattr(self.engine, name, before[name])

    def step(self, step: Callable[[], Any]) -> Any:
        engine = self.engine
        self.settle()
        if engine.dropped or not engine.has_unfinished():
            return step()  # the model does not run
        if not engine.admitted and not engine.running:
            self.ended = []  # the batch has ended, and the next is formed
        self.num_steps += 1
        outputs = step()
        for seq in engine.admitted:
            self.tell("admit", seq)
        for seq in (*self.ended, *engine.waiting):
            self.tell("wait", seq)
        self.settle()
        return outputs

    def prefill(self, prefill: Callable[[Any], Any], batch: list[Any]) -> Any:
        self.has_prefilled = True
        for seq in batch:
            self.tell("chunk", seq, seq.num_tokens)
        return prefill(batch)

    def decode(self, decode: Callable[[Any], Any], batch: list[Any]) -> Any:
        seqs, self.has_prefilled = list(batch), False
        logits = decode(batch)
        if not self.has_prefilled:  # rung 0 has no cache, and computes everything again
            for seq in seqs:
                self.tell("decode", seq, 1)
        return logits

    def give_back(self, give_back: Callable[[Any], None], seq: Any) -> None:
        self.tell("finish", seq)
        self.ended_now.append(seq)
        give_back(seq)

    def settle(self) -> None:
        """Say which requests have ended, now that it is known who has forked."""
        engine = self.engine
        living = {seq.request_id for queue in (engine.waiting, engine.admitted, engine.running) for seq in queue}
        for request_id in dict.fromkeys(seq.request_id for seq in self.ended_now):
            if request_id not in living:
                self.timeline(self.event(self.num_steps, "finish", request_id))
        self.ended += self.ended_now
        self.ended_now = []

    def tell(self, act: "Act", seq: Any, num_tokens: int = 0) -> None:
        self.timeline(self.event(self.num_steps, act, seq.request_id, seq.seq_id, num_tokens))
