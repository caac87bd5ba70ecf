"""QuacK: per-head learning rates for query and key weights, by hooks on the optimizer's step.

The hooks are in core/step_scaler.py, the rates are those of a rule (rules/), and the paths come from
attach/attachment.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment, validate_not_attached_twice
from quacklr.core.local import original
from quacklr.core.path import LogitPath, changed
from quacklr.core.rule import NOT_A_STATE, VERSION, Rule
from quacklr.core.sensitivity import CompiledPaths, HeadChange, LogitChanges
from quacklr.core.step_scaler import StepScaler
from quacklr.describe import describe
from quacklr.rules.limit import Limit
from quacklr.rules.paper import Paper
from quacklr.sharded.blocks import ShardedBlocks, blocks_of

_attached: WeakSet[StepScaler] = WeakSet()  # their hooks keep them alive


class QuacK(AbstractContextManager["QuacK"]):
    """Per-head learning rates that limit how far one optimizer step moves the attention logits.

    An attention logit is a product of weights: the same step of a head's query weights moves its logits further when
    its key weights are larger, and vice versa. QuacK scales the step of these weights, one rate for each head. What the
    rates are is a rule:

        QuacK(model, optimizer)            Limit(0.02): a step that would change the logits of a head by more than 0.02
                                           nats is scaled down. All other steps are the optimizer's own, bitwise.
        QuacK(model, optimizer, tau=1.0)   the paper's: tau * (sensitivity when QuacK was attached) / (sensitivity now).
                                           The sensitivity of query weights is the norm of the key weights; in MLA, the
                                           product of the norms of the other weights on the path.

    Attach QuacK once, after the weights are initialised or loaded. The optimizer's `lr` is never written, so the
    training loop, schedulers, param groups, gradient clipping and logging do not change. With `tau`, rates are relative
    to the weights at the time of attaching: to resume a run, save and load `state_dict()` together with the
    optimizer's. A limit has no state.

    Args:
        model: the model; or an iterable of LogitPath, such as `logit_paths(model, batch)` returns. Attention of the
            classes of some packages is found in tables. All other attention is measured on a few tokens of the first
            batch that the model runs, before the first step.
        optimizer: the optimizer that trains the model, or several; or DeepSpeed's engine. For the rules Paper and
            ConstantTau their steps must be linear in lr, as those of SGD, AdamW, Muon and most others are.
        tau: short for `rule=Paper(tau)`: the rate at the start, relative to the optimizer's lr.
        rule: `Limit`, `Paper`, `ConstantTau`, `Budget`, or a rule of your own. The default is `Limit(0.02)`.
        verify: measure also attention that was found in a table or declared. If that was wrong, the first step raises
            ValueError. With False nothing is measured, and attention of other classes is an error.

    Sharded parameters are supported (FSDP1 and 2, tensor parallelism, DeepSpeed, Megatron): attach after sharding, in
    every process (docs/scaling.md). A step then takes one small all-reduce; with Limit or Budget also an all-to-all.

    A step costs a copy of the rows on the paths, one pass over them for the norms, and one to scale the step; a limit
    needs one more, for the size of the step. Only the checks in the first step wait for the device.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        tau: float | None = None,
        *,
        rule: Rule | None = None,
        verify: bool = True,
    ) -> None:
        self.rule = chosen_rule(tau, rule)
        self._attachment = Attachment(model, optimizer, linear=self.rule.linear, verify=verify, start=self._start)
        self.optimizers = self._attachment.optimizers
        with self._attachment.engine.filled_groups():
            self.rule.attach(self.optimizers)
        self._scaler = StepScaler(self.rule, self.optimizers, self._attachment)
        self._changes: LogitChanges | None = None
        self._state: Mapping[str, Any] | None = None  # loaded before the paths were known
        if self._attachment.paths:
            self._start()
        self._scaler.register()
        _attached.add(self._scaler)

    def _start(self) -> None:
        """Validate the paths that were found, and give them to the rule."""
        paths = self._attachment.paths
        if self.rule.rates_all:
            paths = changed(paths, lambda weight: weight if weight.rated else replace(weight, rated=True))
        compiled = CompiledPaths(paths, blocks_of)
        others = [each for each in _attached - {self._scaler} if not set(each.optimizers).isdisjoint(self.optimizers)]
        taken = [weight for other in others if other.paths is not None for weight in other.paths.weights]
        validate_not_attached_twice(compiled.weights, taken)
        self._attachment.control(compiled.weights)
        with self._attachment.engine.filled_groups():
            self._scaler.set_paths(compiled)
        self._changes = None
        if self._state is not None:
            self.load_state_dict(self._state)
            self._state = None

    @property
    def left_alone(self) -> Mapping[str, str]:
        """By module name, why its attention is on no path."""
        return self._attachment.left_alone

    def rates(self, last: bool = False) -> dict[str, Tensor]:
        """The multipliers of lr that the next step will use: (blocks,) for each weight, by name.

        Limit and Budget know them only after the step: then these are the multipliers of the last step, for weights
        that have stepped. For sharded weights this is a collective call, except with Limit and Budget. With `last`,
        returns the rates of the last step, without communication, so that one process can log them.
        """
        if self._scaler.paths is None:
            return {}
        rates = self._scaler.paths.by_name(self.rule.rates if last else self.rule.next_rates())
        return {each.name: rates[each.name] for each in self._scaler.paths.weights if self.rule.has_rates(each)}

    def changes(self) -> dict[str, HeadChange]:
        """How much the last step changes the logits of each head, in nats, by attention module.

        `asked` is the change by the optimizer's own step; `given` is the change by the scaled step. Both are (heads,),
        and 0 after a step with lr 0. docs/theory.md says what they bound. Limit and Budget measure every step. Other
        rules begin with the first call of this method, in all processes, and it is empty until the next step.
        """
        measures, self._scaler.measures = self._scaler.measures, True
        if self._scaler.paths is None or not measures:
            return {}
        self._changes = self._changes or LogitChanges(self._scaler.paths)
        return self._changes.by_module(self._scaler.measured)

    def rate_of(self, param: Tensor) -> Tensor | None:
        """The multipliers of lr for one weight or bias parameter, broadcastable to it; 1 for rows on no path.

        None if the parameter is frozen, or if none of its rows is on a path. For a sharded parameter this is a
        collective call, except with Limit and Budget, and the result is a plain tensor for the whole parameter.
        """
        paths = self._scaler.paths
        weights = filter(self.rule.has_rates, paths.weights if paths is not None else ())
        parts = [(weight.name, part) for weight in weights for part in weight.parts if original(part.param) is param]
        if not parts or not param.requires_grad:
            return None
        of_row = torch.ones(len(parts[0][1].block_of_row), device=param.device, dtype=torch.float32)
        rates = self.rates()
        for name, part in parts:
            on_path = part.block_of_row >= 0
            of_row[on_path] = rates[name].to(param.device)[part.block_of_row[on_path]]
        return parts[0][1].spread(of_row)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume a run from: for `Paper`, by weight name, the sensitivities at the start and the rates.

        It holds plain tensors, numbers and strings, and can be loaded with `weights_only`. The options of the rule are
        not part of it. The other rules have no state, and this is only a version.
        """
        if self._scaler.paths is None:
            return dict(self._state or {"version": VERSION, "rule": None})
        return self.rule.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. If the state is of another model or norm, a ValueError lists the differences.

        If the attention will be measured on the first batch, the state is kept until then.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping) or "rule" not in given:
            raise ValueError(NOT_A_STATE)
        if (version := state_dict.get("version")) != VERSION:
            raise ValueError(f"the state has version {version}, and this quacklr reads version {VERSION} only")
        if self._scaler.paths is None:
            self._state = state_dict
        elif state_dict["rule"] is not None:
            self.rule.load_state_dict(state_dict, partial=not self._attachment.is_complete and self._attachment.waits)

    def remove(self) -> None:
        """Remove the hooks: later steps of the optimizers are not scaled."""
        self._scaler.remove()
        self._attachment.remove()
        _attached.discard(self._scaler)

    def __reduce__(self) -> NoReturn:
        """Copying raises TypeError: the copy would have no hooks on the copied optimizer, and do nothing."""
        raise TypeError(
            "a QuacK cannot be copied or pickled; attach a new one to the copied optimizer, and give it this one's "
            "state_dict()"
        )

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        names, paths = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers), self._scaler.paths
        if paths is None:
            pending = [name or "the model" for name, finding in self._attachment.found.items() if finding.pending]
            which = f": {', '.join(pending[:3])}{' and others' if len(pending) > 3 else ''}" if pending else ""
            return f"QuacK({self.rule!r}) on {names}\n  attention will be measured on the first batch{which}"
        sharded = isinstance(paths.blocks, ShardedBlocks)  # if so, print the last rates: `rates()` is collective
        when = "last rates" if sharded or self.rule.measures else "rates now"
        table = describe(paths, when, self.rates(last=sharded), self._attachment)
        return f"QuacK({self.rule!r}) on {names}\n{table}"


def chosen_rule(tau: float | None, rule: Rule | None) -> Rule:
    """The rule that is given; without one, the paper's if there is a tau, otherwise a limit."""
    if isinstance(tau, Optimizer):
        raise ValueError("several optimizers are given as a list: QuacK(model, [first, second])")
    if rule is None:
        return Limit() if tau is None else Paper(tau)
    if tau is not None:
        raise ValueError(
            f"tau={tau!r} is short for rule=Paper(tau={tau!r}), and rule={rule!r} is given too; choose one"
        )
    if not isinstance(rule, Rule):
        raise ValueError(f"rule={rule!r}: a rule is Paper(tau), ConstantTau(tau), Limit(nats), Budget(nats), or a Rule")
    if rule.attached:
        raise ValueError(f"{rule} was given to another QuacK, and keeps what it knows of that model; make a new rule")
    return rule
