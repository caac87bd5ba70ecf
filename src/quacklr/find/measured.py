"""A model's attention, measured: run a batch, and differentiate its logits with respect to what projections put out.

Nothing is asked of the model but that its forward runs. For each attention that a Tape catches: which rows of which
projection reach the query and the key of which head; which rows of the one meet which rows of the other (in MLA only
some do); what lies behind a projection in the same module (MLA's latents); and where the chain is cut by a norm, since
there the logit does not depend on the scale of what comes before.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quacklr.find.owners import Rowset
from quacklr.find.probe import Probe
from quacklr.find.records import Attention, Projection, leaves_of
from quacklr.find.tape import Tape
from quacklr.intercept import running
from quacklr.modules import as_written, own_buffers, run, undisturbed, unwrapped


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one attention of a forward was seen to be made of: its terms, head by head, and projections cut by norms.

    A term is two chains of rows, the query's and the key's, each from the logit outwards.
    """

    module: str
    problem: str  # why it cannot be described, if it cannot
    terms: list[tuple[tuple[Rowset, ...], tuple[Rowset, ...]]]
    cut: list[Projection]


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Every attention of one forward, in the order they ran.

    `mixed`: modules that mix the logits of their heads. `idle`: ids of parameters of which the sample left a part out.
    """

    seen: list[Seen]
    mixed: list[str]
    idle: set[int]


def measure(model: nn.Module, sample: Any) -> Measurement:
    """One forward of the model in eval mode, with random numbers for activations; the model is left as it was.

    A model that cannot run on random numbers (it repeats something a predicted number of times) is run on real ones.
    """
    model = unwrapped(model)
    try:
        with suppress(Exception):
            return _measure(model, sample, random=True)
        return _measure(model, sample, random=False)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} failed on the sample: {type(error).__name__}: {error}; a sample is what the model "
            "is called with: a tensor, a tuple of arguments, or a dict of named ones"
        ) from error


def _measure(model: nn.Module, sample: Any, random: bool) -> Measurement:
    seen: list[Seen] = []

    def listen(attention: Attention) -> None:
        probe = Probe(attention, tape.projections)
        seen.append(Seen(probe.module, probe.problem(), probe.terms(), probe.cut()))

    with undisturbed(model), own_buffers(model), torch.enable_grad(), as_written(), running(model) as now:
        tape = Tape(model.parameters(), model.buffers(), now, listen, random)
        with tape:
            run(model, sample)
    return Measurement(seen, tape.mixed, {id(leaf) for w in tape.idle for leaf in (w, *leaves_of(w))})
