"""A measurement leaves no trace: a training run with and without it is bitwise the same."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr import LogitMonitor
from quacklr.find.measure.assemble import measured_paths
from quacklr.util.modules import untouched
from stand_ins_kit import HF, Model, Plain

SAMPLE = torch.randint(61, (3, 5), generator=torch.Generator().manual_seed(0))


class FourHeads(Plain):
    num_heads = 4  # LogitMonitor reads it: a sequence has other logits alone, where state mixes sequences


class AuxiliaryLosses(Plain):
    """As a mixture of experts: every forward appends to a list, which the loss adds up and clears."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.losses.append(query.square().mean())
        return super().attend(query, key, value)


class Cached(FourHeads):
    """The values of the first forward, in a dict in a list, are added to those of later ones, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[dict[str, Tensor]] = [{}]
        self.seen: set[int] = set()
        self.last: deque[float] = deque(maxlen=3)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cached = self.caches[0].setdefault("value", value.detach().clone())
        cached += 0.1
        self.seen.add(len(self.seen))
        self.last.append(float(cached.sum()))
        return super().attend(query, key, value + cached * len(self.seen) * sum(self.last))


@dataclass(slots=True)
class Layer:
    keys: Tensor = field(default_factory=lambda: torch.zeros(3, 2, 5, 8))
    last: tuple[Tensor, int] = field(default_factory=lambda: (torch.zeros(3, 2, 5, 8), 0))


class KeyCache:
    """A plain object with the keys of earlier forwards."""

    def __init__(self) -> None:
        self.layers, self.length = [Layer()], 0

    def update(self, key: Tensor) -> Tensor:
        layer = self.layers[0]
        layer.keys.add_(key.detach())
        layer.last[0].copy_(layer.keys)
        layer.last = layer.last[0], layer.last[1] + 1
        self.length += 1
        return key + (layer.keys + layer.last[0] * layer.last[1]) / 100 / self.length


class WithObject(FourHeads):
    def __init__(self) -> None:
        super().__init__()
        self.cache = KeyCache()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, self.cache.update(key), value)


class Counting(Plain):
    """Queries depend on the number of forwards, and on a view of a buffer that has it too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros(2))
        self.view = self.get_buffer("count")[:1]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls += 1
        self.get_buffer("count").add_(1)
        return super().attend(query * self.calls + self.view, key, value)


class Normed(FourHeads):
    """Batch norm that updates its statistics in eval mode too, and dropout in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mean = value.detach().mean((0, 2, 3))
        self.norm.get_buffer("running_mean").lerp_(mean, 0.5)
        value = self.norm(value.flatten(2)).view_as(value) + self.norm.get_buffer("running_mean").view(1, 2, 1, 1)
        return super().attend(query, key, F.dropout(value, 0.3) * random.random())


class Registering(Plain):
    """A forward hook that registers another one at every call; each of them adds 1 to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(self.register)

    @staticmethod
    def register(module: nn.Module, _: Any, __: Any) -> None:
        module.register_forward_hook(lambda _module, _args, output: output + 1)


def parametrised() -> Plain:
    attention = Plain()
    nn.utils.parametrizations.spectral_norm(attention.v_proj)
    nn.utils.parametrizations.weight_norm(attention.o_proj)
    return attention


def spectral() -> Plain:
    """The older spectral norm: a pre-hook writes the weight, and two buffers."""
    attention = Plain()
    nn.utils.spectral_norm(attention.v_proj)
    return attention


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(SAMPLE).float().square().mean()
    for module in model.modules():
        if isinstance(module, AuxiliaryLosses):
            loss = loss + sum(module.losses)
            module.losses.clear()
    return loss


def train(make: Callable[[], nn.Module], measure: Callable[[nn.Module], object]) -> list[Any]:
    """Losses and weights of three steps of two backward passes each; `measure` runs between all of them."""
    torch.manual_seed(0)
    random.seed(0)
    layers = make(), make()
    for layer in layers:
        vars(layer)["num_heads"] = 4  # else the monitor runs the sequences apart, and these models mix them
    model = Model(HF, *layers).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(3):
        for _ in range(2):
            loss = loss_of(model)
            measure(model)
            loss.backward()
            measure(model)
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return [*found, *model.state_dict().values(), loss_of(model.eval()).detach(), torch.rand(3), random.random()]


@pytest.mark.parametrize(
    "measure",
    [lambda model: measured_paths(model, SAMPLE), lambda model: LogitMonitor(model, SAMPLE).measure()],
    ids=["measured_paths", "LogitMonitor"],
)
@pytest.mark.parametrize(
    "make", [AuxiliaryLosses, Cached, WithObject, Counting, Normed, Registering, parametrised, spectral, Plain]
)
def test_a_run_with_and_without_measuring_is_bitwise_the_same(
    make: Callable[[], nn.Module], measure: Callable[[nn.Module], object]
) -> None:
    for one, other in zip(train(make, measure), train(make, lambda _: None), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_containers_and_buffers_stay_the_same_objects() -> None:
    model = Cached()
    model.register_buffer("buffer", torch.ones(2))
    caches, first, buffer = model.caches, model.caches[0], model.get_buffer("buffer")
    with untouched(model):
        assert model.get_buffer("buffer") is not buffer
        model.get_buffer("buffer").zero_()
        model.caches[0]["new"] = torch.ones(1)
        model.caches = []
        model.eval()
        del model.seen
        model.extra = nn.Linear(1, 1)
    assert model.caches is caches
    assert model.caches[0] is first
    assert not first
    assert model.get_buffer("buffer") is buffer
    assert buffer.tolist() == [1, 1]
    assert model.training
    assert model.seen == set()
    assert "extra" not in dict(model.named_children())


def test_gradients_inside_are_gone_and_those_before_are_kept() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = before = torch.ones(2, 2)
    with untouched(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(2, 2))
    assert model.bias.grad is None


def test_an_object_that_refers_to_a_module_is_not_touched() -> None:
    """A Trainer has its own state: what it does while a model is measured stays done."""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.log = model, list[int]()

    model: Any = nn.Linear(2, 2)
    model.trainer = Trainer(model)
    with untouched(model):
        model.trainer.log.append(1)
    assert model.trainer.log == [1]


def test_a_generator_of_the_model_continues_as_if_not_used() -> None:
    model: Any = nn.Linear(2, 2)
    model.generator = torch.Generator().manual_seed(0)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    with untouched(model):
        torch.rand(3, generator=model.generator)
    assert torch.equal(torch.rand(3, generator=model.generator), expected)
