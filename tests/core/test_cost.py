"""What a step may cost: operations, memory, and no waiting for the device. Times are in benchmarks/."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import Latent, PerHead, Separate, layers, train
from quacklr import Limit, Paper, QuacK, Rule, spectral

RULES = [Paper, partial(Paper, norm=spectral), Limit]
VIEWS = {"detach", "view", "as_strided", "split_with_sizes", "permute", "transpose", "unsqueeze", "alias"}


class Operations(TorchDispatchMode):
    """Counts operations by name, and follows the most bytes of storage allocated by them that was alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[name] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and name not in VIEWS and not name.endswith("_") and "out" not in (kwargs or {}):
            storage = result.untyped_storage()
            self.alive[id(storage)] = storage.nbytes()
            self.most = max(self.most, sum(self.alive.values()))
        return result


def ready(model: nn.Module, rule: Callable[[], Rule] = Paper) -> tuple[torch.optim.Optimizer, QuacK]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer, rule=rule())
    train(model, optimizer, steps=2)
    return optimizer, quack


def hooks(model: nn.Module, rule: Callable[[], Rule] = Paper) -> Counter[str]:
    """The operations of QuacK's two hooks in a step."""
    optimizer, quack = ready(model, rule)
    with Operations() as operations:
        quack._scaler.before(optimizer)
        quack._scaler.after(optimizer)
    return operations.names


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "attention", [lambda h: Separate(16, h, h // 2), lambda h: PerHead(16, h), lambda h: Latent(16, h)]
)
def test_the_number_of_operations_does_not_depend_on_the_number_of_heads(
    attention: Callable[[int], nn.Module], rule: Callable[[], Rule]
) -> None:
    few, many = (hooks(nn.Sequential(attention(heads)), rule) for heads in (2, 8))
    assert few == many


@pytest.mark.parametrize(("rule", "most"), [(Paper, 13), (partial(Paper, norm=spectral), 45), (Limit, 60)])
@pytest.mark.parametrize("attention", [Separate, lambda: PerHead(bias=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_operations_does_not_depend_on_the_number_of_layers(
    attention: Callable[[], nn.Module], rule: Callable[[], Rule], most: int, dtype: torch.dtype
) -> None:
    few, some, many = (hooks(layers(count, attention).to(dtype), rule) for count in (2, 8, 32))
    assert few == some == many
    assert many.total() <= most + 4 * (dtype == torch.bfloat16)  # its steps are scaled in float32


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("attention", [Separate, PerHead, Latent])
def test_a_step_never_waits_for_the_device(attention: Callable[[], nn.Module], rule: Callable[[], Rule]) -> None:
    """Reading a number on the host is `_local_scalar_dense`; copies to the host would be `_to_copy`."""
    names = set(hooks(nn.Sequential(attention()), rule))
    assert not names & {"_local_scalar_dense", "_to_copy", "nonzero", "item", "equal", "is_nonzero"}


def bytes_alive() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("model", [lambda: layers(3, lambda: Separate(64)), lambda: layers(3, lambda: PerHead(64))])
def test_a_step_takes_one_copy_of_the_rows_on_a_path_and_no_more(model: Callable[[], nn.Module]) -> None:
    attention = model()
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    quack = QuacK(attention, optimizer, tau=1.0)
    for param in attention.parameters():
        param.grad = torch.zeros_like(param)
    rows = 3 * 2 * 64 * 64 * 4
    before = bytes_alive()
    quack._scaler.before(optimizer)
    inside = bytes_alive()
    quack._scaler.after(optimizer)
    assert rows <= inside - before <= rows + 1000
    with Operations() as operations:
        quack._scaler.before(optimizer)
        quack._scaler.after(optimizer)
    assert operations.most < 1000  # a second step takes nothing but vectors of a number a head


def test_memory_does_not_grow_over_many_steps() -> None:
    model = layers(2, Separate)
    optimizer, quack = ready(model)
    before = bytes_alive()
    train(model, optimizer, steps=20)
    quack.rates()
    assert bytes_alive() <= before + 1000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_it_works_under_torch_compile_of_the_step() -> None:
    """The hooks run as they are, the optimizer's own code is compiled; judge: the eager run."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = layers(2, PerHead)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        quack = QuacK(model, optimizer, tau=0.5)
        if compiled:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        train(model, optimizer, steps=4)
        results.append((quack.rates(), [param.detach() for param in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert (results[0][0]["0.q"] - 0.5).abs().max() > 0.001
