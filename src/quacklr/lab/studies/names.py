"""How methods and runs are called wherever people read about them."""

from __future__ import annotations

from quacklr.lab.config import Config, kind_of, values_of
from quacklr.lab.methods import (
    AbsorbedQKNorm,
    ConstantTau,
    Default,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
    SoftCap,
)

NAMES: dict[type, str] = {
    Default: "default",
    QKNorm: "QK norm",
    AbsorbedQKNorm: "absorbed QK norm",
    QKClipping: "QK clip",
    ConstantTau: "constant tau",
    Quack: "QuacK",
    MuonSplit: "per-head Muon",
    SoftCap: "soft-capping",
    SigmaReparametrised: "sigma-Reparam",
}
"""By type of method, in the order in which they are listed everywhere."""

PAPERS: tuple[type[Method], ...] = (Default, QKNorm, QKClipping, ConstantTau, Quack)
"""Those that the paper compares."""


def method_name(method: Method) -> str:
    """The method, whatever its settings."""
    return NAMES[type(method)]


def settings_of(method: Method) -> str:
    """The settings that are not at their default, and the first one always: `tau 0.3, norm spectral`."""
    values = values_of(method)
    plain = values_of(type(method)())
    shown = [
        f"{name} {value:g}" if isinstance(value, float) else name if value is True else f"{name} {value}"
        for place, (name, value) in enumerate(values.items())
        if place == 0 or value != plain[name]
    ]
    return ", ".join(shown)


def plain(number: float) -> str:
    """For reading: no exponents, three digits or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def describe(config: Config) -> str:
    """A run in one line."""
    settings = settings_of(config.method)
    parts = [kind_of("attention", config.attention).upper()]
    parts += ["latent norms"] if getattr(config.attention, "latent_norm", False) else []
    parts += [method_name(config.method) + (f" ({settings})" if settings else "")]
    parts += [f"{kind_of('optimizer', config.optimizer)} lr {config.optimizer.lr:g}", f"seed {config.training.seed}"]
    return ", ".join(parts)
