"""The methods of the study, and how the setting of each is selected in a cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quacklr.lab.methods import (
    AbsorbedQKNorm,
    BoundedStep,
    Budget,
    CompositionalMuon,
    ConstantTau,
    Default,
    Limit,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
    SoftCap,
)
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.names import METHOD_NAMES, method_name, settings_of
from quacklr.lab.studies.tuning import VALUES, nearest


@dataclass(frozen=True, eq=False)  # equal only to itself, so it can be the key of a dict
class TunedMethod:
    """A method, and how its setting is selected."""

    name: str
    of_value: Callable[[float], Method]
    """The method for a value of its setting."""
    setting: str = ""
    """The name of the setting; empty for a method without one."""
    first: Callable[[Cell], float] | None = None
    """The value where the search for the best one begins; None for a method without a setting."""
    values: tuple[float, ...] = VALUES
    """The values to select from."""
    same_in_all_cells: bool = False
    """Whether the ratio of the value to `first` is selected once for all cells of an optimizer, not in each cell."""

    def label(self, value: float | None) -> str:
        """The name with the value: `QuacK (tau 1)`."""
        return self.name if value is None else f"{self.name} ({self.setting} {value:g})"


def fixed(method: Method) -> TunedMethod:
    """A method at this setting."""
    settings = settings_of(method)
    return TunedMethod(method_name(method) + (f" ({settings})" if settings else ""), lambda _: method)


def _tau(muon: float, adamw: float) -> Callable[[Cell], float]:
    """The first value of tau in a cell: the nearest to `muon` / lr or `adamw` / lr, so that tau * lr is the same."""
    return lambda cell: nearest((adamw if cell.adamw else muon) / cell.lr)


def _constant_tau(tau: float) -> Method:
    return Default() if tau == 1 else ConstantTau(tau)


QUACK = TunedMethod("QuacK", Quack, "tau", _tau(0.1, 0.01))
LITERAL = TunedMethod("QuacK, literal", lambda tau: Quack(tau, literal=True), "tau", _tau(0.1, 0.01))
"""Algorithm 2 as printed; it differs from QUACK only where latents have norms."""
EVERYWHERE = TunedMethod("QuacK everywhere", lambda tau: Quack(tau, products="all"), "tau", _tau(0.1, 0.01))
"""QuacK also for value . output projection and for the products of the MLP."""
WITH_QK_NORM = TunedMethod("QuacK with QK norm", lambda tau: Quack(tau, together="qk-norm"), "tau", _tau(0.1, 0.01))
WITH_SIGMA = TunedMethod(
    "QuacK with sigma-Reparam", lambda tau: Quack(tau, together="sigma-reparam"), "tau", _tau(0.1, 0.01)
)
"""Sigma-Reparam of all linear layers except those of queries and keys."""
WITH_CLIP = TunedMethod(
    "budget with QK clip", lambda threshold: Budget(threshold=threshold), "threshold", lambda _: 30.0
)
ISOTROPIC = TunedMethod(
    "isotropic compositional Muon",
    lambda factor: CompositionalMuon(factor, isotropic=True),
    "multiplier",
    lambda _: 1.0,
)
SAME_TAU_LR = TunedMethod("QuacK, tau * lr fixed", Quack, "tau", _tau(0.1, 0.01), same_in_all_cells=True)
TUNED_LIMIT = TunedMethod("limit, tuned", Limit, "nats", lambda _: Limit().nats, values=(0.005, 0.01, 0.02, 0.05, 0.1))

TUNED: dict[type[Method], TunedMethod] = {
    Default: fixed(Default()),
    QKNorm: fixed(QKNorm()),
    AbsorbedQKNorm: fixed(AbsorbedQKNorm()),
    QKClipping: TunedMethod(METHOD_NAMES[QKClipping], QKClipping, "threshold", lambda _: 100.0),
    ConstantTau: TunedMethod(METHOD_NAMES[ConstantTau], _constant_tau, "tau", _tau(0.01, 0.003)),
    Quack: QUACK,
    Budget: TunedMethod(METHOD_NAMES[Budget], lambda _: Budget()),
    Limit: TunedMethod(METHOD_NAMES[Limit], lambda _: Limit()),
    MuonSplit: fixed(MuonSplit()),
    SoftCap: TunedMethod(METHOD_NAMES[SoftCap], SoftCap, "cap", lambda _: 30.0),
    SigmaReparametrised: fixed(SigmaReparametrised()),
    CompositionalMuon: TunedMethod(METHOD_NAMES[CompositionalMuon], CompositionalMuon, "multiplier", lambda _: 1.0),
    BoundedStep: TunedMethod(METHOD_NAMES[BoundedStep], BoundedStep, "ratio", lambda _: BoundedStep().ratio),
}
"""By type of method."""
