"""A proof as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from quacklr.checking.faults import folded, listed
from quacklr.checking.report import NO_BOUND, CheckReport, LayerReport

MANY = 40  # layers, above which only the first, the last and the wrong ones are shown


def show(wiring: CheckReport) -> str:
    """The table, the faults, what is left alone, and the verdict."""
    wrong = folded((layer.module, fault.text) for layer in wiring.layers for fault in layer.faults)
    alone = folded(wiring.left_alone.items())
    sections = [
        _table(wiring) if wiring.layers else [],
        ["wrong:", *wrong] if wrong else [],
        ["left alone:", *alone] if alone else [],
        [f"paths are those of the rules, and could not be measured: {wiring.unmeasured}"] * bool(wiring.unmeasured),
        [f"paths are those of the rules, but others were measured: {wiring.contradiction}"]
        * bool(wiring.contradiction),
        [verdict(wiring)],
    ]
    return "\n".join(chain.from_iterable([*section, ""] for section in sections if section)).rstrip()


def _table(wiring: CheckReport) -> list[str]:
    grown = f"grown {wiring.growth:g}x"
    titles = ("attention", "heads", "at the start", "bound", f"{grown}, plain", f"{grown}, QuacK", "its bound", "")
    return _columns([titles, *(_row(layer) for layer in _shown(wiring.layers))])


def _shown(layers: Sequence[LayerReport]) -> Sequence[LayerReport]:
    if len(layers) <= MANY:
        return layers
    picked = [*range(MANY // 2), *range(len(layers) - MANY // 4, len(layers))]
    return [layer for number, layer in enumerate(layers) if number in picked or layer.faults]


def _row(layer: LayerReport) -> tuple[str, ...]:
    changes = (layer.start.measured, layer.start.bound, layer.plain.measured, layer.quack.measured, layer.quack.bound)
    numbers = [_range(of) for of in changes] if not layer.silent else ["-"] * 5
    return (layer.module or "(model)", str(layer.heads), *numbers, _word(layer))


def _range(of: Tensor) -> str:
    if not of.isfinite().all():
        return "-"
    low, high = f"{float(of.min()):.2g}", f"{float(of.max()):.2g}"
    return low if low == high else f"{low}..{high}"


def _word(layer: LayerReport) -> str:
    if layer.faults:
        heads = layer.wrong.nonzero().flatten().tolist()
        return f"WRONG: head{'s' * (len(heads) > 1)} {listed(heads)}"
    if layer.unshown:
        return layer.unshown
    if not layer.quack.bound.any():
        return "ok, but its rows took no step: no gradient, they are frozen"
    return "ok" if layer.plain.measured.any() else "ok, but its steps are too small to see: raise lr"


def verdict(wiring: CheckReport) -> str:
    """The last line."""
    known = [layer for layer in wiring.layers if not layer.unshown or layer.unshown == NO_BOUND]
    wrong = [layer for layer in wiring.layers if layer.faults]
    if wrong:
        heads = sum(int(layer.wrong.sum()) for layer in wrong)
        return (
            f"wired wrong: {heads} head{'s' * (heads != 1)} in {len(wrong)} of {_counted(len(wiring.layers))}; give "
            "the module a method logit_paths() that says what is true, or take what was measured: "
            f"QuacK(logit_paths(model, batch, rules=False), optimizer){_unknown(wiring)}"
        )
    if not known:
        return (
            "not shown: the batch runs none of these layers, or they attend in a way that cannot be heard; give "
            "a batch that runs them, and switch the model to sdpa or eager attention"
        )
    heads = sum(layer.heads for layer in known)
    return (
        f"wired right{', as far as shown' * (not wiring.ok)}: {_counted(len(known))}, {heads} heads; no logit moves by "
        f"more than the rates of its head's rows allow, and none with rows that are not its head's{_unknown(wiring)}"
        f"{'; but other paths were measured' * bool(wiring.contradiction)}"
    )


def _unknown(wiring: CheckReport) -> str:
    """What the proof does not cover."""
    unbound = sum(1 for layer in wiring.layers if layer.unshown == NO_BOUND)
    silent = sum(1 for layer in wiring.layers if layer.unshown not in ("", NO_BOUND) and not layer.faults)
    bound = f"; the bound of {_counted(unbound)} is not known, since a weight's input is not seen" if unbound else ""
    return bound + (f"; of {silent} more nothing is known, since the batch does not show it" if silent else "")


def _counted(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
