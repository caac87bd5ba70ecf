"""The result of a check: a table with one line per layer, the faults, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quacklr.checking.layer_report import NO_BOUND, LayerReport
from quacklr.util.text_table import columns, grouped

MANY = 40  # with more layers, only the first, the last and those with faults are printed


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Whether QuacK's rates reach the right rows: `ok`, a table when printed.

    `unmeasured`: why the paths are those of the rules, if the batch could not be measured. `contradiction`: how the
    measured paths differ from the rules, if they do.
    """

    layers: tuple[LayerReport, ...]
    growth: float
    steps: int
    left_alone: Mapping[str, str]
    unmeasured: str = ""
    contradiction: str = ""
    budget: float | None = None

    @property
    def ok(self) -> bool:
        """Whether every layer was proved to be right, and no measurement contradicts the paths."""
        proved = all(not layer.unproved and not layer.faults for layer in self.layers)
        return bool(self.layers) and proved and not self.contradiction

    def __str__(self) -> str:
        faults = grouped((layer.module, fault.text) for layer in self.layers for fault in layer.faults)
        alone = grouped(self.left_alone.items())
        by_rule = "paths are those of the rules, "
        sections = [
            self._table() if self.layers else [],
            [self._budget_line(self.budget)] if self.budget is not None else [],
            ["wrong:", *faults] if faults else [],
            ["left alone:", *alone] if alone else [],
            [f"{by_rule}and could not be measured: {self.unmeasured}"] if self.unmeasured else [],
            [f"{by_rule}but others were measured: {self.contradiction}"] if self.contradiction else [],
            [self.verdict()],
        ]
        return "\n\n".join("\n".join(section) for section in sections if section)

    def _table(self) -> list[str]:
        grown, count = f"grown {self.growth:g}x", len(self.layers)
        titles = ["attention", "heads", "at the start", "bound", f"{grown}, plain", f"{grown}, QuacK", "its bound"]
        titles += ["RMS, plain", "RMS, QuacK", ""] if self.budget is not None else [""]
        shown = {*range(MANY // 2), *range(count - MANY // 4, count)} if count > MANY else range(count)
        printed = [each for i, each in enumerate(self.layers) if i in shown or each.faults]
        return columns([tuple(titles), *(each.cells(self.budget is not None) for each in printed)])

    def _budget_line(self, budget: float) -> str:
        """In how many layers the root mean square of the changes with QuacK is within the budget."""
        seen = [layer for layer in self.layers if not layer.unobserved]
        within = [layer for layer in seen if bool((layer.quack.root_mean_square <= budget).all())]
        largest = max((float(layer.quack.root_mean_square.max()) for layer in seen), default=0.0)
        return (
            f"budget {budget:g}: the root mean square of a step's changes is within it in {len(within)} of "
            f"{_layers(len(seen))}; the largest is {largest:.2g}"
        )

    def verdict(self) -> str:
        """The last line."""
        proved = [layer for layer in self.layers if layer.unproved in ("", NO_BOUND)]
        wrong = [layer for layer in self.layers if layer.faults]
        if wrong:
            heads = sum(int(layer.wrong.sum()) for layer in wrong)
            return (
                f"wrong: {heads} head{'s' * (heads != 1)} in {len(wrong)} of {_layers(len(self.layers))}; give "
                "the module a method logit_paths() that returns the right paths, or use the measured ones: "
                f"QuacK(logit_paths(model, batch, rules=False), optimizer){self._not_covered()}"
            )
        if not proved:
            return (
                "not shown: the batch runs none of these layers, or their logits cannot be observed; give "
                "a batch that runs them, and switch the model to sdpa or eager attention"
            )
        heads = sum(layer.heads for layer in proved)
        return (
            f"correct{', as far as shown' * (not self.ok)}: {_layers(len(proved))}, {heads} heads; no logit moves "
            "by more than the rates of its head's rows allow, and none changes with the rows of other heads"
            f"{self._not_covered()}{'; but other paths were measured' * bool(self.contradiction)}"
        )

    def _not_covered(self) -> str:
        """The end of the verdict: what the check does not prove."""
        no_bound = sum(layer.unproved == NO_BOUND for layer in self.layers)
        unknown = sum(layer.unproved not in ("", NO_BOUND) and not layer.faults for layer in self.layers)
        bound = f"; the bound of {_layers(no_bound)} is not known, since a weight's input is not seen"
        rest = f"; {unknown} more could not be tested on this batch"
        return bound * bool(no_bound) + rest * bool(unknown)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"
