"""Collects the paths of every attention of a model, with weights named after its module.

Paths come from the module's own declaration, or else from a rule. With a batch, rules are compared with a measurement,
and attention that no rule applies to is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.core.path import LogitPath, as_paths
from quacklr.find.compare import differences, wrong_rule
from quacklr.find.finding import DECLARED, MEASURED, VERIFIED, Finding, is_inside
from quacklr.find.measure.assemble import measured_paths
from quacklr.find.tables import by_rule
from quacklr.util.caller import warn
from quacklr.util.modules import evaluating, named_modules

UNSEEN = (
    "no attention was seen in a forward of the sample. If the model has no softmax attention (Mamba, RWKV, linear "
    "attention), train it without QuacK. If it has: scaled_dot_product_attention and a softmax that the model calls "
    "are seen, other kernels such as flash or flex attention are not; switch the model to sdpa or eager, or pass no "
    "sample"
)
SCALES: dict[str, Callable[[Any], float | None]] = {  # classes whose attribute `scaling` is not the scale of the logit
    "GPTNeoSelfAttention": lambda _: 1.0,  # its logits are not scaled
    "EsmSelfAttention": lambda _: None,  # it multiplies the query by 1 / sqrt(head size), and has `scaling` 1
    "EvollaSaProtSelfAttention": lambda _: None,
    "OpenAIPrivacyFilterAttention": lambda module: (
        getattr(module, "scaling", 0) ** 2
    ),  # applied to the query and to the key
    "MptAttention": lambda module: getattr(module, "softmax_scale", None),
}
NOT_SEEN = "not recognised, and not seen to attend in a forward of the sample"
DECLARED_NONE = "declares no path: its logit does not depend on the scale of its weights"
TAKE_MEASURED = (
    "to use what was measured, call logit_paths(model, batch, rules=False); or give the module a method logit_paths(), "
    "whose paths are used as they are"
)


class LogitPaths(list[LogitPath]):
    """The paths of a model.

    `by_module` has the paths of each attention, `found` the finding for each attention, and `left_alone` the reason for
    each attention or weight that has no path; all by module name.
    """

    def __init__(self, found: Mapping[str, Finding]) -> None:
        self.by_module = {name: _renamed(finding.paths, name) for name, finding in found.items() if finding.paths}
        super().__init__(path for paths in self.by_module.values() for path in paths)
        self.left_alone, self.found = _left_alone(found), dict(found)


def by_module(paths: Iterable[LogitPath]) -> dict[str, list[LogitPath]]:
    """The paths of each attention module. A plain list is grouped by the names of its weights, `<module>.<role>`."""
    if isinstance(paths, LogitPaths):
        return paths.by_module
    found: dict[str, list[LogitPath]] = {}
    for path in paths:
        found.setdefault(path.weights[0].name.rpartition(".")[0], []).append(path)
    return found


def logit_paths(model: nn.Module, sample: Any = None, *, rules: bool = True) -> LogitPaths:
    """The paths of every attention of the model, with weights named `<module>.<role>`.

    If a module has a method `logit_paths()`, its result is used, and the module is not searched further. Rules are
    applied to the other modules. With a `sample`, a batch that the model takes (a tensor, a tuple, or a dict),
    attention is also measured, in a forward pass that does not change the model. This finds attention that no rule
    applies to. Raises ValueError if the measurement contradicts a rule, or if the model has no path. With
    `rules=False`, rules are not applied: paths are declared or measured.
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
        raise ValueError(f"{type(model).__name__} has {_no_paths(found, sample is None)}")
    if unknown := [name for name, finding in found.items() if finding.unknown]:
        warn(
            f"attention is left alone in {len(unknown)} of {len(found)} modules, first {unknown[0] or 'the model'}: "
            f"{found[unknown[0]].reason}",
        )
    return paths


