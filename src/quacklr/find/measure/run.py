"""Measures the attention of a model: runs a batch, and differentiates its logits with respect to projections.

The only requirement is that the model runs. For each attention that a Tape records, these are found: the rows of each
projection that make the query and the key of each head; which of them are multiplied with each other (in MLA only some
are); the earlier projections in the same module that they read (MLA's latents); and where a norm removes their scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from quacklr.find.measure.homogeneity import SCALE, Sizes
from quacklr.find.measure.records import Attention
from quacklr.find.measure.tape import Options, Tape
from quacklr.find.measure.terms import MeasuredAttention, TermFinder
from quacklr.util.autograd import leaves_of
from quacklr.util.modules import module_stack, run, run_uncompiled, undisturbed, unwrapped

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
R = TypeVar("R")
Measurement = tuple[list[MeasuredAttention], set[int]]  # in the order they ran; ids of parameters that no token used
SMALL = 2**16  # entries: in a larger parameter, only the first row is searched for zeros


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
                measurement = _measure(model, sample, Options(random))
            except Exception as error:  # the forward of the model can raise any error; the last one is reported
                failure = error
                continue
            yield measurement
            return
    raise ValueError(
        f"{type(model).__name__} failed on the sample: {type(failure).__name__}: {failure}; a sample is what the model "
        "is called with: a tensor, a tuple of arguments, or a dict of named ones"
    ) from failure


def _measure(model: nn.Module, sample: Any, options: Options) -> Measurement:
    """One forward pass; several for operations on logits, for nonlinear logits, or if the model is the attention."""
    at_scale: Sizes | None = None
    while True:
        tape, measured = _run(model, sample, options, lambda x: (x.measured(), x.homogeneity.needs_scale), at_scale)
        found = [attention for attention, _ in measured]
        if not tape.on_logits <= options.not_replaced:
            options = options._replace(not_replaced=options.not_replaced | tape.on_logits)
        elif not options.root_attends and [each.module for each in found] == [""]:
            options = options._replace(root_attends=True)  # the model is a single attention
        elif any(needs_scale for _, needs_scale in measured):
            at_scale = _sizes_at_scale(model, sample, options)
        else:
            return found, {id(leaf) for weight in tape.idle for leaf in (weight, *leaves_of(weight))}


def _sizes_at_scale(model: nn.Module, sample: Any, options: Options) -> Sizes:
    """Sizes in two forward passes at a larger scale; none if they fail. One is negative, to have all of a ReLU."""
    found: Sizes = {}
    with suppress(Exception):
        for scale in (SCALE, -SCALE):
            _, sizes = _run(model, sample, options._replace(scale=scale), lambda x: x.homogeneity.sizes)
            for key, size in chain.from_iterable(each.items() for each in sizes):
                found[key] = size + found.get(key, 0)
        return found
    return {}


def _run(
    model: nn.Module, sample: Any, options: Options, result: Callable[[TermFinder], R], at_scale: Sizes | None = None
) -> tuple[Tape, list[R]]:
    """One forward pass: its tape, and a result for each attention."""
    found: list[R] = []

    def on_attention(attention: Attention, tape: Tape) -> None:
        found.append(result(TermFinder(attention, tape.projections, at_scale)))

    with (
        undisturbed(model),
        torch.enable_grad(),
        run_uncompiled(),
        module_stack(model) as running,
        Tape(model, running, on_attention, options) as tape,
    ):
        run(model, sample)
    return tape, found


@contextmanager
def no_zeros(model: nn.Module) -> Iterator[None]:
    """While entered, random numbers for the zeros of parameters, which would hide the projections before them."""
    numbers = [p for p in model.parameters() if p.dtype in DTYPES and p.numel() and not p.is_meta]
    kept = [(p, p.data) for p in numbers if ((p.data if p.numel() <= SMALL else p.data[0]) == 0).any()]
    try:
        for parameter, data in kept:
            generator = torch.Generator(data.device).manual_seed(0)
            noise = torch.randn(data.shape, generator=generator, device=data.device, dtype=data.dtype)
            parameter.data = torch.where(data == 0, 0.1 * noise, data)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
