"""Measures attention on a small slice of the first batch that a model runs, before the first step.

Forward pre-hooks keep the first examples of the inputs of the outermost module that is called: the model, or a
submodule if a trainer calls only that (a LightningModule's `self.model`). Every module that may contain an attention
has a hook, which is removed when the module runs. A module that does not run in the first batch keeps its hook: when it
runs in a later batch, a slice of that batch is measured too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quacklr.core.local import is_sharded
from quacklr.find.discover import WAYS_OUT, completed, not_known, validate_controls, warn_unknown, without_pending
from quacklr.find.finding import BY_TABLE, MEASURED, Finding, is_inside
from quacklr.find.measure.assemble import measured_paths
from quacklr.util.modules import Arguments, compiled_modules, named_modules, wrappers
from quacklr.util.torch_functions import tensors_in

NO_BATCH = "no batch was seen before the first step (the model ran none, or was compiled after attaching)"
NOT_YET = "not verified yet: the first batch will be measured before the first step"
EXAMPLES, TOKENS = 2, 8
LONGEST = 512  # tokens of the longest example that is run whole, if the model fails on its first tokens
Call = tuple[str, Arguments]  # the name of an outermost module, and the first examples that it was called with


class FirstBatch:
    """Keeps a slice of the first batch; `measure` verifies the findings of tables on it, and measures all others.

    Costs some forward and backward passes of 2 x 8 tokens, once. `found` has the findings, completed by `measure`. A
    model that cannot be measured is left with the findings of tables; then RuntimeError, if an attention is pending.
    `gathers`: the model has whole parameters only while it runs. Without `verify` nothing is measured.
    """

    def __init__(
        self, model: nn.Module, found: Mapping[str, Finding], gathers: bool = False, verify: bool = True
    ) -> None:
        self.found = dict(found)
        self._model = ref(model)
        self._hooks: dict[str, list[RemovableHandle]] = {}
        self._latest: dict[str, Call] = {}  # of each outermost module
        self._calls: dict[int, Call] = {}  # not measured yet, by id
        self._did_run: set[str] = set()
        self._measuring = False
        if why := _not_measurable(model, gathers) if verify else "verify=False":
            self._leave_unverified(why)
        else:
            self._note(NOT_YET, NOT_YET)
            for name, module in [*compiled_modules(model), *named_modules(model)]:
                if _may_attend(module):
                    hook = module.register_forward_pre_hook(Hook(self, name), with_kwargs=True)
                    self._hooks.setdefault(name, []).append(hook)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._hooks and not self._calls

    @property
    def has_batch(self) -> bool:
        """Whether a batch was kept that was not measured yet. In a step with a closure the model runs in the step."""
        return bool(self._calls)

    def keep(self, name: str, arguments: Arguments) -> None:
        """Keep the first examples of a call of an outermost module, if a module in it runs for the first time."""
        is_new = name not in self._did_run
        self._did_run.add(name)
        if self._measuring:
            return
        outer = next((each for each in self._latest if is_inside(name, each)), name)
        if outer == name:
            self._latest[name] = name, first_examples(arguments)
        else:
            self._unhook(name)
        if is_new:
            self._calls[id(self._latest[outer])] = self._latest[outer]

    def measure(self) -> dict[str, Finding] | None:
        """The findings, completed by a measurement of the batches since the last call; None if there is nothing new.

        ValueError if the measurement contradicts a table, or if the model has no attention to control. RuntimeError if
        a pending attention cannot be measured. After an error the batch is kept, so the next call raises again.
        """
        model = self._model()
        if model is None or self.is_done:
            return None
        why = _not_measurable(model) or ("" if self._calls or self._latest else NO_BATCH)
        if why:  # it may have been sharded or compiled after attaching
            self._leave_unverified(why)
            self.remove()
            return self.found
        if not self._calls:
            _validate_steps(self.found, model)
            return None
        found, measured = dict(self.found), dict[str, Finding]()
        modules = dict((*compiled_modules(model), *named_modules(model)))
        for outer, arguments in self._calls.values():
            seen, why = self._measured(modules[outer], outer, arguments, found)
            inside = {name: finding for name, finding in found.items() if is_inside(name, outer)}
            _raise_if_pending(inside if why else {}, why)
            measured |= seen
            found = completed(found, seen, model)
            for name in inside.keys() - seen.keys():
                if found[name].note and not found[name].pending:
                    note = f"not verified: {why or 'it did not attend in the first batch'}"
                    found[name] = replace(found[name], note=note)
        found = without_pending(found, measured, model, self._ran)
        _validate(found, model)
        warn_unknown({name: finding for name, finding in found.items() if finding != self.found.get(name)})
        self.found = found
        self._calls.clear()
        for name in [name for name in self._hooks if name not in self._latest and self._ran(name)]:
            self._unhook(name)
        if self._hooks.keys() <= self._latest.keys():
            self.remove()
        return dict(found)

    def remove(self) -> None:
        """Remove all hooks."""
        self._calls.clear()
        self._latest.clear()
        for name in list(self._hooks):
            self._unhook(name)

    def _unhook(self, name: str) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()

    def _ran(self, name: str) -> bool:
        """Whether a module ran, or a part of it: a trainer may call only the parts."""
        return any(is_inside(part, name) for part in self._did_run)

    def _measured(
        self, module: nn.Module, outer: str, arguments: Arguments, found: Mapping[str, Finding]
    ) -> tuple[dict[str, Finding], str]:
        """The findings by measurement, and the reason if there is none. A slice that shows too little is enlarged."""
        measured, why = dict[str, Finding](), "its inputs are too long to be measured"
        for part in slices(arguments):
            try:
                self._measuring = True
                seen = measured_paths(module, part)
            except ValueError as error:  # the model does not run on this slice
                why = why if measured else str(error)
                continue
            finally:
                self._measuring = False
            measured = {".".join(filter(None, (outer, name))): finding for name, finding in seen.items()}
            why = ""
            missed = {name for name, finding in found.items() if finding.pending and self._ran(name)}
            if measured.keys() >= missed and not any(finding.undecided for finding in measured.values()):
                break
        return measured, why

    def _leave_unverified(self, why: str) -> None:
        """Note why the findings of tables are not verified. RuntimeError if some attention is not known."""
        if not self.found:
            name, why = type(self._model()).__name__, f"it cannot be measured: {why}; {WAYS_OUT}"
            raise RuntimeError(f"{name}: no attention was found by table or declaration, and {why}")
        _raise_if_pending(self.found, why)
        self._note(f"not verified: {why}")

    def _note(self, by_table: str, measured: str = "") -> None:
        """Note why findings are not verified: those of tables, and those that were measured before."""
        notes = {BY_TABLE: by_table, MEASURED: measured}
        known = {name: finding for name, finding in self.found.items() if finding.origin in notes}
        self.found |= {name: replace(finding, note=notes[finding.origin]) for name, finding in known.items()}


def _validate(found: Mapping[str, Finding], model: nn.Module) -> None:
    for name, finding in found.items():
        if finding.undecided:
            raise RuntimeError(f"{name or 'the model'}: {finding.reason}; {WAYS_OUT}")
    if next(compiled_modules(model), None) is not None:
        _raise_if_pending(
            found, "it did not run in the first batch, and whether it runs later cannot be seen in compiled code"
        )
    if not any(finding.pending for finding in found.values()):
        validate_controls(found, model)
    _validate_steps(found, model)


def _validate_steps(found: Mapping[str, Finding], model: nn.Module) -> None:
    """RuntimeError if a pending attention has gradients. Replicas of a model (DDP) may run different modules."""
    waiting = [(name, module) for name, module in named_modules(model) if name in found and found[name].pending]
    steps = [name for name, module in waiting if any(param.grad is not None for param in module.parameters())]
    _raise_if_pending({name: found[name] for name in steps}, "it steps, and no batch ran it in this process")


def _raise_if_pending(found: Mapping[str, Finding], why: str) -> None:
    if names := [name for name, finding in found.items() if finding.pending]:
        raise RuntimeError(not_known(names, found, why))


def _not_measurable(model: nn.Module, gathers: bool = False) -> str:
    """The reason why a model cannot be measured while it trains; empty if it can."""
    if any(each._compiled_call_impl is not None for each in wrappers(model)):
        return "the model was compiled in place, by model.compile()"
    flat = {param.ndim for param in model.parameters() if hasattr(param, "_fsdp_flattened")}  # by FSDP1
    sharded = gathers or flat == {1} or any(is_sharded(param) for param in model.parameters())
    return "the model is sharded" if sharded else ""


def _may_attend(module: nn.Module) -> bool:
    """Whether a module has parameters, is called, and has either parts or a class that is not torch's (nn.Linear)."""
    if isinstance(module, torch.jit.ScriptModule | nn.ModuleList | nn.ModuleDict):
        return False
    is_leaf_of_torch = type(module).__module__.startswith("torch.") and next(module.children(), None) is None
    return not is_leaf_of_torch and next(module.parameters(), None) is not None


