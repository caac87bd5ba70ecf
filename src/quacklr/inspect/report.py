"""What `quacklr inspect` prints: the attention layers of a model, what is left alone and why, and what QuacK does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD

from quacklr.core.path import LogitPath
from quacklr.describe import FROZEN, UNRATED, weight_term
from quacklr.find.discover import LogitPaths, logit_paths
from quacklr.inspect.target import Target
from quacklr.quack import QuacK
from quacklr.util.layer_names import pattern, shape
from quacklr.util.modules import named_modules, named_parameters
from quacklr.util.text_table import columns, grouped

TITLES = ("attention", "class", "found", "heads", "logit", "scale", "weights")


@dataclass(frozen=True, slots=True)
class Report:
    """The paths of a model. `call` attaches QuacK to it; `error` is the error that the call raises, or ""."""

    name: str
    model: nn.Module
    call: str
    paths: LogitPaths
    error: str

    @property
    def unknown(self) -> list[str]:
        """The attention layers that are not recognised."""
        return [name for name, finding in self.paths.found.items() if finding.unknown]

    @property
    def left_alone(self) -> dict[str, str]:
        """Why attention layers, or weights of them, get no rate."""
        weights = [weight for path in self.paths for weight in path.weights if not weight.trains]
        return {**self.paths.left_alone, **{w.name: FROZEN if w.rated else UNRATED for w in weights}}

    @property
    def summary(self) -> str:
        """One sentence: what QuacK does with the model."""
        if self.error:
            return f"{self.call} raises: {self.error}"
        unknown = f", {len(self.unknown)} not recognised" if self.unknown else ""
        return (
            f"{self.call} attaches to {len(self.paths.by_module)} of {len(self.paths.found)} attention layers{unknown}"
        )

    @property
    def exit_code(self) -> int:
        """0 if QuacK attaches and every layer is recognised."""
        return int(bool(self.error or self.unknown))

    def __str__(self) -> str:
        made = "shapes only" if _on_meta(self.model) else "with its weights"
        sections = [[f"{self.name}: {type(self.model).__name__}, {made}"], self._table()]
        sections += [["left alone:", *grouped(self.left_alone.items())] if self.left_alone else [], [self.summary]]
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _table(self) -> list[str]:
        """One row for all layers that are equal but for the numbers in their names."""
        classes = {name: type(module).__name__ for name, module in named_modules(self.model)}
        parameters = {id(parameter): name for name, parameter in named_parameters(self.model)}
        equal: dict[tuple[str, ...], list[str]] = {}
        for module, paths in self.paths.by_module.items():
            key = shape(module), classes[module], self.paths.found[module].origin, *_cells(paths, module, parameters)
            equal.setdefault(key, []).append(module)
        rows = [(pattern(modules) or "(model)", *cells) for (_, *cells), modules in equal.items()]
        return columns([TITLES, *rows]) if rows else []

    def as_json(self) -> dict[str, Any]:
        """The same for programs, with every layer."""
        parameters = {id(parameter): name for name, parameter in named_parameters(self.model)}
        return {
            "target": self.name,
            "model": type(self.model).__name__,
            "attaches": not self.error,
            "summary": self.summary,
            "layers": {
                module: {"found": self.paths.found[module].origin, "paths": [_path(path, parameters) for path in paths]}
                for module, paths in self.paths.by_module.items()
            },
            "left_alone": self.left_alone,
        }


def report(name: str, target: Target) -> Report:
    """Find the attention of a model by `logit_paths`, with the batch if there is one, and try to attach QuacK."""
    call = f"QuacK({'model' if target.batch is None else 'logit_paths(model, batch)'}, optimizer)"
    paths, error = LogitPaths({}, target.model), ""
    try:
        paths = logit_paths(target.model, target.batch)
        if not _on_meta(target.model):
            QuacK(paths, SGD(target.model.parameters(), lr=1.0)).remove()
    except ValueError as refused:
        error = str(refused)
    return Report(name, target.model, call, paths, error)


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _cells(paths: Sequence[LogitPath], module: str, parameters: dict[int, str]) -> tuple[str, ...]:
    """The number of heads, the logit, its scale, and the parameters with the weights of one attention."""
    heads = dict.fromkeys(str(path.heads) for path in paths)
    logit = " + ".join(" ".join(weight_term(weight, module) for weight in path.weights) for path in paths)
    scales = dict.fromkeys("1/sqrt(head size)" if path.scale is None else f"{path.scale:.4g}" for path in paths)
    names = dict.fromkeys(parameters.get(id(weight.param), "?") for path in paths for weight in path.weights)
    stored = [name.removeprefix(f"{module}.").removesuffix(".weight") for name in names]
    return "/".join(heads), logit, " and ".join(scales), ", ".join(stored)


def _path(path: LogitPath, parameters: dict[int, str]) -> dict[str, Any]:
    weights = {
        weight.name: {"parameter": parameters.get(id(weight.param)), "blocks": weight.blocks} for weight in path.weights
    }
    return {"heads": path.heads, "scale": path.scale, "weights": weights}
