"""One attention layer as quacklr sees it: what was found, how it is stored, and what its rates will follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.describe import FROZEN, UNRATED
from quacklr.find.finding import Finding
from quacklr.inspect.check import Comparison
from quacklr.inspect.layout import is_latent, layout, meeting
from quacklr.util.modules import named_modules, named_parameters


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention module of a model, what was found of it, and whether a measurement agrees."""

    module: str
    kind: str
    finding: Finding
    layout: str
    check: Comparison
    measured_layout: str = ""

    @property
    def terms(self) -> list[LogitPath]:
        """Its paths, those with most keys first."""
        return sorted(self.finding.paths, key=lambda path: -meeting(path)[1].blocks)

    @property
    def sizes(self) -> list[int]:
        """Rows of a head in each term that adds to its size: one, or MLA's nope and rope."""
        terms = self.terms if is_latent(self.finding.paths) else self.terms[:1]
        return [int(meeting(path)[0].rows_of_block[0]) for path in terms]

    @property
    def heads(self) -> int | None:
        """How many logits two tokens have."""
        return self.terms[0].heads if self.terms else None

    @property
    def groups(self) -> int | None:
        """How many keys a token has."""
        return meeting(self.terms[0])[1].blocks if self.terms else None

    @property
    def logit(self) -> str:
        """Its terms as in a QuacK's table: uq[16] uk[16] + qr[16] kr."""
        return " + ".join(" ".join(map(_counted, path.weights)) for path in self.finding.paths)

    @property
    def weights(self) -> list[Weight]:
        """Every weight on its paths, once."""
        return list(dict.fromkeys(weight for path in self.finding.paths for weight in path.weights))

    @property
    def left_alone(self) -> dict[str, str]:
        """For the layer, or parts of it that get no rate, why."""
        alone = {self.module or "(model)": self.finding.reason} if self.finding.reason else {}
        alone |= {full_name(self.module, role): why for role, why in self.finding.cut.items()}
        still = {full_name(self.module, w.name): FROZEN if w.rated else UNRATED for w in self.weights if not w.trains}
        return alone | still

    def rates(self) -> dict[str, str]:
        """What the rate of each weight that trains follows: one over the norms it is multiplied with."""
        return {w.name: follows(w, self.finding.paths) for w in self.weights if w.trains}


def layers_of(model: nn.Module, found: Mapping[str, Finding], checks: Mapping[str, Comparison]) -> list[AttentionLayer]:
    """A layer for each finding, in the model's order."""
    kinds = {name: type(module).__name__ for name, module in named_modules(model)}
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    first: dict[int, str] = {}
    layers = []
    for name in sorted(found, key=list(kinds).index):
        finding, check = found[name], checks[name]
        for weight in (weight for path in finding.paths for weight in path.weights):
            first.setdefault(id(weight.param), name)
        within = {key: parameter.removeprefix(f"{name}.") for key, parameter in parameters.items()}
        words = _words(finding, within) + _shared(finding.paths, name, first)
        measured = _words(check.measured, within) if check.measured else ""
        layers.append(AttentionLayer(name, kinds[name], finding, words, check, measured))
    return layers


def _words(finding: Finding, parameters: dict[int, str]) -> str:
    return layout(finding.paths, parameters) if finding.paths else ""


def _shared(paths: Sequence[LogitPath], name: str, first: Mapping[int, str]) -> str:
    """Which layer it has its weights from, if it is another one."""
    weights = list(dict.fromkeys(weight for path in paths for weight in path.weights))
    elsewhere = [weight for weight in weights if first[id(weight.param)] != name]
    if not elsewhere:
        return ""
    which = "" if len(elsewhere) == len(weights) else ", ".join(weight.name for weight in elsewhere) + " "
    return f", {which}shared with {first[id(elsewhere[0].param)]}"


def full_name(module: str, role: str) -> str:
    """A role's name in the model; what was measured is named by its parameter, which is a full name already."""
    return role if not module or role.startswith(f"{module}.") else f"{module}.{role}"


def named_paths(layers: Sequence[AttentionLayer]) -> list[LogitPath]:
    """The paths of all layers, each weight named after its module."""
    paths = []
    for layer in layers:
        named = {weight: replace(weight, name=full_name(layer.module, weight.name)) for weight in layer.weights}
        paths += [replace(path, weights=tuple(named[w] for w in path.weights)) for path in layer.finding.paths]
    return paths


def follows(weight: Weight, paths: Sequence[LogitPath]) -> str:
    """1/|k|; 1/max|k| where one block meets several; 1/max(|k|, |b|) on several paths."""
    through = [path for path in paths if weight in path.weights]
    terms = ["".join(f"|{other.name}|" for other in path.weights if other is not weight) or "1" for path in through]
    if len(through) > 1:
        return f"1/max({', '.join(dict.fromkeys(terms))})"
    meets = torch.unique(through[0].reads, dim=1).shape[1]
    return f"1/max{terms[0]}" if meets > weight.blocks else f"1/{terms[0]}"


def block_norms(weight: Weight) -> Tensor:
    """(blocks,): the Frobenius norm of each block with its bias."""
    squares = torch.zeros(weight.blocks)
    for part in weight.parts:
        owned = part.block_of_row >= 0
        of_row = part.rows_first().float().cpu().reshape(len(owned), -1).square().sum(1)
        squares.index_add_(0, part.block_of_row[owned], of_row[owned])
    return squares.sqrt()


def controlled(layers: Sequence[AttentionLayer]) -> int:
    """How many numbers get a rate; those that layers share count once."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for part in (part for layer in layers for w in layer.weights if w.rated for part in w.parts):
        if part.param.requires_grad:
            owned = part.block_of_row >= 0
            before = rows.get(id(part.param), (part.param, torch.zeros_like(owned)))[1]
            rows[id(part.param)] = part.param, before | owned
    return sum(int(owned.sum()) * (param.numel() // len(owned)) for param, owned in rows.values())


def _counted(weight: Weight) -> str:
    return weight.name + (f"[{weight.blocks}]" if weight.blocks > 1 else "")
