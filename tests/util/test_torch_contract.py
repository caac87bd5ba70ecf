"""What quacklr.util relies on in torch beyond its documentation. Tried with torch 2.13.0.

If a test here fails after an update of torch, torch has changed one of its internals; the message has the code of
quacklr that must follow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from quacklr.util.modules import untouched
from quacklr.util.torch_functions import LAYOUT, MATRIX_T, MULTIHEAD, SOFTMAX, multihead_opened

TRIED = "2.13.0"


def changed(what: str) -> str:
    return f"torch {torch.__version__} differs from torch {TRIED}: {what}"


class Called(TorchFunctionMode):
    """Records the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        if func is MULTIHEAD:
            with self:
                return multihead_opened(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_multi_head_attention_forward_begins_with_a_check_that_can_be_replaced() -> None:
    """quacklr.util.torch_functions.multihead_opened rebuilds it with another `has_torch_function`."""
    assert "has_torch_function" in MULTIHEAD.__code__.co_names, changed("it does not call has_torch_function by name")
    assert "has_torch_function" in MULTIHEAD.__globals__, changed("has_torch_function is not a global of its file")
    assert MULTIHEAD.__closure__ is None, changed("multi_head_attention_forward is a closure")


def test_a_function_mode_sees_each_softmax_and_transposition_as_a_function_of_the_tables() -> None:
    x = torch.randn(2, 3)
    with Called() as called:
        softmaxes = [x.softmax(-1), torch.softmax(x, -1), F.softmax(x, -1), torch.special.softmax(x, -1)]
    assert len(softmaxes) == 4
    assert set(called.functions) <= SOFTMAX, changed("a softmax is another function")
    with Called() as called:
        transposed = x.mT
    assert transposed.shape == (3, 2)
    assert called.functions == [MATRIX_T], changed("x.mT is another function; quacklr.util.torch_functions.MATRIX_T")
    assert MATRIX_T in LAYOUT


def test_copies_of_views_of_one_tensor_are_views_of_one_copy() -> None:
    model: Any = nn.Linear(2, 2)
    model.whole = torch.zeros(4)
    model.part = model.whole[1:3]
    with untouched(model):
        model.part.add_(1)
        assert model.whole.tolist() == [0, 1, 1, 0]
    assert model.whole.tolist() == [0, 0, 0, 0]
