"""A model and the optimizers that train it, as QuacK and QK clip need them: which weights step, and on which paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quacklr.attach.optimizers import as_optimizers
from quacklr.core.path import LogitPath, as_paths
from quacklr.core.stepped import Stepped
from quacklr.find.discover import logit_paths
from quacklr.find.finding import Finding
from quacklr.find.verify import Verification
from quacklr.sharded.collectives import reshard
from quacklr.sharded.engines.read import as_module, engine_of


class Attachment:
    """The optimizers, and the paths over the tensors that they step.

    Attributes:
        module: the model; None if paths were given instead.
        engine: the training engine that divides the parameters among processes, if there is one.
        optimizers: those whose steps move the weights.
        in_groups: which parameters their param groups step.
        paths: the paths, over the tensors that are stepped.
        found: by module name, how its attention was found.
        left_alone: by module name, why its attention is on no path.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        linear: bool,
        verify: bool,
    ) -> None:
        self.module = as_module(model)
        self.engine = engine_of(self.module, optimizer)
        self.optimizers = as_optimizers(self.engine.optimizers or optimizer, linear)
        self.in_groups: Stepped = self.engine.stepped
        reshard(self.module)
        with self.engine.whole_shapes():
            given: Any = model if self.module is None else logit_paths(self.module)
        self.left_alone: Mapping[str, str] = getattr(given, "left_alone", {})
        self.found: Mapping[str, Finding] = getattr(given, "found", {})
        self.paths = self.engine.located(as_paths(given, "the model must be an nn.Module or"))
        self.verification = (
            None if self.module is None else Verification(self.module, self.found, verify, self.engine.gathers)
        )

    def remove(self) -> None:
        """Remove the hooks from the model."""
        if self.verification is not None:
            self.verification.remove()
