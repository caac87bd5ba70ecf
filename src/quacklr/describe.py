"""The text of `print(quack)`: a table of the attention modules, then those that were left alone and why."""

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
    """A table with one line for each attention module: how it was found, its heads, its logit, and its rates.

    Args:
        rule: the rule, with the paths.
        when: heading of the rates.
        rates: by weight name.
        left_alone: by module name, why its attention is on no path.
        origin: by module name, how its attention was found.
        notes: by module name, for attention that was found by rule: whether it is verified, or why not.
    """
    attentions: dict[str, list[LogitPath]] = {}
    for path in rule.paths:
        attentions.setdefault(path.weights[0].name.rpartition(".")[0], []).append(path)
    rows = [("attention", "found", "heads", "logit", when)]
    for module, paths in attentions.items():
        logit = " + ".join(" ".join(_factor(weight, module) for weight in path.weights) for path in paths)
        weights = dict.fromkeys(rule.canonical[weight] for path in paths for weight in path.weights)
        ranges = [f"{_role(w, module)} {_range(rates[w.name])}" for w in weights if w.name in rates]
        heads = "/".join(dict.fromkeys(str(path.heads) for path in paths))
        found = VERIFIED if notes.get(module) == VERIFIED else origin.get(module, GIVEN)
        rows.append((module or "(model)", found, heads, logit, "  ".join(ranges)))
    not_verified = {name: note for name, note in notes.items() if note != VERIFIED and name in attentions}
    frozen = {w.name: FROZEN if w.rated else UNRATED for w in rule.weights if w.name not in rates}
    lines = _columns(rows)
    for title, reasons in (("found by rule:", not_verified), ("left alone:", {**frozen, **left_alone})):
        lines += [title, *_folded(reasons)] if reasons else []
    return "\n".join(lines)


def _folded(reasons: Mapping[str, str]) -> list[str]:
    """One line for each reason, with the names of equal layers written as one pattern."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault((shape(name), reason), []).append(name)
    return [f"  {pattern(names) or '(model)'}: {reason}" for (_, reason), names in alike.items()]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _role(weight: Weight, module: str) -> str:
    return weight.name.removeprefix(f"{module}.")


def _factor(weight: Weight, module: str) -> str:
    return _role(weight, module) + (f"[{weight.blocks}]" if weight.blocks > 1 else "")


def _range(rates: Tensor) -> str:
    if rates.isnan().any():
        return "?"
    low, high = f"{float(rates.min()):.3g}", f"{float(rates.max()):.3g}"
    return low if low == high else f"{low}..{high}"
