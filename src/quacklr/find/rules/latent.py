"""Multi-head latent attention: dq uq[h] . uk[h] dkv + dq qr[h] . kr, whoever wrote it.

Rows of a head are [nope, rope] in the query's last projection and [nope, value] in the key's; the first projection of
keys and values is [latent, rope]. A norm on a latent cuts the chain.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from quacklr.core.weight import Segment
from quacklr.find.finding import LATENT_NORM, Finding, unknown
from quacklr.find.rules.evidence import (
    NO_PRODUCT,
    NOT_SHOWN,
    is_trusted,
    shows_consecutive_rows,
    shows_product,
    shows_rope_last,
)
from quacklr.find.rules.module_source import HEADS, attends, child, norm_calls, read, strange_parts
from quacklr.find.rules.naming import Q_NORM
from quacklr.find.rules.projections import Chain, ProjectionWeight, projection_weights
from quacklr.find.rules.separate import multiplied


@dataclass(frozen=True, slots=True)
class Names:
    """What somebody calls the parts: q, or down and up; the keys' down and up; the norms on the latents.

    `gated`: up is [query, gate] for each head, and reads the queries' latent twice, with its norm and without.
    """

    q: str
    q_down: str
    q_up: str
    kv_down: str
    kv_up: str
    q_norm: str
    kv_norm: str
    gated: bool = False


NAMES = (
    Names("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm"),
    Names("", "q_a_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "", "kv_a_layernorm", gated=True),  # AXK2
    Names("wq", "wq_a", "wq_b", "wkv_a", "wkv_b", "q_norm", "kv_norm"),
    Names(
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *("q_layernorm", "kv_layernorm"),
    ),
)
NOPE = ("qk_nope_head_dim", "nope_head_dim", "qk_head_dim")  # the last is Megatron's word for it
ROPE = ("qk_rope_head_dim", "rope_head_dim", "qk_pos_emb_head_dim")
VALUE = ("v_head_dim", "value_head_dim")


def latent(module: nn.Module) -> Finding | None:
    """MLA with full or low-rank queries; None if the module has other names."""
    names = next((n for n in NAMES if child(module, n.kv_down) and child(module, n.kv_up) and _query(module, n)), None)
    if names is None or not attends(module):
        return None
    if strange := strange_parts(module, (*astuple(names)[:-1], "q_a_layernorm", *Q_NORM)):
        return unknown(f"beside {names.kv_down} it has {', '.join(strange)}")
    up = child(module, names.q_up)
    down, q = (child(module, names.q_down), up) if up is not None else (None, child(module, names.q))
    kv_down, kv_up = child(module, names.kv_down), child(module, names.kv_up)
    terms = [projection_weights(each) for each in (q, kv_down, kv_up)]
    if not all(terms) or (down is not None and not projection_weights(down)):
        return unknown("one of its projections is not one that we can read")
    sized = _sizes(module, [term[0].weight.shape[0] for term in terms], gated=names.gated)
    if isinstance(sized, str):
        return unknown(sized)
    heads, nope, rope, value, rest = sized
    if not is_trusted(module) and not shows_product(module):
        return unknown(NO_PRODUCT)
    if not is_trusted(module) and not shows_consecutive_rows(module, {heads}, {nope + rope + rest, nope + value}):
        return unknown(NOT_SHOWN)
    if not is_trusted(module) and not shows_rope_last(module, rope):
        return unknown("its source does not show that the rows of rope come last")
    if calls := [call for call in norm_calls(module) if call != "norm"]:
        return unknown(f"its code calls {' and '.join(calls)}")
    if names.q_norm != "q_norm" and child(module, *Q_NORM) is not None and names.q_norm not in Q_NORM:
        return unknown("it norms queries after their last projection")
    return _assembled(sized, terms, down, child(module, names.q_norm), child(module, names.kv_norm))


def _query(module: nn.Module, names: Names) -> nn.Module | None:
    return child(module, names.q_up) or child(module, names.q)


def _sizes(module: Any, rows: list[int], gated: bool) -> tuple[int, int, int, int, int] | str:
    """Heads, nope, rope and value rows of a head, and what else there is in a head's query rows."""
    q_rows, kv_down, kv_up = rows
    config = getattr(module, "config", None)
    nope, rope, value = (next(iter([*read(module, n), *read(config, n)]), 0) for n in (NOPE, ROPE, VALUE))
    heads = next(iter([*read(module, HEADS), *read(config, HEADS)]), 0)
    if not nope or not rope or not value or not heads:
        return "it does not say how large the parts of its heads are"
    rest = q_rows // heads - nope - rope
    if kv_up != heads * (nope + value) or q_rows != heads * (nope + rope + rest) or (rest != 0) != gated:
        return f"{heads} heads of {nope} + {rope} and {value} do not make {q_rows} and {kv_up} rows"
    if kv_down <= rope or rest < 0:
        return f"{kv_down} rows are too few for a latent and {rope} of rope"
    return heads, nope, rope, value, rest


def _assembled(
    sized: tuple[int, int, int, int, int], terms: list[list[ProjectionWeight]], down: Any, q_norm: Any, kv_norm: Any
) -> Finding:
    heads, nope, rope, value, rest = sized
    q, kv_down, kv_up = terms
    of_head: list[Segment] = [("uq", 1, nope), ("qr", 1, rope)]
    if rest:
        of_head.append((None, 1, rest))
    uq_qr = [source.cut(of_head, heads) for source in q]
    uk = [source.cut([("uk", 1, nope), (None, 1, value)], heads)["uk"] for source in kv_up]
    latent_rows = kv_down[0].weight.shape[0] - rope
    dkv_kr = [source.cut([("dkv", 1, latent_rows), ("kr", 1, rope)], 1) for source in kv_down]
    dq = (
        []
        if down is None
        else [c for s in projection_weights(down) for c in s.cut([("dq", 1, s.weight.shape[0])], 1)["dq"]]
    )
    dkv = [chain for each in dkv_kr for chain in each["dkv"]]
    cut = {"dq": LATENT_NORM} if dq and q_norm is not None else {}
    cut |= {"dkv": LATENT_NORM} if kv_norm is not None else {}
    behind_q: list[Chain] = [()] if not dq or "dq" in cut or rest else []
    behind_q += dq if "dq" not in cut else []
    behind_k = [()] if "dkv" in cut else dkv
    nope_q = _extended([chain for each in uq_qr for chain in each["uq"]], behind_q)
    rope_q = _extended([chain for each in uq_qr for chain in each["qr"]], behind_q)
    nope_k = _extended([chain for each in uk for chain in each], behind_k)
    rope_k = [chain for each in dkv_kr for chain in each["kr"]]
    return Finding([*multiplied(nope_q, nope_k).paths, *multiplied(rope_q, rope_k).paths], cut=cut)


def _extended(chains: list[Chain], behind: list[Any]) -> list[Chain]:
    return [(*chain, *earlier) for chain in chains for earlier in behind]
