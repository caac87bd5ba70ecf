"""Methods that control attention logits: QuacK, its alternatives, and none. One dataclass each.

A method changes the model (`alter`), the optimizer steps (`attach`), or both. Training is the same for all methods: it
builds the model, calls `alter`, builds the optimizers, calls `attach`, and saves the state of what `attach` returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

import quacklr
from quacklr import QKClip, QuacK, frobenius, logit_paths, spectral
from quacklr.lab.errors import UserError, validate_non_negative, validate_positive
from quacklr.lab.model import Decoder
from quacklr.lab.model.sigma import reparametrise
from quacklr.lab.model_parts import attentions_of, factors, linears, logit_linears, mlp_paths
from quacklr.lab.optim import Muon
from quacklr.lab.optim.compositional import Composition
from quacklr.lab.optim.step_bound import StepBound

NORMS = {"frobenius": frobenius, "spectral": spectral}


@dataclass(frozen=True)
class QuacKAndClip:
    """QuacK and QK clip on the same optimizers. Attach the clip last: it then sees the steps that QuacK has scaled."""

    quack: QuacK
    clip: QKClip

    def state_dict(self) -> dict[str, Any]:
        """The state of QuacK: QK clip has none."""
        return self.quack.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of QuacK."""
        self.quack.load_state_dict(state_dict)


Attached = QuacK | QKClip | QuacKAndClip
"""The result of `attach` for methods with hooks on the optimizers: its `state_dict()` belongs in the checkpoint."""


@dataclass(frozen=True)
class Default:
    """No method: the model and its optimizers are unchanged."""


@dataclass(frozen=True)
class Quack:
    """QuacK: the learning rate of a head's query weights is proportional to 1 / norm of its keys, and vice versa."""

    tau: float = 1.0
    """Learning rate of query and key weights at the start, relative to the base learning rate."""
    norm: Literal["frobenius", "spectral"] = "frobenius"
    """Norm of the weights."""
    floor: float = 0.0
    """Lower bound of the norm of a block."""
    literal: bool = False
    """Algorithm 2 as printed, also with latent norms: dq and dkv get rates, though the norm removes their scale."""
    products: Literal["logits", "values", "all"] = "logits"
    """Which products have rates. logits: query . key; values: also value . output projection; all: also the MLP's."""
    together: Literal["nothing", "qk-norm", "sigma-reparam"] = "nothing"
    """A second method: QK norm, or Sigma-Reparam of all linear layers except those of queries and keys."""

    def __post_init__(self) -> None:
        validate_positive(tau=self.tau)
        validate_non_negative(floor=self.floor)
        if self.products != "logits" and self.together != "nothing":
            raise UserError(f"--products {self.products} and --together {self.together} are not implemented together")


@dataclass(frozen=True)
class ConstantTau:
    """The paper's ablation: query and key weights have a smaller, constant learning rate."""

    tau: float = 0.1
    """Learning rate of query and key weights, relative to the base learning rate."""

    def __post_init__(self) -> None:
        validate_positive(tau=self.tau)


@dataclass(frozen=True)
class Budget:
    """QuacK with a budget: each head's step is scaled so that its logits change by a given amount."""

    budget: float = 0.02
    """How much one step may change the logits of a head, in nats."""
    threshold: float = 0.0
    """QK clip as a second method, with this threshold; 0 for none."""

    def __post_init__(self) -> None:
        validate_positive(budget=self.budget)
        validate_non_negative(threshold=self.threshold)


@dataclass(frozen=True)
class Limit:
    """The default of QuacK: a head's step is scaled down if it would change the head's logits by more than `nats`."""

    nats: float = 0.02
    """How much one step may change the logits of a head, in nats."""

    def __post_init__(self) -> None:
        validate_positive(nats=self.nats)


@dataclass(frozen=True)
class QKNorm:
    """RMS norm, with a learned gain, on every query and key."""


@dataclass(frozen=True)
class AbsorbedQKNorm:
    """QK norm on each part of MLA's queries and keys; the cache holds latents and one number per head, not keys."""


@dataclass(frozen=True)
class QKClipping:
    """Kimi K2's QK clip: after each step, scale down the heads whose maximum logit was above the threshold."""

    threshold: float = 100.0
    """Maximum logit that is not clipped."""

    def __post_init__(self) -> None:
        validate_positive(threshold=self.threshold)


@dataclass(frozen=True)
class SoftCap:
    """Gemma 2's soft-capping: the softmax is applied to cap * tanh(logit / cap)."""

    cap: float = 50.0
    """Bound of the logits."""

    def __post_init__(self) -> None:
        validate_positive(cap=self.cap)


@dataclass(frozen=True)
class SigmaReparametrised:
    """Sigma-Reparam: weights are gamma * W / (largest singular value of W), with a learned gamma."""

    scope: Literal["all", "qk"] = "all"
    """Which weights: all linear layers, as in its paper, or those of queries and keys only."""


