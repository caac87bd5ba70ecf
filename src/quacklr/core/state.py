"""The state dict of QuacK, keyed by weight name: all that a run needs to resume exactly.

    version        of this format; states of quacklr 0.1 have none
    norm           name of the norm
    shape, rows    by weight: the parameter's shape, and a digest of its block_of_row
    sensitivity    by weight, (blocks,): at the start; all rates are relative to it
    rates          by weight, (blocks,): of the last step
    stepped        by parameter: whether it has stepped in this iteration; if so, the other parameters use `rates` too
    memory         by weight: the norm's memory; absent if it has none

It consists of plain tensors, numbers and strings, and can be loaded with weights_only. The keys are the same at every
step, as torch.distributed.checkpoint requires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quacklr.core.blocks import BlockGroup, Memory
from quacklr.core.norms import Norm
from quacklr.core.sensitivity import Rule
from quacklr.core.weight import Weight

VERSION = 2


class Saved(NamedTuple):
    """The contents of a state: flat vectors for all blocks, and ids of the tensors that have stepped."""

    start: Tensor
    rates: Tensor | None
    stepped: set[int]
    memory: Memory


def norm_name(norm: Norm) -> str:
    """The name of a norm in states and tables."""
    return str(getattr(norm, "__name__", type(norm).__name__))


def write_state(rule: Rule, norm: Norm, saved: Saved) -> dict[str, Any]:
    """The state dict; its tensors are copies."""
    state: dict[str, Any] = {"version": VERSION, "norm": norm_name(norm)}
    state["shape"] = {weight.name: list(weight.param.shape) for weight in rule.weights}
    state["rows"] = {weight.name: _digest(weight) for weight in rule.weights}
    state["sensitivity"] = {weight.name: saved.start[index] for weight, index in rule.blocks.flat_index.items()}
    if saved.rates is not None:
        state["rates"] = {weight.name: saved.rates[index] for weight, index in rule.blocks.flat_index.items()}
        state["stepped"] = {part.name: id(part.param) in saved.stepped for part in rule.parts}
    groups = zip(rule.blocks.groups, saved.memory, strict=True)
    if memory := {_key(group): last.clone() for group, last in groups if last is not None}:
        state["memory"] = memory
    return state


def read_state(rule: Rule, norm: Norm, state: Any, expected: Saved, adapt: bool) -> Saved:
    """The contents of a state dict; ValueError if it is of another model or norm, or holds invalid numbers.

    `expected` has the shapes that the state must have.
    """
    _validate_same_weights(rule, norm, state)
    start = _flat(rule, state, "sensitivity")
    rates = _flat(rule, state, "rates") if "rates" in state else None
    for weight, index in rule.blocks.flat_index.items():
        if weight.rated and adapt and not (start[index] > 0).all():
            raise ValueError(f"{weight.name}: the state holds a sensitivity of {float(start[index].min()):g}")
        if rates is not None and not (rates[index] >= 0).all():
            raise ValueError(f"{weight.name}: the state holds a rate of {float(rates[index].min()):g}")
    memory: Memory = []
    for group, known in zip(rule.blocks.groups, expected.memory, strict=True):
        last = state.get("memory", {}).get(_key(group))
        if last is not None and known is not None:
            _validate_values(group.weight.name, last, known.shape)
        memory.append(None if last is None else last.to(group.weight.param.device))
    stepped = state.get("stepped", {})
    return Saved(start, rates, {id(part.param) for part in rule.parts if stepped.get(part.name, False)}, memory)


def _flat(rule: Rule, state: Mapping[str, Any], key: str) -> Tensor:
    """The flat vector of an entry of the state, which has one vector for each weight."""
    flat = torch.empty(rule.blocks.total, device=rule.blocks.device, dtype=torch.float32)
    for weight, index in rule.blocks.flat_index.items():
        of_weight = state[key].get(weight.name)
        _validate_values(weight.name, of_weight, (weight.blocks,))
        flat[index] = of_weight.to(flat)
    return flat


def _validate_values(name: str, found: object, shape: Collection[int]) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"{name}: the state holds a {type(found).__name__} where a tensor should be")
    if found.shape != tuple(shape):
        raise ValueError(f"{name}: the state holds a tensor of shape {tuple(found.shape)}, not {tuple(shape)}")
    if not found.isfinite().all():
        raise ValueError(f"{name}: the state holds NaN or inf; resume from an earlier checkpoint")


def _digest(weight: Weight) -> str:
    """A digest of the blocks of all rows, of the parameter and of its bias."""
    runs = [torch.unique_consecutive(part.block_of_row, return_counts=True) for part in weight.parts]
    layout = [(part.dim, *(run.tolist() for run in each)) for part, each in zip(weight.parts, runs, strict=True)]
    return hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()


def _key(group: BlockGroup) -> str:
    """The weight's name; with the number of rows if its blocks have different numbers of rows."""
    name, sizes = group.weight.name, group.weight.rows_of_block
    return name if len(group.blocks) == len(sizes) else f"{name}[{sizes[group.blocks[0]]} rows]"


def validate_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a newer quacklr has written the state."""
    if state.get("version", 1) not in (1, VERSION):
        raise ValueError(
            f"the state has version {state['version']}, so it was written by a newer quacklr; use that one"
        )


def _validate_same_weights(rule: Rule, norm: Norm, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"this is not the state of a QuacK: it is a {type(state).__name__}")
    validate_version(state)
    if set(state) == {"version"}:
        raise ValueError(
            "the state is that of a QuacK with a budget, which has no sensitivities at the start; pass the same "
            "budget= to resume that run"
        )
    if missing := {"norm", "shape", "sensitivity"} - set(state):
        raise ValueError(f"this is not the state of a QuacK: it has no {', '.join(sorted(missing))}")
    if state["norm"] != norm_name(norm):
        raise ValueError(f"the state was made with norm={state['norm']}, but this QuacK has norm={norm_name(norm)}")
    saved = {name: (list(shape), _length(state["sensitivity"].get(name))) for name, shape in state["shape"].items()}
    own = {weight.name: (list(weight.param.shape), weight.blocks) for weight in rule.weights}
    rows = {weight.name: _digest(weight) for weight in rule.weights}
    differences = [f"{name} is in the state but not in the model" for name in sorted(saved.keys() - own.keys())]
    differences += [f"{name} is in the model but not in the state" for name in sorted(own.keys() - saved.keys())]
    differences += [
        "{} has shape {} and {} blocks in the state, shape {} and {} blocks in the model".format(
            name, *saved[name], *own[name]
        )
        for name in sorted(own.keys() & saved.keys())
        if saved[name][0] != own[name][0] or saved[name][1] not in (None, own[name][1])
    ]
    differences += [
        f"{name} has other rows in the state than in the model"
        for name, digest in sorted(state.get("rows", {}).items())
        if rows.get(name, digest) != digest
    ]
    if differences:
        raise ValueError("the state is of another model: " + "; ".join(differences))


def _length(found: object) -> int | None:
    return len(found) if isinstance(found, Tensor) and found.ndim == 1 else None
