"""What a training engine steps instead of the model's parameters.

A reader (deepspeed.py, fsdp1.py, megatron.py) recognises its engine by the objects that it is given, and answers one
question: where are the entries of this parameter that this process steps? All else works on the answer, a FlatTensor
for each parameter, without knowing the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quacklr.core.local import FlatTensor
from quacklr.core.path import LogitPath, changed
from quacklr.core.rule import Stepped
from quacklr.core.weight import Weight
from quacklr.sharded.collectives import Groups

NOT_READ = "{}'s {} keeps its weights in a way that QuacK cannot read, so their steps would not be scaled; {}"
PASS_ON = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # their wrappers only call `step`


@dataclass(frozen=True)
class Engine:
    """The flat ranges of an engine; by default that of no engine, where optimizers step the parameters themselves."""

    optimizers: list[Any] | None = None  # the torch optimizers that move the ranges; None if they are those given
    shards: Mapping[int, FlatTensor] = field(default_factory=dict)  # the local range of a parameter, by its id
    stepped: Stepped = field(default_factory=Stepped)  # which parameters the param groups step
    data_groups: Groups | None = None  # the process groups whose ranks see different data; None if the model shows it
    gathers: bool = False  # whether the model has whole parameters only while it runs
    tensor_parallel: bool = False  # whether the heads are divided among ranks
    validate_weight: Callable[[Weight], None] = lambda _: None  # ValueError if its division is not supported
    filled_groups: Callable[[], AbstractContextManager[None]] = nullcontext  # puts all tensors into them

    def located(self, paths: Iterable[LogitPath]) -> list[LogitPath]:
        """The same paths, over the ranges that are stepped instead of the model's parameters."""
        paths = list(paths)
        for weight in dict.fromkeys(weight for path in paths for weight in path.weights):
            self.validate_weight(weight)
        return changed(paths, self._located) if self.shards else paths

    def _located(self, weight: Weight) -> Weight:
        bias = self._located(weight.bias) if isinstance(weight.bias, Weight) else None
        return replace(weight, param=self.shards.get(id(weight.param), weight.param), bias=bias)

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """While entered, all parameters have their whole shapes; those that are gathered have no values."""
        shards = list(self.shards.values()) if self.gathers else []
        kept = [shard.param.data for shard in shards]
        try:
            for shard in shards:
                shard.param.data = shard.param.data.new_zeros(1).expand(shard.shape)
            yield
        finally:
            for shard, data in zip(shards, kept, strict=True):
                shard.param.data = data


def flat_range(
    param: Tensor, shape: Sequence[int], start: int, group: Any, flat: Tensor, at: int = 0, size: int | None = None
) -> FlatTensor:
    """The entries from `start` of a parameter, which are `size` entries from `at` of what the optimizer steps.

    Without `size` all to the end; none if it is negative.
    """
    end = flat.numel() if size is None else at + max(size, 0)
    return FlatTensor(param, shape, lambda: flat.detach().view(-1)[at:end], start, group, lambda: flat.grad)


def validate_settings(engine: str, objects: Iterable[Any], refused: Mapping[str, tuple[str, str]]) -> None:
    """ValueError if an object has one of these settings; `refused` has its name in English, and what to do instead."""
    for each in objects:
        for setting, (name, instead) in refused.items():
            if getattr(each, setting, None):
                raise ValueError(NOT_READ.format(engine, name, instead))


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
