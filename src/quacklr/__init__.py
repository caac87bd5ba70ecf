"""quacklr: per-head learning rates that control how fast attention logits change.

    quack = QuacK(model, optimizer)

The method, QuacK, is from "Controlling changes to attention logits" (Anson & Aitchison, 2025).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quacklr.attention.clip import QKClip
    from quacklr.attention.monitor import LogitMonitor, LogitStats
    from quacklr.checking.check import check
    from quacklr.core.norms import frobenius, spectral
    from quacklr.core.path import LogitPath, mha, mla
    from quacklr.core.rule import Rule
    from quacklr.core.weight import Weight, packed
    from quacklr.find.discover import logit_paths
    from quacklr.quack import QuacK
    from quacklr.rules.budget import Budget
    from quacklr.rules.constant_tau import ConstantTau
    from quacklr.rules.limit import Limit
    from quacklr.rules.paper import Paper
    from quacklr.sharded.blocks import sensitivity

__version__ = "0.2.0"

__all__ = ["Budget", "ConstantTau", "Limit", "LogitPath", "Paper", "QuacK", "Rule", "Weight", "logit_paths"]
__all__ += ["LogitMonitor", "LogitStats", "QKClip", "check", "frobenius", "mha", "mla", "packed", "sensitivity"]
__all__ += ["spectral"]

_MODULES = {
    "checking.check": ("check",),
    "core.norms": ("frobenius", "spectral"),
    "core.path": ("LogitPath", "mha", "mla"),
    "core.weight": ("Weight", "packed"),
    "sharded.blocks": ("sensitivity",),
    "find.discover": ("logit_paths",),
    "attention.clip": ("QKClip",),
    "attention.monitor": ("LogitMonitor", "LogitStats"),
    "core.rule": ("Rule",),
    "quack": ("QuacK",),
    "rules.budget": ("Budget",),
    "rules.constant_tau": ("ConstantTau",),
    "rules.limit": ("Limit",),
    "rules.paper": ("Paper",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line can run without importing torch."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"quacklr.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module 'quacklr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
