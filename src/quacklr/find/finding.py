"""What a rule says of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quacklr.core.path import LogitPath

QK_NORM = "QK norm: its logit does not depend on the scale of its queries and keys"
SCALE_FREE = "parametrised so that its logit does not depend on the scale of its weights"
NO_SOFTMAX = "no softmax attention"
UNKNOWN = "not recognised{}; pass a batch to measure it: QuacK(logit_paths(model, batch), optimizer)"
NOT_LINEAR = "comes before a norm, or something else that the logit is not linear in"
NO_WEIGHTS = "its queries and keys are not made of weights of its own"
LATENT_NORM = "cut off by the norm on the latent: the logit does not depend on its scale"


# how an attention was found
DECLARED, BY_RULE, VERIFIED, MEASURED, GIVEN = "declared", "by rule", "verified", "measured", "given"


@dataclass(frozen=True, slots=True)
class Finding:
    """The paths of an attention; or why it has none.

    `cut`: weights by role that are on no path, and why. `unknown`: it may well have paths, but they are not known.
    `undecided`: unknown because of the sample, so that it contradicts no other finding. `origin`: how it was found.
    """

    paths: Sequence[LogitPath] = ()
    reason: str = ""
    cut: Mapping[str, str] = field(default_factory=dict)
    unknown: bool = False
    undecided: bool = False
    origin: str = BY_RULE

    @property
    def declared(self) -> bool:
        """Whether the module itself said it, by a method `logit_paths`."""
        return self.origin == DECLARED


def unknown(why: str = "") -> Finding:
    """An attention that no rule can read, with what is known of why."""
    return Finding(reason=UNKNOWN.format(f" ({why})" if why else ""), unknown=True)
