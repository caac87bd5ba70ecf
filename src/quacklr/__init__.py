"""quacklr: per-head learning rates that control how fast attention logits change.

    quack = QuacK(model, optimizer)

The method, QuacK, is from "Controlling changes to attention logits" (Anson & Aitchison, 2025).
"""

from quacklr.clip import QKClip
from quacklr.find import logit_paths
from quacklr.monitor import LogitMonitor, LogitStats
from quacklr.norms import frobenius, spectral
from quacklr.path import Path, mha, mla
from quacklr.quack import QuacK
from quacklr.rule import sensitivity
from quacklr.weight import Weight, packed

__version__ = "0.1.0"

__all__ = [
    "LogitMonitor",
    "LogitStats",
    "Path",
    "QKClip",
    "QuacK",
    "Weight",
    "frobenius",
    "logit_paths",
    "mha",
    "mla",
    "packed",
    "sensitivity",
    "spectral",
]
