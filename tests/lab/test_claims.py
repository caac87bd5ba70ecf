"""Claims are decided by paired seeds and intervals. The ledgers are made by hand, so that the right answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_ledger import HIGH, LOW, MIDDLE, SCALE, as_the_paper_says, ledger
from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import (
    ConstantTau,
    Default,
    Method,
    QKClipping,
    QKNorm,
    Quack,
    SoftCap,
)
from quacklr.lab.methods import SigmaReparametrised as Sigma
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.claims import CLAIMS
from quacklr.lab.studies.comparison import Comparison, Verdict, agree, below, compare, difference, less, more, next_runs
from quacklr.lab.studies.condition_claims import CONDITION_CLAIMS
from quacklr.lab.studies.measures import NotRun, largest_logit, loss
from quacklr.lab.studies.questions import DECADES, GRIDS, QUACK_TAUS, STUDIES, runs_of
from quacklr.lab.studies.results import MethodRuns, Results
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.studies.size_claims import SIZE_CLAIMS
from quacklr.lab.studies.tuned_methods import fixed
from quacklr.lab.studies.verdicts import ClaimResult, all_of, check
from swept_runs import made, seeds_of, tiny_scale

COMBINATIONS = (
    "everywhere",
    "everywhere and sigma-Reparam",
    "with QK norm",
    "with sigma-Reparam",
    "with sigma-Reparam in MLA",
    "with QK clip",
)
CONDITIONS = [name for name in CONDITION_CLAIMS if name != "longer"]
OF_RESULTS = ["limit: transfers", "limit: stress"]  # their cells follow from the results of other runs
NOT_IN_STUDIES = [*OF_RESULTS, "isotropic compositional Muon", "AdamW^2", *COMBINATIONS, *CONDITIONS, *SIZE_CLAIMS]
"""Claims whose runs are in no study; `quacklr sweep --until-decided` does them."""


def findings(entries: list[Entry]) -> dict[str, ClaimResult]:
    return {each.name: each for each in claim_results(Results(entries, SCALE))}


def test_all_claims_hold_where_the_numbers_are_the_papers() -> None:
    found = findings(ledger(budgets=True))
    assert list(found) == CLAIM_NAMES
    run = {name: each for name, each in found.items() if name not in NOT_IN_STUDIES}
    assert {found[name].verdict for name in NOT_IN_STUDIES} == {"not run"}
    assert {name: each.verdict for name, each in found.items() if each.source == "paper"} == dict.fromkeys(
        CLAIMS, "holds"
    )
    assert {name: each.verdict for name, each in run.items() if each.source == "own"} == {
        "per-head Muon": "fails",
        "soft-capping": "holds",
        "sigma-Reparam": "holds",
        "sigma-Reparam of q and k": "fails",
        "absorbed QK norm": "fails",
        "compositional Muon": "holds",
        "compositional Muon in MLA": "holds",
        "tau and learning rate": "holds",
        "latent norms": "holds",
        "AdamW": "holds",
        "highest rate": "holds",
        "tuned": "holds",
        "tau": "holds",
        "budget": "holds",
        "budget and learning rate": "fails",
        "longer": "holds",
        "limit: harmless": "holds",
        "limit: enough": "holds",
        "Muon's scale": "holds",
    }
    assert all(each.evidence and each.summary for each in run.values())
    assert all(comparison.seeds == 3 for each in run.values() for comparison in each.evidence)


def changed(**changes: Any) -> Callable[[Config], tuple[float, float, float]]:
    """The paper's numbers, but for what matches `when`."""
    when, loss_, top, change = (changes.get(name) for name in ("when", "loss", "top", "change"))

    def values(config: Config) -> tuple[float, float, float]:
        found = as_the_paper_says(config)
        new = (loss_, top, change)
        return tuple(n if n is not None and when(config) else f for n, f in zip(new, found, strict=True))  # type: ignore[misc, return-value]

    return values


