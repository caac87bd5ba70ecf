"""QuacK's state, keyed by weight name: what a run must keep to resume exactly.

    {"norm": "frobenius", "shape": {name: [...]}, "sensitivity": {name: (blocks,)}, "memory": {name: (blocks, ...)}}

Plain tensors and strings, none stored on a parameter: they survive sharding, torch.save and weights_only loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quacklr.blocks import Memory, Run
from quacklr.norms import Norm
from quacklr.rule import Rule


def norm_name(norm: Norm) -> str:
    """How a norm is called in states and tables."""
    return str(getattr(norm, "__name__", type(norm).__name__))


def write_state(rule: Rule, norm: Norm, start: Tensor, memory: Memory) -> dict[str, Any]:
    """The sensitivities at the start, and what the norm remembers, as copies."""
    sensitivity = {weight.name: start[place] for weight, place in rule.blocks.place.items()}
    remembered = {
        _key(run): last.clone() for run, last in zip(rule.blocks.runs, memory, strict=True) if last is not None
    }
    shape = {weight.name: list(weight.param.shape) for weight in rule.weights}
    return {"norm": norm_name(norm), "shape": shape, "sensitivity": sensitivity, "memory": remembered}


def read_state(rule: Rule, norm: Norm, state: Mapping[str, Any]) -> tuple[Tensor, Memory]:
    """What `write_state` was given. Raises ValueError before anything is changed if it is of another model or norm."""
    _refuse_foreign(rule, norm, state)
    start = torch.empty(rule.blocks.total, device=rule.blocks.device, dtype=torch.float32)
    for weight, place in rule.blocks.place.items():
        start[place] = state["sensitivity"][weight.name].to(start)
    memory: Memory = []
    for run in rule.blocks.runs:
        last = state["memory"].get(_key(run))
        memory.append(None if last is None else last.to(run.weight.param.device))
    return start, memory


def _key(run: Run) -> str:
    """A weight's name; with a number of rows if not all of its blocks have the same."""
    sizes = run.weight.rows_of_block
    return run.weight.name if len(run.blocks) == len(sizes) else f"{run.weight.name}[{sizes[run.blocks[0]]} rows]"


def _refuse_foreign(rule: Rule, norm: Norm, state: Mapping[str, Any]) -> None:
    if missing := {"norm", "shape", "sensitivity", "memory"} - set(state):
        raise ValueError(f"this is not the state of a QuacK: it has no {', '.join(sorted(missing))}")
    if state["norm"] != norm_name(norm):
        raise ValueError(f"the state was made with norm={state['norm']}, but this QuacK has norm={norm_name(norm)}")
    saved = {name: (shape, len(state["sensitivity"][name])) for name, shape in state["shape"].items()}
    here = {weight.name: (list(weight.param.shape), weight.blocks) for weight in rule.weights}
    differences = [
        *(f"{name} is in the state but not in the model" for name in sorted(saved.keys() - here.keys())),
        *(f"{name} is in the model but not in the state" for name in sorted(here.keys() - saved.keys())),
        *(
            f"{name} has shape {saved[name][0]} and {saved[name][1]} blocks in the state, "
            f"shape {here[name][0]} and {here[name][1]} blocks in the model"
            for name in sorted(here.keys() & saved.keys())
            if saved[name] != here[name]
        ),
    ]
    if differences:
        raise ValueError("the state is of another model: " + "; ".join(differences))
    for name, sensitivity in state["sensitivity"].items():
        if not sensitivity.isfinite().all():
            raise ValueError(f"{name}: the state holds NaN or inf; resume from an earlier checkpoint")
