"""Verifies the findings of rules by a measurement on the first batch that the model runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quacklr.core.local import is_sharded
from quacklr.find.compare import differences, wrong_rule
from quacklr.find.finding import BY_RULE, VERIFIED, Finding, is_inside
from quacklr.find.first_batch import FirstBatch, slices
from quacklr.find.measure.assemble import measured_paths
from quacklr.find.tables.evidence import is_trusted
from quacklr.util.caller import warn
from quacklr.util.modules import Arguments, named_modules, unwrapped, wrappers

TAKE_MEASURED = (
    "to use what was measured, pass the paths that logit_paths(model, batch, rules=False) returns; to use the rule all "
    "the same, pass verify=False"
)
NOT_FOUND = (
    "{}: attention was measured in a {} that no rule knows, so it is not controlled; to control it, pass the paths "
    "that logit_paths(model, batch) returns"
)
WAITS = "not verified yet: the first batch will be measured before the first step"
NO_BATCH = "not verified: no batch was seen before the first step (the model ran none, or was compiled after attaching)"
NOT_SEEN = "not verified: it did not attend in the first batch"
SWITCHED_OFF = "not verified: verify=False"
COMPILED = "not verified: the model was compiled in place, by model.compile()"
SHARDED = "not verified: the model is sharded"
GUESSED = (
    "{}: the query and key rows were read off the source of {}, a class that quacklr does not know, and are "
    "{}; call logit_paths(model, batch) once, on the model before it is compiled or sharded: it raises an "
    "error if the rows are wrong. If it does not, pass verify=False"
)


class Verification:
    """Keeps a slice of the first batch; `finish` measures on it, and compares with the findings of rules.

    Costs about three forward passes of 2 x 8 tokens, once. The measurement does not change the model, its gradients or
    the random state. `notes` has, for each attention found by a rule, VERIFIED or the reason why it is not verified.
    """

    def __init__(self, model: nn.Module, found: Mapping[str, Finding], verify: bool, sharded: bool = False) -> None:
        self._found = dict(found)
        ruled = [name for name, finding in found.items() if finding.origin == BY_RULE and not finding.unknown]
        why = SWITCHED_OFF if not verify else _unverifiable(model, sharded) or WAITS
        self.notes: dict[str, str] = dict.fromkeys(ruled, why)
        self._batch = FirstBatch(model, ruled) if why == WAITS and ruled else None
        self._unknown_classes = {
            name: type(module).__name__
            for name, module in named_modules(model)
            if name in ruled and found[name].paths and not is_trusted(module)
        }
        if why not in (WAITS, SWITCHED_OFF):
            self._warn_unverified()

    def before_step(self) -> None:
        """Verify, if there was a batch. In a step with a closure, as in Lightning, the model runs during the step."""
        if self._batch is not None and self._batch.calls:
            self.finish()

    def finish(self) -> None:
        """Verify, or note that there was no batch. ValueError if the measurement contradicts a rule.

        After an error the batch is kept, so that the next step raises again.
        """
        if self._batch is None:
            return
        notes: dict[str, str] = {}
        for name, (module, call) in self._batch.calls.items():
            if (called := module()) is not None:
                notes |= self._notes_for(name, called, call)
        self.notes = {name: notes.get(name, NOT_SEEN if self._batch.calls else NO_BATCH) for name in self.notes}
        self.remove()
        self._warn_unverified()

    def _warn_unverified(self) -> None:
        """One warning for each reason why attentions of unknown classes were not verified."""
        guessed: dict[str, list[str]] = {}
        for name in self._unknown_classes:
            if self.notes[name] != VERIFIED:
                guessed.setdefault(self.notes[name], []).append(name)
        for why, names in guessed.items():
            classes = sorted({self._unknown_classes[name] for name in names})
            where = names[0] or "the model"
            where += f" and {len(names) - 1} more" if len(names) > 1 else ""
            warn(GUESSED.format(where, " and ".join(classes), why))

    def remove(self) -> None:
        """Remove the hooks."""
        if self._batch is not None:
            self._batch.remove()
            self._batch = None

    def _notes_for(self, outer: str, module: nn.Module, call: Arguments) -> dict[str, str]:
        """The note for each attention in a module that was called."""
        why = "its inputs are too long to be measured"
        for part in slices(call):
            try:
                seen = measured_paths(module, part)
                break
            except ValueError as error:  # the model does not run on this slice
                why = str(error)
        else:
            return {name: f"not verified: {why}" for name in self.notes if is_inside(name, outer)}
        seen = {".".join(filter(None, (outer, name))): finding for name, finding in seen.items()}
        return {name: note for name, found in seen.items() if (note := self._note_for(name, found, outer, module))}

    def _note_for(self, name: str, measured: Finding, outer: str, module: nn.Module) -> str:
        """The note for an attention; empty if no rule found it. ValueError if a rule is wrong."""
        attention = dict(named_modules(module))[name.removeprefix(outer).lstrip(".")]
        ruled = self._found.get(name)
        if ruled is None:
            declared = any(finding.declared and is_inside(name, other) for other, finding in self._found.items())
            if measured.paths and not declared:
                warn(NOT_FOUND.format(name or "the model", type(attention).__name__))
        if ruled is None or name not in self.notes:
            return ""
        if measured.undecided:
            return f"not verified: {measured.reason}"
        said = "that it is on a path" if ruled.paths else ruled.reason
        wrong = f"it says {said}, but the measurement says: {measured.reason}" if measured.unknown else ""
        if wrong := wrong or differences(ruled.paths, measured.paths, unwrapped(module)):
            raise wrong_rule(name, attention, wrong, TAKE_MEASURED)
        return VERIFIED


def _unverifiable(model: nn.Module, sharded: bool) -> str:
    """The reason why a model cannot be verified while it trains; empty if it can."""
    if any(each._compiled_call_impl is not None for each in wrappers(model)):
        return COMPILED
    return SHARDED if sharded or any(is_sharded(param) for param in model.parameters()) else ""
