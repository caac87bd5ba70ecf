"""The result of looking for the paths of one attention module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quacklr.core.path import LogitPath

# reasons for having no path
QK_NORM = "QK norm: its logit does not depend on the scale of its queries and keys"
NO_SOFTMAX = "no softmax attention"
NOT_LINEAR = "comes before a norm or another nonlinear function, or is a gate"
NO_WEIGHTS = "its queries and keys are not made of weights of its own"
LATENT_NORM = "cut off by the norm on the latent: the logit does not depend on its scale"
WILL_BE_MEASURED = "will be measured on the first batch"

# how an attention was found
DECLARED, BY_TABLE, VERIFIED, MEASURED, GIVEN = "declared", "by table", "verified", "measured", "given"
PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Finding:
    """The paths of an attention module, or the reason why it has none.

    `cut` maps roles of weights that are on no path to the reason. `unknown`: the module may have paths, but they could
    not be determined. `undecided`: unknown because of the sample, so it does not contradict another finding.
    `origin` is how the attention was found. `note` is the reason why a finding by table is not verified, or why no
    table applies.
    """

    paths: Sequence[LogitPath] = ()
    reason: str = ""
    cut: Mapping[str, str] = field(default_factory=dict)
    unknown: bool = False
    undecided: bool = False
    origin: str = BY_TABLE
    note: str = ""

    @property
    def declared(self) -> bool:
        """Whether the paths come from the module's own method `logit_paths`."""
        return self.origin == DECLARED

    @property
    def pending(self) -> bool:
        """Whether the module may be an attention that no table knows: it has to be measured."""
        return self.origin == PENDING


def is_inside(name: str, outer: str) -> bool:
    """Whether the module with this name is the outer one or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")
