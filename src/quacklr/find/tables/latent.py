"""The table of multi-head latent attention: dq uq[h] . uk[h] dkv + dq qr[h] . kr.

Rows of a head are [nope, rope] in the query's last projection and [nope, value] in the key's. Rows of the first
projection of keys and values are [latent, rope]. A norm on a latent ends the path: weights before it are on none.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from quacklr.core.weight import Segment
from quacklr.find.finding import LATENT_NORM, Finding
from quacklr.find.tables.facts import UnreadableError, active_child, int_setting, norm_calls, validate_parts
from quacklr.find.tables.naming import HEADS, NOPE_SIZE, Q_NORM, ROPE_SIZE, VALUE_SIZE
from quacklr.find.tables.projections import Chain, ProjectionWeight, chains, finding_from, projection_weights


class PartNames(NamedTuple):
    """A library's names of the parts: q, or q down and q up; the keys' down and up; the norms on the latents.

    `gated`: rows of a head in q up are [query, gate], and q up reads the latent with its norm and without.
    """

    q: str
    q_down: str
    q_up: str
    kv_down: str
    kv_up: str
    q_norms: tuple[str, ...]
    kv_norms: tuple[str, ...]
    gated: bool = False


KV_NORMS = ("kv_a_layernorm", "kv_a_norm")  # the second is litgpt's
NAMES = (
    PartNames(
        *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), ("q_a_layernorm", "q_a_norm"), KV_NORMS
    ),
    PartNames("", "q_a_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", (), KV_NORMS, gated=True),  # AXK2
    PartNames("wq", "wq_a", "wq_b", "wkv_a", "wkv_b", ("q_norm",), ("kv_norm",)),
    PartNames(
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *(("q_layernorm",), ("kv_layernorm",)),
    ),
)


def latent(module: nn.Module) -> Finding | None:
    """The finding for MLA with full or low-rank queries; None if the parts of the module have other names."""
    for names in NAMES:
        q = active_child(module, names.q_up) or active_child(module, names.q)
        parts = [q, *(active_child(module, name) for name in (names.kv_down, names.kv_up))]
        if all(parts):
            return _read(module, names, parts)
    return None


def _read(module: nn.Module, names: PartNames, parts: list[nn.Module | None]) -> Finding:
    validate_parts(module, (*names[:5], *names.q_norms, *names.kv_norms, "q_a_layernorm", *Q_NORM), names.kv_down)
    q, kv_down, kv_up = map(projection_weights, parts)
    down = active_child(module, names.q_down) if active_child(module, names.q_up) is not None else None
    q_down = projection_weights(down)
    if not (q and kv_down and kv_up) or (down is not None and not q_down):
        raise UnreadableError("one of its projections is not one that we can read")
    if calls := norm_calls(module):
        raise UnreadableError(f"its code calls {' and '.join(calls)}")
    if set(names.q_norms).isdisjoint(Q_NORM) and active_child(module, *Q_NORM) is not None:
        raise UnreadableError("it norms queries after their last projection")
    normed = {"dq": names.q_norms, "dkv": names.kv_norms}
    fused = {"dq": "LayerNorm" in type(parts[0]).__name__, "dkv": "LayerNorm" in type(parts[2]).__name__}  # TE's
    cut = {role: LATENT_NORM for role, norms in normed.items() if fused[role] or active_child(module, *norms)}
    return _paths(module, names.gated, (q, q_down, kv_down, kv_up), cut)


def _paths(module: nn.Module, gated: bool, terms: tuple[list[ProjectionWeight], ...], cut: dict[str, str]) -> Finding:
    """The path without rotary embedding, and the one with it."""
    q, q_down, kv_down, kv_up = terms
    heads, nope, rope, value, rest = _sizes(module, q[0].rows, kv_down[0].rows, kv_up[0].rows, gated)
    of_head: list[Segment] = [("uq", 1, nope), ("qr", 1, rope), *([(None, 1, rest)] if gated else [])]
    uq_qr = chains(q, *of_head, repeat=heads)
    uk = chains(kv_up, ("uk", 1, nope), (None, 1, value), repeat=heads)["uk"]
    dkv_kr = chains(kv_down, ("dkv", 1, kv_down[0].rows - rope), ("kr", 1, rope))
    dq = chains(q_down, ("dq", 1, q_down[0].rows))["dq"] if q_down else []
    cut = {role: why for role, why in cut.items() if role != "dq" or dq}
    before_q: list[Chain] = [()] if not dq or "dq" in cut or gated else []
    before_q += dq if "dq" not in cut else []
    nope_paths = finding_from(_extended(uq_qr["uq"], before_q), _extended(uk, [()] if "dkv" in cut else dkv_kr["dkv"]))
    rope_paths = finding_from(_extended(uq_qr["qr"], before_q), dkv_kr["kr"])
    return Finding([*nope_paths.paths, *rope_paths.paths], cut=cut)


def _sizes(module: nn.Module, q_rows: int, kv_down: int, kv_up: int, gated: bool) -> tuple[int, int, int, int, int]:
    """The number of heads, and of a head's rows: nope, rope, value, and others in the query projection (a gate)."""
    nope, rope, value, heads = (int_setting(module, names) for names in (NOPE_SIZE, ROPE_SIZE, VALUE_SIZE, HEADS))
    if not nope or not rope or not value or not heads:
        raise UnreadableError("it does not say how large the parts of its heads are")
    rest = q_rows // heads - nope - rope
    if kv_up != heads * (nope + value) or q_rows != heads * (nope + rope + rest) or (rest > 0) != gated or rest < 0:
        raise UnreadableError(f"{heads} heads of {nope} + {rope} and {value} do not make {q_rows} and {kv_up} rows")
    if kv_down <= rope:
        raise UnreadableError(f"{kv_down} rows are too few for a latent and {rope} of rope")
    return heads, nope, rope, value, rest


def _extended(ends: list[Chain], before: list[Chain]) -> list[Chain]:
    return [(*chain, *earlier) for chain in ends for earlier in before]