class Hook:
    """The forward pre-hook. Its reference is weak: a model does not keep what was attached to it alive."""

    def __init__(self, batch: FirstBatch | None, name: str) -> None:
        self.batch, self.name = None if batch is None else ref(batch), name

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the call, but not while compiling, nor in inference mode, whose tensors have no gradients."""
        batch = None if self.batch is None else self.batch()
        if batch is not None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            batch.keep(self.name, Arguments(args, kwargs))

    def __reduce__(self) -> tuple[type[Hook], tuple[None, str]]:
        return Hook, (None, self.name)


def slices(call: Arguments) -> Iterator[Arguments]:
    """The call with a few tokens of each example; then with all of them, if they are not too many."""
    batch, lengths = _sizes(call)

    def first_tokens(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if size in lengths and (dim or size != batch):
                tensor = tensor.narrow(dim, 0, min(TOKENS, size))
        return tensor

    if any(length > TOKENS for length in lengths):
        yield call.map(first_tokens)
    if all(length <= LONGEST for length in lengths):
        yield call


def first_examples(call: Arguments) -> Arguments:
    """A copy of the first examples of a call."""
    batch, _ = _sizes(call)

    def copied(tensor: Tensor) -> Tensor:
        dim = next((dim for dim in range(min(2, tensor.ndim)) if tensor.shape[dim] == batch), None)
        first = tensor if dim is None else tensor.narrow(dim, 0, min(EXAMPLES, batch))
        return first.detach().clone()

    with torch.no_grad():
        return call.map(copied)


def _sizes(call: Arguments) -> tuple[int, set[int]]:
    """The batch size, and the sequence lengths: second dimensions of token ids, or of a batch of vectors."""
    tensors = tensors_in(call)
    ids = [tensor for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()]
    vectors = [tensor for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()]
    batch = next((len(tensor) for tensor in [*ids, *tensors] if tensor.ndim > 1), 0)
    return batch, {tensor.shape[1] for tensor in ids or vectors[:1]}
