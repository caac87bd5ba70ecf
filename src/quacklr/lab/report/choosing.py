"""Which method to use: a table of advice, each line with the comparisons that it relies on.

The advice is written by hand, for certain verdicts on these comparisons. If one of them changes, `tests/test_readme.py`
fails until the line is revised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quacklr.lab.methods import Method, Quack
from quacklr.lab.report.deciding import short_label
from quacklr.lab.report.markdown import table
from quacklr.lab.studies.comparison import Comparison, Verdict
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

OPEN = ("undecided", "not run")


class Basis(NamedTuple):
    """A comparison that advice relies on."""

    claim: str
    part: int
    """Its position among the comparisons of the claim."""
    verdict: Verdict = "holds"
    """The verdict on this comparison that the advice was written for."""


@dataclass(frozen=True)
class Advice:
    """A line of the table."""

    situation: str
    advice: str
    relies_on: Sequence[Basis]


def choosing(claims: Sequence[ClaimResult], lines: Sequence[Advice], lr: float) -> str:
    """The table of advice, with the numbers of the claims; `lr` is the learning rate of most claims."""
    by_name = {claim.name: claim for claim in claims}
    rows = [
        (line.situation, line.advice, "<br>".join(evidence(by_name, basis, lr) for basis in line.relies_on))
        for line in lines
    ]
    return table(("if", "then", "difference of the losses"), rows)


def outdated(claims: Sequence[ClaimResult], lines: Sequence[Advice]) -> list[str]:
    """The lines that rely on verdicts which have changed since they were written."""
    by_name = {claim.name: claim for claim in claims}
    found = [(line, basis, verdict_on(by_name, basis)) for line in lines for basis in line.relies_on]
    return [
        f"{line.situation}: {basis.claim}, comparison {basis.part}: {verdict}, not {basis.verdict}"
        for line, basis, verdict in found
        if verdict != basis.verdict
    ]


def part_of(by_name: Mapping[str, ClaimResult], basis: Basis) -> ClaimPart | None:
    """The comparison; None if its claim was not run."""
    parts = by_name[basis.claim].parts
    return parts[basis.part] if parts else None


def verdict_on(by_name: Mapping[str, ClaimResult], basis: Basis) -> Verdict:
    """The verdict on the comparison now."""
    part = part_of(by_name, basis)
    return "not run" if part is None else part.verdict


def evidence(by_name: Mapping[str, ClaimResult], basis: Basis, lr: float) -> str:
    """Which minus which, the mean difference, its interval, the number of seeds, and the claim."""
    part = part_of(by_name, basis)
    if part is None:
        return f"not run yet (*{basis.claim}*)"
    part = minus_quack(part)
    seeds = f"{part.comparison.seeds} seed{'s' * (part.comparison.seeds != 1)}"
    return f"{short_label(part, lr)}: {difference_text(part.comparison)}, {seeds} (*{basis.claim}*)"


def minus_quack(part: ClaimPart) -> ClaimPart:
    """The comparison with its sides exchanged if it is `QuacK - another method`: above zero QuacK is better."""
    found = part.comparison
    if [is_quack(runs.method) for runs in found.compared] != [True, False]:
        return part
    one, other = found.compared
    label = found.label.replace(f"{one} - {other}", f"{other} - {one}")
    return part._replace(comparison=replace(found, label=label, mean=-found.mean, low=-found.high, high=-found.low))


def is_quack(method: Method) -> bool:
    """Whether a method is QuacK, with any tau and no other option."""
    return isinstance(method, Quack) and method == Quack(method.tau)


def difference_text(comparison: Comparison) -> str:
    """The mean difference and its interval: `-0.035 [-0.058, -0.012]`."""
    known = math.isfinite(comparison.high - comparison.low)
    return f"{comparison.mean:+.3f}" + (f" [{comparison.low:+.3f}, {comparison.high:+.3f}]" if known else "")


def open_questions(claims: Sequence[ClaimResult]) -> str:
    """The claims without a verdict, as a list."""
    lines = [f"- *{claim.name}* ({claim.verdict}): {claim.claim}\n" for claim in claims if claim.verdict in OPEN]
    return "".join(lines) or "Every claim has a verdict.\n"


ADVICE = (
    Advice(
        "you can lower the learning rate",
        "Do this first. QuacK and QK norm had a lower loss at 0.01 than at 0.1. At its best learning rate QuacK still "
        "had a lower loss than the default, with a larger tau.",
        (Basis("highest rate", 1, "fails"), Basis("highest rate", 3, "fails"), Basis("tuned", 0)),
    ),
    Advice(
        "MHA, Muon, and you can change the model",
        "Use QK norm, or sigma-Reparam of all linear layers. Both had a lower loss than QuacK. QuacK adds nothing to "
        "QK norm.",
        (Basis("f", 0), Basis("sigma-Reparam", 0), Basis("with QK norm", 1, "the same")),
    ),
    Advice(
        "MHA, Muon, and the model must stay as it is",
        "Use QuacK. If you can declare products of weights by hand, give also value times output projection and the "
        "products of the MLP rates by the same rule (`examples/all_products.py`); this was better. Compositional Muon "
        "at a tenth of its learning rate was not worse than QuacK. A constant tau (a fixed factor of the learning rate "
        "of query and key weights) and soft-capping were worse.",
        (
            Basis("everywhere", 0),
            Basis("compositional Muon", 0),
            Basis("e", 0),
            Basis("soft-capping", 0, "fails"),
        ),
    ),
    Advice(
        "MLA that decodes from latents, Muon, and the model must stay as it is",
        "Use QuacK, or QuacK for all products of weights. QK clip, a constant tau, Compositional Muon and per-head "
        "Muon were worse.",
        (
            Basis("everywhere", 1),
            Basis("g", 1),
            Basis("g", 2),
            Basis("compositional Muon in MLA", 0, "fails"),
            Basis("per-head Muon", 1, "fails"),
        ),
    ),
    Advice(
        "MLA that decodes from latents, Muon, and you can change the model",
        "Sigma-Reparam of all linear layers had a lower loss than QuacK at 0.1; its weights are plain after training. "
        "Absorbed QK norm was not worse than QuacK at 0.1, and the same at the best learning rates.",
        (Basis("sigma-Reparam", 1), Basis("absorbed QK norm", 0), Basis("tuned", 1, "the same")),
    ),
    Advice(
        "MLA with QK norm, whose keys are cached",
        "Add QuacK: both together were better than QK norm. Declare the paths by hand, because QuacK skips attention "
        "that has QK norm.",
        (Basis("with QK norm", 3),),
    ),
    Advice(
        "MLA with norms on its latents, as in DeepSeek, and Muon",
        "Declare dq and dkv, the weights before these norms, on the paths too ([how](attach.md#declared)). This was "
        "better than what QuacK finds by itself, which has no rates for them.",
        (Basis("latent norms", 0, "fails"),),
    ),
    Advice(
        "AdamW trains all weights",
        "Bound the step of every linear layer relative to its weight (AdamW^2; in the lab `--method bounded-step`): in "
        "MHA it was much better than QuacK, in MLA not worse. It leaves the model as it is. QuacK was better than the "
        "default; whether it is better than a constant tau is not decided.",
        (Basis("AdamW^2", 0), Basis("AdamW^2", 1), Basis("AdamW", 0), Basis("AdamW", 1, "undecided")),
    ),
    Advice(
        "you use QK clip already",
        "Try a lower threshold: at 0.1 the best was 10 in MHA and 3 in MLA, not 100. In MLA, QuacK was better even so.",
        (Basis("d", 0, "undecided"), Basis("d", 1)),
    ),
    Advice(
        "you do not want to tune anything",
        "QK norm and sigma-Reparam have no setting. With QuacK and Muon, set tau to 0.1 / lr: this product fitted all "
        "three learning rates. An error in tau costs QuacK less than a constant tau. A budget (`budget=0.02`) needs no "
        "tau; use it if the latents have no norms.",
        (Basis("tau and learning rate", 0), Basis("tau and learning rate", 4), Basis("tau", 0)),
    ),
    Advice(
        "you use a cosine schedule or weight decay, or do not clip gradients (MLA, Muon)",
        "QuacK kept its advantage over a constant tau. The best tau was 3 in all three cases, not 1.",
        (Basis("cosine", 1), Basis("weight decay", 1), Basis("no clipping", 1)),
    ),
    Advice(
        "your text is natural language",
        "The same on speeches, the one corpus that we tried.",
        (Basis("speeches", 1), Basis("speeches", 3)),
    ),
    Advice(
        "you train longer than 300 steps",
        "With 3,000 steps, at the learning rate that is too high for it, the default became worse and QuacK better, so "
        "the difference grew (MLA). QK norm was then a little better than QuacK with the tau of the short runs "
        "([losses](study.md#longer-runs)).",
        (Basis("longer", 0),),
    ),
    Advice(
        "your model is larger than ours",
        "We do not know. The larger our models, the lower the learning rate at which logits exploded (0.3M to 4M "
        "parameters). QuacK was better than the default at all of these sizes. With one tau * lr its own largest logit "
        "grew with the size too, so watch it, and lower tau if it passes 100. The paper's runs with 1B agree on three "
        "points: QuacK is stable where the default is not, a constant tau is worse, QK norm is slightly better in MHA.",
        (Basis("size and critical rate", 0), Basis("every size", 0), Basis("every size", 2)),
    ),
)
