"""A model's attention, measured: run a batch, and differentiate its logits with respect to what projections put out.

Nothing is asked of the model but that its forward runs. For each attention that a Tape catches: which rows of which
projection reach the query and the key of which head; which rows of the one meet which rows of the other (in MLA only
some do); what lies behind a projection in the same module (MLA's latents); and where the chain is cut by a norm, since
there the logit does not depend on the scale of what comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.find.measure.growth import SCALE, Change, Slope
from quacklr.find.measure.projection_rows import Rowset
from quacklr.find.measure.records import Attention, Projection
from quacklr.find.measure.tape import Tape
from quacklr.find.measure.terms import TermFinder
from quacklr.util.autograd import leaves_of
from quacklr.util.module_stack import module_stack
from quacklr.util.modules import own_attributes, own_buffers, run, run_uncompiled, undisturbed, unwrapped

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
SMALL = 2**16  # entries: in a parameter of no more, every entry is looked at for zeros


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one attention of a forward was seen to be made of: its terms, head by head, and projections cut by norms.

    A term is two chains of rows, the query's and the key's, each from the logit outwards.
    """

    module: str
    problem: str  # why it cannot be described, if it cannot
    terms: list[tuple[tuple[Rowset, ...], tuple[Rowset, ...]]]
    cut: list[Projection]  # those that a norm follows, and gates
    bounded: list[Projection]  # those that something bounded follows, as a tanh


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Every attention of one forward, in the order they ran.

    `idle`: ids of parameters of which the sample left a part out.
    """

    seen: list[Seen]
    idle: set[int]


@contextmanager
def measuring(model: nn.Module, sample: Any) -> Iterator[Measurement]:
    """Forwards of the model in eval mode, with random numbers for activations, and for zeros of its parameters.

    Parameters are as they were after the context, so that what was seen can be asked until then; the rest of the model
    is as it was already. A model that cannot run on random numbers (it repeats something a predicted number of times)
    is run on real ones.
    """
    model = unwrapped(model)
    for random, filled in ((True, True), (False, True), (False, False)):
        with no_zeros(model) if filled else nullcontext():
            try:
                measurement = _measure(model, sample, random)
            except Exception as error:
                failure = error
                continue
            yield measurement
            return
    raise ValueError(
        f"{type(model).__name__} failed on the sample: {type(failure).__name__}: {failure}; a sample is what the model "
        "is called with: a tensor, a tuple of arguments, or a dict of named ones"
    ) from failure


def _measure(model: nn.Module, sample: Any, random: bool) -> Measurement:
    """One forward; more where something multiplies logits, they are not linear, or if the model attends itself."""
    of_logits: set[int] = set()
    root_attends = False
    changes: dict[Slope, Change] = {}
    while True:
        seen: list[Seen] = []
        unknown: dict[Slope, Tensor] = {}

        def listen(attention: Attention, tape: Tape) -> None:
            probe = TermFinder(attention, tape.projections, changes)  # noqa: B023
            seen.append(Seen(attention.module, probe.problem(), probe.terms, probe.cut(), probe.euler.bounded))  # noqa: B023
            unknown.update({slope: slope.taken(attention, tape.projections) for slope in probe.unknown})  # noqa: B023

        given = {"as_written": of_logits, "root_attends": root_attends}
        tape = _run(model, sample, listen, random, **given)
        if not tape.of_logits <= of_logits:
            of_logits |= tape.of_logits
            continue
        if not root_attends and [each.module for each in seen] == [""]:
            root_attends = True  # the model is a single attention
            continue
        found = _changes(model, sample, random, unknown, given) if unknown else {}
        changes |= found
        if set(found.values()) <= {Change.STAYS}:
            return Measurement(seen, {id(leaf) for w in tape.idle for leaf in (w, *leaves_of(w))})


def _changes(
    model: nn.Module, sample: Any, random: bool, slopes: dict[Slope, Tensor], given: dict[str, Any]
) -> dict[Slope, Change]:
    """What becomes of slopes in a forward on larger numbers. Of one that cannot be taken there: that it grows."""
    found: dict[Slope, Change] = dict.fromkeys(slopes, Change.GROWS)

    def listen(attention: Attention, tape: Tape) -> None:
        for slope, before in slopes.items():
            if slope.is_of(attention):
                found[slope] = slope.changed(before, slope.taken(attention, tape.projections))

    with suppress(Exception):
        _run(model, sample, listen, random, **given, scale=SCALE)
    return found


def _run(
    model: nn.Module, sample: Any, listener: Callable[[Attention, Tape], None], random: bool, **given: Any
) -> Tape:
    """One forward on a tape."""
    with (
        undisturbed(model),
        own_buffers(model),
        own_attributes(model),
        torch.enable_grad(),
        run_uncompiled(),
        module_stack(model) as now,
    ):
        tape = Tape(model.parameters(), model.buffers(), now, lambda seen: listener(seen, tape), random, **given)
        with tape:
            run(model, sample)
    return tape


@contextmanager
def no_zeros(model: nn.Module) -> Iterator[None]:
    """The model with random numbers for the zeros of its parameters; afterwards they are what they were.

    A weight that starts at zero, or as the identity, would hide what is behind it. Of a large one the first row tells.
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
