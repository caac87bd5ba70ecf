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

VERSION = 3
NOT_STARTED = {"version": VERSION, "rule": None}  # the state before the paths are known
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
        **_layouts(compiled),
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
    _validate_same_weights(_layouts(compiled), state, partial)
    start, rates = (_flat(compiled, state, key) for key in ("sensitivity", "rates"))
    return start, rates, {id(part.param) for part in compiled.parts if state["stepped"].get(part.name) is True}


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
        least = torch.finfo(torch.float32).tiny if key == "sensitivity" and weight.rated else 0.0
        is_vector = isinstance(found, Tensor) and found.is_floating_point() and found.shape == (weight.blocks,)
        if not is_vector or not (found.isfinite() & (found >= least)).all():
            numbers = "finite numbers above 0" if least else "finite numbers from 0 up"
            raise ValueError(f"{weight.name}: its {key} in the state must be {weight.blocks} {numbers}, not {found}")
        flat[index] = found.to(flat)
    return flat


def _layouts(compiled: CompiledPaths) -> dict[str, dict[str, Any]]:
    """By weight, the shape of its parameter, and a digest of the blocks of all rows, of the parameter and its bias."""
    digests = {}
    for weight in compiled.weights:
        runs = [torch.unique_consecutive(part.block_of_row, return_counts=True) for part in weight.parts]
        layout = [(part.dim, *(run.tolist() for run in each)) for part, each in zip(weight.parts, runs, strict=True)]
        digests[weight.name] = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
    return {"shape": {weight.name: list(weight.param.shape) for weight in compiled.weights}, "rows": digests}


def _validate_same_weights(own: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], partial: bool) -> None:
    names, saved = own["shape"].keys(), state["shape"].keys()
    differences = [f"{name} is in the state but not in the model" for name in sorted(saved - names) if not partial]
    differences += [f"{name} is in the model but not in the state" for name in sorted(names - saved)]
    for name in sorted(names & saved):
        for key in (key for key in own if state[key].get(name) != own[key][name]):
            differences.append(f"{name} has {key} {state[key].get(name)} in the state, {own[key][name]} in the model")
            break
    if differences:
        raise ValueError("the state is of another model: " + "; ".join(differences))
