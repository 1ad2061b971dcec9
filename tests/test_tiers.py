"""How an implementation is chosen, and how a reader's own takes its place."""

import pytest
import torch

from minipaged import UserError, use
from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.paged.ops import paged_attention
from minipaged.tiers import parts, replacement, run_op


def test_use_replaces_an_operation_inside_and_nowhere_else():
    inputs = make_paged_inputs(AttentionCase("small", (3,)))
    calls = []

    def mine(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window):
        calls.append((scale, window))
        return q + 1

    with use(paged_attention=mine):
        assert torch.equal(paged_attention(*inputs.args, window=2), inputs.q + 1)
    assert calls == [(0.25, 2)]
    assert not torch.equal(paged_attention(*inputs.args), inputs.q + 1)


def test_uses_nest_and_the_innermost_wins():
    with use(block_pool=int):
        with use(block_pool=str):
            assert replacement("block_pool") is str
        assert replacement("block_pool") is int
    assert replacement("block_pool") is None


def test_an_unknown_part_is_refused_with_the_closest_name_and_all_names_but_no_contracts():
    with pytest.raises(UserError) as refusal, use(paged_atention=print):
        pass
    message = str(refusal.value)
    assert message.startswith("no part is called 'paged_atention', perhaps you mean paged_attention; the parts are ")
    assert message.endswith(", ".join(parts()))
    assert "->" not in message


def test_a_name_that_is_close_to_none_is_refused_without_a_guess():
    with pytest.raises(UserError, match=r"^no part is called 'soup'; the parts are "), use(soup=print):
        pass


@pytest.mark.parametrize("value", [None, 3, "paged_attention", []])
def test_something_that_cannot_be_called_is_refused_by_the_name_of_its_part(value):
    with pytest.raises(UserError) as refusal, use(block_pool=value):
        pass
    assert str(refusal.value) == f"the part 'block_pool' must be a function or a class, not {value!r}"
    assert replacement("block_pool") is None


def test_the_parts_are_listed_with_one_line_on_each_and_the_list_is_a_copy():
    known = parts()
    assert list(known) == sorted(known)
    assert known["prepare_write"].startswith("(cache, seq_id) -> None")
    assert all(contract and "\n" not in contract for contract in known.values())
    known.clear()
    assert parts()


def test_a_tier_that_does_not_exist_is_refused():
    inputs = make_paged_inputs(AttentionCase("small", (3,)))
    with pytest.raises(UserError, match="tier must be 'torch', 'triton' or None, not 'fast'"):
        paged_attention(*inputs.args, tier="fast")


def test_an_explicit_tier_never_falls_back():
    with pytest.raises(UserError, match="soup has no Triton kernel yet"):
        run_op("soup", "triton", torch.device("cpu"), lambda: "torch", None)
    assert run_op("soup", None, torch.device("cuda"), lambda: "torch", None) == "torch"


def test_an_operation_on_a_machine_without_triton_refuses_the_tier_in_one_sentence(run_python):
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from minipaged import UserError\n"
        "from minipaged.foundation.ops import silu_mul\n"
        "x = torch.ones(2, 4)\n"
        "assert silu_mul(x, x).shape == (2, 4)\n"
        "try:\n"
        "    silu_mul(x, x, tier='triton')\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tier='triton' needs the package triton, which cannot be imported")
