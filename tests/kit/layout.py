"""A short name for how the queries and keys of an attention are stored, derived from the rows of its weights.

separate q, k             one parameter each
fused [q|k|v]             all queries, then all keys; "per head [q,k,v]" if the rows of a head are adjacent
grouped [g, r+2, d]       the queries of a group, then its key and value
MLA, low-rank queries     two paths, one with a key that all heads read
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight


def layout(paths: Sequence[LogitPath], parameters: dict[int, str]) -> str:
    """The name of the layout of one attention's paths, or its parameters if the layout has no name; "" for no paths."""
    if not paths:
        return ""
    if is_latent(paths):
        return "MLA, full queries" if _queries_read_the_input(paths) else "MLA, low-rank queries"
    if len(paths[0].weights) != 2:
        return " . ".join(parameters.get(id(weight.param), weight.name) for weight in paths[0].weights)
    others = {w: None for path in paths[1:] for w in path.weights if w not in paths[0].weights}
    lora = " with LoRA" if any(not weight.rated for weight in others) else ""
    more = "" if lora or not others else ", and " + ", ".join(weight.name for weight in others)
    return _pair(*paths[0].weights) + lora + more


def query_and_key(path: LogitPath) -> tuple[Weight, Weight]:
    """The two weights whose outputs are multiplied: of the neighbours with equal block sizes those with most blocks."""
    pairs = [pair for pair in pairwise(path.weights) if _sizes(pair[0]) == _sizes(pair[1])]
    return max(pairs, key=lambda pair: pair[0].blocks + pair[1].blocks, default=(path.weights[0], path.weights[-1]))


def is_latent(paths: Sequence[LogitPath]) -> bool:
    """Whether it is MLA: two paths with queries in one parameter, and a key in one of them that all heads read."""
    if len(paths) != 2:
        return False
    (q, k), (r, s) = (query_and_key(path) for path in paths)
    return q is not r and q.param is r.param and min(k.blocks, s.blocks) == 1 < max(k.blocks, s.blocks)


def _queries_read_the_input(paths: Sequence[LogitPath]) -> bool:
    """Whether queries have as many columns as the key that all heads read; otherwise they read a latent."""
    q, kr = min((query_and_key(path) for path in paths), key=lambda pair: pair[1].blocks)
    return q.columns == kr.columns


def _sizes(weight: Weight) -> set[int]:
    return set(weight.rows_of_block.tolist())


def _pair(q: Weight, k: Weight) -> str:
    if q.param is k.param:
        words = _arrangement({"q": q, "k": k}, "v")
        return words if words.startswith("grouped") else f"fused {words}"
    return f"separate {_arrangement({'q': q}, 'other')}, {_arrangement({'k': k}, 'v')}"


def _arrangement(weights: dict[str, Weight], rest: str) -> str:
    """How the rows of a parameter alternate between weights and the rest."""
    runs = _runs(weights, rest)
    roles = [role for role, _ in runs]
    period = roles[: len(set(roles))]
    repeat = len(roles) // len(period)
    if roles != period * repeat:
        return f"rows of {', '.join(sorted(set(roles)))} mixed"
    blocks = {role: count for role, count in runs[: len(period)] if role != rest}
    if len(period) == 1:
        return period[0]
    if repeat == 1:
        return f"[{'|'.join(period)}]"
    if set(blocks.values()) == {1}:
        return f"per head [{','.join(period)}]"
    if period == ["q", "k", "v"] and blocks["k"] == 1:
        return "grouped [g, r+2, d]"
    return f"in {repeat} parts [{'|'.join(period)}]"


def _runs(weights: dict[str, Weight], rest: str) -> list[tuple[str, int]]:
    """The role of each run of adjacent rows with one role, and its number of blocks."""
    rows = [(rest, -1)] * len(next(iter(weights.values())).block_of_row)
    for role, weight in weights.items():
        for row, block in enumerate(weight.block_of_row.tolist()):
            if block >= 0:
                rows[row] = role, block
    return [(role, len(set(run))) for role, run in groupby(rows, key=lambda row: row[0])]