def _no_paths(found: Mapping[str, Finding], rules_only: bool) -> str:
    """The message for a model without paths: the reasons, and what to do."""
    reasons = _reasons(_left_alone(found))
    if found and not any(finding.unknown or finding.declared for finding in found.values()):
        return f"nothing for QuacK to control in its {len(found)} attention layers{reasons}; train it without QuacK"
    measure = "pass a batch to measure it, logit_paths(model, batch), " if rules_only else ""
    declare = "give its attention a method logit_paths(), or pass paths: QuacK([LogitPath(...), ...], optimizer)"
    if not found:
        return (
            "no attention that QuacK can control: no module looks like softmax attention. If it has none (Mamba, RWKV, "
            f"linear attention), train it without QuacK. If it has: {measure}{declare}"
        )
    measure = "or " if "pass a batch" in reasons else measure
    return f"no attention that QuacK can control{reasons}; {measure}{declare}"


def found_by_rule(model: nn.Module) -> dict[str, Finding]:
    """The finding by declaration or rule for each attention, by module name, in the model's order."""
    found: dict[str, Finding] = {}
    with evaluating(model):  # reading a parametrised weight in training mode may change it
        for name, module in named_modules(model):
            if not any(is_inside(name, outer) for outer in found):
                finding = _declared(module, name) or by_rule(module)
                if finding is not None:
                    found[name] = finding if finding.declared else _with_scale(finding, module)
    return found


def _with_scale(finding: Finding, module: Any) -> Finding:
    """Set the scale of the paths, if the module has the attribute `scaling` of transformers' attention."""
    scale_of = SCALES.get(type(module).__name__)
    scale = getattr(module, "scaling", None) if scale_of is None else scale_of(module)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        return finding
    return replace(finding, paths=[replace(path, scale=scale) for path in finding.paths])


def _declared(module: Any, name: str) -> Finding | None:
    if not callable(getattr(module, "logit_paths", None)):
        return None
    paths = as_paths(module.logit_paths(), f"logit_paths() of {name or 'the model'} must return")
    return Finding(paths, "" if paths else DECLARED_NONE, origin=DECLARED)


def _measured(model: nn.Module, sample: Any, found: dict[str, Finding]) -> dict[str, Finding]:
    """Findings, completed by a measurement. ValueError if it contradicts a rule."""
    measured = measured_paths(model, sample)
    if not measured:
        raise ValueError(f"{type(model).__name__}: {UNSEEN}")
    modules = dict(named_modules(model))
    declared = [name for name, finding in found.items() if finding.declared]
    for name, finding in measured.items():
        ruled = found.get(name)
        if any(is_inside(name, outer) for outer in declared):
            continue
        if ruled is None or ruled.unknown or (finding.unknown and not finding.undecided):
            found[name] = replace(_with_scale(finding, modules[name]), origin=MEASURED)
        elif not finding.undecided:
            if wrong := differences(ruled.paths, finding.paths, model):
                raise wrong_rule(name, modules[name], wrong, TAKE_MEASURED)
            found[name] = replace(ruled, origin=VERIFIED)
    for name, finding in found.items():
        if finding.unknown and name not in measured:
            found[name] = Finding(reason=NOT_SEEN, unknown=True)
    return {name: found[name] for name in modules if name in found}


def _left_alone(found: Mapping[str, Finding]) -> dict[str, str]:
    left_alone: dict[str, str] = {}
    for name, finding in found.items():
        if finding.reason:
            left_alone[name] = finding.reason
        left_alone |= {f"{name}.{role}" if name else role: why for role, why in finding.cut.items()}
    return left_alone


def _reasons(left_alone: dict[str, str]) -> str:
    """Each reason once, with the first module that has it."""
    first: dict[str, str] = {}
    for name, reason in left_alone.items():
        first.setdefault(reason, name)
    return "".join(f" ({name or 'the model'}: {reason})" for reason, name in first.items())


def _renamed(paths: Sequence[LogitPath], module: str) -> list[LogitPath]:
    """The same paths, with weights named `<module>.<role>`."""
    if not module:
        return list(paths)
    weights = {weight: replace(weight, name=f"{module}.{weight.name}") for path in paths for weight in path.weights}
    return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]
