"""Scales the steps of optimizers by the rates of a rule, with hooks on `step`.

The pre-step hook copies the rows on the paths. The post-step hook sets them to old + rate * (new - old). For an update
that is linear in lr, this is the step that the optimizer would have taken with lr * rate, weight decay included.

A step may call its parent class's step, or another optimizer's, and torch runs the hooks of every such call. A nested
step of the same optimizer is part of the outer one. Counting hook calls is not enough to recognise it: a step that
raised an exception never runs its post-hook. So the call stack is read, but only if a step is unfinished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.rule import Rule, Step, Stepped
from quacklr.core.sensitivity import CompiledPaths

_HOOKED_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # every class's step is wrapped by this function


class StepScaler:
    """The hooks of a rule on some optimizers. They do nothing until `paths` are set.

    `measured` has (norms, steps, rates) of the steps of this iteration that were measured: by the rule, or because
    `measures` is True.
    """

    def __init__(self, rule: Rule, optimizers: Sequence[Optimizer], attachment: Any) -> None:
        self.rule, self.optimizers = rule, optimizers
        self.in_groups: Stepped = attachment.in_groups
        self.paths: CompiledPaths | None = None
        self.on_paths: set[int] = set()
        self.running: dict[Optimizer, Step] = {}
        self.first_step = attachment  # None when each optimizer has stepped
        self.measures = rule.measures
        self.measured: list[list[Tensor]] = []
        self._hooks: list[Any] = []

    def register(self) -> None:
        """Register the hooks. Those after a step run first: changes by other post-step hooks are not scaled."""
        eager: Any = torch.compiler.disable  # not compiled under torch.compile(optimizer.step)
        before, after = (eager(without_autocast(each)) for each in (self.before, self.after))
        for optimizer in self.optimizers:
            self._hooks += [optimizer.register_step_pre_hook(before), first_after_step(optimizer, after)]
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self._loaded))

    def set_paths(self, paths: CompiledPaths) -> None:
        """Scale the weights on these paths from now on. Called again if more paths are found."""
        if self.paths is not None:
            before = self.paths
            self.measured = [[paths.flat(before.by_name(flat)) for flat in step] for step in self.measured]
        self.rule.start(paths, self.optimizers, self.in_groups)
        self.paths, self.on_paths = paths, {id(part.param) for part in paths.parts}

    def before(self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Copy the rows that the optimizer is about to move. Returns other arguments of the step, or None."""
        self._drop_failed(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # a GradScaler calls a fused step also after an overflow
        skipped = isinstance(found_inf, Tensor) and found_inf.device.type == "cpu" and bool(found_inf)
        if optimizer in self.running or skipped:  # a nested step, or none
            return None
        idle = is_idle(optimizer)  # every lr is 0
        if self.first_step is not None and not idle:
            if later := self._in_closure(optimizer, args, kwargs or {}):
                return later
            self.first_step.before_step()
        if self.paths is not None:
            self._begin(optimizer, self.paths, idle)
        return None

    def _in_closure(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """If the model runs its first batch in the step's closure: arguments with a closure that calls `before` too."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or not self.first_step.needs_batch:
            return None

        def measured() -> Any:
            result = closure()
            self.before(optimizer)
            return result

        return ((args[0], measured, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": measured})

    def _begin(self, optimizer: Optimizer, paths: CompiledPaths, idle: bool) -> None:
        of_callers = [running.tensors for running in self.running.values()]  # of steps that called this one
        tensors = (self.in_groups.by(optimizer) & self.on_paths).difference(*of_callers)
        stepped = self.rule.stepped
        begins = not stepped or not stepped.isdisjoint(tensors)
        if begins:
            self.measured = []
        if not tensors or idle:
            return
        self.rule.stepped = tensors if begins else stepped | tensors
        step = Step(optimizer, tensors, begins, paths.blocks, [])
        step.copies = self.rule.before(step)
        self.running[optimizer] = step

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Scale the step that the optimizer has taken."""
        step = self.running.get(optimizer)
        if step is None or (step.calls_step and steps_on_stack(optimizer) > 1):  # only a nested step ends
            return
        if self.first_step is not None and self.first_step.after_step(optimizer, step):
            self.first_step = None
        del self.running[optimizer]
        rates = self.rule.after(step)
        if self.measures:
            step.measure()
        if step.measured is not None:
            self.measured.append([*step.measured, rates])
        step.blocks.scale_step(step.copies, rates, step.tensors)

    def _loaded(self, optimizer: Optimizer) -> None:
        if self.paths is not None:
            self.rule.optimizer_loaded(optimizer)

    def _drop_failed(self, optimizer: Optimizer) -> None:
        """Drop steps that raised an exception: they are not on the call stack."""
        for other, running in list(self.running.items()):
            running.calls_step = steps_on_stack(other) > (other is optimizer)
            if not running.calls_step:
                del self.running[other]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.running.clear()


def is_idle(optimizer: Optimizer) -> bool:
    """Whether every lr is 0, so that the next step moves nothing. An lr on an accelerator is not read: that waits."""
    lrs = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return all((not isinstance(lr, Tensor) or lr.device.type == "cpu") and lr == 0 for lr in lrs)


def steps_on_stack(optimizer: Optimizer) -> int:
    """The number of calls of the optimizer's `step` on the call stack: 2 in a hook of a nested step."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        code = frame.f_code  # torch.compile renames it, to torch_dynamo_resume_in_wrapper_at_...
        if code.co_filename == _HOOKED_STEP.co_filename and _HOOKED_STEP.co_name in code.co_name:
            count += any(value is optimizer for value in frame.f_locals.values())
        frame = frame.f_back
    return count


def first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> Any:
    """Register a post-step hook that runs before the hooks that are registered already."""
    handle = optimizer.register_step_post_hook(hook)
    vars(optimizer)["_optimizer_step_post_hooks"].move_to_end(handle.id, last=False)
    return handle


def without_autocast(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with autocast disabled: in float16, products of a small or large step would be 0 or inf."""

    @wraps(hook)
    def call(optimizer: Optimizer, *args: Any) -> Any:
        device = next((p.device.type for group in optimizer.param_groups for p in group["params"]), "cpu")
        if not torch.is_autocast_enabled(device):
            return hook(optimizer, *args)
        with torch.autocast(device, enabled=False):
            return hook(optimizer, *args)

    return call
