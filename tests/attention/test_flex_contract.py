"""What quacklr.attention.flex relies on in torch's flex attention beyond its documentation. Tried with torch 2.13.0.

If a test here fails after an update of torch, flex attention has changed its internals, and flex.py must follow.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from quacklr.attention.flex import is_flex, run_flex
from quacklr.util.modules import run_uncompiled

TRIED = "2.13.0"


def changed(what: str) -> str:
    return f"torch {torch.__version__} differs from torch {TRIED}: {what}"


class Operator(TorchFunctionMode):
    """Records the arguments and outputs of flex attention's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_flex(func):
            assert not kwargs, changed("the operator has keyword arguments")
            self.calls.append((args, output))
        return output


def half(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
    return score / 2


def causal(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    return q, k, v


@pytest.fixture
def call() -> Any:
    mask = flex.create_block_mask(causal, None, None, 5, 5, device="cpu")
    with warnings.catch_warnings(action="ignore"), run_uncompiled(), torch.no_grad(), Operator() as mode:
        flex.flex_attention(*inputs(), score_mod=half, block_mask=mask, scale=0.5)
    assert len(mode.calls) == 1, changed("flex_attention is no higher-order operator of that name; is_flex")
    return mode.calls[0]


def test_the_operator_has_the_arguments_that_flex_logits_names(call: Any) -> None:
    query, key, value, score_mod, block_mask, scale, options, *buffers = call[0]
    for given, expected in zip((query, key, value), inputs(), strict=True):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
    assert score_mod is half, changed("the fourth argument is not score_mod")
    assert block_mask[-1] is causal, changed("the last entry of the block mask is not mask_mod")
    assert scale == 0.5, changed("the sixth argument is not the scale")
    assert isinstance(options, dict), changed("the seventh argument is not the kernel's options")
    assert buffers in ([], [(), ()]), changed("the last arguments are not two tuples of buffers")


def test_the_operator_returns_the_output_and_logarithms_to_base_2(call: Any) -> None:
    q, k, v = inputs()
    logits = (q @ k.mT / 4).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    wanted = (logits.softmax(-1) @ v, logits.logsumexp(-1) / math.log(2), logits.amax(-1) / math.log(2))
    assert len(call[1]) == 3, changed("the operator does not return output, logsumexp and maxima")
    for name, ours, theirs, expected in zip(("output", "lse", "max"), run_flex(*call[0]), call[1], wanted, strict=True):
        torch.testing.assert_close(ours, expected, msg=f"run_flex: {name}")
        if name != "max":  # which torch computes only if it is asked for
            torch.testing.assert_close(theirs, expected, msg=changed(f"the operator returns another {name}"))
