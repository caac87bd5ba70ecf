"""The summary of a study has the numbers of its ledger, and its words follow the intervals."""

from __future__ import annotations

from made_ledger import HIGH, SCALE, as_the_paper_says, ledger
from quacklr.lab.config import Config
from quacklr.lab.methods import QKClipping
from quacklr.lab.report.summary import summary
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.results import Results


def text_of(results: Results) -> str:
    return summary(results, claim_results(results))


def test_the_numbers_are_those_of_the_ledger() -> None:
    first, in_mla, in_mha, *_, verdicts = text_of(Results(ledger(), SCALE)).splitlines()
    assert "the default ends at a validation loss of 6.000 with logits of 5,000" in first
    assert "QuacK ends at 2.200 with logits of 40" in first
    assert "QK clip 4.000 (worse)" in in_mla
    assert "QK clip 3.000 (worse)" in in_mha
    assert verdicts.endswith("the 10 claims of the paper's experiments: holds 10.")


def test_a_method_below_quack_is_better_and_one_within_the_noise_is_not_decided() -> None:
    def clip_is_better(config: Config) -> tuple[float, float, float]:
        found = as_the_paper_says(config)
        return (2.0, *found[1:]) if isinstance(config.method, QKClipping) and config.optimizer.lr == HIGH else found

    assert "QK clip 2.000 (better)" in text_of(Results(ledger(clip_is_better), SCALE))

    def clip_varies(config: Config) -> tuple[float, float, float]:
        found = as_the_paper_says(config)
        clipped = isinstance(config.method, QKClipping) and config.optimizer.lr == HIGH
        return (2.2 + (config.training.seed - 2) * 0.2, *found[1:]) if clipped else found

    assert "QK clip 2.200 (undecided)" in text_of(Results(ledger(clip_varies), SCALE))


def test_the_best_learning_rate_is_that_of_the_lowest_loss() -> None:
    entries = ledger()
    best = next(line for line in text_of(Results(entries, SCALE)).splitlines() if line.startswith("- In MLA QuacK"))
    assert best == f"- In MLA QuacK is best at lr {HIGH:g}: 2.200; the default has 6.000."
