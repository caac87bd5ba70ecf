"""The table of multi-head latent attention: dq uq[h] . uk[h] dkv + dq qr[h] . kr.

Rows of a head are [nope, rope] in the query's last projection and [nope, value] in the key's. Rows of the first
projection of keys and values are [latent, rope]. A norm on a latent ends the path: weights before it are on none.
"""

from __future__ import annotations

from torch import nn

from quacklr.core.weight import Segment
from quacklr.find.finding import Finding
from quacklr.find.tables.facts import UnreadableError, active_child, int_setting, norm_calls, validate_parts
from quacklr.find.tables.naming import HEADS, Q_NORM
from quacklr.find.tables.projections import Chain, chains, joined, projection_weights

LATENT_NORM = "cut off by the norm on the latent: the logit does not depend on its scale"
KV_NORMS = ("kv_a_layernorm", "kv_a_norm", "kv_norm", "kv_layernorm")  # norms on the latent of keys and values
NOPE_SIZE = ("qk_nope_head_dim", "nope_head_dim", "qk_head_dim")  # the last is Megatron's name
ROPE_SIZE = ("qk_rope_head_dim", "rope_head_dim", "qk_pos_emb_head_dim")
VALUE_SIZE = ("v_head_dim", "value_head_dim")
GATED = "q_gate_proj"  # AXK2's q up: its rows of a head are [query, gate], and it reads a latent normed and not normed
# the names of: q, or q down and q up; the down and up of keys and values; the norms on the latent of queries
NAMES: tuple[tuple[str, str, str, str, str, tuple[str, ...]], ...] = (
    ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", ("q_a_layernorm", "q_a_norm")),
    ("", "q_a_proj", GATED, "kv_a_proj_with_mqa", "kv_b_proj", ()),
    ("wq", "wq_a", "wq_b", "wkv_a", "wkv_b", ("q_norm",)),
    (
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        ("q_layernorm",),
    ),
)


def latent(module: nn.Module) -> Finding | None:
    """The finding for MLA with full or low-rank queries; None if the parts of the module have other names."""
    for *names, q_norms in NAMES:
        one_q, q_down, q_up, kv_down, kv_up = (active_child(module, name) for name in names)
        if kv_down is not None and kv_up is not None and (q_up is not None or one_q is not None):
            validate_parts(module, (*names, *q_norms, *KV_NORMS, "q_a_layernorm", *Q_NORM), names[3])
            parts = [q_up, q_down, kv_down, kv_up] if q_up is not None else [one_q, None, kv_down, kv_up]
            return _read(module, parts, q_norms, hasattr(module, GATED))
    return None


def _read(module: nn.Module, parts: list[nn.Module | None], q_norms: tuple[str, ...], gated: bool) -> Finding:
    """The path without rotary embedding, and the one with it."""
    terms = [projection_weights(part) for part in parts]
    if any(part is not None and not of_part for part, of_part in zip(parts, terms, strict=True)):
        raise UnreadableError("one of its projections is not one that we can read")
    q, q_down, kv_down, kv_up = terms
    if calls := norm_calls(module):
        raise UnreadableError(f"its code calls {' and '.join(calls)}")
    if set(q_norms).isdisjoint(Q_NORM) and active_child(module, *Q_NORM) is not None:
        raise UnreadableError("it norms queries after their last projection")
    is_normed = {  # a projection of Transformer Engine may have the norm on its input inside
        "dq": "LayerNorm" in type(parts[0]).__name__ or active_child(module, *q_norms) is not None,
        "dkv": "LayerNorm" in type(parts[3]).__name__ or active_child(module, *KV_NORMS) is not None,
    }
    heads, nope, rope, value, gate = _sizes(module, gated, q[0].rows, kv_down[0].rows, kv_up[0].rows)
    of_head: list[Segment] = [("uq", 1, nope), ("qr", 1, rope), *([(None, 1, gate)] if gate else [])]
    found = chains(q, *of_head, repeat=heads) | chains(kv_up, ("uk", 1, nope), (None, 1, value), repeat=heads)
    found |= chains(kv_down, ("dkv", 1, kv_down[0].rows - rope), ("kr", 1, rope))
    found |= chains(q_down, ("dq", 1, q_down[0].rows)) if q_down else {"dq": []}
    cut = {role: LATENT_NORM for role, normed in is_normed.items() if normed and found[role]}
    before_q: list[Chain] = [()] if not q_down or "dq" in cut or gated else []
    before_q += found["dq"] if "dq" not in cut else []
    before_k: list[Chain] = [()] if "dkv" in cut else found["dkv"]
    nope_paths = joined(found["uq"], found["uk"], before_q, before_k)
    return Finding([*nope_paths, *joined(found["qr"], found["kr"], before_q)], cut=cut)


def _sizes(module: nn.Module, gated: bool, q_rows: int, kv_down: int, kv_up: int) -> tuple[int, int, int, int, int]:
    """The number of heads, and of a head's rows: nope, rope, value, and those of a gate in the query projection."""
    nope, rope, value, heads = (int_setting(module, names) for names in (NOPE_SIZE, ROPE_SIZE, VALUE_SIZE, HEADS))
    if not nope or not rope or not value or not heads:
        raise UnreadableError("it does not say how large the parts of its heads are")
    gate = q_rows // heads - nope - rope
    divides = kv_up == heads * (nope + value) and q_rows == heads * (nope + rope + gate) and kv_down > rope
    if not divides or (gate > 0) != gated or gate < 0:
        rows = f"{q_rows}, {kv_up} and {kv_down} rows"
        raise UnreadableError(f"{heads} heads of {nope} + {rope} and {value} do not make {rows}")
    return heads, nope, rope, value, gate
