"""Measures the attention of a model: runs a batch, and differentiates its logits with respect to projections.

The only requirement is that the model runs. For each attention that a Tape records, these are found: the rows of each
projection that make the query and the key of each head; which of them are multiplied with each other (in MLA only some
are); the earlier projections in the same module that they read (MLA's latents); and where a norm removes their scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.find.measure.growth import SCALE, Slope, SlopeChange
from quacklr.find.measure.records import Attention, Projection
from quacklr.find.measure.tape import Tape
from quacklr.find.measure.terms import Chain, TermFinder
from quacklr.util.autograd import leaves_of
from quacklr.util.module_stack import module_stack
from quacklr.util.modules import run, run_uncompiled, undisturbed, unwrapped

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
SMALL = 2**16  # entries: in a larger parameter, only the first row is searched for zeros


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAttention:
    """The terms of one attention's logits, head by head, and the projections that are on no path.

    A term is the chain of the query and that of the key, each from the logit to the input.
    """

    module: str
    problem: str  # why paths cannot describe it; empty if they can
    terms: list[tuple[Chain, Chain]]
    cut: list[Projection]  # gates, and projections that a norm follows
    bounded: list[Projection]  # projections that a bounded function follows, such as tanh


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Every attention of one forward pass, in the order they ran, and the ids of parameters that no token used."""

    attentions: list[MeasuredAttention] = field(default_factory=list)
    idle: set[int] = field(default_factory=set)


@contextmanager
def measuring(model: nn.Module, sample: Any) -> Iterator[Measurement]:
    """A measurement of the model in eval mode, with random numbers for activations and for zeros of its parameters.

    The zeros are restored when the context ends, so that derivatives can be taken inside it; everything else in the
    model is restored before the context begins. If the model fails on random activations (for example, because it
    computes the number of iterations of a loop from them), it is run on its own activations.
    """
    model = unwrapped(model)
    for random, filled in ((True, True), (False, True), (False, False)):
        with no_zeros(model) if filled else nullcontext():
            try:
                measurement = _measure(model, sample, random)
            except Exception as error:  # the forward of the model can raise any error; the last one is reported
                failure = error
                continue
            yield measurement
            return
    raise ValueError(
        f"{type(model).__name__} failed on the sample: {type(failure).__name__}: {failure}; a sample is what the model "
        "is called with: a tensor, a tuple of arguments, or a dict of named ones"
    ) from failure


def _measure(model: nn.Module, sample: Any, random: bool) -> Measurement:
    """One forward pass; several for operations on logits, for nonlinear logits, or if the model is the attention."""
    not_replaced: set[int] = set()
    options = {"random": random, "not_replaced": not_replaced, "root_attends": False}
    changes: dict[Slope, SlopeChange] = {}
    while True:
        tape, measurement, unknown = _observe(model, sample, changes, options)
        if not tape.on_logits <= not_replaced:
            not_replaced |= tape.on_logits
        elif not options["root_attends"] and [each.module for each in measurement.attentions] == [""]:
            options["root_attends"] = True  # the model is a single attention
        else:
            found = _changes(model, sample, unknown, options) if unknown else {}
            changes |= found
            if set(found.values()) <= {SlopeChange.STAYS}:
                measurement.idle.update(id(leaf) for weight in tape.idle for leaf in (weight, *leaves_of(weight)))
                return measurement


def _observe(
    model: nn.Module, sample: Any, changes: dict[Slope, SlopeChange], options: dict[str, Any]
) -> tuple[Tape, Measurement, dict[Slope, Tensor]]:
    """One forward pass: its tape, its attentions, and the slopes whose change at a larger scale must be measured."""
    measurement, unknown = Measurement(), dict[Slope, Tensor]()

    def on_attention(attention: Attention, tape: Tape) -> None:
        found = TermFinder(attention, tape.projections, changes)
        measurement.attentions.append(
            MeasuredAttention(attention.module, found.problem(), found.terms, found.cut(), found.homogeneity.bounded)
        )
        unknown.update({slope: slope.measure(attention, tape.projections) for slope in found.unknown})

    return _run(model, sample, on_attention, **options), measurement, unknown


def _changes(
    model: nn.Module, sample: Any, slopes: dict[Slope, Tensor], options: dict[str, Any]
) -> dict[Slope, SlopeChange]:
    """How slopes change in a forward pass at a larger scale. One that cannot be measured there counts as growing."""
    found: dict[Slope, SlopeChange] = dict.fromkeys(slopes, SlopeChange.GROWS)

    def on_attention(attention: Attention, tape: Tape) -> None:
        for slope, before in slopes.items():
            if slope.belongs_to(attention):
                found[slope] = slope.change(before, slope.measure(attention, tape.projections))

    with suppress(Exception):
        _run(model, sample, on_attention, **options, scale=SCALE)
    return found


def _run(model: nn.Module, sample: Any, on_attention: Callable[[Attention, Tape], None], **options: Any) -> Tape:
    """One forward pass with a tape."""
    with (
        undisturbed(model),
        torch.enable_grad(),
        run_uncompiled(),
        module_stack(model) as running,
        Tape(model.parameters(), model.buffers(), running, lambda found: on_attention(found, tape), **options) as tape,
    ):
        run(model, sample)
    return tape


@contextmanager
def no_zeros(model: nn.Module) -> Iterator[None]:
    """The model with random numbers for the zeros of its parameters; afterwards they are zero again.

    A weight that is initialised to zero, or to the identity, would hide the projections before it.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters() if _has_zeros(parameter)]
    try:
        for parameter, data in kept:
            generator = torch.Generator(data.device).manual_seed(0)
            noise = torch.randn(data.shape, generator=generator, device=data.device, dtype=data.dtype)
            parameter.data = torch.where(data == 0, 0.1 * noise, data)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _has_zeros(parameter: Tensor) -> bool:
    if parameter.dtype not in DTYPES or not parameter.numel() or parameter.is_meta:
        return False
    part = parameter.detach() if parameter.numel() <= SMALL else parameter.detach()[0]
    return bool((part == 0).any())
