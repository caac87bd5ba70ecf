"""Claims about combinations, conditions of training and sizes: the runs that they ask for, and their verdicts.

The losses are made from formulas, so that the right answer is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from made_ledger import HIGH, SCALE
from quacklr.lab.config import Config, differences
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Budget, ConstantTau, Default, QKClipping, QKNorm, Quack, SigmaReparametrised
from quacklr.lab.studies import conditions
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.condition_claims import CONDITION_CLAIMS
from quacklr.lab.studies.questions import runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.size_claims import SIZE_CLAIMS
from quacklr.lab.studies.sizes import above_critical, critical_rate, crossing
from quacklr.lab.studies.undecided import plan
from quacklr.lab.studies.verdicts import ClaimResult
from quacklr.lab.sweep.sweep import missing
from swept_runs import made

Known = dict[str, Entry]
Values = Callable[[Config], tuple[float, float]]  # loss and largest logit
NOISE = (0.0, -0.002, 0.002, 0.001)


def decided(values: Values, *names: str) -> tuple[dict[str, ClaimResult], Known]:
    """Do all runs that the claims ask for, one round after another."""
    known: Known = {}
    while True:
        claims = claim_results(Results(known.values(), SCALE), names)
        found = plan(claims, known)
        if not found.runs:
            return {claim.name: claim for claim in claims}, known
        for config in found.runs:
            loss, top = values(config)
            entry = made(config, loss + NOISE[config.training.seed % 4], top)
            known[entry.key] = entry


def by_kind(config: Config) -> tuple[float, float]:
    """QuacK is better than a constant tau, which is better than the default; a combination is better than all."""
    match config.method:
        case Quack(tau, products="all"):
            return 1.9 + 0.1 * abs(math.log10(tau)), 10.0
        case Quack(tau, together="nothing"):
            return 2.0 + 0.1 * abs(math.log10(tau)), 10.0
        case Quack(tau):
            return 1.8 + 0.1 * abs(math.log10(tau / 3)), 10.0
        case Budget(_, 0.0):
            return 2.0, 10.0
        case Budget(_, threshold):
            return 2.1 + 0.1 * abs(math.log10(threshold / 30)), 10.0
        case ConstantTau(tau):
            return 2.1 + 0.1 * abs(math.log10(tau / 0.1)), 10.0
        case QKNorm() | SigmaReparametrised():
            return 1.95, 10.0
        case QKClipping(threshold):
            return 2.2 + 0.1 * abs(math.log10(threshold / 100)), 10.0
    return 3.0, 1000.0


def test_a_combination_is_compared_with_both_of_its_methods() -> None:
    found, known = decided(by_kind, "with QK norm", "with sigma-Reparam", "with sigma-Reparam in MLA", "with QK clip")
    assert {name: claim.verdict for name, claim in found.items()} == {
        "with QK norm": "holds",
        "with sigma-Reparam": "holds",
        "with sigma-Reparam in MLA": "holds",
        "with QK clip": "fails",
    }
    assert [comparison.seeds for comparison in found["with QK norm"].evidence] == [3] * 4
    in_mla = found["with sigma-Reparam in MLA"].evidence
    assert [comparison.label.split(",")[0] for comparison in in_mla] == ["MLA", "MLA"]
    taus = {c.tau for c in (each.config.method for each in known.values()) if isinstance(c, Quack) and c.tau == 3}
    assert taus == {3.0}, "the tau of a combination is selected for itself"
    assert "QuacK with QK norm (tau 3) - QK norm" in found["with QK norm"].evidence[1].label


def test_quack_everywhere_is_compared_with_quack_and_with_sigma_reparam() -> None:
    found, _ = decided(by_kind, "everywhere", "everywhere and sigma-Reparam")
    assert [claim.verdict for claim in found.values()] == ["holds", "holds"]

    def worse(config: Config) -> tuple[float, float]:
        loss, top = by_kind(config)
        return loss + 0.075 * (isinstance(config.method, Quack) and config.method.products == "all"), top

    found, _ = decided(worse, "everywhere", "everywhere and sigma-Reparam")
    assert [claim.verdict for claim in found.values()] == ["holds", "fails"], "0.025 is more than 0.02"


CHANGED = {
    conditions.cosine_to_zero: ["--final", "--schedule"],
    conditions.weight_decay: ["--weight-decay"],
    conditions.no_gradient_clipping: ["--grad-clip"],
    conditions.speeches: ["--corpus"],
    conditions.longer: ["--eval-every", "--probe-every", "--steps"],
}


@pytest.mark.parametrize("condition", CHANGED)
def test_a_condition_changes_what_it_says_and_nothing_else(condition: Any) -> None:
    cell = SCALE.cell("mla", HIGH)
    changed = condition(cell)
    assert [each.split()[0] for each in differences(cell.base, changed.base)] == CHANGED[condition]
    assert str(changed) != str(cell)


def test_conditions_are_decided_by_runs_of_their_own() -> None:
    found, known = decided(by_kind, *CONDITION_CLAIMS)
    assert {claim.verdict for claim in found.values()} == {"holds"}
    usual = SCALE.cell("mla", HIGH).base
    for entry in known.values():
        changed = replace(entry.config, method=Default(), training=replace(entry.config.training, seed=0))
        assert changed not in (usual, SCALE.cell("mha", HIGH).base)
    steps = {each.config.method for each in known.values() if each.config.training.steps != usual.training.steps}
    assert steps == {Quack(1.0), Default()}, "longer runs select no tau"


def by_size(gain: float = 0.0) -> Values:
    """The default's logits are 100 at lr 0.1 * (64 / width)^1.5 and grow with lr^2; QuacK gains with the width."""

    def values(config: Config) -> tuple[float, float]:
        width, lr, seed = config.shape.d_model, config.optimizer.lr, config.training.seed
        critical = 0.1 * (64 / width) ** 1.5 * (1 + 0.02 * seed)
        if isinstance(config.method, Quack):
            return 2.5 - gain * math.log2(width / 64), 20.0
        return 3.0, 100 * (lr / critical) ** 2

    return values


