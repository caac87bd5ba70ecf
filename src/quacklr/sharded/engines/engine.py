"""What a training engine steps instead of the model's parameters.

A reader (deepspeed.py, fsdp1.py, megatron.py) recognises its engine by the objects that it is given, and answers one
question: where are the entries of this parameter that this process steps? All else works on the answer, a FlatTensor
for each parameter, without knowing the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.flat_tensor import FlatTensor
from quacklr.core.path import LogitPath
from quacklr.core.stepped import PLAIN, Group, Stepped
from quacklr.core.weight import Weight
from quacklr.sharded.collectives import Groups

REPLACED = (
    "{} has put other tensors into the param groups since QuacK was attached, so QuacK would not scale their steps; "
    "attach a new one"
)
PASS_ON = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # their wrappers only call `step`


@dataclass(frozen=True)
class Engine:
    """The flat ranges of an engine; by default that of no engine, where optimizers step the parameters themselves.

    Attributes:
        optimizers: the torch optimizers whose steps move the ranges; None if they are those that were given.
        shards: for each parameter that is stepped in flat ranges, by its id, the local range.
        stepped: which parameters the param groups step.
        data_groups: the process groups whose ranks see different data; None if the model shows it.
        gathers: whether the model has whole parameters only while it runs.
        tensor_parallel: whether the heads are divided among ranks.
        whole_shapes: a context in which all parameters of the model have their whole shapes, but no values.
        validate_weight: raises ValueError for a weight that the engine divides in a way that is not supported.
        filled_groups: a context in which the param groups have all tensors that the optimizers step.
    """

    optimizers: list[Any] | None = None
    shards: Mapping[int, FlatTensor] = field(default_factory=dict)
    stepped: Stepped = PLAIN
    data_groups: Groups | None = None
    gathers: bool = False
    tensor_parallel: bool = False
    whole_shapes: Callable[[], AbstractContextManager[None]] = nullcontext
    validate_weight: Callable[[Weight], None] = lambda _: None
    filled_groups: Callable[[], AbstractContextManager[None]] = nullcontext

    def located(self, paths: Iterable[LogitPath]) -> list[LogitPath]:
        """The same paths, over the ranges that are stepped instead of the model's parameters."""
        paths = list(paths)
        for weight in dict.fromkeys(weight for path in paths for weight in path.weights):
            self.validate_weight(weight)
        if not self.shards:
            return paths
        weights = {weight: self._located(weight) for path in paths for weight in path.weights}
        return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]

    def _located(self, weight: Weight) -> Weight:
        bias = self._located(weight.bias) if isinstance(weight.bias, Weight) else None
        return replace(weight, param=self.shards.get(id(weight.param), weight.param), bias=bias)


class CompleteGroups(Stepped):
    """Param groups of an engine that has only flat tensors in them. RuntimeError if they were replaced."""

    def __init__(self, of_tensor: Mapping[int, Iterable[int]], engine: str) -> None:
        super().__init__({key: tuple(ids) for key, ids in of_tensor.items()})
        self._engine = engine

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups that the optimizer has now, each with the ids of its parameters."""
        if any(id(tensor) not in self._of_tensor for group in optimizer.param_groups for tensor in group["params"]):
            raise RuntimeError(REPLACED.format(self._engine))
        return super().groups(optimizer)


@contextmanager
def shaped(shapes: Iterable[tuple[Tensor, Iterable[int]]]) -> Iterator[None]:
    """While entered, parameters have these shapes and no values: all their entries are in one place of memory."""
    shapes = list(shapes)
    kept = [param.data for param, _ in shapes]
    try:
        for param, shape in shapes:
            param.data = param.data.new_zeros(1).expand(tuple(shape))
        yield
    finally:
        for (param, _), data in zip(shapes, kept, strict=True):
            param.data = data


def class_names(given: object) -> set[str]:
    """The names of the classes that an object is of, each with its package: "deepspeed.DeepSpeedEngine"."""
    return {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(given).__mro__}


def unwrapped_optimizer(given: Any) -> Any:
    """The optimizer inside a wrapper that only calls its `step`; also the only one of a list."""
    if isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]
    while type(given).__module__.split(".")[0] in PASS_ON and hasattr(given, "optimizer"):
        given = given.optimizer
    return given
