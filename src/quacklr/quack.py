"""QuacK: per-head learning rates for query and key weights, by hooks on the optimizer's step.

The pre-step hook copies the rows on the paths. The post-step hook sets them to old + rate * (new - old). For an update
that is linear in lr, this is the step that the optimizer would have taken with lr * rate, weight decay included. Rates
come from the weights before the step (core/relative_rates.py) or from the step itself (core/budget_rates.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.linearity import validate_linear
from quacklr.attach.nested_steps import RunningStep, RunningSteps
from quacklr.attach.optimizers import as_optimizers, first_after_step, has_stepped, is_idle
from quacklr.attach.step_check import StepCheck
from quacklr.core.budget_rates import BudgetRates, HeadChange
from quacklr.core.flat_tensor import original
from quacklr.core.norms import Norm, frobenius
from quacklr.core.path import LogitPath, all_rated, as_paths
from quacklr.core.relative_rates import ATTACHED_LATE, RESUMED_ALONE, RelativeRates
from quacklr.core.sensitivity import Rule
from quacklr.core.validate import (
    validate_budget,
    validate_not_attached_twice,
    validate_not_meta,
    validate_settings,
    validate_stepped,
)
from quacklr.describe import describe
from quacklr.find import logit_paths
from quacklr.find.finding import Finding
from quacklr.find.verify import Verification
from quacklr.sharded.blocks import ShardedBlocks, blocks_of
from quacklr.sharded.collectives import reshard
from quacklr.sharded.engines.read import as_module, engine_of
from quacklr.util.autocast import without_autocast
from quacklr.util.read_only import ReadOnly

_attached: WeakSet[QuacK] = WeakSet()


class QuacK:
    """Per-head learning rates that bound how far one optimizer step can move an attention logit.

    An attention logit is a sum of products of weights: one product in most models, two in MLA. The sensitivity of a
    head's query weights is the norm of its key weights, and vice versa; in MLA it is the product of the norms of the
    other weights on the path. The weights of each head step with `lr * rate`, where

        rate = tau * (sensitivity when QuacK was attached) / (sensitivity now)

    Attach QuacK once, after the weights are initialised or loaded: `quack = QuacK(model, optimizer)`. The optimizer's
    `lr` is never written, so the training loop, schedulers, param groups, gradient clipping and logging do not change.
    Rates are relative to the weights at the time of attaching: to resume a run, save and load `state_dict()` together
    with the optimizer's.

    Args:
        model: the model, whose attention is found by `logit_paths(model)`; or an iterable of LogitPath.
        optimizer: the optimizer that trains the model, or several; or DeepSpeed's engine. Without a budget their steps
            must be linear in lr, as those of SGD, AdamW, Muon and most others are.
        tau: the rate at the start, relative to the optimizer's lr. The one hyperparameter to tune.
        norm: the norm of a block of weights: `quacklr.frobenius`, `quacklr.spectral`, or a function of the same form.
        adapt: if False, all rates stay at tau (the constant-tau ablation of the paper).
        floor: a lower bound on all norms, for weights that are all zeros when QuacK is attached.
        budget: instead of tau, norm, adapt and floor: how much one step should change a head's logits, in nats (root
            mean square). The step of each head is scaled to this change, down or up. The budget follows the schedule of
            lr: it is multiplied by lr / initial lr. Begin with 0.02. Optimizers need not be linear in lr. There is no
            state to save. docs/attach.md says when to use it.
        verify: measure attention that was found by rule, on a few tokens of the first batch. If the rule was wrong, the
            first step raises ValueError. A model that is sharded, or compiled in place, cannot be measured; it triggers
            a warning if the class of its attention is not one that quacklr has tested.

    Rates are computed from the weights before a step; with a budget, from the step itself. With several optimizers and
    no budget, all steps of one iteration use the same rates; an iteration ends when a parameter steps again.
    Sharded parameters are supported (FSDP1 and 2, tensor parallelism, DeepSpeed, Megatron): attach after sharding, in
    every process (docs/scaling.md). A step then takes one small all-reduce; with a budget also an all-to-all.

    A step costs a copy of the rows on the paths (on the CPU its memory is kept for the next step), one pass over them
    for the norms, and one to scale the step. Only the checks in the first step wait for the device.
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
        budget: float | None = None,
        verify: bool = True,
    ) -> None:
        validate_settings(tau, norm, floor)
        if budget is not None:
            validate_budget(budget, tau, norm, adapt, floor)
        self._norm, self._adapt, self._floor = norm, adapt, floor
        module = as_module(model)
        engine = engine_of(module, optimizer)
        self.optimizers, self._in_groups = as_optimizers(engine.optimizers or optimizer, budget is None), engine.stepped
        reshard(module)
        with engine.whole_shapes():
            given: Any = model if module is None else logit_paths(module)
        self.left_alone: Mapping[str, str] = getattr(given, "left_alone", {})
        found: Mapping[str, Finding] = getattr(given, "found", {})
        paths = engine.located(as_paths(given, "the model must be an nn.Module or"))
        validate_not_meta(weight for path in paths for weight in path.weights)
        self._rule = Rule(paths if budget is None else all_rated(paths), blocks_of)
        weights = self._rule.weights
        self._on_paths = {id(part.param) for part in self._rule.parts}
        others = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(weights, [weight for other in others for weight in other._rule.weights])
        self._method: RelativeRates | BudgetRates
        with engine.filled_groups():
            validate_stepped(weights, self.optimizers, self._in_groups)
            if budget is None:
                validate_linear(self.optimizers, (part.param for part in self._rule.parts), self._in_groups)
                self._method = RelativeRates(self._rule, tau, norm, adapt, floor)
            else:
                self._method = BudgetRates(self._rule, budget, self.optimizers, self._in_groups)
        late = budget is None and adapt and not engine.shards and any(map(has_stepped, self.optimizers))
        self._running, self._loaded, self._not_loaded = RunningSteps(), False, ATTACHED_LATE if late else ""
        self._step_check = StepCheck(module, weights, self.optimizers, budget is None, self._in_groups)
        self._origin = {name: finding.origin for name, finding in found.items()}
        self._verification = None if module is None else Verification(module, found, verify, engine.gathers)
        self._hooks = [hook for each in self.optimizers for hook in self._register_hooks(each)]
        _attached.add(self)

    def _register_hooks(self, optimizer: Optimizer) -> list[Any]:
        eager: Any = torch.compiler.disable  # not compiled under torch.compile(optimizer.step)
        before, after = (without_autocast(each, self._rule.blocks.device) for each in (self._before, self._after))
        return [
            optimizer.register_step_pre_hook(eager(before)),
            first_after_step(optimizer, eager(after)),  # changes by other post-step hooks are not scaled
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
        ]

    norm = ReadOnly[Norm]()
    adapt = ReadOnly[bool]()
    floor = ReadOnly[float]()

    @property
    def tau(self) -> float:
        """The rate at the start, relative to lr. It can be set during training, for a schedule."""
        return self._relative("tau").tau

    @tau.setter
    def tau(self, tau: float) -> None:
        validate_settings(tau, self.norm, self.floor)
        self._relative("tau").set_tau(tau)

    @property
    def budget(self) -> float | None:
        """The change of a head's logits in one step, in nats; None without a budget. It can be set during training."""
        return self._method.budget if isinstance(self._method, BudgetRates) else None

    @budget.setter
    def budget(self, budget: float) -> None:
        validate_budget(budget)
        if not isinstance(self._method, BudgetRates):
            raise AttributeError("this QuacK has no budget; pass budget= when you attach it")
        self._method.budget = budget

    def _relative(self, name: str) -> RelativeRates:
        if isinstance(self._method, BudgetRates):
            raise AttributeError(f"a QuacK with a budget has no {name}")
        return self._method

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._running.drop_failed(optimizer)
        if optimizer in self._running:  # a nested step
            return
        of_callers = [running.tensors for running in self._running.values()]  # steps that called this one
        tensors = (self._in_groups.by(optimizer) & self._on_paths).difference(*of_callers)
        stepped = self._method.stepped
        new_iteration = not stepped or not stepped.isdisjoint(tensors)
        if is_idle(optimizer):  # every lr is 0
            self._method.no_step(tensors, new_iteration)
            return
        if self._not_loaded:
            message, self._not_loaded = self._not_loaded, ""
            warnings.warn(message, stacklevel=5)  # refers to the line that called optimizer.step
        self._step_check.before_step(tensors, stepped if new_iteration else ())
        if not tensors:
            return
        if self._verification is not None:
            self._verification.before_step()
        copies = self._method.before_step(tensors, new_iteration)
        self._running[optimizer] = RunningStep(copies, tensors)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        running = self._running.finish(optimizer)
        if running is None:
            return
        if self._verification is not None:
            self._verification.finish()
        blocks = self._rule.blocks
        self._step_check.after_step(optimizer, running.tensors, lambda: blocks.have_moved(running.copies))
        rates = self._method.after_step(optimizer, running.copies, running.tensors)
        blocks.scale_step(running.copies, rates, running.tensors)

    def _optimizer_loaded(self, optimizer: Optimizer) -> None:
        if isinstance(self._method, BudgetRates):
            self._method.optimizer_loaded(optimizer)
        else:
            self._not_loaded = RESUMED_ALONE if optimizer.state and not self._loaded else ""

    def rates(self, last: bool = False) -> dict[str, Tensor]:
        """The multipliers of lr that the next step will use: (blocks,) for each weight, by name.

        With a budget these are the multipliers of the last step, for weights that have stepped: empty before the first.
        For sharded weights this is a collective call, except with a budget. With `last`, returns the rates of the last
        step, without communication, so that one process can log them. They are NaN after loading a state of quacklr
        0.1, until the next step.
        """
        if isinstance(self._method, BudgetRates) or last:
            return self._named(self._method.rates)
        return self._named(self._method.next_rates())

    def changes(self) -> dict[str, HeadChange]:
        """With a budget: how much the last step changes the logits of each head, in nats, by attention module.

        `asked` is the change by the optimizer's own step; `given` is the change by the scaled step. Both are (heads,),
        and 0 before the first step. docs/theory.md says what they bound.
        """
        if isinstance(self._method, RelativeRates):
            raise AttributeError("changes are computed for a budget only: QuacK(model, optimizer, budget=0.02)")
        return self._method.changes()

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        flat_index = self._rule.blocks.flat_index
        return {weight.name: flat[index] for weight, index in flat_index.items() if self._method.has_rates(weight)}

    def rate_of(self, param: Tensor) -> Tensor | None:
        """The multipliers of lr for one weight or bias parameter, broadcastable to it; 1 for rows on no path.

        None if the parameter is frozen, or if none of its rows is on a path. For a sharded parameter this is a
        collective call, except with a budget, and the result is a plain tensor for the whole parameter.
        """
        rated = [weight for weight in self._rule.weights if weight.rated]
        parts = [(weight, part) for weight in rated for part in weight.parts if original(part.param) is param]
        if not parts or not param.requires_grad:
            return None
        rates = self.rates()
        if any(weight.name not in rates for weight, _ in parts):
            return None
        of_row = torch.ones(len(parts[0][1].block_of_row), device=param.device, dtype=torch.float32)
        for weight, part in parts:
            on_path = part.block_of_row >= 0
            of_row[on_path] = rates[weight.name].to(param.device)[part.block_of_row[on_path]]
        return parts[0][1].spread(of_row)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume a run from: by weight name, the sensitivities at the start, the rates, the norm's memory.

        It holds plain tensors, numbers and strings, and can be loaded with `weights_only`. tau, adapt and floor are not
        part of it. With a budget there is no state, and this is only a version.
        """
        return self._method.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. If the state is of another model or norm, a ValueError lists the differences."""
        self._method.load_state_dict(state_dict)
        self._loaded, self._not_loaded = True, ""

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
        sharded = isinstance(self._rule.blocks, ShardedBlocks)  # if so, print the last rates: `rates()` is collective
        when = "last rates" if sharded or self.budget is not None else "rates now"
        notes = self._verification.notes if self._verification is not None else {}
        table = describe(self._rule, when, self.rates(last=sharded), self.left_alone, self._origin, notes)
        return f"QuacK({self._method!r}) on {names}\n{table}"
