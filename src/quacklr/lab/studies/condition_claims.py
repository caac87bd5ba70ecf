"""Claims about other conditions of training: does QuacK's advantage at the highest learning rate stay?"""

from __future__ import annotations

from collections.abc import Sequence

from quacklr.lab.methods import ConstantTau, Default, Quack
from quacklr.lab.studies.claims import BOTH
from quacklr.lab.studies.comparison import Comparison, Test, difference, less
from quacklr.lab.studies.conditions import (
    Condition,
    cosine_to_zero,
    longer,
    no_gradient_clipping,
    speeches,
    weight_decay,
)
from quacklr.lab.studies.results import AnyMethod, Results
from quacklr.lab.studies.tuned_methods import QUACK, TUNED
from quacklr.lab.studies.verdicts import Answer, Claim, answer, mean_and_sd

TUNED_METHODS = (QUACK, TUNED[Default], TUNED[ConstantTau])


def beats(
    sentence: str,
    condition: Condition,
    attentions: Sequence[str] = ("mla",),
    methods: Sequence[AnyMethod] = TUNED_METHODS,
) -> Claim:
    """The claim that the first method has a lower loss than each of the others, at the highest learning rate."""

    def claim(results: Results) -> Answer:
        tested, texts = list[tuple[Test, Comparison]](), []
        for attention in attentions:
            cell = condition(results.scale.cell(attention, results.scale.high))
            first, *others = (results.runs(cell, method) for method in methods)
            tested += [(less, difference(first, other)) for other in others]
            texts.append(f"{cell}: " + ", ".join(f"{runs} {mean_and_sd(runs)}" for runs in (first, *others)))
        return answer("; ".join(texts), *tested)

    claim.__doc__ = sentence
    return claim


BEATS = "QuacK beats the default and a constant tau in MLA, at the highest learning rate"
CONDITION_CLAIMS: dict[str, Claim] = {
    "cosine": beats(f"With a learning rate that decays to zero along a cosine, {BEATS}.", cosine_to_zero),
    "weight decay": beats(f"With weight decay, {BEATS}.", weight_decay),
    "no clipping": beats(f"Without gradient clipping, {BEATS}.", no_gradient_clipping),
    "speeches": beats(
        "On natural language, QuacK beats the default and a constant tau in MHA and in MLA, at the highest rate.",
        speeches,
        BOTH,
    ),
    "longer": beats(
        "In runs of ten times as many steps, QuacK with tau 1 beats the default in MLA, at the highest learning rate.",
        longer,
        methods=(Quack(1.0), Default()),
    ),
}
