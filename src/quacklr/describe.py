"""The text of `print(quack)`: a table of the attention modules, then those that were left alone and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from quacklr.attach.attachment import Attachment
from quacklr.core.path import LogitPath, attentions_of, module_of
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight
from quacklr.find.finding import GIVEN, Finding
from quacklr.util.text_table import columns, grouped, value_range

FROZEN = "frozen: no rate, counts in its partners' norms"
UNRATED = "starts with a zero partner: no rate, counts in its partners' norms"


def describe(compiled: CompiledPaths, when: str, rates: Mapping[str, Tensor], attachment: Attachment) -> str:
    """A table with one line for each attention module: how it was found, its heads, its logit, and its rates.

    `rates` are by weight name, `when` is their heading.
    Behind the table: attention that is not verified, and what was left alone, with reasons.
    """
    found, attentions = attachment.found, attentions_of(compiled.paths).values()

    def rates_of(module: str, paths: Sequence[LogitPath]) -> str:
        weights = dict.fromkeys(compiled.canonical[weight] for path in paths for weight in path.weights)
        return "  ".join(f"{_short(w, module)} {value_range(rates[w.name])}" for w in weights if w.name in rates)

    modules = [module_of(paths[0]) for paths in attentions]
    notes = {name: found[name].note for name in modules if name in found and found[name].note}
    left_alone = {**without_rate(compiled.weights), **attachment.left_alone}
    table = columns(attention_rows(attentions, found, when, rates_of))
    return "\n".join([*table, *grouped("not verified on the first batch:", notes), *grouped("left alone:", left_alone)])


def attention_rows(
    attentions: Iterable[Sequence[LogitPath]],
    found: Mapping[str, Finding],
    title: str,
    last: Callable[[str, Sequence[LogitPath]], str],
) -> list[tuple[str, ...]]:
    """The rows of the table, and their titles. `last` returns the cell of a module in the last column."""
    rows: list[tuple[str, ...]] = [("attention", "found", "heads", "logit", title)]
    for paths in attentions:
        module = module_of(paths[0])
        origin = found[module].origin if module in found else GIVEN
        heads = "/".join(dict.fromkeys(str(path.heads) for path in paths))
        terms = [[_short(w, module) + f"[{w.blocks}]" * (w.blocks > 1) for w in path.weights] for path in paths]
        logit = " + ".join(map(" ".join, terms))
        rows.append((module or "(model)", origin, heads, logit, last(module, paths)))
    return rows


def without_rate(weights: Iterable[Weight]) -> dict[str, str]:
    """By name, why weights on paths have no rate."""
    return {weight.name: FROZEN if weight.rated else UNRATED for weight in weights if not weight.trains}


def _short(weight: Weight, module: str) -> str:
    return weight.name.removeprefix(f"{module}.")
