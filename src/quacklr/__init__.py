"""quacklr: per-head learning rates that control how fast attention logits change.

    quack = QuacK(model, optimizer)

The method, QuacK, is from "Controlling changes to attention logits" (Anson & Aitchison, 2025).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quacklr.checking import check
    from quacklr.core.norms import frobenius, spectral
    from quacklr.core.path import LogitPath, mha, mla
    from quacklr.core.weight import Weight, packed
    from quacklr.distributed.sharded_blocks import sensitivity
    from quacklr.find import logit_paths
    from quacklr.logits.clip import QKClip
    from quacklr.logits.monitor import LogitMonitor, LogitStats
    from quacklr.quack import QuacK

__version__ = "0.1.0"

__all__ = [
    "LogitMonitor",
    "LogitPath",
    "LogitStats",
    "QKClip",
    "QuacK",
    "Weight",
    "check",
    "frobenius",
    "logit_paths",
    "mha",
    "mla",
    "packed",
    "sensitivity",
    "spectral",
]

_HOME = {
    "LogitMonitor": "logits.monitor",
    "LogitStats": "logits.monitor",
    "LogitPath": "core.path",
    "QKClip": "logits.clip",
    "QuacK": "quack",
    "Weight": "core.weight",
    "check": "checking",
    "frobenius": "core.norms",
    "logit_paths": "find",
    "mha": "core.path",
    "mla": "core.path",
    "packed": "core.weight",
    "sensitivity": "distributed.sharded_blocks",
    "spectral": "core.norms",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line can answer before torch is loaded."""
    if name not in _HOME:
        raise AttributeError(f"module 'quacklr' has no attribute {name!r}")
    value = getattr(import_module(f"quacklr.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
