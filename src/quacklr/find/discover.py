"""Collects the paths of every attention of a model, with weights named after its module.

Paths come from the module's own declaration, from a table of reviewed classes, or from a measurement on a batch. With a
batch, tables are compared with the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

from torch import nn

from quacklr.core.path import LogitPath, as_paths, changed
from quacklr.find.finding import DECLARED, MEASURED, Finding, innermost, is_inside, verified
from quacklr.find.measure.assemble import measured_paths
from quacklr.find.tables import by_table, scaled
from quacklr.util.caller import warn
from quacklr.util.modules import evaluating, named_modules, named_parameters

IF_IT_HAS = ". If it has none (Mamba, RWKV, linear attention), train it without QuacK. If it has: "
UNSEEN = (
    f"no softmax attention was seen in a forward of the sample{IF_IT_HAS}scaled_dot_product_attention and a softmax "
    "that the model calls are seen, other kernels such as flash or flex attention are not; switch the model to sdpa or "
    "eager, or pass no sample"
)
WAYS_OUT = (
    "give the module a method logit_paths(), or measure the model on a batch, before it is sharded or compiled, and "
    "pass the paths: QuacK(logit_paths(model, batch), optimizer)"
)


class LogitPaths(list[LogitPath]):
    """The paths of a model, with weights named `<module>.<role>`.

    Attributes:
        found: by module name, the finding for each attention.
        model: a weak reference to the model.
        parameters: the name and the shape that each parameter of the model had, by its id.
    """

    def __init__(self, found: Mapping[str, Finding], model: nn.Module) -> None:
        self.found, self.model = dict(found), ref(model)
        self.parameters = {id(each): (name, each.shape) for name, each in named_parameters(model)}
        for name, finding in found.items():
            self.extend(replace(path, origin=(self, name)) for path in _named(finding.paths, name))

    @property
    def left_alone(self) -> dict[str, str]:
        """By name, why an attention or a weight of one is on no path."""
        reasons: dict[str, str] = {}
        for name, finding in self.found.items():
            reasons |= {name: finding.reason} if finding.reason else {}
            reasons |= {f"{name}.{role}" if name else role: why for role, why in finding.cut.items()}
        return reasons


def by_origin(paths: Iterable[LogitPath]) -> dict[str, list[LogitPath]]:
    """The paths that `logit_paths` found, by module name."""
    named = [(path.origin[1], path) for path in paths if path.origin is not None]
    return {name: [path for other, path in named if other == name] for name, _ in named}


def model_of(paths: Iterable[LogitPath]) -> nn.Module | None:
    """The model in which `logit_paths` found the paths; None if there is none, or several."""
    models = {path.origin[0].model() for path in paths if path.origin is not None}
    return models.pop() if len(models) == 1 else None


def found_of(paths: Sequence[LogitPath]) -> dict[str, Finding]:
    """By module name, what `logit_paths` found of paths that were given, and the attention that it left alone."""
    given = by_origin(paths)
    found = {name: each for of in given.values() for name, each in of[0].origin[0].found.items()}
    return {n: replace(each, paths=given.get(n, ())) for n, each in found.items() if n in given or not each.paths}


def logit_paths(model: nn.Module, sample: Any = None, *, rules: bool = True) -> LogitPaths:
    """The paths of every attention of the model, with weights named `<module>.<role>`.

    If a module has a method `logit_paths()`, its result is used, and the module is not searched further. Attention of
    the classes of some packages, such as transformers, is found in tables. With a `sample`, a batch that the model
    takes (a tensor, a tuple, or a dict), attention is also measured, in a forward pass that does not change the model.
    Attention of any other class has to be measured: without a sample it is an error. Raises ValueError also if the
    measurement contradicts what was found, or if the model has no path. With `rules=False`, what is measured is used
    instead of tables and declarations.
    """
    if not rules and sample is None:
        raise ValueError("rules=False takes what is measured, so it needs a batch: logit_paths(model, batch)")
    found = found_by_table(model)
    if sample is not None:
        measured = measured_paths(model, sample)
        if not measured:
            raise ValueError(f"{type(model).__name__}: {UNSEEN}")
        if not rules:  # declarations are used where nothing could be measured
            known = [name for name, finding in measured.items() if not finding.unknown]
            unknown = [name for name in found if not any(is_inside(each, name) for each in known)]
            found = {n: each for n, each in found.items() if each.pending or (each.origin == DECLARED and n in unknown)}
        found = without_pending(completed(found, measured, model), measured, model)
    validate_controls(found, model)
    warn_unknown(found)
    return LogitPaths(found, model)


def found_by_table(model: nn.Module) -> dict[str, Finding]:
    """The finding by declaration or by table for each attention, by module name, in the model's order."""
    found: dict[str, Finding] = {}
    with evaluating(model):  # reading a parametrised weight in training mode may change it
        for name, module in named_modules(model):
            if any(is_inside(name, outer) for outer, finding in found.items() if not finding.pending):
                continue
            if (finding := _declared(module, name) or by_table(module)) is not None:
                found[name] = finding
    return found