def of(kind: type[Method], lr: float | None = None, attention: str = "") -> Callable[[Config], bool]:
    return lambda config: (
        type(config.method) is kind
        and lr in (None, config.optimizer.lr)
        and attention in type(config.attention).__name__.lower()
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a", {"when": lambda c: c.method == ConstantTau(0.1), "loss": 6.0}),
        ("a", {"when": lambda c: c.method == ConstantTau(0.1), "top": 101.0}),
        ("a", {"when": of(Default), "top": 99.0}),
        ("b", {"when": of(Quack, LOW), "loss": 3.3}),
        ("c", {"when": of(QKNorm, LOW), "loss": 1.0}),
        ("d", {"when": of(QKClipping, HIGH, "mha"), "loss": 2.0}),
        ("d", {"when": of(QKClipping, HIGH, "mla"), "loss": 2.9}),
        ("e", {"when": of(ConstantTau, HIGH), "loss": 2.0}),
        ("e", {"when": of(ConstantTau, HIGH), "top": 300.0}),
        ("f", {"when": of(QKNorm, HIGH), "loss": 2.5}),
        ("f", {"when": of(Quack, HIGH), "loss": 4.9}),
        ("g", {"when": of(QKClipping, HIGH, "mla"), "loss": 2.0}),
        ("h", {"when": lambda c: c.method == Quack(10.0, norm="spectral"), "loss": 2.5}),
        ("i", {"when": of(Quack, HIGH, "mla"), "top": 150.0}),
        ("i", {"when": of(Quack, HIGH), "change": 60.0}),
        ("per-head Muon", {"when": of(Default), "loss": 1.0}),
        ("soft-capping", {"when": of(SoftCap, HIGH, "mla"), "loss": 2.4}),
        ("sigma-Reparam", {"when": lambda c: c.method == Sigma(), "loss": 2.4}),
        ("latent norms", {"when": lambda c: c.method == Quack(literal=True), "loss": 2.0}),
        ("AdamW", {"when": of(ConstantTau, 0.03), "loss": 2.0}),
        ("highest rate", {"when": of(Quack, MIDDLE, "mha"), "loss": 2.0}),
        ("tuned", {"when": of(Default, MIDDLE), "loss": 2.0}),
        ("tau", {"when": of(ConstantTau, HIGH, "mha"), "loss": 2.2}),
    ],
)
def test_a_claim_fails_where_the_numbers_contradict_it(name: str, what: dict[str, Any]) -> None:
    assert findings(ledger(changed(**what)))[name].verdict == "fails"


def test_speed_is_judged_by_interleaved_runs_only() -> None:
    entries = ledger()
    slow = [replace(e, step_seconds=2.0) if type(e.config.method) is Quack else e for e in entries]
    assert findings(slow)["j"].verdict == "fails"
    assert findings([replace(e, environment={}) for e in entries])["j"].verdict == "not run"


def test_a_difference_that_the_seeds_do_not_agree_on_is_undecided() -> None:
    noisy = []
    for entry in ledger():
        swing = (0.0, 0.3, -0.3, 0.1)[entry.config.training.seed] if type(entry.config.method) is ConstantTau else 0.0
        noisy.append(replace(entry, result=entry.result | {"val_loss": entry.result["val_loss"] + swing}))
    assert findings(noisy)["e"].verdict == "undecided"


def test_what_the_ledger_lacks_is_not_run_and_says_what_is_missing() -> None:
    for entries in ([], [e for e in ledger() if e.config.training.seed == 0 and not e.environment]):
        found = findings(entries)
        assert {each.verdict for each in found.values()} == {"not run"}
        assert all(each.needed for name, each in found.items() if name != "j")
    assert findings([])["g"].summary == "the tau of QuacK is not selected yet in MLA, Muon, lr 0.1"
    assert [config.method for config in findings([])["g"].needed] == [Quack(1.0), Quack(0.3), Quack(3.0)]
    assert found["g"].summary == "no run of QuacK (tau 1) in MLA, Muon, lr 0.1"
    assert [(config.method, config.training.seed) for config in found["g"].needed] == [
        (Quack(1.0), seed) for seed in (1, 2, 3)
    ]
    assert "quacklr sweep speed" in found["j"].summary


def test_runs_of_another_size_or_length_or_that_crashed_do_not_count() -> None:
    entries = ledger()
    assert not Results(entries, tiny_scale(Path("nowhere"), steps=99)).entries
    assert not Results([replace(e, status="crashed") for e in entries], SCALE).entries


