"""The state of the paper's rule, keyed by weight name: all that a run needs to resume exactly.

    version, rule  of this format, and the class of the rule
    norm           name of the norm
    shape, rows    by weight: the parameter's shape, and a digest of its block_of_row
    sensitivity    by weight, (blocks,): at the start; all rates are relative to it
    rates          by weight, (blocks,): of the last step
    stepped        by parameter: whether it has stepped in this iteration; if so, the other parameters use `rates` too

It consists of plain tensors, numbers and strings, and can be loaded with weights_only. The keys are the same at every
step, as torch.distributed.checkpoint requires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quacklr.core.norms import Norm
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight

VERSION = 3
FLOAT32 = torch.finfo(torch.float32)
NOT_A_STATE = "this is not the state of a QuacK of this version"
BY_WEIGHT = ("shape", "rows", "sensitivity", "rates", "stepped")


def norm_name(norm: Norm) -> str:
    """The name of a norm in states and tables."""
    return str(getattr(norm, "__name__", type(norm).__name__))


def write_state(
    compiled: CompiledPaths, norm: Norm, start: Tensor, rates: Tensor, stepped: Iterable[int]
) -> dict[str, Any]:
    """The state dict; its tensors are copies. `start` and `rates` are (blocks,); `stepped` are ids of tensors."""
    index, stepped = compiled.blocks.flat_index, set(stepped)
    return {
        "norm": norm_name(norm),
        "shape": {weight.name: list(weight.param.shape) for weight in compiled.weights},
        "rows": {weight.name: _digest(weight) for weight in compiled.weights},
        "sensitivity": {weight.name: start[blocks] for weight, blocks in index.items()},
        "rates": {weight.name: rates[blocks] for weight, blocks in index.items()},
        "stepped": {part.name: id(part.param) in stepped for part in compiled.parts},
    }


def read_state(
    compiled: CompiledPaths, norm: Norm, state: Mapping[str, Any], partial: bool = False
) -> tuple[Tensor, Tensor, set[int]]:
    """`start`, `rates` and `stepped` of a state dict; ValueError if it is of another model or norm, or invalid.

    If `partial`, the state may have more weights than the paths.
    """
    if state["rule"] != "Paper":
        raise ValueError(f"the state is that of rule {state['rule']}, which has no sensitivities at the start")
    for key in BY_WEIGHT:
        if not isinstance(state.get(key), Mapping):
            raise ValueError(f"{NOT_A_STATE}: it has no valid {key!r}")
    if state.get("norm") != norm_name(norm):
        raise ValueError(f"the state was made with norm={state.get('norm')}, but this QuacK has norm={norm_name(norm)}")
    _validate_same_weights(compiled, state, partial)
    start, rates = (_flat(compiled, state, key) for key in ("sensitivity", "rates"))
    stepped = state["stepped"]
    return start, rates, {id(part.param) for part in compiled.parts if stepped.get(part.name) is True}


def not_started(rule: object) -> dict[str, Any]:
    """The state of a rule whose paths are not known yet."""
    return {"version": VERSION, "rule": type(rule).__name__, "not_started": True}


def validate_state(state: Any) -> None:
    """Raise ValueError if this is not a state, or if another quacklr has written it."""
    if not isinstance(state, Mapping) or "rule" not in state:
        raise ValueError(NOT_A_STATE)
    if state.get("version") != VERSION:
        raise ValueError(f"the state has version {state.get('version')}, and this quacklr reads version {VERSION} only")


def _flat(compiled: CompiledPaths, state: Mapping[str, Any], key: str) -> Tensor:
    """The flat vector of an entry of the state, which has one vector for each weight."""
    flat = torch.empty(compiled.blocks.total, device=compiled.blocks.device, dtype=torch.float32)
    for weight, index in compiled.blocks.flat_index.items():
        found = state[key].get(weight.name)
        least = FLOAT32.tiny if key == "sensitivity" and weight.rated else 0.0
        if not isinstance(found, Tensor) or found.shape != (weight.blocks,) or not _are_numbers(found, least):
            numbers = "finite numbers above 0" if least else "finite numbers from 0 up"
            raise ValueError(f"{weight.name}: its {key} in the state must be {weight.blocks} {numbers}, not {found}")
        flat[index] = found.to(flat)
    return flat


def _are_numbers(values: Tensor, least: float) -> bool:
    return values.is_floating_point() and bool((values.isfinite() & (values >= least)).all())


def _digest(weight: Weight) -> str:
    """A digest of the blocks of all rows, of the parameter and of its bias."""
    runs = [torch.unique_consecutive(part.block_of_row, return_counts=True) for part in weight.parts]
    layout = [(part.dim, *(run.tolist() for run in each)) for part, each in zip(weight.parts, runs, strict=True)]
    return hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()


def _validate_same_weights(compiled: CompiledPaths, state: Mapping[str, Any], partial: bool) -> None:
    saved = {name: (list(shape), state["rows"].get(name)) for name, shape in state["shape"].items()}
    own = {weight.name: (list(weight.param.shape), _digest(weight)) for weight in compiled.weights}
    more = [] if partial else sorted(saved.keys() - own.keys())
    differences = [f"{name} is in the state but not in the model" for name in more]
    differences += [f"{name} is in the model but not in the state" for name in sorted(own.keys() - saved.keys())]
    for name in sorted(own.keys() & saved.keys()):
        if saved[name][0] != own[name][0]:
            differences.append(f"{name} has shape {saved[name][0]} in the state, {own[name][0]} in the model")
        elif saved[name][1] != own[name][1]:
            differences.append(f"{name} has other rows in the state than in the model")
    if differences:
        raise ValueError("the state is of another model: " + "; ".join(differences))