@dataclass(frozen=True)
class MuonSplit:
    """Per-head Muon: the rows of each head of queries, keys and values are orthogonalised separately."""


@dataclass(frozen=True)
class CompositionalMuon:
    """Compositional Muon: the steps of q, k, v and o are preconditioned by the weight that each is multiplied with."""

    multiplier: float = 1.0
    """Learning rate of these weights, relative to the base learning rate."""
    damping: float = 0.01
    """Added to the eigenvalues of a partner's Gram matrix."""
    isotropic: bool = False
    """Precondition by one number for each head, not by a matrix."""

    def __post_init__(self) -> None:
        validate_positive(multiplier=self.multiplier, damping=self.damping)


@dataclass(frozen=True)
class BoundedStep:
    """AdamW^2: the spectral norm of a step on a linear layer's weight is at most about a given part of the weight's."""

    ratio: float = 0.03
    """The largest step relative to the weight, both as spectral norms."""

    def __post_init__(self) -> None:
        validate_positive(ratio=self.ratio)


Method = (
    Default
    | Quack
    | ConstantTau
    | Budget
    | Limit
    | QKNorm
    | AbsorbedQKNorm
    | QKClipping
    | SoftCap
    | SigmaReparametrised
    | MuonSplit
    | CompositionalMuon
    | BoundedStep
)


def alter(method: Method, model: Decoder) -> None:
    """Apply the method's change to the model; call it after the weights are initialised and before the optimizers."""
    attentions = model.attentions().values()
    match method:
        case Quack():
            _alter_for_quack(method, model)
        case QKNorm() | AbsorbedQKNorm():
            for attention in attentions:
                attention.add_qk_norm(model.shape.norm_eps, apart=isinstance(method, AbsorbedQKNorm))
        case SoftCap(cap):
            for attention in attentions:
                attention.cap = cap
        case SigmaReparametrised(scope):
            for linear in logit_linears(model) if scope == "qk" else linears(model):
                reparametrise(linear)
        case _:
            pass


def _alter_for_quack(method: Quack, model: Decoder) -> None:
    """Set which paths the attentions declare, and apply the second method."""
    normed = method.together == "qk-norm"
    for attention in model.attentions().values():
        attention.norms_cut = not method.literal and not normed
        attention.values_have_rates = method.products != "logits"
        if normed:
            attention.add_qk_norm(model.shape.norm_eps)
    if method.together == "sigma-reparam":
        in_logit = set(logit_linears(model))
        for linear in linears(model):
            if linear not in in_logit:
                reparametrise(linear)


def attach(method: Method, model: nn.Module, optimizers: Sequence[Optimizer]) -> Attached | None:
    """Apply the method's change to the optimizers; the state of the result belongs in the checkpoint.

    `model` is the decoder, or DistributedDataParallel around it.
    """
    try:
        match method:
            case Quack(tau, norm, floor, products=products):
                paths = [*logit_paths(model), *mlp_paths(model)] if products == "all" else model
                return QuacK(paths, optimizers, rule=quacklr.Paper(tau, norm=NORMS[norm], floor=floor))
            case ConstantTau(tau):
                return QuacK(model, optimizers, rule=quacklr.ConstantTau(tau))
            case Budget(budget, threshold):
                quack = QuacK(model, optimizers, rule=quacklr.Budget(budget))
                return QuacKAndClip(quack, QKClip(model, optimizers, threshold)) if threshold else quack
            case Limit(nats):
                return QuacK(model, optimizers, rule=quacklr.Limit(nats))
            case QKClipping(threshold):
                return QKClip(model, optimizers, threshold)
            case CompositionalMuon(multiplier, damping, isotropic):
                pairs = [pair for attention in attentions_of(model) for pair in factors(attention)]
                muon_of(optimizers).compose(Composition(pairs, multiplier, damping, isotropic))
            case BoundedStep(ratio):
                StepBound((linear.weight for linear in linears(model)), optimizers, ratio)
            case MuonSplit():
                muon, attentions = muon_of(optimizers), attentions_of(model)
                matrices = [m for attention in attentions for m in attention.matrices().values()]
                muon.split({linear.weight: blocks for linear, blocks in matrices if blocks > 1})
    except ValueError as error:  # the message names the weight and the fix
        raise UserError(str(error)) from error
    return None


def muon_of(optimizers: Sequence[Optimizer]) -> Muon:
    """The Muon among the optimizers."""
    return next(optimizer for optimizer in optimizers if isinstance(optimizer, Muon))


def rates(attached: Attached | None) -> dict[str, Tensor]:
    """Learning rates of the method, relative to the base rate: weight name -> one rate per block."""
    quack = attached.quack if isinstance(attached, QuacKAndClip) else attached
    return quack.rates() if isinstance(quack, QuacK) else {}
