"""How much one step may compute."""

from minipaged.errors import UserError

MAX_NUM_SEQS = 256
"""Seats in the batch when nobody says. A decode step reads all weights once for everybody, so more seats pay."""

MAX_NUM_BATCHED_TOKENS = 8192
"""Tokens of one step when nobody says: enough to keep a GPU's matrix units busy, few enough for small activations."""


MAX_PASSED = 64
"""Most requests that one step looks past, so that its time does not depend on the queue."""


def check_sequences(num_sequences: int, max_num_seqs: int) -> None:
    """Refuse a request of more sequences than may run at a time: it would wait for ever."""
    if num_sequences > max_num_seqs:
        raise UserError(
            f"the request has {num_sequences} sequences; at most {max_num_seqs} run at a time (max_num_seqs)"
        )


def check_limits(max_num_seqs: int | None, max_num_batched_tokens: int) -> None:
    """Refuse limits of a step that are no numbers from 1, and more sequences than one step has tokens."""
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} must be a whole number from 1, not {value!r}")
    if max_num_seqs is not None and max_num_seqs > max_num_batched_tokens:
        raise UserError(
            f"max_num_seqs must be at most max_num_batched_tokens, which is {max_num_batched_tokens}, not "
            f"{max_num_seqs}: a step computes one token of every sequence"
        )
