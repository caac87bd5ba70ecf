"""Methods that control attention logits: QuacK, its alternatives, and none. One dataclass each.

A method changes the model (`alter`), the optimizer steps (`attach`), or both. The training loop is the same for all
methods: it builds the model, calls `alter`, builds the optimizers, calls `attach`, and saves the state of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr import QKClip, QuacK, frobenius, spectral
from quacklr.lab.errors import UserError, validate_non_negative, validate_positive
from quacklr.lab.model import Attention, Decoder
from quacklr.lab.model.sigma import reparametrise
from quacklr.lab.optim import Muon
from quacklr.lab.optim.compositional import Composition, Factor

NORMS = {"frobenius": frobenius, "spectral": spectral}
Attached = QuacK | QKClip
"""A method with state between steps: `state_dict()` belongs in the checkpoint."""


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

    def __post_init__(self) -> None:
        validate_positive(tau=self.tau)
        validate_non_negative(floor=self.floor)


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

    def __post_init__(self) -> None:
        validate_positive(budget=self.budget)


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


Method = (
    Default
    | Quack
    | ConstantTau
    | Budget
    | QKNorm
    | AbsorbedQKNorm
    | QKClipping
    | SoftCap
    | SigmaReparametrised
    | MuonSplit
    | CompositionalMuon
)


def alter(method: Method, model: Decoder) -> None:
    """Apply the method's change to the model; call it after the weights are initialised and before the optimizers."""
    attentions = model.attentions().values()
    match method:
        case Quack(literal=True):
            for attention in attentions:
                attention.norms_cut = False
        case QKNorm() | AbsorbedQKNorm():
            for attention in attentions:
                attention.add_qk_norm(model.shape.norm_eps, apart=isinstance(method, AbsorbedQKNorm))
        case SoftCap(cap):
            for attention in attentions:
                attention.cap = cap
        case SigmaReparametrised(scope):
            in_logit = [attention.matrices()[role][0] for attention in attentions for role in attention.logit_roles]
            for linear in in_logit if scope == "qk" else [m for m in model.modules() if isinstance(m, nn.Linear)]:
                reparametrise(linear)
        case _:
            pass


def attach(method: Method, model: nn.Module, optimizers: Sequence[Optimizer]) -> Attached | None:
    """Apply the method's change to the optimizers; the state of the result belongs in the checkpoint.

    `model` is the decoder, or DistributedDataParallel around it.
    """
    try:
        match method:
            case Quack(tau, norm, floor, _):
                return QuacK(model, optimizers, tau, norm=NORMS[norm], floor=floor)
            case ConstantTau(tau):
                return QuacK(model, optimizers, tau, adapt=False)
            case Budget(budget):
                return QuacK(model, optimizers, budget=budget)
            case QKClipping(threshold):
                return QKClip(model, optimizers, threshold)
            case CompositionalMuon(multiplier, damping, isotropic):
                products = [product for attention in attentions_of(model) for product in factors(attention)]
                muon_of(optimizers).compose(Composition(products, multiplier, damping, isotropic))
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


def attentions_of(model: nn.Module) -> list[Attention]:
    """All attention modules."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def factors(attention: Attention) -> Iterator[tuple[Factor, Factor]]:
    """The products of an attention's weights. The heads of the output projection are among its columns."""
    matrices = attention.matrices()
    for one, other in attention.product_roles:
        second = Factor(matrices[other][0].weight, matrices[other][1])
        first = (
            Factor(attention.o.weight, attention.o.in_features // (second.param.shape[0] // second.blocks), True)
            if one == "o"
            else Factor(matrices[one][0].weight, matrices[one][1])
        )
        yield first, second


def rates(attached: Attached | None) -> dict[str, Tensor]:
    """Learning rates of the method, relative to the base rate: weight name -> one rate per block."""
    return attached.rates() if isinstance(attached, QuacK) else {}
