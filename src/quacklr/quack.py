"""QuacK: every head's query and key weights step with the learning rate that keeps changes of its logits in bounds.

The step is scaled, the learning rate is never written. Before the optimizer steps, a hook computes the rates from the
weights and copies the rows that are on a path; after it, another moves them to old + rate * (new - old). For every
update that is linear in lr this is the step it would have taken with lr * rate, weight decay included, and
schedulers, param groups, clipping and logging see what they always saw.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.core.blocks import Copies, Memory
from quacklr.core.norms import Norm, frobenius
from quacklr.core.path import LogitPath, as_paths
from quacklr.core.sensitivity import Rule, rates_from
from quacklr.core.state import Saved, norm_name, read_state, write_state
from quacklr.core.validate import (
    FLOAT32,
    validate_norms,
    validate_not_attached_twice,
    validate_not_meta,
    validate_settings,
    validate_stepped,
)
from quacklr.describe import describe
from quacklr.distributed.collectives import reshard
from quacklr.distributed.sharded_blocks import ShardedBlocks, blocks_of
from quacklr.distributed.validate import validate_not_fsdp1
from quacklr.find import logit_paths
from quacklr.find.finding import Finding
from quacklr.find.verify import Verification
from quacklr.optimizers.attach import as_optimizers, first_after_step, is_idle, validate_linear
from quacklr.optimizers.nested_steps import RunningStep, running_steps
from quacklr.optimizers.step_check import StepCheck, ids_in_groups
from quacklr.util.read_only import ReadOnly

_attached: WeakSet[QuacK] = WeakSet()

RESUMED_ALONE = (
    "the optimizer's state was loaded but QuacK's was not, so all rates start again from tau; "
    "call quack.load_state_dict(...) too when you resume a run"
)


class QuacK:
    """Per-head learning rates for the query and key weights of a model, on the optimizer (or optimizers) that train it.

        quack = QuacK(model, optimizer)     # once, after the weights are initialised or loaded

    and the training loop stays as it was. `model` is a module, or its paths. `tau` is the rate at the start, relative
    to the optimizer's lr: the one knob to tune. `adapt=False` leaves it there (the paper's constant-tau ablation).
    `floor` bounds every norm from below, for weights that start at zero. All rates are relative to the weights found
    here, so save `state_dict()` beside the optimizer's, and load it when resuming.

    With `verify`, attention that was found by rule is measured before the first step, on a few tokens of the first
    batch; if a rule is wrong, that step raises a ValueError. A sharded model, or one compiled in place,
    cannot be measured: that is a warning if its attention is a class which quacklr does not know.

    Rates are computed from the weights before the step; of several optimizers, all that step before one of them steps
    again use the same rates. Parameters may be sharded (FSDP2, HSDP, tensor parallelism): attach afterwards, in every
    process; a step then takes one small all-reduce for the whole model.

    Costs a copy of the rows on a path while a step runs (on the CPU it is kept for the next one: fresh pages cost more
    than the copying), one pass over them for the norms, and one to scale the step; waits for no device.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        tau: float = 1.0,
        *,
        norm: Norm = frobenius,
        adapt: bool = True,
        floor: float = 0.0,
        verify: bool = True,
    ) -> None:
        validate_settings(tau, norm, floor)
        self._norm, self._adapt, self._floor = norm, adapt, floor
        self.optimizers = as_optimizers(optimizer)
        if isinstance(model, nn.Module):
            validate_not_fsdp1(model)
            reshard(model)
        paths: Iterable[LogitPath] = logit_paths(model) if isinstance(model, nn.Module) else model
        self.left_alone: Mapping[str, str] = getattr(paths, "left_alone", {})
        found: Mapping[str, Finding] = getattr(paths, "found", {})
        paths = as_paths(paths, "the model must be an nn.Module or")
        validate_not_meta(weight for path in paths for weight in path.weights)
        self._rule = Rule(paths, blocks_of)
        self._on_paths = {id(part.param) for part in self._rule.parts}
        validate_stepped(self._rule.weights, self.optimizers)
        validate_linear(self.optimizers, (part.param for weight in self._rule.weights for part in weight.parts))
        here = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(self._rule.weights, [weight for other in here for weight in other._rule.weights])
        self._start, self._memory = self._measure_start()
        self._largest = _largest(self._start)
        self._rates = torch.full_like(self._start, tau)
        self.tau = tau
        self._stepped: set[int] = set()  # ids of the tensors that have stepped in this iteration
        self._running: dict[Optimizer, RunningStep] = {}
        self._loaded = self._resumed_alone = False
        self._step_check = StepCheck(
            model if isinstance(model, nn.Module) else None, self._rule.weights, self.optimizers
        )
        self._origin = {name: finding.origin for name, finding in found.items()}
        self._verification = Verification(model, found, verify) if isinstance(model, nn.Module) else None
        self._hooks = [hook for each in self.optimizers for hook in self._hook(each)]
        _attached.add(self)

    def _hook(self, optimizer: Optimizer) -> list[Any]:
        eager: Any = torch.compiler.disable  # under torch.compile(optimizer.step) the hooks run as they are
        return [
            optimizer.register_step_pre_hook(eager(self._before)),
            first_after_step(optimizer, eager(self._after)),  # what others do to weights after a step is no step
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
        ]

    norm = ReadOnly[Norm]()
    adapt = ReadOnly[bool]()
    floor = ReadOnly[float]()

    @property
    def tau(self) -> float:
        """The rate at the start, relative to lr. Can be set while training, for a schedule."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        validate_settings(tau, self.norm, self.floor)
        if self.adapt and tau * self._largest > FLOAT32.max:
            raise ValueError(f"tau={tau!r}: with these weights, tau * sensitivity is more than float32 can hold")
        self._tau = tau
        self._target = tau * self._start
        if not self.adapt:
            self._rates.fill_(tau)

    def _measure(self, memory: Memory) -> tuple[Copies, list[Tensor], Memory]:
        copies, norms, memory = self._rule.blocks.measure(self.norm, memory)
        return copies, [norm.clamp(min=self.floor) for norm in norms] if self.floor else norms, memory

    def _measure_start(self) -> tuple[Tensor, Memory]:
        """The sensitivities that all later rates are relative to."""
        _, _, memory = self._measure(self._rule.blocks.nothing())
        _, norms, _ = self._measure(memory)  # as the first step will, so that what has not changed has rate 1 exactly
        start = self._rule.sensitivity(norms)
        validate_norms(self._rule, torch.cat(norms), start, self.adapt)
        return start, memory

    def _tensors(self, optimizer: Optimizer) -> set[int]:
        """Ids of the tensors on a path that this optimizer moves, but for those that a step moves which calls it."""
        tensors = ids_in_groups(optimizer) & self._on_paths
        return tensors.difference(*(running.tensors for running in self._running.values()))

    def _drop_failed(self, optimizer: Optimizer) -> None:
        """Forget steps that raised, so that their post-hooks never ran: all that are not on the call stack."""
        for other, running in list(self._running.items()):
            running.calls_step = running_steps(other) > (other is optimizer)
            if not running.calls_step:
                del self._running[other]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._running:
            self._drop_failed(optimizer)
        if optimizer in self._running or is_idle(optimizer):  # the former: its step called its parent class's
            return
        if self._resumed_alone:
            self._resumed_alone = False
            warnings.warn(RESUMED_ALONE, stacklevel=4)  # the line that called optimizer.step
        tensors = self._tensors(optimizer)
        new_iteration = not self._stepped or not self._stepped.isdisjoint(tensors)
        self._step_check.before_step(tensors, self._stepped if new_iteration else ())
        if not tensors:
            return
        if self._verification is not None:
            self._verification.before_step()
        if new_iteration:
            self._stepped.clear()
        self._stepped |= tensors
        if new_iteration and self.adapt:
            copies, norms, self._memory = self._measure(self._memory)
            rates_from(self._target, self._rule.sensitivity(norms), self._tau, out=self._rates)
        else:
            copies = self._rule.blocks.copy(tensors)
        self._running[optimizer] = RunningStep(copies, tensors)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        running = self._running.get(optimizer)
        if running is None or (running.calls_step and running_steps(optimizer) > 1):
            return
        del self._running[optimizer]
        copies, tensors = running.copies, running.tensors
        if self._verification is not None:
            self._verification.finish()
        self._step_check.after_step(optimizer, tensors, lambda: self._rule.blocks.have_moved(copies))
        self._rule.blocks.move(copies, self._rates, tensors)

    def _optimizer_loaded(self, optimizer: Optimizer) -> None:
        self._resumed_alone = bool(optimizer.state) and not self._loaded

    def rates(self, last: bool = False) -> dict[str, Tensor]:
        """For each weight's name the (blocks,) multipliers of lr for a step from the weights as they are now.

        Of sharded weights every process must ask, at the same time. With `last` they are those of the last step: that
        asks nobody, so one process can log them. NaN between loading a state of quacklr 0.1 and the next step.
        """
        if last:
            return self._named(self._rates)
        if not self.adapt:
            return self._named(torch.full_like(self._start, self._tau))
        copies, norms, _ = self._measure(self._memory)
        self._rule.blocks.take_back(copies)
        return self._named(rates_from(self._target, self._rule.sensitivity(norms), self._tau))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return {w.name: flat[place] for w, place in self._rule.blocks.flat_index.items() if w.trains}

    def rate_of(self, param: Tensor) -> Tensor | None:
        """The multipliers of lr of one parameter or bias, in a shape that broadcasts to it; 1 for rows on no path.

        None if it is frozen, or no row of it is on a path. Of a sharded one it is a plain tensor for the whole of it.
        """
        parts = [(weight, part) for weight in self._rule.weights for part in weight.parts if part.param is param]
        parts = [(weight, part) for weight, part in parts if weight.rated]
        if not parts or not param.requires_grad:
            return None
        by_name = self.rates()
        of_row = torch.ones(len(parts[0][1].block_of_row), device=param.device, dtype=torch.float32)
        for weight, part in parts:
            owned = part.block_of_row >= 0
            of_row[owned] = by_name[weight.name].to(param.device)[part.block_of_row[owned]]
        return parts[0][1].spread(of_row)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, by weight name: the sensitivities at the start, the rates, the norm's memory.

        Plain tensors, numbers and strings, loadable with `weights_only`. tau, adapt and floor are not in it: the script
        says them.
        """
        return write_state(self._rule, self.norm, self._saved())

    def _saved(self) -> Saved:
        rates = None if bool(self._rates.isnan().any()) else self._rates
        return Saved(self._start, rates, self._stepped, self._memory)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`. One of another model or norm is a ValueError that lists the difference."""
        saved = read_state(self._rule, self.norm, state_dict, self._saved(), self.adapt)
        self._start, self._memory, self._stepped = saved.start, saved.memory, saved.stepped
        self._largest = _largest(self._start)
        self._rates.copy_(saved.rates if saved.rates is not None else torch.tensor(torch.nan))
        self.tau = self._tau
        self._loaded, self._resumed_alone = True, False

    def remove(self) -> None:
        """Take the hooks off: the optimizers step as if QuacK had never been there."""
        for hook in self._hooks:
            hook.remove()
        self._running.clear()
        if self._verification is not None:
            self._verification.remove()
        _attached.discard(self)

    def __reduce__(self) -> NoReturn:
        """A copy would look attached and do nothing, since a copied optimizer has no hooks."""
        raise TypeError(
            "a QuacK cannot be copied or pickled; attach a new one to the copied optimizer, and give it this one's "
            "state_dict()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        settings = f"tau={self.tau:g}, norm={norm_name(self.norm)}, adapt={self.adapt}, floor={self.floor:g}"
        alone = isinstance(self._rule.blocks, ShardedBlocks)  # one process may print by itself, so others are not asked
        when = "last rates" if alone else "rates now"
        rates, notes = self.rates(alone), self._verification.notes if self._verification is not None else {}
        return f"QuacK({settings}) on {names}\n" + describe(
            self._rule, when, rates, self.left_alone, self._origin, notes
        )


def _largest(sensitivity: Tensor) -> float:
    """The largest finite one. Waits for the device."""
    return float(sensitivity.nan_to_num(0, 0, 0).max())