def test_the_critical_rate_is_found_between_two_learning_rates_and_interpolated() -> None:
    _, known = decided(by_size(), *SIZE_CLAIMS)
    results = Results(known.values(), SCALE)
    for size, width in (("0.3M", 64), ("1M", 128), ("4M", 256)):
        expected = 0.1 * (64 / width) ** 1.5
        found = critical_rate(results, size)
        assert 10**found.on_tuning_seed == pytest.approx(expected, rel=1e-3)
        assert found.low.cell.lr <= expected <= found.high.cell.lr
        assert 10 ** found.by_seed()[2] == pytest.approx(expected * 1.04, rel=1e-3)
        assert above_critical(results, size).lr == pytest.approx(10 * expected, rel=0.8)
    tried = {each.config.optimizer.lr for each in known.values() if each.config.shape.d_model == 256}
    assert min(tried) >= 0.003, "the search goes only as far as it must"


@pytest.mark.parametrize(("top", "end"), [(5000.0, "0.0001"), (5.0, "30000")])
def test_a_search_for_a_critical_rate_ends_where_there_is_none(top: float, end: str) -> None:
    found, known = decided(lambda _: (3.0, top), "size and critical rate")
    assert found["size and critical rate"].verdict == "not run"
    assert found["size and critical rate"].summary == f"no critical learning rate of 0.3M: the search has reached {end}"
    assert len(known) < 20


def test_heads_keep_their_size_when_a_model_is_wider() -> None:
    _, known = decided(by_size(), "size and critical rate")
    for entry in known.values():
        config: Any = entry.config
        assert config.attention.heads * config.attention.head_dim == config.shape.d_model
        assert config.attention.head_dim == SCALE.attentions["mha"].head_dim  # type: ignore[union-attr]
        assert config.shape.d_ff / config.shape.d_model == pytest.approx(
            SCALE.base.shape.d_ff / SCALE.base.shape.d_model, rel=0.1
        )


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "holds"), (-0.1, "fails")])
def test_claims_about_size(gain: float, verdict: str) -> None:
    found, _ = decided(by_size(gain), *SIZE_CLAIMS)
    assert {name: claim.verdict for name, claim in found.items()} == {
        "size and critical rate": "holds",
        "every size": "holds",
        "size and gain": verdict,
    }


def test_a_seed_without_a_critical_rate_is_left_out() -> None:
    """On seed 2 the logits are the same at both learning rates, as if both runs had diverged."""

    def values(config: Config) -> tuple[float, float]:
        return 2.0, 500.0 if config.training.seed == 2 else 100 * config.optimizer.lr / 0.02

    found, _ = decided(values, "size and critical rate")
    differences = found["size and critical rate"].evidence[0].differences
    assert len(differences) >= 3
    assert all(map(math.isfinite, differences))


def test_a_line_through_two_points_crosses_the_limit_where_it_should() -> None:
    assert 10 ** crossing(0.01, 1.0, 0.1, 3.0) == pytest.approx(10**-1.5)
    assert math.isnan(crossing(0.01, 3.0, 0.1, 1.0)), "logits that fall with the learning rate have no critical rate"


def test_the_largest_model_is_trained_with_two_methods_and_no_more_seeds_than_asked_for() -> None:
    def values(config: Config) -> tuple[float, float]:
        return 2.0, 100 * config.optimizer.lr / 0.02

    known: Known = {}
    while todo := missing(runs_of("sizes", SCALE, known, 1), known):
        for config in todo:
            entry = made(config, *values(config))
            known[entry.key] = entry
    seeds = [entry.config.training.seed for entry in known.values() if entry.config.shape.d_model == 512]
    assert sorted(seeds) == [0, 0, 1, 1, 1, 1], "two runs search the critical rate, four are judged"
    methods = {type(entry.config.method) for entry in known.values() if entry.config.shape.d_model == 512}
    assert methods == {Default, Quack}
    assert QKNorm in {type(entry.config.method) for entry in known.values()}
