"""How the queries and keys of an attention are stored, in words, read off the rows that its weights own.

separate q, k             a parameter each
fused [q|k|v]             all queries, then all keys; per head [q,k,v]: a head's together
grouped [g, r+2, d]       the queries of a group, then its key and value
MLA, low-rank queries     two terms, one with a key that serves all heads
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight


def layout(paths: Sequence[LogitPath], parameters: dict[int, str]) -> str:
    """Words for the paths of one attention; the names of its parameters if there are none for it."""
    if is_latent(paths):
        return "MLA, full queries" if _queries_read_the_input(paths) else "MLA, low-rank queries"
    if len(paths[0].weights) != 2:
        return " . ".join(parameters.get(id(weight.param), weight.name) for weight in paths[0].weights)
    beside = {w: None for path in paths[1:] for w in path.weights if w not in paths[0].weights}
    lora = " with LoRA" if any(not weight.rated for weight in beside) else ""
    more = "" if lora or not beside else ", and " + ", ".join(weight.name for weight in beside)
    return _pair(*paths[0].weights) + lora + more


def meeting(path: LogitPath) -> tuple[Weight, Weight]:
    """The two weights whose product is the logit: the neighbours with equal rows a block, of most blocks."""
    pairs = [pair for pair in pairwise(path.weights) if _sizes(pair[0]) == _sizes(pair[1])]
    return max(pairs, key=lambda pair: pair[0].blocks + pair[1].blocks, default=(path.weights[0], path.weights[-1]))


def is_latent(paths: Sequence[LogitPath]) -> bool:
    """Whether it is MLA: two terms with queries in one parameter, and in one of them a key that serves all heads."""
    if len(paths) != 2:
        return False
    (q, k), (r, s) = (meeting(path) for path in paths)
    return q is not r and q.param is r.param and min(k.blocks, s.blocks) == 1 < max(k.blocks, s.blocks)


def _queries_read_the_input(paths: Sequence[LogitPath]) -> bool:
    """Whether they are as wide as the key that serves all heads, which does; if not, they read a latent."""
    q, kr = min((meeting(path) for path in paths), key=lambda pair: pair[1].blocks)
    return q.rows_first()[0].numel() == kr.rows_first()[0].numel()


def _sizes(weight: Weight) -> set[int]:
    return set(weight.rows_of_block.tolist())


def _pair(q: Weight, k: Weight) -> str:
    if q.param is k.param:
        words = _arranged({"q": q, "k": k}, "v")
        return words if words.startswith("grouped") else f"fused {words}"
    return f"separate {_arranged({'q': q}, 'other')}, {_arranged({'k': k}, 'v')}"


def _arranged(weights: dict[str, Weight], rest: str) -> str:
    """How a parameter's rows are shared out among weights and the rest."""
    runs = _runs(weights, rest)
    roles = [role for role, _ in runs]
    period = roles[: len(set(roles))]
    repeat = len(roles) // len(period)
    if roles != period * repeat:
        return f"rows of {', '.join(sorted(set(roles)))} mixed"
    of_period = {role: blocks for role, blocks in runs[: len(period)] if role != rest}
    if len(period) == 1:
        return period[0]
    if repeat == 1:
        return f"[{'|'.join(period)}]"
    if set(of_period.values()) == {1}:
        return f"per head [{','.join(period)}]"
    if period == ["q", "k", "v"] and of_period["k"] == 1:
        return "grouped [g, r+2, d]"
    return f"in {repeat} parts [{'|'.join(period)}]"


def _runs(weights: dict[str, Weight], rest: str) -> list[tuple[str, int]]:
    """Each run of rows with one role, and how many blocks it has."""
    rows = [(rest, -1)] * len(next(iter(weights.values())).block_of_row)
    for role, weight in weights.items():
        for row, block in enumerate(weight.block_of_row.tolist()):
            if block >= 0:
                rows[row] = role, block
    return [(role, len(set(run))) for role, run in groupby(rows, key=lambda row: row[0])]
