"""What is done about attention logits: QuacK, its rivals, and nothing. One type each, one way to attach them all.

A method may alter the model (what it computes), attach to the optimizers (how they step), or both. The training loop
knows none of them: it builds the model, calls `alter`, builds the optimizers, calls `attach`, saves what that returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr import QKClip, QuacK, frobenius, spectral
from quacklr.lab.errors import UserError, refuse_negative, refuse_unless_positive
from quacklr.lab.model import Attention, Decoder
from quacklr.lab.model.sigma import reparametrise
from quacklr.lab.optim import Muon

NORMS = {"frobenius": frobenius, "spectral": spectral}


class Attached(Protocol):
    """What a method has to remember between steps."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a `state_dict()`."""


@dataclass(frozen=True)
class Default:
    """Nothing: the model and its optimizers as they are."""


@dataclass(frozen=True)
class Quack:
    """QuacK: each head's query and key weights have learning rates that go with 1 / the norm of their partners."""

    tau: float = 1.0
    """Learning rate of query and key weights at the start, relative to the base learning rate."""
    norm: Literal["frobenius", "spectral"] = "frobenius"
    """How weights are measured."""
    floor: float = 0.0
    """Least norm of a block."""
    literal: bool = False
    """Algorithm 2 as printed where latents have norms too: dq and dkv have rates, though the norms cut them off."""

    def __post_init__(self) -> None:
        refuse_unless_positive(tau=self.tau)
        refuse_negative(floor=self.floor)


@dataclass(frozen=True)
class ConstantTau:
    """The paper's ablation: query and key weights have a smaller learning rate, the same throughout."""

    tau: float = 0.1
    """Learning rate of query and key weights, relative to the base learning rate."""

    def __post_init__(self) -> None:
        refuse_unless_positive(tau=self.tau)


@dataclass(frozen=True)
class QKNorm:
    """RMS norm with a gain on every query and key."""


@dataclass(frozen=True)
class AbsorbedQKNorm:
    """QK norm on each part of MLA's queries and keys: a decoder caches latents and a number a head, not keys."""


@dataclass(frozen=True)
class QKClipping:
    """Kimi K2's QK clip: after each step, heads whose largest logit was above the threshold are scaled back."""

    threshold: float = 100.0
    """Largest logit that is left alone."""

    def __post_init__(self) -> None:
        refuse_unless_positive(threshold=self.threshold)


@dataclass(frozen=True)
class SoftCap:
    """Gemma 2's soft-capping: the softmax sees cap * tanh(logit / cap)."""

    cap: float = 50.0
    """Bound of the logits."""

    def __post_init__(self) -> None:
        refuse_unless_positive(cap=self.cap)


@dataclass(frozen=True)
class SigmaReparametrised:
    """Sigma-Reparam: weights are gamma * W / (largest singular value of W), with gamma learned."""

    scope: Literal["all", "qk"] = "all"
    """Which weights: all linear layers, as in its paper, or those that make queries and keys."""


@dataclass(frozen=True)
class MuonSplit:
    """Per-head Muon: the rows of each head of queries, keys and values are orthogonalised by themselves."""


Method = (
    Default | Quack | ConstantTau | QKNorm | AbsorbedQKNorm | QKClipping | SoftCap | SigmaReparametrised | MuonSplit
)


def alter(method: Method, model: Decoder) -> None:
    """Change what the model computes, if the method does; after its weights are made, before its optimizers are."""
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
    """Change how the optimizers step, if the method does; what it returns must be saved with the optimizers.

    `model` is what trains: the decoder, or DistributedDataParallel around it.
    """
    try:
        match method:
            case Quack(tau, norm, floor, _):
                return QuacK(model, optimizers, tau, norm=NORMS[norm], floor=floor)
            case ConstantTau(tau):
                return QuacK(model, optimizers, tau, adapt=False)
            case QKClipping(threshold):
                return QKClip(model, optimizers, threshold)
            case MuonSplit():
                muon = next(optimizer for optimizer in optimizers if isinstance(optimizer, Muon))
                attentions = [module for module in model.modules() if isinstance(module, Attention)]
                matrices = [m for attention in attentions for m in attention.matrices().values()]
                muon.split({linear.weight: blocks for linear, blocks in matrices if blocks > 1})
    except ValueError as error:  # the library's refusal, a sentence already
        raise UserError(str(error)) from error
    return None


def rates(attached: Attached | None) -> dict[str, Tensor]:
    """The learning rates that a method gives to blocks of weights, relative to the base rate, by weight name."""
    return attached.rates() if isinstance(attached, QuacK) else {}
