"""What a QuacK is attached to, as a table to read: a line an attention, then what was left alone and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import Rule
from quacklr.core.weight import Weight
from quacklr.find.finding import GIVEN, VERIFIED
from quacklr.util.layer_names import pattern, shape

FROZEN = "frozen: no rate, counts in its partners' norms"
UNRATED = "starts with a zero partner: no rate, counts in its partners' norms"


def describe(
    rule: Rule,
    when: str,
    rates: Mapping[str, Tensor],
    left_alone: Mapping[str, str],
    origin: Mapping[str, str],
    notes: Mapping[str, str],
) -> str:
    """One line for each attention module: how it was found, its heads, the terms of its logit, and its rates.

    `notes` say of those found by rule whether they are verified, or why not.
    """
    attentions: dict[str, list[LogitPath]] = {}
    for path in rule.paths:
        attentions.setdefault(_module(path.weights[0]), []).append(path)
    rows = [("attention", "found", "heads", "logit", when)]
    for module, paths in attentions.items():
        logit = " + ".join(" ".join(_term(weight, module) for weight in path.weights) for path in paths)
        weights = dict.fromkeys(rule.canonical[weight] for path in paths for weight in path.weights)
        ranges = [f"{_short(w, module)} {_range(rates[w.name])}" for w in weights if w.name in rates]
        heads = "/".join(dict.fromkeys(str(path.heads) for path in paths))
        found = VERIFIED if notes.get(module) == VERIFIED else origin.get(module, GIVEN)
        rows.append((module or "(model)", found, heads, logit, "  ".join(ranges)))
    frozen = {w.name: FROZEN if w.rated else UNRATED for w in rule.weights if w.name not in rates}
    alone = _folded({**frozen, **left_alone})
    open_notes = _folded({name: note for name, note in notes.items() if note != VERIFIED and name in attentions})
    sections = [*_columns(rows), *(["found by rule:", *open_notes] if open_notes else [])]
    return "\n".join([*sections, *(["left alone:", *alone] if alone else [])])


def _folded(left_alone: Mapping[str, str]) -> list[str]:
    """A line for each reason and kind of name, however many layers have it."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_alone.items():
        alike.setdefault((shape(name), reason), []).append(name)
    return [f"  {pattern(names) or '(model)'}: {reason}" for (_, reason), names in alike.items()]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _module(weight: Weight) -> str:
    return weight.name.rpartition(".")[0]


def _short(weight: Weight, module: str) -> str:
    return weight.name.removeprefix(f"{module}.")


def _term(weight: Weight, module: str) -> str:
    return _short(weight, module) + (f"[{weight.blocks}]" if weight.blocks > 1 else "")


def _range(rates: Tensor) -> str:
    if rates.isnan().any():
        return "?"
    low, high = f"{float(rates.min()):.3g}", f"{float(rates.max()):.3g}"
    return low if low == high else f"{low}..{high}"
