"""Names of methods and runs in tables, figures and messages."""

from __future__ import annotations

from quacklr.lab.config import Config, kind_of, values_of
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
from quacklr.lab.optim import Constant
from quacklr.lab.presets import PRESETS

METHOD_NAMES: dict[type, str] = {
    Default: "default",
    QKNorm: "QK norm",
    AbsorbedQKNorm: "absorbed QK norm",
    QKClipping: "QK clip",
    ConstantTau: "constant tau",
    Quack: "QuacK",
    Budget: "budget",
    MuonSplit: "per-head Muon",
    SoftCap: "soft-capping",
    SigmaReparametrised: "sigma-Reparam",
    CompositionalMuon: "compositional Muon",
    BoundedStep: "AdamW^2",
    Limit: "QuacK limit",
}
"""By type of method, in the order of all tables and legends."""

PAPER_METHODS: tuple[type[Method], ...] = (Default, QKNorm, QKClipping, ConstantTau, Quack)
"""The methods that the paper compares."""


def method_name(method: Method) -> str:
    """The name of a method, without its settings."""
    return METHOD_NAMES[type(method)]


def settings_of(method: Method) -> str:
    """The first setting, and all others that are not at their default: `tau 0.3, norm spectral`."""
    defaults = values_of(type(method)())
    shown = [
        f"{name} {value:g}" if isinstance(value, float) else name if value is True else f"{name} {value}"
        for index, (name, value) in enumerate(values_of(method).items())
        if index == 0 or value != defaults[name]
    ]
    return ", ".join(shown)


def readable_number(number: float) -> str:
    """A number below 100 with three significant digits, a larger one as an integer with commas."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def unusual(config: Config) -> list[str]:
    """What is different from all presets: `width 64`, `3,000 steps`, `cosine to 0`, ..."""
    presets, training, schedule = PRESETS.values(), config.training, config.schedule
    found = {
        f"width {config.shape.d_model}": config.shape.d_model not in {each.shape.d_model for each in presets},
        f"{training.steps:,} steps": training.steps not in {each.training.steps for each in presets},
        f"corpus {training.corpus}": training.corpus not in {each.training.corpus for each in presets},
        f"{kind_of('schedule', schedule)} to {getattr(schedule, 'final', 1):g}": not isinstance(schedule, Constant),
        f"weight decay {config.optimizer.weight_decay:g}": config.optimizer.weight_decay != 0,
        "no gradient clipping": training.grad_clip == 0,
    }
    return [text for text, shown in found.items() if shown]


def describe(config: Config) -> str:
    """A run in one line, such as `MLA, QuacK (tau 1), muon lr 0.1, seed 0`, with what is unusual about it."""
    settings = settings_of(config.method)
    parts = [kind_of("attention", config.attention).upper()]
    parts += ["latent norms"] if getattr(config.attention, "latent_norm", False) else []
    parts += unusual(config)
    parts += [method_name(config.method) + (f" ({settings})" if settings else "")]
    parts += [f"{kind_of('optimizer', config.optimizer)} lr {config.optimizer.lr:g}", f"seed {config.training.seed}"]
    return ", ".join(parts)
