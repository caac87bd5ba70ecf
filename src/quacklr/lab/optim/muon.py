"""Muon: momentum, orthogonalised. All matrices of one shape are orthogonalised in one batch, by matrix or by head.

    buffer <- lerp(buffer, grad, 1 - momentum)
    update <- lerp(grad, buffer, momentum)                          (Nesterov; else the buffer)
    param  <- (1 - lr weight_decay) param - lr scale orthogonalise(update)

torch.optim.Muon has the same update rule, but processes one matrix at a time, and in bf16 on every device. For sharded
matrices (DTensors of fully_shard) only `orthogonalise` needs whole matrices; the rest works on the local shards.

Shapes: B matrices, R rows, C columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from quacklr.core.local import local_tensor
from quacklr.lab.optim.compositional import Composition
from quacklr.lab.optim.newton_schulz import orthogonalise, precision
from quacklr.lab.optim.shard_exchange import ShardExchange, ShardSpec, local_gradient, shard_spec, validate_sharding

UpdateScale = Literal["jordan", "rms", "ratio"]
SCALES: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "ratio": lambda rows, columns: (rows / columns) ** 0.5,
}

Job: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A parameter to step, and its param group."""


class Muon(Optimizer):
    """Steps 2-D parameters by the orthogonalised momentum of their gradients. Linear in lr.

    `scale` is the factor of an update of shape (rows, columns): "jordan" is sqrt(max(1, rows / columns)), "rms" is
    0.2 sqrt(max(rows, columns)), torch's "original" and "match_rms_adamw", and "ratio" is sqrt(rows / columns).
    `weight_decay` is decoupled. `blocks` splits
    the rows of a parameter into that many equal blocks, each stepped as if it were a parameter of its own: one block
    per head is "Muon Split". All of these can differ between param groups.

    Matrices of equal shape, from all groups, are stacked and orthogonalised in one batch. Memory: a momentum buffer for
    each parameter, and during the step about five copies of a stack, in fp32 or (GPU) bf16.

    A DTensor may be sharded over one mesh dimension and replicated over others: FSDP2, HSDP. The matrices of one shape
    are then distributed over the ranks by two collectives (shard_exchange.py), and each rank orthogonalises its share;
    every replica repeats the work. During the exchange a rank holds two more copies of its shards of one shape. All
    ranks must have gradients for the same parameters.
    """

    max_stack_numel = 2**25
    """Most elements in a stack of more than one parameter. 128 MB in fp32: eight matrices of 2048^2."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: UpdateScale = "jordan",
        blocks: int = 1,
    ) -> None:
        self.composition: Composition | None = None
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "scale": scale, "blocks": blocks})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. ValueError for a parameter that is not a matrix, or not sharded in a supported way."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        if group["scale"] not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {group['scale']!r}")
        names = group.get("param_names", ["a parameter"] * len(group["params"]))
        for name, param in zip(names, group["params"], strict=True):
            _validate(name, param, group["blocks"])
        self.param_groups.append(group)

    def split(self, blocks_of_param: Mapping[Tensor, int]) -> None:
        """Set the number of blocks of these parameters; each moves to a param group with that `blocks`.

        Call it before the first step, before load_state_dict, and before a scheduler is made. To resume a run that was
        split, split the same way and then load its state.
        """
        if self.state:
            raise ValueError("split Muon's parameters before its first step and before load_state_dict")
        held = {param for group in self.param_groups for param in group["params"]}
        for param, blocks in blocks_of_param.items():
            if param not in held:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is to be split but is not this Muon's")
            _validate("a parameter", param, blocks)
        self.param_groups[:] = [part for group in self.param_groups for part in _split_group(group, blocks_of_param)]

    def compose(self, composition: Composition) -> None:
        """Step the weights of these products by Compositional Muon, the others as before. Not for sharded weights."""
        held = {param for group in self.param_groups for param in group["params"]}
        for param in composition.params():
            if param not in held or shard_spec(param) is not None:
                what = "is sharded" if param in held else "is not this Muon's"
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is to be composed but {what}")
        self.composition = composition

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.composition is not None:
            self._step_composed(self.composition)
        matrices: Counter[Any] = Counter()  # number of matrices assigned to owners so far, by process group
        for (rows, *_, spec), jobs in self._jobs_by_shape().items():
            if spec is None:
                size = max(1, self.max_stack_numel // max(param.numel() for param, _ in jobs))
                for start in range(0, len(jobs), size):
                    self._step_whole(rows, jobs[start : start + size])
            else:
                self._step_sharded(rows, jobs, spec, matrices[spec.group])
                matrices[spec.group] += len(jobs)  # owners continue from shape to shape, so the work is balanced
        return loss

    def _jobs_by_shape(self) -> dict[Any, list[Job]]:
        """Parameters that can be stacked, by the rows of a block, columns, dtype, device and sharding."""
        found: dict[Any, list[Job]] = {}
        composed = set() if self.composition is None else self.composition.params()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param not in composed:
                    rows, columns = param.shape[0] // group["blocks"], param.shape[1]
                    key = (rows, columns, precision(param), param.device, shard_spec(param))
                    found.setdefault(key, []).append((param, group))
        return found

    def _step_whole(self, rows: int, jobs: list[Job]) -> None:
        """Step one stack of parameters that are not sharded."""
        param, heights = jobs[0][0], [len(param) for param, _ in jobs]
        stack_RC = torch.empty(sum(heights), param.shape[1], dtype=precision(param), device=param.device)
        self._write_updates(jobs, stack_RC.split(heights))
        _apply_updates(jobs, _orthogonalise_blocks(stack_RC, rows).split(heights), rows)

    def _step_sharded(self, rows: int, jobs: list[Job], spec: ShardSpec, first: int) -> None:
        """Step sharded parameters; rank `first` owns the first of them while they are orthogonalised."""
        shapes = [tuple(param.shape) for param, _ in jobs]
        exchange = ShardExchange(shapes, spec, first, precision(jobs[0][0]), jobs[0][0].device)
        self._write_updates(jobs, exchange.shards)
        exchange.run_at_owners(lambda stack_RC: _orthogonalise_blocks(stack_RC, rows), self.max_stack_numel)
        _apply_updates(jobs, exchange.shards, rows)

    def _step_composed(self, composition: Composition) -> None:
        """Step the weights of products by Compositional Muon; none of them if one has no gradient."""
        group_of = {param: group for group in self.param_groups for param in group["params"]}

        def update_of(param: Tensor) -> Tensor:
            update_RC = torch.empty_like(param)
            self._write_updates([(param, group_of[param])], [update_RC])
            return update_RC

        if all(param.grad is not None for param in composition.params()):
            for param, step in composition.steps(update_of):
                lr = group_of[param]["lr"]
                if group_of[param]["weight_decay"]:
                    param.mul_(1 - lr * group_of[param]["weight_decay"])
                param.add_(step.to(param.dtype), alpha=-lr)

    def _write_updates(self, jobs: list[Job], updates: Iterable[Tensor]) -> None:
        """Update the momentum of each parameter, and write its update before orthogonalisation."""
        for (param, group), update_RC in zip(jobs, updates, strict=True):
            grad_RC, state = local_gradient(param), self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer_RC = local_tensor(state["momentum_buffer"]).lerp_(grad_RC, 1 - group["momentum"])
            if group["nesterov"]:
                torch.lerp(grad_RC, buffer_RC, group["momentum"], out=update_RC)
            else:
                update_RC.copy_(buffer_RC)


def _orthogonalise_blocks(stack_RC: Tensor, rows: int) -> Tensor:
    """Orthogonalise each block of that many rows. Overwrites the stack."""
    return orthogonalise(stack_RC.view(-1, rows, stack_RC.shape[1]), overwrite=True).flatten(0, 1)


def _apply_updates(jobs: list[Job], updates: Iterable[Tensor], rows: int) -> None:
    """Decay the local shard of each parameter, and subtract its scaled update."""
    for (param, group), update_RC in zip(jobs, updates, strict=True):
        lr, param_RC, columns = group["lr"], local_tensor(param), param.shape[1]
        if group["weight_decay"]:
            param_RC.mul_(1 - lr * group["weight_decay"])
        param_RC.add_(update_RC, alpha=-lr * SCALES[group["scale"]](rows, columns))


def _validate(name: str, param: Tensor, blocks: int) -> None:
    shape = tuple(param.shape)
    if param.ndim != 2:
        raise ValueError(f"Muon steps matrices, but {name} has shape {shape}; give it to AdamW")
    if blocks < 1 or shape[0] % blocks:
        raise ValueError(f"the rows of {name} of shape {shape} cannot be cut into {blocks} equal blocks")
    validate_sharding(name, param)


def _split_group(group: dict[str, Any], blocks_of_param: Mapping[Tensor, int]) -> Iterator[dict[str, Any]]:
    """The param group as one group for each number of blocks."""
    blocks = [blocks_of_param.get(param, group["blocks"]) for param in group["params"]]
    lists: list[str] = [key for key in ("params", "param_names") if key in group]
    for number in dict.fromkeys(blocks):
        members = {key: [x for x, b in zip(group[key], blocks, strict=True) if b == number] for key in lists}
        yield {**group, **members, "blocks": number}
