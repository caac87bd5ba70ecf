"""Muon: momentum, orthogonalised. Every matrix of one shape in one batched Newton-Schulz, by matrix or by head.

    buffer <- lerp(buffer, grad, 1 - momentum)
    update <- lerp(grad, buffer, momentum)                          (Nesterov; else the buffer)
    param  <- (1 - lr weight_decay) param - lr scale orthogonalise(update)

as in torch.optim.Muon, which takes one matrix after another, and in bf16 whatever the machine. Of sharded matrices
(DTensors, as fully_shard makes them) everything but `orthogonalise` is done on the shards, and that at owners.

Shapes: B matrices, R rows, C columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from quacklr.core.local import ShardSpec, local_tensor
from quacklr.lab.optim.dealt import ShardExchange, cut_of, gradient_here, refuse_unless_one_cut
from quacklr.lab.optim.newton_schulz import orthogonalise, precision

UpdateScale = Literal["jordan", "rms"]
SCALES: dict[str, Callable[[int, int], float]] = {
    "jordan": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}

Job: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A parameter to step, and the param group it is in."""


class Muon(Optimizer):
    """Steps 2-D parameters by the orthogonalised momentum of their gradients. Linear in lr.

    `scale` is the factor of an update of shape (rows, columns): "jordan" is sqrt(max(1, rows / columns)), "rms" is
    0.2 sqrt(max(rows, columns)), torch's "original" and "match_rms_adamw". `weight_decay` is decoupled. `blocks` cuts
    the rows of a parameter into that many equal blocks, each stepped as if it were a parameter of its own: one a head
    is "Muon Split". All of these can differ between param groups.

    Matrices of equal shape, of all groups, are stacked and orthogonalised at once. Costs little but that, and memory:
    a momentum buffer for each parameter, and while it runs about five copies of a stack, in fp32 or (GPU) bf16.

    A DTensor may be sharded over one mesh dimension, and replicated over others: FSDP2, HSDP. Matrices of one shape
    are then dealt out to the ranks, for two collectives however many they are (dealt.py), and each rank works on its
    share, in each replica again. A rank holds two copies more of its shards of one shape while they are away. The
    ranks must have gradients for the same parameters.
    """

    most = 2**25
    """Numbers in a stack, at most; a larger parameter has one of its own. 128 MB in fp32: eight matrices of 2048^2."""

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
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "scale": scale, "blocks": blocks})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group, as for any optimizer. ValueError for a parameter that is no matrix or cannot be stepped."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        if group["scale"] not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {group['scale']!r}")
        names = group.get("param_names", ["a parameter"] * len(group["params"]))
        for name, param in zip(names, group["params"], strict=True):
            _refuse(name, param, group["blocks"])
        self.param_groups.append(group)

    def split(self, blocks_of_param: Mapping[Tensor, int]) -> None:
        """Cut these parameters into that many blocks from now on; each moves to a group of its blocks' number.

        Before the first step, before a state is loaded, and before a scheduler looks at the groups. A run that was
        split is resumed by one that is split the same way and then loads its state.
        """
        if self.state:
            raise ValueError("split Muon's parameters before its first step and before load_state_dict")
        held = {param for group in self.param_groups for param in group["params"]}
        for param, blocks in blocks_of_param.items():
            if param not in held:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is to be split but is not this Muon's")
            _refuse("a parameter", param, blocks)
        self.param_groups[:] = [part for group in self.param_groups for part in _parts(group, blocks_of_param)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        dealt: Counter[Any] = Counter()
        for (rows, *_, cut), jobs in self._alike().items():
            if cut is None:
                for stack in self._stacks(jobs):
                    self._step(rows, stack)
            else:
                self._step_dealt(rows, jobs, cut, dealt[cut.group])
                dealt[cut.group] += len(jobs)  # where one shape ends the next goes on: even work
        return loss

    def _alike(self) -> dict[Any, list[Job]]:
        """Parameters whose blocks have one shape, by the rows of a block, and what else they must have in common."""
        alike: dict[Any, list[Job]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows, columns = param.shape[0] // group["blocks"], param.shape[1]
                    key = (rows, columns, precision(param), param.device, cut_of(param))
                    alike.setdefault(key, []).append((param, group))
        return alike

    def _stacks(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """At most `most` numbers at once."""
        each = max(1, self.most // max(param.numel() for param, _ in jobs))
        for first in range(0, len(jobs), each):
            yield jobs[first : first + each]

    def _step(self, rows: int, jobs: list[Job]) -> None:
        heights = [len(param) for param, _ in jobs]
        columns, device = jobs[0][0].shape[1], jobs[0][0].device
        stack_RC = torch.empty(sum(heights), columns, dtype=precision(jobs[0][0]), device=device)
        for (param, group), update_RC in zip(jobs, stack_RC.split(heights), strict=True):
            self._write_update(param, group, update_RC)
        stack_RC = _orthogonalised(stack_RC, rows)
        for (param, group), update_RC in zip(jobs, stack_RC.split(heights), strict=True):
            _take(param, group, update_RC, rows)

    def _step_dealt(self, rows: int, jobs: list[Job], cut: ShardSpec, first: int) -> None:
        """As `_step`, but of shards, which are away at the owners of their matrices to be orthogonalised."""
        shapes = [tuple(param.shape) for param, _ in jobs]
        deal = ShardExchange(shapes, cut, first, precision(jobs[0][0]), jobs[0][0].device)
        for (param, group), update_RC in zip(jobs, deal.shards, strict=True):
            self._write_update(param, group, update_RC)
        deal.at_owners(lambda stack_RC: _orthogonalised(stack_RC, rows), self.most)
        for (param, group), update_RC in zip(jobs, deal.shards, strict=True):
            _take(param, group, update_RC, rows)

    def _write_update(self, param: Tensor, group: dict[str, Any], update_RC: Tensor) -> None:
        grad_RC, state = gradient_here(param), self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer_RC = local_tensor(state["momentum_buffer"]).lerp_(grad_RC, 1 - group["momentum"])
        if group["nesterov"]:
            torch.lerp(grad_RC, buffer_RC, group["momentum"], out=update_RC)
        else:
            update_RC.copy_(buffer_RC)


def _orthogonalised(stack_RC: Tensor, rows: int) -> Tensor:
    """Each block of that many rows by itself. Overwrites them."""
    return orthogonalise(stack_RC.view(-1, rows, stack_RC.shape[1]), overwrite=True).flatten(0, 1)


def _take(param: Tensor, group: dict[str, Any], update_RC: Tensor, rows: int) -> None:
    """The step itself, on what this rank has of the parameter."""
    lr, param_RC, columns = group["lr"], local_tensor(param), param.shape[1]
    if group["weight_decay"]:
        param_RC.mul_(1 - lr * group["weight_decay"])
    param_RC.add_(update_RC, alpha=-lr * SCALES[group["scale"]](rows, columns))


def _refuse(name: str, param: Tensor, blocks: int) -> None:
    shape = tuple(param.shape)
    if param.ndim != 2:
        raise ValueError(f"Muon steps matrices, but {name} has shape {shape}; give it to AdamW")
    if blocks < 1 or shape[0] % blocks:
        raise ValueError(f"the rows of {name} of shape {shape} cannot be cut into {blocks} equal blocks")
    refuse_unless_one_cut(name, param)


def _parts(group: dict[str, Any], blocks_of_param: Mapping[Tensor, int]) -> Iterator[dict[str, Any]]:
    """The group as one group for each number of blocks."""
    blocks = [blocks_of_param.get(param, group["blocks"]) for param in group["params"]]
    lists: list[str] = [key for key in ("params", "param_names") if key in group]
    for number in dict.fromkeys(blocks):
        chosen = {key: [x for x, b in zip(group[key], blocks, strict=True) if b == number] for key in lists}
        yield {**group, **chosen, "blocks": number}