def completed(found: Mapping[str, Finding], measured: Mapping[str, Finding], model: nn.Module) -> dict[str, Finding]:
    """Findings, completed by a measurement. ValueError if it contradicts one."""
    modules, complete = dict(named_modules(model)), dict(found)
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    declared = [name for name, finding in found.items() if finding.origin == DECLARED]
    for inner, finding in sorted(measured.items(), key=lambda item: item[1].unknown):
        outer = innermost(inner, declared)
        name = inner if outer is None else outer
        known = complete.get(name)
        if known is None or known.unknown:
            complete[name] = replace(scaled(finding, modules[name]), origin=MEASURED)
        elif known.origin != MEASURED or known.note:
            complete[name] = verified(known, finding, name, modules[name], parameters)
    return {name: complete[name] for name in modules if name in complete}


def without_pending(
    found: Mapping[str, Finding],
    measured: Mapping[str, Finding],
    model: nn.Module,
    ran: Callable[[str], bool] = lambda _: True,
) -> dict[str, Finding]:
    """The findings after a measurement: a module that ran, and was not seen to attend, is not pending any more.

    A pending module is dropped if it contains an attention that was measured, or has weights of one.
    """
    modules, left = dict(named_modules(model)), dict[str, Finding]()
    weights = [w for finding in measured.values() for path in finding.paths for w in path.weights]
    on_paths = {id(part.param) for weight in weights for part in weight.parts}
    for name, finding in found.items():
        attends = any(is_inside(other, name) for other in measured)
        if not finding.pending or not ran(name):
            left[name] = finding
        elif not attends and on_paths.isdisjoint(map(id, modules[name].parameters())):
            why = "not recognised, and not seen to attend in a forward of the batch"
            left[name] = Finding(reason=why, unknown=True, origin=MEASURED)
    return left


def not_known(names: Sequence[str], found: Mapping[str, Finding], why: str = "") -> str:
    """The message for attention that has to be measured, and was not: the first module, why, and the ways out."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    but = f", but {why}" if why else ""
    return f"{names[0] or 'the model'}{more}: {found[names[0]].note}, so it has to be measured{but}; {WAYS_OUT}"


def validate_controls(found: Mapping[str, Finding], model: nn.Module) -> None:
    """ValueError if some attention has to be measured, or if none has a path: the reasons, and what to do."""
    if not_measured := [name for name, finding in found.items() if finding.pending]:
        raise ValueError(not_known(not_measured, found))
    if any(finding.paths for finding in found.values()):
        return
    first_with = {finding.reason: name or "the model" for name, finding in reversed(list(found.items()))}
    kind, reasons = type(model).__name__, "".join(f" ({name}: {why})" for why, name in first_with.items())
    if found and not any(finding.unknown or finding.origin == DECLARED for finding in found.values()):
        raise ValueError(
            f"{kind} has nothing for QuacK to control in its {len(found)} attention layers{reasons}; "
            "train it without QuacK"
        )
    why = f"{reasons}: " if reasons else f": no module looks like softmax attention{IF_IT_HAS}"
    raise ValueError(f"{kind} has no attention that QuacK can control{why}{WAYS_OUT}")


def warn_unknown(found: Mapping[str, Finding]) -> None:
    """A warning for attention that ran, and whose paths could not be determined."""
    if unknown := [name for name, finding in found.items() if finding.unknown and not finding.pending]:
        warn(
            f"attention is left alone in {len(unknown)} of {len(found)} modules, first {unknown[0] or 'the model'}: "
            f"{found[unknown[0]].reason}"
        )


def _declared(module: Any, name: str) -> Finding | None:
    if not callable(getattr(module, "logit_paths", None)):
        return None
    paths = as_paths(module.logit_paths(), f"logit_paths() of {name or 'the model'} must return")
    reason = "" if paths else "declares no path: its logit does not depend on the scale of its weights"
    return Finding(paths, reason, origin=DECLARED)


def _named(paths: Sequence[LogitPath], module: str) -> Sequence[LogitPath]:
    """The same paths, with weights named `<module>.<role>`."""
    return changed(paths, lambda weight: replace(weight, name=f"{module}.{weight.name}")) if module else paths
