"""QuacK: per-head learning rates for query and key weights, by hooks on the optimizer's step.

The pre-step hook computes the rates from the weights and copies the rows on the paths. The post-step hook sets these
rows to old + rate * (new - old). For every update that is linear in lr, this is the step that the optimizer would have
taken with lr * rate, weight decay included.
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
from quacklr.optimizers.nested_steps import RunningStep, RunningSteps
from quacklr.optimizers.scratch import ids_in_groups
from quacklr.optimizers.step_check import StepCheck
from quacklr.util.read_only import ReadOnly

_attached: WeakSet[QuacK] = WeakSet()

RESUMED_ALONE = (
    "the optimizer's state was loaded but QuacK's was not, so all rates start again from tau; "
    "call quack.load_state_dict(...) too when you resume a run"
)


class QuacK:
    """Per-head learning rates that bound how far one optimizer step can move an attention logit.

    An attention logit is a product of weights. The sensitivity of a head's query weights is the norm of its key
    weights, and vice versa; in MLA it is the product of the norms of the other weights on the path. The weights of each
    head step with `lr * rate`, where

        rate = tau * (sensitivity when QuacK was attached) / (sensitivity now)

    Attach QuacK once, after the weights are initialised or loaded. The training loop does not change:

        quack = QuacK(model, optimizer)

    The optimizer's `lr` is never written, so schedulers, param groups, gradient clipping and logging work as before.
    Rates are relative to the weights at the time of attaching: to resume a run, save and load `state_dict()` together
    with the optimizer's.

    Args:
        model: the model, whose attention is found by `logit_paths(model)`; or an iterable of LogitPath.
        optimizer: the optimizer that trains the model, or several. Their steps must be linear in lr, as those of SGD,
            AdamW, Muon and most others are.
        tau: the rate at the start, relative to the optimizer's lr. The one hyperparameter to tune.
        norm: the norm of a block of weights: `quacklr.frobenius`, `quacklr.spectral`, or a function of the same form.
        adapt: if False, all rates stay at tau (the constant-tau ablation of the paper).
        floor: a lower bound on all norms, for weights that are all zeros when QuacK is attached.
        verify: measure attention that was found by rule, on a few tokens of the first batch. If the rule was wrong, the
            first step raises ValueError. A model that is sharded, or compiled in place, cannot be measured; there is
            then a warning if the class of its attention is not one that quacklr has tested.

    Rates are computed from the weights before a step. With several optimizers, all that step in one iteration use the
    same rates; an iteration ends when a parameter steps again. Sharded parameters (FSDP2, HSDP, tensor parallelism) are
    supported: attach QuacK after sharding, in every process. A step then takes one small all-reduce.

    A step costs a copy of the rows on the paths (on the CPU its memory is kept for the next step), one pass over them
    for the norms, and one to scale the step. QuacK never waits for the device.
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
        module = model if isinstance(model, nn.Module) else None
        if module is not None:
            validate_not_fsdp1(module)
            reshard(module)
        given: Any = model if module is None else logit_paths(module)
        self.left_alone: Mapping[str, str] = getattr(given, "left_alone", {})
        found: Mapping[str, Finding] = getattr(given, "found", {})
        paths = as_paths(given, "the model must be an nn.Module or")
        validate_not_meta(weight for path in paths for weight in path.weights)
        self._rule = Rule(paths, blocks_of)
        weights = self._rule.weights
        self._on_paths = {id(part.param) for part in self._rule.parts}
        validate_stepped(weights, self.optimizers)
        validate_linear(self.optimizers, (part.param for part in self._rule.parts))
        others = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(weights, [weight for other in others for weight in other._rule.weights])
        self._start, self._memory = self._measure_start()
        self._largest, self._rates = _largest(self._start), torch.full_like(self._start, tau)
        self.tau = tau
        self._stepped: set[int] = set()  # ids of the tensors that have stepped in this iteration
        self._running = RunningSteps()
        self._loaded = self._resumed_alone = False
        self._step_check = StepCheck(module, weights, self.optimizers)
        self._origin = {name: finding.origin for name, finding in found.items()}
        self._verification = None if module is None else Verification(module, found, verify)
        self._hooks = [hook for each in self.optimizers for hook in self._register_hooks(each)]
        _attached.add(self)

    def _register_hooks(self, optimizer: Optimizer) -> list[Any]:
        eager: Any = torch.compiler.disable  # not compiled under torch.compile(optimizer.step)
        return [
            optimizer.register_step_pre_hook(eager(self._before)),
            first_after_step(optimizer, eager(self._after)),  # changes by other post-step hooks are not scaled
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
        ]

    norm = ReadOnly[Norm]()
    adapt = ReadOnly[bool]()
    floor = ReadOnly[float]()

    @property
    def tau(self) -> float:
        """The rate at the start, relative to lr. It can be set during training, for a schedule."""
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
        """The sensitivities at the start, to which all later rates are relative, and the norm's memory."""
        _, _, memory = self._measure(self._rule.blocks.empty_memory())
        _, norms, _ = self._measure(memory)  # the first step uses this memory too, so its rates are exactly tau
        start = self._rule.sensitivity(norms)
        validate_norms(self._rule, torch.cat(norms), start, self.adapt)
        return start, memory

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._running.drop_failed(optimizer)
        if optimizer in self._running or is_idle(optimizer):  # nested step, or every lr is 0
            return
        if self._resumed_alone:
            self._resumed_alone = False
            warnings.warn(RESUMED_ALONE, stacklevel=4)  # refers to the line that called optimizer.step
        of_callers = [running.tensors for running in self._running.values()]  # steps that called this one
        tensors = (ids_in_groups(optimizer) & self._on_paths).difference(*of_callers)
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
        running = self._running.finish(optimizer)
        if running is None:
            return
        if self._verification is not None:
            self._verification.finish()
        blocks = self._rule.blocks
        self._step_check.after_step(optimizer, running.tensors, lambda: blocks.have_moved(running.copies))
        blocks.scale_step(running.copies, self._rates, running.tensors)

    def _optimizer_loaded(self, optimizer: Optimizer) -> None:
        self._resumed_alone = bool(optimizer.state) and not self._loaded

    def rates(self, last: bool = False) -> dict[str, Tensor]:
        """The multipliers of lr that the next step will use: (blocks,) for each weight, by name.

        For sharded weights this is a collective call. With `last`, returns the rates of the last step, without
        communication, so that one process can log them. They are NaN after loading a state of quacklr 0.1, until the
        next step.
        """
        if last:
            return self._named(self._rates)
        if not self.adapt:
            return self._named(torch.full_like(self._start, self._tau))
        copies, norms, _ = self._measure(self._memory)
        self._rule.blocks.recycle(copies)
        return self._named(rates_from(self._target, self._rule.sensitivity(norms), self._tau))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return {weight.name: flat[index] for weight, index in self._rule.blocks.flat_index.items() if weight.trains}

    def rate_of(self, param: Tensor) -> Tensor | None:
        """The multipliers of lr for one weight or bias parameter, broadcastable to it; 1 for rows on no path.

        None if the parameter is frozen, or if none of its rows is on a path. For a sharded parameter this is a
        collective call, and the result is a plain tensor for the whole parameter.
        """
        rated = [weight for weight in self._rule.weights if weight.rated]
        parts = [(weight, part) for weight in rated for part in weight.parts if part.param is param]
        if not parts or not param.requires_grad:
            return None
        rates = self.rates()
        of_row = torch.ones(len(parts[0][1].block_of_row), device=param.device, dtype=torch.float32)
        for weight, part in parts:
            on_path = part.block_of_row >= 0
            of_row[on_path] = rates[weight.name].to(param.device)[part.block_of_row[on_path]]
        return parts[0][1].spread(of_row)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume a run from: by weight name, the sensitivities at the start, the rates, the norm's memory.

        It holds plain tensors, numbers and strings, and can be loaded with `weights_only`. tau, adapt and floor are not
        part of it.
        """
        return write_state(self._rule, self.norm, self._saved())

    def _saved(self) -> Saved:
        rates = None if bool(self._rates.isnan().any()) else self._rates
        return Saved(self._start, rates, self._stepped, self._memory)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. If the state is of another model or norm, a ValueError lists the differences."""
        saved = read_state(self._rule, self.norm, state_dict, self._saved(), self.adapt)
        self._start, self._memory, self._stepped = saved.start, saved.memory, saved.stepped
        self._largest = _largest(self._start)
        self._rates.copy_(saved.rates if saved.rates is not None else torch.tensor(torch.nan))
        self.tau = self._tau
        self._loaded, self._resumed_alone = True, False

    def remove(self) -> None:
        """Remove the hooks: later steps of the optimizers are not scaled."""
        for hook in self._hooks:
            hook.remove()
        self._running.clear()
        if self._verification is not None:
            self._verification.remove()
        _attached.discard(self)

    def __reduce__(self) -> NoReturn:
        """Copying raises TypeError: the copy would have no hooks on the copied optimizer, and do nothing."""
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
        sharded = isinstance(self._rule.blocks, ShardedBlocks)  # if so, print the last rates: `rates()` is collective
        when = "last rates" if sharded else "rates now"
        notes = self._verification.notes if self._verification is not None else {}
        table = describe(self._rule, when, self.rates(last=sharded), self.left_alone, self._origin, notes)
        return f"QuacK({settings}) on {names}\n{table}"


def _largest(sensitivity: Tensor) -> float:
    """The largest finite sensitivity. Waits for the device."""
    return float(sensitivity.nan_to_num(0, 0, 0).max())
