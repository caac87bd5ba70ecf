"""The rule of the paper, its Algorithms 1 and 2: rates go with 1 / sensitivity.

The state of the rule is keyed by weight name. It is all that a run needs to resume exactly:

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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.blocks import Copies
from quacklr.core.norms import Norm, frobenius
from quacklr.core.rule import FLOAT32, NOT_A_STATE, Rule, Step, Stepped, validate_number
from quacklr.core.sensitivity import CompiledPaths
from quacklr.util.caller import warn

RESUMED_ALONE = (
    "the optimizer's state was loaded but QuacK's was not, so all rates start again from tau; "
    "call quack.load_state_dict(...) too when you resume a run"
)
ATTACHED_LATE = (
    "the optimizer had stepped before QuacK was attached, so rates are relative to the weights at that time. This is "
    "right if QuacK is new in this run; to resume a run with QuacK, call quack.load_state_dict(...) before the next "
    "step"
)
BY_WEIGHT = ("shape", "rows", "sensitivity", "rates", "stepped")


class Paper(Rule):
    """rate = tau * (sensitivity at the start) / (sensitivity now), with the sensitivities of the weights before a step.

    Args:
        tau: the rate at the start, relative to the optimizer's lr. It can be set during training, for a schedule.
        norm: the norm of a block of weights: `quacklr.frobenius`, `quacklr.spectral`, or a function of the same form.
        floor: a lower bound on all norms, for weights that are all zeros at the start.

    All steps of an iteration use the rates that were computed before its first step.
    """

    linear = True
    has_state = True

    def __init__(self, tau: float = 1.0, *, norm: Norm = frobenius, floor: float = 0.0) -> None:
        if not callable(norm):
            raise ValueError(f"norm={norm!r}: a norm is a function, quacklr.frobenius or quacklr.spectral")
        validate_number("floor", floor, "the least norm of a block", zero=True)
        self._norm, self._floor = norm, floor
        self._start, self._largest = torch.zeros(0), 0.0
        self._warning, self._loaded = "", False
        self._known: dict[str, Tensor] = {}  # sensitivities at the start, by weight; also of weights on no path yet
        self.tau = tau

    @property
    def norm(self) -> Norm:
        """The norm of a block. It cannot be set later: rates are relative to the sensitivities at the start."""
        return self._norm

    @property
    def floor(self) -> float:
        """The lower bound on all norms. It cannot be set later."""
        return self._floor

    @property
    def tau(self) -> float:
        """The rate at the start, relative to lr."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        validate_number("tau", tau, "the rate relative to lr")
        if tau * self._largest > FLOAT32.max:
            raise ValueError(f"tau={tau!r}: with these weights, tau * sensitivity is more than float32 can hold")
        self._tau, self._target = tau, tau * self._start

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Remember whether an optimizer has stepped."""
        super().attach(optimizers)
        self._attached_late = any(map(has_stepped, optimizers))

    def start(self, paths: CompiledPaths, optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
        """Measure the sensitivities that all later rates are relative to. Known weights keep theirs."""
        self.first_rate = self.tau
        super().start(paths, optimizers, in_groups)
        _, norms = self._measure()
        sensitivity = paths.sensitivity(norms)
        paths.validate(norms, sensitivity)
        if self._attached_late and not self._known and in_groups.is_plain:
            self._warning = ATTACHED_LATE
        self._set_start(paths.flat({**paths.by_name(sensitivity), **self._known}))

    def _set_start(self, sensitivity: Tensor) -> None:
        self._start = sensitivity
        self._known = {**self._known, **self.paths.by_name(sensitivity)}
        self._largest = float(sensitivity.nan_to_num(0, 0).max())
        self.tau = self._tau  # sets the target too

    def _measure(self) -> tuple[Copies, Tensor]:
        copies, norms = self.paths.blocks.measure(self.norm)
        return copies, norms.clamp(min=self.floor) if self.floor else norms

    def _rates(self, norms: Tensor, out: Tensor | None = None) -> Tensor:
        """Never NaN or inf: if a partner is exactly zero, the block moves no logit and its rate is tau."""
        now = self.paths.sensitivity(norms)
        return torch.div(self._target, now, out=out).nan_to_num_(nan=self.tau, posinf=self.tau)

    def before(self, step: Step) -> Copies:
        """Compute the rates, if an iteration begins. Norms are computed from the copies of the rows."""
        if self._warning:
            warn(self._warning)
        self._warning, self._loaded = "", False
        if not step.begins:
            return self.paths.blocks.copy(step.tensors)
        copies, norms = self._measure()
        self._rates(norms, out=self.rates)
        return copies

    def after(self, step: Step) -> Tensor:  # noqa: ARG002
        """The rates that were computed before the step."""
        return self.rates

    def next_rates(self) -> Tensor:
        """The rates of the next step. Collective for sharded weights."""
        return self._rates(self._measure()[1])

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """Warn at the next step if the optimizer's state was loaded without QuacK's."""
        if optimizer.state and not self._loaded:
            self._warning = RESUMED_ALONE

    def start_is_known(self) -> None:
        """Do not warn that the optimizer has stepped before."""
        self._warning, self._attached_late = "", False

    def state_dict(self) -> dict[str, Any]:
        """The sensitivities at the start, the rates, and which parameters have stepped in this iteration."""
        return {
            **super().state_dict(),
            "norm": norm_name(self.norm),
            **_layouts(self.paths),
            "sensitivity": self.paths.by_name(self._start),
            "rates": self.paths.by_name(self.rates),
            "stepped": {part.name: id(part.param) in self.stepped for part in self.paths.parts},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], partial: bool = False) -> None:
        """Load a state; ValueError if it is of another model or norm. Sensitivities of unknown weights are kept."""
        if state_dict["rule"] not in ("Paper", type(self).__name__):
            raise ValueError(f"the state is that of rule {state_dict['rule']}, which has no sensitivities at the start")
        for key in BY_WEIGHT:
            if not isinstance(state_dict.get(key), Mapping):
                raise ValueError(f"{NOT_A_STATE}: it has no valid {key!r}")
        norm, own = state_dict.get("norm"), norm_name(self.norm)
        if norm != own:
            raise ValueError(f"the state was made with norm={norm}, but this QuacK has norm={own}")
        _validate_same_weights(_layouts(self.paths), state_dict, partial)
        for key in ("sensitivity", "rates"):
            self._validate_numbers(state_dict, key)
        parts, stepped = self.paths.parts, state_dict["stepped"]
        self.stepped = {id(part.param) for part in parts if stepped.get(part.name) is True}
        self._known = dict(state_dict["sensitivity"])
        self._set_start(self.paths.flat(self._known))
        self.rates = self.paths.flat(state_dict["rates"])
        self._warning, self._loaded = "", True

    def _validate_numbers(self, state: Mapping[str, Any], key: str) -> None:
        for weight in self.paths.weights:
            found = state[key].get(weight.name)
            least = FLOAT32.tiny if key == "sensitivity" and weight.rated else 0.0
            is_vector = isinstance(found, Tensor) and found.is_floating_point() and found.shape == (weight.blocks,)
            if not is_vector or not (found.isfinite() & (found >= least)).all():
                kind = "finite numbers above 0" if least else "finite numbers from 0 up"
                raise ValueError(f"{weight.name}: its {key} in the state must be {weight.blocks} {kind}, not {found}")

    def __repr__(self) -> str:
        norm = "" if self.norm is frobenius else f", norm={norm_name(self.norm)}"
        floor = f", floor={self.floor:g}" if self.floor else ""
        return f"Paper(tau={self.tau:g}{norm}{floor})"


def norm_name(norm: Norm) -> str:
    """The name of a norm in states and tables."""
    return str(getattr(norm, "__name__", type(norm).__name__))


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state says that it has taken a step; False if it keeps neither a number of steps nor a momentum."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return any(float(state.get("step", "momentum_buffer" in state)) > 0 for state in states)


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
        if key := next((key for key in own if state[key].get(name) != own[key][name]), ""):
            differences.append(f"{name} has {key} {state[key].get(name)} in the state, {own[key][name]} in the model")
    if differences:
        raise ValueError("the state is of another model: " + "; ".join(differences))
