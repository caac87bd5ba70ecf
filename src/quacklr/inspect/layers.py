"""One attention layer: its paths, how its weights are stored, and what their learning rates depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.describe import FROZEN, UNRATED, weight_term
from quacklr.find.finding import Finding
from quacklr.inspect.comparison import Comparison
from quacklr.inspect.layout import is_latent, layout, query_and_key
from quacklr.util.modules import named_modules, named_parameters


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention module, what was found in it, and the comparison with a measurement."""

    module: str
    kind: str
    finding: Finding
    layout: str
    comparison: Comparison
    measured_layout: str = ""

    @property
    def paths(self) -> list[LogitPath]:
        """Its paths, first those with the most key blocks."""
        return sorted(self.finding.paths, key=lambda path: -query_and_key(path)[1].blocks)

    @property
    def sizes(self) -> list[int]:
        """The sizes of a head whose sum is the head size: one, or MLA's nope and rope."""
        paths = self.paths if is_latent(self.finding.paths) else self.paths[:1]
        return [int(query_and_key(path)[0].rows_of_block[0]) for path in paths]

    @property
    def heads(self) -> int | None:
        """The number of heads."""
        return self.paths[0].heads if self.paths else None

    @property
    def groups(self) -> int | None:
        """The number of key heads."""
        return query_and_key(self.paths[0])[1].blocks if self.paths else None

    @property
    def logit(self) -> str:
        """Its paths as in QuacK's table: uq[16] uk[16] + qr[16] kr."""
        return " + ".join(" ".join(map(weight_term, path.weights)) for path in self.finding.paths)

    @property
    def scale(self) -> str:
        """The factor of q . k in the logit, which a budget uses: the module's, or else the usual one."""
        usual = f"1/sqrt({sum(self.sizes)})"
        known = [usual if path.scale is None else f"{path.scale:.4g}" for path in self.finding.paths]
        return " and ".join(dict.fromkeys(known))

    @property
    def weights(self) -> list[Weight]:
        """The weights on its paths, each once."""
        return _weights(self.finding.paths)

    @property
    def left_alone(self) -> dict[str, str]:
        """Why the layer, or some of its weights, get no rate."""
        prefix = f"{self.module}." if self.module else ""
        alone = {self.module or "(model)": self.finding.reason} if self.finding.reason else {}
        alone |= {f"{prefix}{role}": why for role, why in self.finding.cut.items()}
        return alone | {f"{prefix}{w.name}": FROZEN if w.rated else UNRATED for w in self.weights if not w.trains}

    def rates(self) -> dict[str, str]:
        """For each weight that trains, the norms that its rate is inversely proportional to."""
        return {weight.name: _follows(weight, self.finding.paths) for weight in self.weights if weight.trains}


def _weights(paths: Sequence[LogitPath]) -> list[Weight]:
    return list(dict.fromkeys(weight for path in paths for weight in path.weights))


def layers_of(
    model: nn.Module, found: Mapping[str, Finding], comparisons: Mapping[str, Comparison]
) -> list[AttentionLayer]:
    """A layer for each finding, in the model's order."""
    kinds = {name: type(module).__name__ for name, module in named_modules(model)}
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    first: dict[int, str] = {}  # the first layer that has a parameter
    layers = []
    for name in sorted(found, key=list(kinds).index):
        paths, comparison = found[name].paths, comparisons[name]
        for weight in _weights(paths):
            first.setdefault(id(weight.param), name)
        local = {key: parameter.removeprefix(f"{name}.") for key, parameter in parameters.items()}
        stored = layout(paths, local) + _shared(paths, name, first)
        measured = layout(comparison.measured.paths, local) if comparison.measured else ""
        layers.append(AttentionLayer(name, kinds[name], found[name], stored, comparison, measured))
    return layers


def _shared(paths: Sequence[LogitPath], name: str, first: Mapping[int, str]) -> str:
    """The earlier layer that it shares weights with, if any."""
    shared = [weight for weight in _weights(paths) if first[id(weight.param)] != name]
    if not shared:
        return ""
    which = "" if len(shared) == len(_weights(paths)) else ", ".join(weight.name for weight in shared) + " "
    return f", {which}shared with {first[id(shared[0].param)]}"


def _follows(weight: Weight, paths: Sequence[LogitPath]) -> str:
    """1/|k|; 1/max|k| if a block is multiplied by several blocks of k; 1/max(|k|, |b|) if it is on several paths."""
    through = [path for path in paths if weight in path.weights]
    norms = ["".join(f"|{other.name}|" for other in path.weights if other is not weight) or "1" for path in through]
    if len(through) > 1:
        return f"1/max({', '.join(dict.fromkeys(norms))})"
    pairs = torch.unique(through[0].reads, dim=1).shape[1]
    return f"1/max{norms[0]}" if pairs > weight.blocks else f"1/{norms[0]}"


def rated_entries(layers: Sequence[AttentionLayer]) -> int:
    """The number of parameter entries that get a rate; those that layers share count once."""
    rows: dict[torch.Tensor, torch.Tensor] = {}
    for part in (part for layer in layers for weight in layer.weights if weight.rated for part in weight.parts):
        if part.param.requires_grad:
            on_path = part.block_of_row >= 0
            rows[part.param] = on_path | rows.get(part.param, on_path)
    return sum(int(on_path.sum()) * (param.numel() // len(on_path)) for param, on_path in rows.items())
