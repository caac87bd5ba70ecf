"""What `quacklr inspect` prints: the table of `print(quack)`, what is left alone and why, and what QuacK does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.describe import attention_rows, without_rate
from quacklr.find.discover import LogitPaths, found_by_table, logit_paths, validate_controls
from quacklr.inspect.resolve import Target
from quacklr.quack import QuacK
from quacklr.util.text_table import columns, grouped, merged


@dataclass(frozen=True, slots=True)
class Report:
    """The paths of a model. `call` attaches QuacK to it; `error` is the error that the call raises, or ""."""

    name: str
    model: nn.Module
    call: str
    paths: LogitPaths
    error: str

    @property
    def left_alone(self) -> dict[str, str]:
        """Why attention layers, or weights of them, get no rate."""
        return {**self.paths.left_alone, **without_rate(weight for path in self.paths for weight in path.weights)}

    @property
    def summary(self) -> str:
        """One sentence: what QuacK does with the model."""
        if self.error:
            return f"{self.call} raises: {self.error}"
        return f"{self.call} attaches to {len(self.paths.by_module)} of {len(self.paths.found)} attention layers"

    @property
    def exit_code(self) -> int:
        """0 if QuacK attaches and every layer is recognised."""
        return int(bool(self.error) or any(finding.unknown for finding in self.paths.found.values()))

    def __str__(self) -> str:
        def stored(module: str, paths: Sequence[LogitPath]) -> str:
            names = dict.fromkeys(self._parameter(weight) for path in paths for weight in path.weights)
            return ", ".join(name.removeprefix(f"{module}.").removesuffix(".weight") for name in names)

        made = "shapes only" if _on_meta(self.model) else "with its weights"
        rows = merged(attention_rows(self.paths.by_module, self.paths.found, "weights", stored))
        sections = [f"{self.name}: {type(self.model).__name__}, {made}"], columns(rows) if self.paths else []
        sections += grouped("left alone:", self.left_alone), [self.summary]
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs, with every layer."""

        def described(path: LogitPath) -> dict[str, Any]:
            weights = {w.name: {"parameter": self._parameter(w), "blocks": w.blocks} for w in path.weights}
            return {"heads": path.heads, "scale": path.scale, "weights": weights}

        layers = {
            module: {"found": self.paths.found[module].origin, "paths": [described(path) for path in paths]}
            for module, paths in self.paths.by_module.items()
        }
        about = {"target": self.name, "model": type(self.model).__name__, "attaches": not self.error}
        return {**about, "summary": self.summary, "layers": layers, "left_alone": self.left_alone}

    def _parameter(self, weight: Weight) -> str:
        name, _ = self.paths.parameters.get(id(weight.param), ("?", None))
        return name


def report(name: str, target: Target) -> Report:
    """Find the attention of a model, with the batch if there is one, and try to attach QuacK."""
    model, batch = target.model, target.batch
    call = f"QuacK({'model' if batch is None else 'logit_paths(model, batch)'}, optimizer)"
    paths, error = LogitPaths({}, model), ""
    try:
        paths = LogitPaths(found_by_table(model), model) if batch is None else logit_paths(model, batch)
        if not any(finding.pending for finding in paths.found.values()):
            validate_controls(paths.found, model)
        if not _on_meta(model):
            QuacK(model if batch is None else paths, SGD(model.parameters(), lr=1.0)).remove()
    except (ValueError, RuntimeError) as refused:
        error = str(refused)
    return Report(name, model, call, paths, error)


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