def test_a_setting_is_chosen_on_seed_0_and_judged_on_others() -> None:
    """tau 1 is the best on seed 0, tau 3 on all others."""
    cell = SCALE.cell("mha", HIGH)
    losses = {0.3: (3.0, 1.0, 1.0), 1.0: (2.0, 5.0, 6.0), 3.0: (2.5, 1.0, 1.0)}
    entries = [made(cell.run(Quack(tau), seed), each[seed]) for tau, each in losses.items() for seed in range(3)]
    found = Results(entries, SCALE).best("mha", Quack, HIGH)
    assert str(found) == "QuacK (tau 1)"
    assert found.by_seed() == {1: 5.0, 2: 6.0}


def test_a_learning_rate_is_chosen_on_seed_0_too() -> None:
    losses = {LOW: (2.0, 7.0), MIDDLE: (3.0, 1.0), HIGH: (4.0, 1.0)}
    entries = [
        made(SCALE.cell("mha", lr).run(QKNorm(), seed), value)
        for lr, values in losses.items()
        for seed, value in enumerate(values)
    ]
    found = Results(entries, SCALE).best("mha", QKNorm)
    assert (found.cell.lr, found.by_seed()) == (LOW, {1: 7.0})
    with pytest.raises(NotRun, match="its learning rate is not selected yet") as error:
        Results(entries[1:], SCALE).best("mha", QKNorm)
    assert error.value.needed == [SCALE.cell("mha", LOW).run(QKNorm(), 0)]


def test_a_run_that_crashed_is_left_out_and_its_seed_is_not_asked_for_again() -> None:
    cell = SCALE.cell("mha", HIGH)
    first, second, third = (made(cell.run(QKNorm(), seed), 2.0) for seed in (1, 2, 3))
    runs = Results([first, replace(second, status="crashed"), third], SCALE).best("mha", QKNorm, HIGH)
    assert (list(runs.runs), runs.crashed) == ([1, 3], frozenset({2}))
    assert next_runs([runs]) == [cell.run(QKNorm(), 4)]


def test_a_run_that_diverged_counts_as_untrained() -> None:
    entry = made(SCALE.run("mha", Default(), HIGH), 2.0)
    assert loss(entry) == 2.0
    assert loss(replace(entry, status="diverged", result={"val_loss": None})) == 5.5


def test_learning_rate_sensitivity_is_the_mean_height_above_the_minimum() -> None:
    entries = [e for lr, value in zip(SCALE.rates, (3.0, 2.0, 4.0), strict=True) for e in same(lr, value)]
    assert Results(entries, SCALE).lr_sensitivity("mha", QKNorm) == {1: 1.0, 2: 1.0}


def same(lr: float, value: float) -> Iterator[Entry]:
    return seeds_of(SCALE.run("mha", QKNorm(), lr), [9.0, value, value])


def comparison(low: float, high: float, same_within: float = 0.02) -> Comparison:
    return Comparison("x", (low + high) / 2, low, high, (0.1, 0.2, 0.3), same_within)


@pytest.mark.parametrize(
    ("low", "high", "verdicts"),
    [
        (-0.2, -0.1, ("holds", "fails", "holds", "fails")),
        (0.1, 0.2, ("fails", "holds", "fails", "fails")),
        (-0.01, 0.01, ("the same", "the same", "holds", "holds")),
        (0.001, 0.01, ("fails", "holds", "holds", "holds")),
        (-0.03, 0.01, ("undecided", "undecided", "holds", "holds")),
        (-0.1, 0.1, ("undecided", "undecided", "undecided", "undecided")),
        (-math.inf, math.inf, ("undecided", "undecided", "undecided", "undecided")),
    ],
)
def test_an_interval_decides(low: float, high: float, verdicts: tuple[Verdict, ...]) -> None:
    found = comparison(low, high)
    assert (less(found), more(found), below(found, 0.05), agree(found)) == verdicts


