"""Which steps of speed an engine takes: each can be switched off alone, to see what it is worth."""

from dataclasses import dataclass, fields

from minipaged.errors import UserError


@dataclass(frozen=True)
class Steps:
    """The steps, lowest first. None means: where it pays, which is on a GPU.

    Args:
        fused: Packed weights and fused kernels; see `minipaged.fast.fused`.
        graphs: Decode steps in batches of a few fixed sizes, each recorded once as a CUDA graph; see
            `minipaged.fast.graphs`. On a CPU the sizes alone.
        device_batch: Block tables and sampling settings stay on the GPU, and tokens are chosen there; see
            `minipaged.fast.device_batch`.
        overlap: A step is planned while the one before it runs; see `minipaged.fast.engine`. Needs ``device_batch``.
    """

    fused: bool = False
    graphs: bool = False
    device_batch: bool = False
    overlap: bool = False

    def __bool__(self) -> bool:
        """Return whether any step is taken."""
        return bool(self.taken)

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the names of the steps that are taken."""
        return tuple(name for name, is_taken in vars(self).items() if is_taken)


NAMES = tuple(each.name for each in fields(Steps))


def choose_steps(wanted: dict[str, bool | None], enforce_eager: bool, reason_against: str | None, pays: bool) -> Steps:
    """Return the steps to take.

    Args:
        wanted: What the user asks for, by name; None leaves it to the rule.
        enforce_eager: No CUDA graphs.
        reason_against: Why this engine can take no step at all, if it cannot.
        pays: Whether the steps are taken when nobody asks.

    Raises:
        UserError: A step is asked for that cannot be taken.

    Example:
        >>> choose_steps({"overlap": False}, enforce_eager=True, reason_against=None, pays=True)
        Steps(fused=True, graphs=False, device_batch=True, overlap=False)
    """
    for name, value in {**wanted, "enforce_eager": enforce_eager}.items():
        if type(value) is not bool and (value is not None or name not in wanted):
            raise UserError(f"{name} must be True or False, not {value!r}")
    asked = [name for name in NAMES if wanted.get(name)]
    if asked and reason_against:
        raise UserError(f"{asked[0]} cannot be had: {reason_against}")
    if enforce_eager and wanted.get("graphs"):
        raise UserError("graphs and enforce_eager exclude each other")
    if wanted.get("overlap") and wanted.get("device_batch") is False:
        raise UserError("overlap needs device_batch: tokens that leave the GPU at every step cannot come late")
    taken = {name: (pays and not reason_against) if wanted.get(name) is None else bool(wanted[name]) for name in NAMES}
    if wanted.get("overlap"):
        taken["device_batch"] = True
    taken["graphs"] &= not enforce_eager
    taken["overlap"] &= taken["device_batch"]
    return Steps(**taken)
