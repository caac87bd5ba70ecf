"""The text of `print(quack)`: a table of the attention modules, then those that were left alone and why."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quacklr.attach.attachment import Attachment
from quacklr.core.path import attentions_of, module_of
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight
from quacklr.find.finding import GIVEN
from quacklr.util.text_table import columns, grouped, value_range

FROZEN = "frozen: no rate, counts in its partners' norms"
UNRATED = "starts with a zero partner: no rate, counts in its partners' norms"


def describe(compiled: CompiledPaths, when: str, rates: Mapping[str, Tensor], attachment: Attachment) -> str:
    """A table with one line for each attention module: how it was found, its heads, its logit, and its rates.

    `rates` are by weight name, `when` is their heading.
    Behind the table: attention that is not verified, and what was left alone, with reasons.
    """
    findings = attachment.found
    modules = [module_of(path) for path in compiled.paths]
    rows = [("attention", "found", "heads", "logit", when)]
    for paths in attentions_of(compiled.paths).values():
        module = module_of(paths[0])
        logit = " + ".join(" ".join(weight_term(weight, module) for weight in path.weights) for path in paths)
        weights = dict.fromkeys(compiled.canonical[weight] for path in paths for weight in path.weights)
        ranges = [f"{_short(w, module)} {value_range(rates[w.name])}" for w in weights if w.name in rates]
        heads = "/".join(dict.fromkeys(str(path.heads) for path in paths))
        found = findings[module].origin if module in findings else GIVEN
        rows.append((module or "(model)", found, heads, logit, "  ".join(ranges)))
    frozen = {w.name: FROZEN if w.rated else UNRATED for w in compiled.weights if not w.trains}
    alone = grouped({**frozen, **attachment.left_alone}.items())
    notes = grouped((name, each.note) for name, each in findings.items() if each.note and name in modules)
    sections = [*columns(rows), *(["found by table:", *notes] if notes else [])]
    return "\n".join([*sections, *(["left alone:", *alone] if alone else [])])


def _short(weight: Weight, module: str) -> str:
    return weight.name.removeprefix(f"{module}.")


def weight_term(weight: Weight, module: str = "") -> str:
    """The weight's name within the module and its number of blocks: q[8]."""
    return _short(weight, module) + (f"[{weight.blocks}]" if weight.blocks > 1 else "")
