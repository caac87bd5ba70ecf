"""Which method to use: a table of advice, each line with the verdicts that it relies on and their numbers.

The advice is written by hand, for certain verdicts. If one of them changes, `tests/test_readme.py` fails until the line
is revised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quacklr.lab.report.markdown import table
from quacklr.lab.studies.comparison import Comparison, Verdict
from quacklr.lab.studies.deciding import deciding, short_label
from quacklr.lab.studies.verdicts import ClaimResult

OPEN = ("undecided", "not run")


@dataclass(frozen=True)
class Advice:
    """A line of the table."""

    situation: str
    advice: str
    relies_on: Mapping[str, Verdict]
    """The claims that the advice follows from, with the verdicts that it was written for."""


def choosing(claims: Sequence[ClaimResult], lines: Sequence[Advice], lr: float) -> str:
    """The table of advice, with the verdicts and numbers of the claims; `lr` is the learning rate of most claims."""
    by_name = {claim.name: claim for claim in claims}
    rows = [
        (line.situation, line.advice, "<br>".join(evidence(by_name[name], lr) for name in line.relies_on))
        for line in lines
    ]
    return table(("if", "then", "because"), rows)


def outdated(claims: Sequence[ClaimResult], lines: Sequence[Advice]) -> list[str]:
    """The lines whose verdicts have changed since they were written."""
    verdicts = {claim.name: claim.verdict for claim in claims}
    return [
        f"{line.situation}: {name} is {verdicts[name]}, not {expected}"
        for line in lines
        for name, expected in line.relies_on.items()
        if verdicts[name] != expected
    ]


def evidence(claim: ClaimResult, lr: float) -> str:
    """The name of a claim, its verdict, and the difference that decided it: which minus which, mean and interval."""
    part = deciding(claim)
    number = "" if part is None else f" ({short_label(part, lr)}: {difference_text(part.comparison)})"
    return f"*{claim.name}* {claim.verdict}{number}"


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
        "Do this first. All methods ended lower at the middle learning rate than at the highest.",
        {"highest rate": "fails"},
    ),
    Advice(
        "MHA or GQA, and you can change the model",
        "Use QK norm, or sigma-Reparam of all linear layers. Both ended below QuacK. QuacK adds nothing to QK norm. "
        "Sigma-Reparam of the query and key weights alone did as well as QuacK.",
        {"f": "holds", "sigma-Reparam": "holds", "with QK norm": "the same", "sigma-Reparam of q and k": "holds"},
    ),
    Advice(
        "MHA or GQA, and the model must stay as it is",
        "Use QuacK. A constant tau, per-head Muon and soft-capping ended above it. With Muon, Compositional Muon at a "
        "tenth of its learning rate also removes the problem.",
        {"e": "holds", "per-head Muon": "fails", "soft-capping": "fails", "compositional Muon": "holds"},
    ),
    Advice(
        "you can declare products of weights by hand",
        "Give the product of values and output projection, and those of the MLP, rates by the same rule "
        "(`examples/all_products.py`; in the lab `--products all`). In MHA and in MLA this ended well below QuacK for "
        "the logits alone. In MLA it ended above sigma-Reparam, which changes the model while it trains.",
        {"everywhere": "holds", "everywhere and sigma-Reparam": "fails"},
    ),
    Advice(
        "MLA that decodes from latents",
        "Use QuacK: the best of the paper's methods that keep latent decoding. If you can change the model, absorbed "
        "QK norm and sigma-Reparam of all linear layers do as well or better; the weights of sigma-Reparam are plain "
        "after training. If you cache keys and have QK norm anyway, QuacK and QK norm together ended below either "
        "alone; then declare the paths by hand, because QuacK leaves attention with QK norm alone. Compositional Muon "
        "ended above QuacK.",
        {
            "g": "holds",
            "absorbed QK norm": "holds",
            "sigma-Reparam": "holds",
            "with QK norm": "the same",
            "compositional Muon in MLA": "fails",
        },
    ),
    Advice(
        "MLA with norms on its latents, as in DeepSeek, and Muon",
        "Declare dq and dkv on the paths too, as in the paper's Algorithm 2. This ended lower than paths that end at "
        "the norms, which is what QuacK finds by itself.",
        {"latent norms": "fails"},
    ),
    Advice(
        "you use QK clip already",
        "Lower its threshold: 10 was best in MHA and 3 in MLA, not 100. In MLA, QuacK ended below it even so.",
        {"g": "holds", "d": "undecided"},
    ),
    Advice(
        "your model is larger than ours, or your text is natural language",
        "Expect the problem at a lower learning rate: the larger the model, the lower the rate where logits explode. "
        "At ten times this rate QuacK beat the default at every size that we ran. It also did on speeches.",
        {"size and critical rate": "holds", "every size": "holds", "speeches": "holds"},
    ),
    Advice(
        "you use a cosine schedule or weight decay, or do not clip gradients",
        "This changes nothing: QuacK beat the default and a constant tau in each of these cases too (in MLA).",
        {"cosine": "holds", "weight decay": "holds", "no clipping": "holds"},
    ),
    Advice(
        "AdamW trains all weights",
        "AdamW^2, which bounds the step of every linear layer relative to its weight, ended below QuacK in MHA and did "
        "as well in MLA (in the lab `--method bounded-step`). Whether QuacK beats a constant tau is not decided.",
        {"AdamW^2": "holds", "AdamW": "undecided"},
    ),
    Advice(
        "you do not want to tune tau",
        "One tau * lr fits all learning rates: with Muon it was 0.1 in our models, so begin with tau = 0.1 / lr. A "
        "wrong tau costs QuacK less than it costs a constant tau. Or pass `budget=0.02`: it is close to a tuned tau "
        "in most cells, but not to the best method in every cell.",
        {"tau and learning rate": "holds", "tau": "holds", "budget": "fails"},
    ),
)
