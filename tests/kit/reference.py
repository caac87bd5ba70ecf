"""The paper's Algorithms 1 and 2, line by line, in slow plain Python: the judge of the rule.

A matrix is a list of rows of floats. A model is a list of layers; a layer is a dict of weights, where a weight that
has heads is a list of matrices, one a head, and any other is one matrix. Nothing here imports quacklr.
"""

from __future__ import annotations

import math
from typing import Any

Matrix = list[list[float]]
Layer = dict[str, Any]


def norm(matrix: Matrix) -> float:
    """Frobenius."""
    return math.sqrt(sum(x * x for row in matrix for x in row))


def mha_init_norms(layers: list[Layer]) -> list[Layer]:
    """Algorithm 1, at initialization: W.init_norm <- ||W|| for all layers, for all heads."""
    init = []
    for layer in layers:
        init_norm: Layer = {"q": [], "k": []}
        for h in range(len(layer["q"])):
            init_norm["q"].append(norm(layer["q"][h]))
            init_norm["k"].append(norm(layer["k"][h]))
        init.append(init_norm)
    return init


def mha_lrs(layers: list[Layer], init: list[Layer], tau: float, eta: float) -> list[Layer]:
    """Algorithm 1, during training: the learning rates before a step."""
    lrs = []
    for layer, init_norm in zip(layers, init, strict=True):
        lr: Layer = {"q": [], "k": []}
        for h in range(len(layer["q"])):
            lr["q"].append(tau * eta * init_norm["k"][h] / norm(layer["k"][h]))
            lr["k"].append(tau * eta * init_norm["q"][h] / norm(layer["q"][h]))
        lrs.append(lr)
    return lrs


def mla_factors(layers: list[Layer]) -> list[Layer]:
    """Algorithm 2: compute_lr_factors()."""
    factors = []
    for layer in layers:
        dq, dkv, kr = norm(layer["dq"]), norm(layer["dkv"]), norm(layer["kr"])
        uq, uk, qr = ([norm(w) for w in layer[name]] for name in ("uq", "uk", "qr"))
        heads = range(len(uq))
        factor: Layer = {"uq": [], "uk": [], "qr": []}
        for h in heads:
            factor["uq"].append(1 / (dq * uk[h] * dkv))
            factor["uk"].append(1 / (uq[h] * dq * dkv))
            factor["qr"].append(1 / (dq * kr))
        factor["dq"] = min(1 / max(uq[h] * uk[h] * dkv for h in heads), 1 / max(qr[h] * kr for h in heads))
        factor["dkv"] = 1 / max(uq[h] * dq * uk[h] for h in heads)
        factor["kr"] = 1 / max(qr[h] * dq for h in heads)
        factors.append(factor)
    return factors


def mla_lrs(layers: list[Layer], init: list[Layer], tau: float, eta: float) -> list[Layer]:
    """Algorithm 2, during training: W.lr <- tau * eta * W.factor / W.init_factor."""
    lrs = []
    for factor, init_factor in zip(mla_factors(layers), init, strict=True):
        lr: Layer = {}
        for name, now in factor.items():
            then = init_factor[name]
            if isinstance(now, list):
                lr[name] = [tau * eta * f / f0 for f, f0 in zip(now, then, strict=True)]
            else:
                lr[name] = tau * eta * now / then
        lrs.append(lr)
    return lrs
