"""Settings selected on one seed and judged on others: against losses made by hand, whose best settings are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Budget, ConstantTau, Default, QKNorm, Quack
from quacklr.lab.report import markdown
from quacklr.lab.studies.budget_table import methods_in
from quacklr.lab.studies.extra_claims import budget_and_learning_rate, budget_needs_no_tuning
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.questions import runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.tuned_methods import SAME_TAU_LR
from quacklr.lab.studies.tuning import VALUES, nearest, select
from quacklr.lab.studies.verdicts import Claim, ClaimResult, check
from quacklr.lab.sweep.sweep import missing
from swept_runs import made, tiny_scale

SCALE = tiny_scale(Path("nowhere"))
CRASHED = float("nan")


def entry(config: Config, value: float) -> Entry:
    return replace(made(config, 3.0), status="crashed") if math.isnan(value) else made(config, value)


def searched(first: float, value_of: Callable[[float], float]) -> tuple[float | None, list[float]]:
    """The selected tau, and the values that were tried, in order."""
    known: dict[str, Entry] = {}
    tried: list[float] = []
    for _ in range(len(VALUES)):
        found = select(lambda tau: SCALE.cell("mha", 0.1).run(Quack(tau), 0), first, known)
        if not found.needed:
            return found.value, tried
        for config in found.needed:
            assert isinstance(config.method, Quack)
            assert config.training.seed == 0
            tried.append(config.method.tau)
            known[fingerprint(config)] = entry(config, value_of(config.method.tau))
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("best", [0.0001, 0.03, 1.0, 3.0, 300.0, 30000.0])
@pytest.mark.parametrize("first", [0.001, 1.0, 1000.0])
def test_a_search_ends_at_the_lowest_loss_with_its_neighbours_tried(first: float, best: float) -> None:
    found, tried = searched(first, lambda tau: 2 + abs(math.log(tau / best)))
    assert found == best
    assert len(tried) == len(set(tried)), "no value is run twice"
    assert set(tried[:3]) == set(VALUES[VALUES.index(first) - 1 : VALUES.index(first) + 2])
    index = VALUES.index(best)
    assert set(VALUES[max(0, index - 1) : index + 2]) <= set(tried)
    assert len(tried) <= abs(VALUES.index(first) - index) + 4, "and nothing beyond"


def test_a_run_that_crashed_is_not_selected_and_not_run_again() -> None:
    found, tried = searched(1.0, lambda tau: CRASHED if tau == 3.0 else 2 - tau / 100 if tau < 3 else 5.0)
    assert found == 1.0
    assert len(tried) == 3


def test_equal_losses_end_a_search_where_it_began() -> None:
    assert searched(1.0, lambda _: 2.0) == (1.0, [1.0, 0.3, 3.0])


def test_the_nearest_value_is_that_of_the_smallest_factor() -> None:
    assert [nearest(value) for value in (1.0, 0.01 / 0.03, 0.01 / 0.003, 1.7, 1.8, 1e9)] == [1, 0.3, 3, 1, 3, 3e4]


def best_tau(config: Config) -> float:
    """Different for every learning rate, kind of attention and method, and not where the search begins."""
    constant = isinstance(config.method, ConstantTau | Default)
    normed = getattr(config.attention, "latent_norm", False)
    return nearest((0.003 if constant else 0.3) / config.optimizer.lr * (10 if normed else 1))


def made_by_hand(config: Config) -> Entry:
    tau = getattr(config.method, "tau", 1.0)
    value = 2 + 0.1 * abs(math.log10(tau / best_tau(config)))
    value = {QKNorm: 1.9, Budget: 1.85}.get(type(config.method), value)
    return made(config, value + config.training.seed / 1000)


def swept(seeds: int, result: Callable[[Config], Entry] = made_by_hand) -> dict[str, Entry]:
    """The ledger after `quacklr sweep budgets`."""
    known: dict[str, Entry] = {}
    while todo := missing(runs_of("budgets", SCALE, known, seeds), known):
        known |= {fingerprint(config): result(config) for config in todo}
    return known


@cache
def whole_ledger() -> dict[str, Entry]:
    """The ledger with three seeds."""
    return swept(3)


def test_settings_are_selected_on_seed_0_and_judged_on_others() -> None:
    known = swept(seeds=2)
    results = Results(known.values(), SCALE)
    assert len(SCALE.cells()) == 18
    for cell in SCALE.cells():
        for method in methods_in(cell):
            runs = results.runs(cell, method)
            assert list(runs.runs) == [1, 2], "seed 0 has selected the setting"
            used = runs.runs[1].config.method
            assert runs.runs[2].config.method == used
            if method.name in ("QuacK", "QuacK, literal", "constant tau"):
                assert getattr(used, "tau", 1.0) == best_tau(runs.runs[1].config), method.name
                assert getattr(used, "literal", False) == (method.name == "QuacK, literal")
    budgets = {e.config.training.seed for e in known.values() if isinstance(e.config.method, Budget | QKNorm)}
    assert budgets == {1, 2}, "a method without a setting is not run on the seed that selects"


def test_the_order_in_which_runs_end_does_not_matter() -> None:
    known: dict[str, Entry] = {}
    while todo := missing(runs_of("budgets", SCALE, known, 1), known):
        known |= {fingerprint(config): made_by_hand(config) for config in todo[len(todo) // 2 :]}
    assert known.keys() == swept(1).keys()


def test_a_setting_is_not_selected_by_the_seeds_that_judge_it() -> None:
    """On seeds 1 and 2 another tau is better, and it is not used."""

    def result(config: Config) -> Entry:
        other = config.training.seed > 0 and getattr(config.method, "tau", 1.0) == best_tau(config)
        return made(config, 9.0) if other else made_by_hand(config)

    results = Results(swept(2, result).values(), SCALE)
    assert set(results.runs(SCALE.cells()[0], Quack).by_seed().values()) == {9.0}


def test_tau_times_lr_is_the_same_in_all_cells_of_an_optimizer() -> None:
    results = Results(whole_ledger().values(), SCALE)
    for adamw in (False, True):
        of_optimizer = [cell for cell in SCALE.cells() if cell.adamw == adamw]
        taus = {cell.lr: results.value(cell, SAME_TAU_LR) for cell in of_optimizer}
        # the best is 0.3; the search begins at 0.1 with Muon, and at 0.01 with AdamW
        assert {nearest(lr * tau) for lr, tau in taus.items()} == {0.3}
        for cell in of_optimizer:
            assert results.runs(cell, SAME_TAU_LR).runs[1].config.method == Quack(taus[cell.lr])


def test_learning_rates_of_adamw_are_a_third_of_muons() -> None:
    lrs: dict[bool, set[float]] = {False: set(), True: set()}
    for cell in SCALE.cells():
        lrs[cell.adamw].add(cell.lr)
    assert lrs == {False: {0.1, 0.01, 0.001}, True: {0.03, 0.003, 0.0003}}


def test_the_table_has_a_row_for_each_method_and_says_what_was_selected() -> None:
    results = Results(whole_ledger().values(), SCALE)
    text = markdown.budget(results)
    short, *tables = text.split("## ")[1:]
    assert short.count("\n| M") == 18
    budget, tuned, norm = (f"{loss} (sd 0.001, n 3)" for loss in (1.852, 2.002, 1.902))
    assert f"| MHA, Muon, lr 0.1 | {budget} | constant tau {tuned} | -0.150 | {norm} |" in short
    assert [each.splitlines()[0] for each in tables] == [
        "MHA, Muon", "MHA, AdamW", "MLA, Muon", "MLA, AdamW",
        "MLA with latent norms, Muon", "MLA with latent norms, AdamW",
    ]  # fmt: skip
    assert ["QuacK, literal" in each for each in tables] == [False] * 4 + [True] * 2
    assert f"| QuacK | {tuned} | {tuned} | {tuned} | 0.000 | 300, 30, 3 | 3 |" in tables[0]
    assert f"| budget | {budget} | {budget} | {budget} | 0.000 |  | 3 |" in tables[0]


def test_a_table_of_a_sweep_that_has_not_ended_has_what_was_run() -> None:
    known = whole_ledger()
    gone = {*(key for key, each in known.items() if each.config.training.seed == 0)}
    results = Results((each for key, each in known.items() if key not in gone), SCALE)
    assert "QuacK" not in markdown.budget(results), "no setting is selected"
    assert "| MHA, Muon, lr 0.1 | 1.85" in markdown.budget(results)
    assert "| default |" in markdown.budget(results)
    with pytest.raises(NotRun, match="the tau of QuacK is not selected yet in MHA, Muon, lr 0.1"):
        results.runs(SCALE.cells()[0], Quack)
    assert markdown.budget(Results([], SCALE)).count("## ") == 7


def checked(
    claim: Claim, by: float = 0.0, noise: float = 0.0, where: Callable[[Config], bool] | None = None
) -> ClaimResult:
    """The verdict on a claim, if the losses of the budget are shifted."""
    entries = []
    for each in whole_ledger().values():
        moved = isinstance(each.config.method, Budget) and (where is None or where(each.config))
        shift = by + ((each.config.training.seed * 7) % 3 - 1) * noise
        entries.append(made(each.config, each.result["val_loss"] + shift) if moved else each)
    return check("budget", "own", claim, Results(entries, SCALE))


def test_the_claim_that_one_budget_is_enough() -> None:
    assert checked(budget_needs_no_tuning).verdict == "holds"
    assert checked(budget_needs_no_tuning, by=0.06).verdict == "holds", (
        "0.01 above QK norm, the best of the paper's methods"
    )
    assert checked(budget_needs_no_tuning, by=0.08).verdict == "fails"
    assert checked(budget_needs_no_tuning, by=0.06, noise=0.05).verdict == "undecided"
    one = checked(
        budget_needs_no_tuning,
        by=0.08,
        where=lambda config: config.optimizer.lr == 0.0003 and not hasattr(config.attention, "latent_norm"),
    )
    assert one.verdict == "fails", "one cell is enough"
    assert "17 of 18 cells; others: +0.030 in MHA, AdamW, lr 0.0003" in one.summary


def test_the_claim_about_the_learning_rate() -> None:
    def low(config: Config) -> bool:
        return config.optimizer.lr in (0.001, 0.0003)

    assert checked(budget_and_learning_rate).verdict == "the same", "both are 0"
    assert checked(budget_and_learning_rate, by=0.3, where=low).verdict == "fails"
    text = checked(budget_and_learning_rate, by=0.3, where=low).summary
    assert "MLA with latent norms, AdamW 0.100 (QK norm 0.000)" in text
