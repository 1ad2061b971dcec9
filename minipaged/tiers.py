"""How an operation's implementation is chosen.

Every operation exists in tiers: ``"torch"`` is plain PyTorch and runs anywhere, ``"triton"`` is a kernel.
``tier=None`` takes the kernel on a CUDA device when there is one, and PyTorch elsewhere. A named tier is obeyed
or refused; it never turns silently into the other.

``use(...)`` puts a reader's own code in the place of a part::

    with use(paged_attention=my_paged_attention):
        llm.generate("The capital of France is")

`parts` says which parts there are and what each must do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

import torch

from minipaged.errors import UserError

Tier = Literal["torch", "triton"] | None

_parts: dict[str, str] = {}
"""Every part that can be replaced, with one line on what takes its place must do."""

_replacements: ContextVar[dict[str, Callable[..., Any]]] = ContextVar("replacements", default={})  # noqa: B039


def declare_part(name: str, contract: str) -> None:
    """Make ``name`` known to `use`. Each module declares the parts it owns when it is imported."""
    _parts[name] = contract


def parts() -> dict[str, str]:
    """Return the name of every part that `use` can replace, with one line on what takes its place must do.

    Modules declare their parts when they are imported; ``from minipaged import LLM`` imports all rungs.

    Example:
        >>> import minipaged.llm
        >>> parts()["choose_victim"]
        '(groups) -> Group; picks who is sent away, of groups in the order of their turn'
    """
    return dict(sorted(_parts.items()))


def replacement(name: str) -> Callable[..., Any] | None:
    """Return what `use` has put in the place of ``name``, or None."""
    return _replacements.get().get(name)


@contextmanager
def use(**parts: Callable[..., Any]) -> Iterator[None]:
    """Run the body with each named part replaced by the given function or class.

    An operation's replacement gets the operation's arguments without ``tier``. Uses nest; the innermost wins. A class
    such as ``ref_counted_block_pool`` is read when an `LLM` is made, so the `LLM` must be made inside.

    A part is asked for only where the rung has it: ``block_pool`` is rung ``paged``'s, and on rung ``sharing`` the
    same place is ``ref_counted_block_pool``. Elsewhere a replacement changes nothing and nobody complains; to see
    whether yours is called, let it count its calls or print.

    Raises:
        UserError: A name is not a part, or what shall take its place cannot be called.
    """
    for name, part in parts.items():
        if name not in _parts:
            raise UserError(_unknown_part(name))
        if not callable(part):
            raise UserError(f"the part {name!r} must be a function or a class, not {part!r}")
    token = _replacements.set({**_replacements.get(), **parts})
    try:
        yield
    finally:
        _replacements.reset(token)


def _unknown_part(name: str) -> str:
    close = get_close_matches(name, _parts, n=1)
    hint = f", perhaps you mean {close[0]}" if close else ""
    return f"no part is called {name!r}{hint}; the parts are {', '.join(sorted(_parts))}"


def check_tier(tier: str | None) -> None:
    """Refuse a tier that does not exist."""
    if tier not in (None, "torch", "triton"):
        raise UserError(f"tier must be 'torch', 'triton' or None, not {tier!r}")


def run_op(
    name: str,
    tier: Tier,
    device: torch.device,
    torch_impl: Callable[..., Any],
    triton_impl: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the implementation of operation ``name`` that ``tier``, the device and `use` ask for.

    Args:
        torch_impl: The function of the operation's ``reference.py``.
        triton_impl: ``"package.kernels:function"``, imported only when it is called, so that the package
            works without Triton. None while the operation has no kernel.
    """
    replaced = replacement(name)
    if replaced is not None:
        return replaced(*args, **kwargs)
    check_tier(tier)
    if tier == "triton" and triton_impl is None:
        raise UserError(f"{name} has no Triton kernel yet; use tier='torch' or leave tier away")
    if tier == "triton" or (tier is None and device.type == "cuda" and triton_impl is not None):
        assert triton_impl is not None
        module, function = triton_impl.split(":")
        try:
            kernels = import_module(module)
        except ImportError as error:
            raise UserError(f"tier='triton' needs the package triton, which cannot be imported ({error})") from error
        return getattr(kernels, function)(*args, **kwargs)
    return torch_impl(*args, **kwargs)