def test_only_differences_of_losses_can_be_the_same() -> None:
    assert less(comparison(-0.01, 0.01, same_within=0.0)) == "undecided"
    one, other = ledger()[:2]
    first, second = (MethodRuns(SCALE.cell("mha", HIGH), fixed(Default()), None, {1: each}) for each in (one, other))
    assert difference(first, second).same_within == 0.02
    assert difference(first, second, largest_logit).same_within == 0.0


def test_a_claim_of_several_parts_is_as_strong_as_its_weakest() -> None:
    assert all_of(["holds", "undecided", "the same", "fails"]) == "fails"
    assert all_of(["holds", "undecided", "the same"]) == "undecided"
    assert all_of(["holds", "the same"]) == "the same"
    assert all_of(["holds", "holds"]) == "holds"
    assert check("a", "paper", CLAIMS["a"], Results([], SCALE)).claim.startswith("Lowering the learning rates of query")


@pytest.mark.parametrize("name", ["cpu", "100m", "paper"])
def test_every_study_can_be_planned_at_every_scale(name: Any) -> None:
    scale = scale_of(Size(name))
    for study_name, study in STUDIES.items():
        columns = list(study(scale))
        assert len({(str(cell), str(method)) for cell, method in columns}) == len(columns) > 0
        assert {config.training.seed for config in runs_of(study_name, scale, {}, seeds=1)} <= {0, 1}
        assert "Scientific:" in (study.__doc__ or "")
        assert "Fixed:" in (study.__doc__ or "")
    for grid in GRIDS.values():
        configs = list(grid(scale))
        assert len({repr(config) for config in configs}) == len(configs) > 0
    taus = {method.tau for _, method in STUDIES["norms"](scale) if isinstance(method, Quack)}
    assert taus == set(QUACK_TAUS) > set(DECADES) == {0.01, 0.1, 1.0, 10.0}
    assert all(config.training.steps < scale.base.training.steps for config in GRIDS["speed"](scale))


def test_an_unfinished_sweep_is_judged_on_the_seeds_that_both_have() -> None:
    found = compare("x", {1: 3.0, 2: 3.0, 4: 9.0}, {1: 1.0, 2: 2.0, 3: 5.0})
    assert found.differences == (2.0, 1.0)
    assert (found.mean, found.low, found.high) == (1.5, -math.inf, math.inf), "two seeds are too few for an interval"
    assert str(found) == "x: +1.5, 2 seeds, sd 0.71"
    with pytest.raises(NotRun, match="no seed in common"):
        compare("x", {1: 1.0}, {2: 1.0})


def diverged(entry: Entry) -> Entry:
    return replace(entry, status="diverged", history=entry.history[:1], result=entry.result | {"val_loss": None})


def test_a_default_that_diverges_before_any_measurement_counts_as_unstable() -> None:
    lost = [diverged(e) if e.config.method == Default() and e.config.optimizer.lr == HIGH else e for e in ledger()]
    found = findings(lost)
    assert (found["a"].verdict, found["i"].verdict) == ("holds", "holds")


@pytest.mark.parametrize("study", [name for name in STUDIES if name != "budgets"])
def test_a_ledger_with_one_study_alone_is_judged_without_an_error(study: str) -> None:
    entries = ledger()
    wanted = {fingerprint(config) for config in runs_of(study, SCALE, {e.key: e for e in entries}, 3)}
    found = findings([entry for entry in entries if entry.key in wanted])
    assert list(found) == CLAIM_NAMES
    assert found["AdamW"].verdict == ("holds" if study == "adamw" else "not run")


def test_the_largest_logit_has_the_digits_of_the_result_unless_a_logit_is_no_number() -> None:
    history = [{"step": 4, "logits": {"max": [[1.0, 12.3], [2.0, 3.0]]}}]
    run = replace(made(SCALE.base, 2.0), history=history, result={"val_loss": 2.0, "max_logit": 12.3456})
    assert 10 ** largest_logit(run) == pytest.approx(12.3456)
    assert 10 ** largest_logit(replace(run, result={"val_loss": 2.0})) == pytest.approx(12.3)
    assert largest_logit(replace(run, history=[{"step": 4, "logits": {"max": [[1.0, None], [2.0, 3.0]]}}])) == 38.0
    assert largest_logit(replace(run, status="diverged")) == 38.0
