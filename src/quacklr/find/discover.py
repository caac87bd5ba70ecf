"""Walk over a model's modules and collect the paths of each attention, named after its module.

What a module declares is believed; then come the rules; with a batch, what they say is held against what was measured,
and what no rule knows is taken from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.core.path import LogitPath, as_paths
from quacklr.find.compare import differences
from quacklr.find.finding import DECLARED, MEASURED, VERIFIED, Finding
from quacklr.find.measure.assemble import measured_paths
from quacklr.find.rules import by_rule
from quacklr.util.modules import evaluating, named_modules

UNSEEN = (
    "no attention was seen in a forward of the sample. A model may have no softmax attention (Mamba, RWKV, linear "
    "attention): then train it without. Otherwise: scaled_dot_product_attention and a softmax written out are seen, "
    "a kernel of its own such as flash or flex attention is not; switch the model to sdpa or eager, or leave it out"
)
NOT_SEEN = "not recognised, and not seen to attend in a forward of the sample"
DECLARED_NONE = "declares no path: its logit does not depend on the scale of its weights"


class LogitPaths(list[LogitPath]):
    """Paths, those of each attention module under its name; and what has none and why.

    `found` is what is known of each attention, by module name.
    """

    def __init__(self, found: Mapping[str, Finding]) -> None:
        self.by_module = {name: _named(finding.paths, name) for name, finding in found.items() if finding.paths}
        super().__init__(path for paths in self.by_module.values() for path in paths)
        self.left_alone, self.found = _left_alone(found), dict(found)


def by_module(paths: Iterable[LogitPath]) -> dict[str, list[LogitPath]]:
    """The paths of each attention module: as they were found, or else as their weights are named, `<module>.<role>`."""
    if isinstance(paths, LogitPaths):
        return paths.by_module
    found: dict[str, list[LogitPath]] = {}
    for path in paths:
        found.setdefault(path.weights[0].name.rpartition(".")[0], []).append(path)
    return found


def logit_paths(model: nn.Module, sample: Any = None, *, rules: bool = True) -> LogitPaths:
    """The paths of every attention of the model, their weights named `<module>.<role>`.

    A module with a method `logit_paths()` is believed, and not searched further; others are read by rules. With a
    `sample`, a batch that the model takes (a tensor, a tuple, or a dict), attention is measured too, in one forward
    that leaves the model as it was: what no rule knows is found, and where a rule is wrong, that is a ValueError that
    shows both. With `rules=False` what was measured is taken, and no rule is asked. A model with nothing to control is
    a ValueError.
    """
    if not rules and sample is None:
        raise ValueError(
            "rules=False takes what is measured, so it needs a batch: logit_paths(model, batch, rules=False)"
        )
    found = found_by_rule(model)
    if not rules:
        found = {name: finding for name, finding in found.items() if finding.declared}
    if sample is not None:
        found = _measured(model, sample, found)
    paths = LogitPaths(found)
    if not paths:
        raise ValueError(f"{type(model).__name__} has {_nothing(found, sample is None)}")
    if unknown := [name for name, finding in found.items() if finding.unknown]:
        warnings.warn(
            f"attention is left alone in {len(unknown)} of {len(found)} modules, first {unknown[0] or 'the model'}: "
            f"{found[unknown[0]].reason}",
            stacklevel=3,
        )
    return paths


def _nothing(found: Mapping[str, Finding], rules_only: bool) -> str:
    """Why there is nothing to control, and what can be done about it, if anything can."""
    reasons = _reasons(_left_alone(found))
    if found and not any(finding.unknown or finding.declared for finding in found.values()):
        return f"nothing for QuacK to control in its {len(found)} attention layers{reasons}; train it without"
    measure = "pass a batch to measure it, logit_paths(model, batch), " if rules_only else ""
    declare = (
        "give its attention a method logit_paths(), or pass the paths themselves: "
        "QuacK([LogitPath(...), ...], optimizer)"
    )
    if not found:
        return (
            "no attention that QuacK can control: no module looks like softmax attention. A model may have none "
            f"(Mamba, RWKV, linear attention): then train it without. If it has: {measure}{declare}"
        )
    return f"no attention that QuacK can control{reasons}; {measure}{declare}"


def found_by_rule(model: nn.Module) -> dict[str, Finding]:
    """What declarations and rules say of each attention, by module name, in the model's order."""
    found: dict[str, Finding] = {}
    done: list[str] = []
    with evaluating(model):  # some parametrised weights move on when they are read in training
        for name, module in named_modules(model):
            if any(name.startswith(outer) for outer in done):
                continue
            finding = _declared(module, name) or by_rule(module)
            if finding is not None:
                found[name] = finding
                done.append(f"{name}." if name else "")
    return found


def _declared(module: Any, name: str) -> Finding | None:
    if not callable(getattr(module, "logit_paths", None)):
        return None
    paths = as_paths(module.logit_paths(), f"logit_paths() of {name or 'the model'} must return")
    return Finding(paths, "" if paths else DECLARED_NONE, origin=DECLARED)


def _measured(model: nn.Module, sample: Any, found: dict[str, Finding]) -> dict[str, Finding]:
    """Findings, completed by what was measured; a rule that it contradicts is an error."""
    seen = measured_paths(model, sample)
    if not seen:
        raise ValueError(f"{type(model).__name__}: {UNSEEN}")
    believed = [name for name, finding in found.items() if finding.declared]
    for name, finding in seen.items():
        if any(name == outer or not outer or name.startswith(f"{outer}.") for outer in believed):
            continue
        ruled = found.get(name)
        if ruled is None or ruled.unknown or (finding.unknown and not finding.undecided):
            found[name] = replace(finding, origin=MEASURED)
        elif finding.undecided:
            continue
        elif wrong := differences(ruled.paths, finding.paths, model):
            raise ValueError(
                f"{name or 'the model'}: the rule for {_class(model, name)} is wrong here; {wrong}; to use what was "
                "measured, call logit_paths(model, batch, rules=False); a method logit_paths() of the module would be "
                "believed"
            )
        else:
            found[name] = replace(ruled, origin=VERIFIED)
    found = {n: f if n in seen or not f.unknown else Finding(reason=NOT_SEEN, unknown=True) for n, f in found.items()}
    order = [name for name, _ in named_modules(model)]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _class(model: nn.Module, name: str) -> str:
    return type(dict(named_modules(model))[name]).__name__


def _left_alone(found: Mapping[str, Finding]) -> dict[str, str]:
    left_alone: dict[str, str] = {}
    for name, finding in found.items():
        if finding.reason:
            left_alone[name] = finding.reason
        left_alone |= {f"{name}.{role}" if name else role: why for role, why in finding.cut.items()}
    return left_alone


def _reasons(left_alone: dict[str, str]) -> str:
    """Why, each reason once, with the first module that has it."""
    first: dict[str, str] = {}
    for name, reason in left_alone.items():
        first.setdefault(reason, name)
    return "".join(f" ({name or 'the model'}: {reason})" for reason, name in first.items())


def _named(paths: Iterable[LogitPath], module: str) -> list[LogitPath]:
    """The same paths, each weight's name prefixed with its module's."""
    paths = list(paths)
    if not module:
        return paths
    weights = {weight: replace(weight, name=f"{module}.{weight.name}") for path in paths for weight in path.weights}
    return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]
