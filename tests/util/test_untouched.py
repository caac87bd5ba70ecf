"""A measurement leaves no trace: a training run with and without it is bitwise the same."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

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


class WithArrays(Plain):
    """Arrays that are not tensors, one of them in a dict: every forward writes into them, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.scalar, self.sizes = np.zeros((2, 3)), np.array(1.0), {"last": np.zeros(6)[::2]}
        self.raw, self.numbers = bytearray(2), array("d", [1.0])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.counts[0] += 1
        self.scalar += 0.5
        self.sizes["last"][1] += 1
        self.raw.append(len(self.raw))
        self.numbers[0] += 1
        read = [self.counts.sum(), self.scalar, self.sizes["last"].sum(), len(self.raw), *self.numbers]
        return super().attend(query, key, value * sum(map(float, read)))


class WithGenerators(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.older = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        drawn = self.python.gauss(0, 1) + self.numpy.random() + self.older.normal()
        return super().attend(query, key, value * (drawn + torch.rand(1, generator=self.torch)))


class Recorder:
    """Refers to the module that it records, to an optimizer, and to itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.optimizer, self.parent = module, torch.optim.SGD(module.parameters(), lr=0.1), self
        self.losses: list[Tensor] = []
        self.mean = torch.zeros(())
        self.calls = 0

    def record(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach())
        self.mean.lerp_(loss.detach(), 0.5)
        self.calls += 1
        return torch.stack(self.losses).sum() + self.mean + self.calls

    def on_forward(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * self.record(output.mean())


class Recorded(FourHeads):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(self)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, key, value * self.recorder.record(value.mean()))


def recorded_by_a_hook() -> Plain:
    attention = Plain()
    attention.register_forward_hook(partial(Recorder(attention).on_forward))
    return attention


def with_class_attributes() -> Plain:
    """A class of its own, because the run that is compared begins with the same attributes."""

    class Shared:
        calls = 0

    class Counter(Shared, Plain):
        losses: ClassVar[list[Tensor]] = []
        mean: ClassVar[Tensor] = torch.zeros(())
        last: ClassVar[Tensor]

        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            Shared.calls += 1
            type(self).last = query.detach().mean()
            self.losses.append(getattr(type(self), "last", self.mean))
            self.mean.lerp_(self.losses[-1], 0.5)
            return super().attend(query, key, value * (torch.stack(self.losses).sum() + self.calls + self.mean))

    return Counter()


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
    "make",
    [
        *(AuxiliaryLosses, Cached, WithObject, Counting, Normed, Registering, parametrised, spectral, Plain),
        *(WithArrays, WithGenerators, Recorded, recorded_by_a_hook, with_class_attributes),
    ],
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


class OwnOptimizer(torch.optim.SGD):
    pass


class Examples(Dataset[int]):
    def __init__(self) -> None:
        self.read: list[int] = []


class Engine:
    """As an optimizer of DeepSpeed, which derives from no class of torch."""

    def __init__(self) -> None:
        self.masters: list[int] = []

    @property
    def param_groups(self) -> list[Any]:
        return []


class Trainer:
    """Has state of its own and refers to objects that are not state of a forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.log, self.progress = model, list[int](), {"done": 0}
        self.optimizer = OwnOptimizer(model.parameters(), lr=0.1, momentum=0.9)
        self.examples, self.engine, self.queue = Examples(), Engine(), Queue[int]()


def test_of_an_object_that_refers_to_a_module_its_own_lists_are_restored_and_no_optimizer_dataset_or_queue() -> None:
    model: Any = nn.Linear(2, 2)
    model.trainer = trainer = Trainer(model)
    with untouched(model):
        trainer.log.append(1)
        trainer.progress["done"] = 1
        trainer.optimizer.param_groups[0]["lr"] = 0.2
        trainer.optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(2, 2)
        trainer.queue.put(1)
        trainer.examples.read.append(1)
        trainer.engine.masters.append(1)
    assert (trainer.log, trainer.progress) == ([], {"done": 0})
    assert trainer.optimizer.param_groups[0]["lr"] == 0.2
    assert model.weight in trainer.optimizer.state
    assert trainer.examples.read == trainer.engine.masters == [1]
    assert trainer.queue.get_nowait() == 1, "another thread may read it"


def test_class_attributes_of_the_models_own_classes_are_restored_and_torchs_are_not_looked_at() -> None:
    class Own(nn.Linear):
        names: ClassVar[list[str]] = []

    model = Own(2, 2)
    try:
        with untouched(model):
            Own.names.append("a")
            Own.new = 1  # type: ignore[attr-defined]
            nn.Linear.new = 1  # type: ignore[attr-defined]
        assert Own.names == []
        assert "new" not in vars(Own)
        assert "new" in vars(nn.Linear)
    finally:
        del nn.Linear.new  # type: ignore[attr-defined]
