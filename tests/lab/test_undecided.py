"""Sweeps until claims are decided: on runs whose losses are made from known differences and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_ledger import HIGH, LOW, MIDDLE, SCALE, as_the_paper_says, ledger
from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.methods import ConstantTau, Default, Quack
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.comparison import Comparison, Test, agree, expected_decision, less
from quacklr.lab.studies.intervals import MOST_SEEDS, interval
from quacklr.lab.studies.results import MethodRuns, Results
from quacklr.lab.studies.tuned_methods import fixed
from quacklr.lab.studies.undecided import describe_open, plan
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult, all_of
from quacklr.lab.sweep import command
from quacklr.lab.sweep.command import ClaimsGoal
from quacklr.lab.sweep.executor import Job, Outcome
from quacklr.lab.sweep.sweep import sweep
from swept_runs import made

Known = dict[str, Entry]


def noisy(spread: float, shift: float = 0.0) -> Callable[[Config], Entry]:
    """Runs as in the paper; at the highest rate a constant tau is behind QuacK by `shift`, with noise."""

    def run(config: Config) -> Entry:
        loss, top, change = as_the_paper_says(config)
        if isinstance(config.method, ConstantTau) and config.optimizer.lr == HIGH:
            noise = random.Random(repr((config.training.seed, type(config.attention), config.method))).gauss(0, spread)
            loss = 2.2 + shift + 0.1 * (config.method.tau != 0.1) + noise
        return made(config, loss, top, change)

    return run


def until_decided(run: Callable[[Config], Entry], names: Collection[str], known: Known) -> tuple[ClaimResult, ...]:
    """Do all runs that the claims ask for, one round after another."""
    while True:
        claims = claim_results(Results(known.values(), SCALE), names)
        found = plan(claims, known)
        if not found.runs:
            return tuple(claims)
        assert {fingerprint(config) for config in found.runs} <= {fingerprint(config) for config in found.left}
        assert not {fingerprint(config) for config in found.runs} & known.keys(), "nothing is run twice"
        known |= {fingerprint(config): run(config) for config in found.runs}


def seeds_in(known: Known, method: type) -> int:
    judged = {each.config.training.seed for each in known.values() if isinstance(each.config.method, method)} - {0}
    return max(judged, default=0)


def test_a_clear_difference_takes_three_seeds_and_a_small_one_more_and_both_are_decided() -> None:
    clear: Known = {}
    (found,) = until_decided(noisy(0.01, shift=0.3), ["e"], clear)
    assert (found.verdict, seeds_in(clear, Quack)) == ("holds", 3)
    small: Known = {}
    (found,) = until_decided(noisy(0.04, shift=0.05), ["e"], small)
    assert found.verdict == "holds"
    assert 4 <= seeds_in(small, Quack) <= MOST_SEEDS


def test_no_difference_is_the_same_or_undecided_at_the_cap() -> None:
    (found,) = until_decided(noisy(0.01), ["e"], {})
    assert found.verdict == "the same"
    known: Known = {}
    (found,) = until_decided(noisy(3.0), ["e"], known)
    assert (found.verdict, seeds_in(known, Quack)) == ("undecided", MOST_SEEDS)
    text = describe_open([found])
    assert "over 200 seeds in all would decide it" in text or " would decide it" not in text


def test_a_claim_that_has_failed_asks_for_nothing_more() -> None:
    """In MHA it fails at once; in MLA it would take all seeds."""

    def run(config: Config) -> Entry:
        in_mha = "MHA" in type(config.attention).__name__
        return noisy(0.0, shift=-0.3)(config) if in_mha else noisy(0.5)(config)

    known: Known = {}
    (found,) = until_decided(run, ["e"], known)
    assert (found.verdict, seeds_in(known, Quack)) == ("fails", 3)


def test_if_one_comparison_is_expected_to_fail_only_it_gets_more_seeds() -> None:
    """In MHA the claim fails after some seeds; in MLA it is not decided by any number of them."""

    def run(config: Config) -> Entry:
        in_mha = "MHA" in type(config.attention).__name__
        return noisy(0.04, shift=-0.1)(config) if in_mha else noisy(0.5)(config)

    known: Known = {}
    (found,) = until_decided(run, ["e"], known)
    seeds = {}
    for attention in ("MHA", "MLA"):
        of_attention = {key: each for key, each in known.items() if type(each.config.attention).__name__ == attention}
        seeds[attention] = seeds_in(of_attention, ConstantTau)
    assert found.verdict == "fails"
    assert seeds["MLA"] == 3 < seeds["MHA"]


def claim_of(*parts: ClaimPart, name: str = "x") -> ClaimResult:
    return ClaimResult(name, "A sentence.", "own", all_of(part.verdict for part in parts), "cpu", "", parts)


def columns(lr: float, *seeds: int, crashed: tuple[int, ...] = ()) -> tuple[MethodRuns, MethodRuns]:
    """Two methods in the cell of a learning rate, with runs of these seeds."""
    cell = SCALE.cell("mha", lr)
    methods = [fixed(method) for method in (Default(), Quack())]
    runs = [{seed: made(cell.run(each.of_value(0.0), seed), 2.0) for seed in seeds} for each in methods]
    one, other = (MethodRuns(cell, each, None, of) for each, of in zip(methods, runs, strict=True))
    left = {seed: run for seed, run in other.runs.items() if seed not in crashed}
    return one, replace(other, runs=left, crashed=frozenset(crashed))


def part_of(mean: float, spread: float, compared: tuple[MethodRuns, ...], test: Test = less) -> ClaimPart:
    """A comparison of the seeds that both have, with this mean and standard deviation."""
    count = len(set.intersection(*(set(runs.runs) for runs in compared)))
    offsets = [spread * (-1) ** i * (count / (count - 1)) ** -0.5 for i in range(count - count % 2)]
    differences = tuple(mean + offset for offset in offsets) + (mean,) * (count % 2)
    return ClaimPart(test, Comparison("x", mean, *interval(differences), differences, 0.0, compared))


def seeds_of(configs: Iterable[Config]) -> list[tuple[float, int]]:
    return [(config.optimizer.lr, config.training.seed) for config in configs]


def test_the_claim_that_is_decided_soonest_comes_first_and_one_that_the_cap_would_not_decide_last() -> None:
    one_left = columns(LOW, *range(1, MOST_SEEDS))
    hopeless = claim_of(part_of(0.01, 1.0, one_left), name="hopeless")
    slow = claim_of(part_of(-0.1, 0.1, columns(MIDDLE, 1, 2, 3)), name="slow")
    fast = claim_of(part_of(-0.3, 0.1, columns(HIGH, 1, 2, 3)), name="fast")
    found = plan([hopeless, slow, fast], {})
    assert seeds_of(found.runs) == [(HIGH, 4)] * 2 + [(MIDDLE, 4)] * 2 + [(LOW, MOST_SEEDS)] * 2
    assert len(found.left) > len(found.runs)


def test_of_two_comparisons_that_are_expected_to_fail_the_cheaper_gets_seeds() -> None:
    dear, cheap = part_of(0.1, 0.1, columns(MIDDLE, 1, 2, 3)), part_of(0.3, 0.1, columns(HIGH, 1, 2, 3))
    assert seeds_of(plan([claim_of(dear, cheap)], {}).runs) == [(HIGH, 4)] * 2
    assert seeds_of(plan([claim_of(cheap, dear)], {}).runs) == [(HIGH, 4)] * 2


def test_a_comparison_that_has_all_seeds_and_is_undecided_leaves_its_claim_undecided() -> None:
    """So the claim comes after one that takes longer but is decided."""
    ended = part_of(0.0, 1.0, columns(LOW, *range(1, MOST_SEEDS + 1)))
    hopeless = claim_of(ended, part_of(-0.5, 0.1, columns(HIGH, 1, 2, 3)))
    decided = claim_of(part_of(-0.1, 0.1, columns(MIDDLE, 1, 2, 3)))
    assert seeds_of(plan([hopeless, decided], {}).runs) == [(MIDDLE, 4)] * 2 + [(HIGH, 4)] * 2
    assert plan([claim_of(ended)], {}) == ([], [], None)


def test_a_claim_is_not_expected_to_be_decided_if_one_of_its_comparisons_is_not() -> None:
    half = claim_of(part_of(0.01, 1.0, columns(LOW, *range(1, MOST_SEEDS))), part_of(-0.3, 0.1, columns(HIGH, 1, 2, 3)))
    decided = claim_of(part_of(-0.1, 0.1, columns(MIDDLE, 1, 2, 3)))
    assert seeds_of(plan([half, decided], {}).runs)[:2] == [(MIDDLE, 4)] * 2


def test_a_seed_that_crashed_is_skipped_and_another_one_takes_its_place() -> None:
    part = part_of(-1.0, 0.1, columns(HIGH, 1, 2, 3, crashed=(2,)))
    assert part.verdict == "undecided", "two seeds are left"
    found = plan([claim_of(part)], {})
    assert seeds_of(found.runs) == [(HIGH, 4)] * 2
    assert seeds_of(found.left) == [(HIGH, 4)] * 2, "three seeds decide it"


def test_an_expected_decision_uses_the_intervals_so_far() -> None:
    """With five seeds the interval would be [-0.07, 0.03]; an earlier one has excluded what is below -0.045."""
    alone = Comparison("x", -0.02, -float("inf"), float("inf"), (-0.04, -0.02, 0.0))
    assert expected_decision(alone, agree, MOST_SEEDS) == (8, "holds")
    assert expected_decision(replace(alone, low=-0.045), agree, MOST_SEEDS) == (5, "holds")
    assert expected_decision(replace(alone, differences=(-0.02,)), agree, MOST_SEEDS) == (3, "not run")


def test_only_the_open_comparison_gets_more_seeds() -> None:
    """Claim g compares QuacK in MLA with the default, QK clip and a constant tau; only the last is noisy."""
    known: Known = {}
    until_decided(noisy(0.05, shift=0.05), ["g"], known)
    seeds = {kind: seeds_in(known, kind) for kind in (Default, Quack, ConstantTau)}
    assert seeds[Default] == 3
    assert seeds[Quack] == seeds[ConstantTau] > 3


def test_the_cheapest_comparison_comes_first() -> None:
    """MLA takes ten times as long a step."""
    entries = {
        entry.key: replace(entry, step_seconds=10.0 if "MLA" in type(entry.config.attention).__name__ else 1.0)
        for entry in ledger()
        if entry.config.training.seed < 3
    }
    claims = claim_results(Results(entries.values(), SCALE), ["e"])
    kinds = [type(config.attention).__name__ for config in plan(claims, entries).runs]
    assert kinds == sorted(kinds), "MHA before MLA"
    assert len(set(kinds)) == 2


def test_the_time_left_is_that_of_all_runs_until_the_last_is_decided() -> None:
    known = {entry.key: replace(entry, step_seconds=2.0) for entry in ledger() if entry.config.training.seed < 3}
    found = plan(claim_results(Results(known.values(), SCALE), ["f"]), known)
    # seed 3 of QuacK, QK norm and the default in MHA
    assert (len(found.runs), len(found.left)) == (3, 3)
    assert found.seconds == pytest.approx(3 * 2.0 * SCALE.base.training.steps)


@pytest.mark.parametrize(("mean", "seeds"), [(1.0, 3), (0.2, 6), (0.1, 13), (0.01, None)])
def test_a_decision_is_expected_when_the_interval_would_be_short_enough(mean: float, seeds: int | None) -> None:
    """Half widths at a standard deviation of 0.1: 0.81 for 3 seeds, 0.25 for 5, 0.195 for 6, 0.101 for 12."""
    differences = (mean - 0.1 / 2**0.5, mean + 0.1 / 2**0.5)
    found = Comparison("x", mean, float("-inf"), float("inf"), differences)
    assert found.spread == pytest.approx(0.1)
    assert expected_decision(found, less, MOST_SEEDS).seeds == seeds
    assert expected_decision(replace(found, differences=(1.0,)), agree, MOST_SEEDS).seeds == 3


class Instant:
    """An executor whose runs end at once; after `limit` starts the sweep is asked to stop."""

    slots, pause = 2, 0.0

    def __init__(self, run: Callable[[Config], Entry], limit: int) -> None:
        self.run, self.limit, self.started = run, limit, list[str]()

    def start(self, config: Config, path: Path) -> Job:
        self.started.append(path.name)
        entry, stopping = self.run(config), len(self.started) > self.limit

        class Done:
            def outcome(self) -> Outcome | None:
                if stopping:
                    raise KeyboardInterrupt
                return entry

            def stop(self) -> None: ...

        return Done()

    def close(self) -> None: ...


def test_a_sweep_that_is_killed_goes_on_where_it_was_and_decides_the_same(tmp_path: Path) -> None:
    goal, run = ClaimsGoal(["e"], SCALE), noisy(0.04, shift=0.05)

    def swept(folder: Path, limit: int) -> list[str]:
        records, executor = Ledger(folder / "ledger.jsonl"), Instant(run, limit)
        known = records.entries()

        def next_runs(ended: Any) -> list[Config]:
            return goal.next(known | {entry.key: entry for entry in ended})

        sweep(goal.next(known), records, executor, folder, plan=next_runs)
        return executor.started

    whole = swept(tmp_path / "whole", 10**9)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path / "killed", 12)
    before = set(Ledger(tmp_path / "killed/ledger.jsonl").entries())
    rest = swept(tmp_path / "killed", 10**9)
    assert before
    assert not before & set(rest), "what has ended is not run again"
    assert len(rest) == len(set(rest))
    one, other = (Ledger(tmp_path / name / "ledger.jsonl").entries() for name in ("whole", "killed"))
    verdicts = [goal.claims(known)[0].verdict for known in (one, other)]
    assert verdicts == ["holds", "holds"]
    assert set(whole) == set(one)


def test_a_cluster_with_many_slots_gets_later_seeds_too_the_next_seed_first() -> None:
    goal, known = ClaimsGoal(["e"], SCALE), dict[str, Entry]()
    run = noisy(0.04, shift=0.05)
    for _ in range(8):  # until all settings are selected, and some seeds are judged
        known |= {fingerprint(config): run(config) for config in plan(goal.claims(known), known).runs}
    found = plan(goal.claims(known), known)
    runs = goal.next(known)
    assert runs[: len(found.runs)] == found.runs
    assert len(runs) == len(found.left) > len(found.runs)
    seeds = {config.training.seed for config in runs}
    assert max(seeds) > min(seeds)


def test_a_dry_run_lists_verdicts_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Ledger(tmp_path / "ledger.jsonl")
    for entry in ledger():
        if entry.config.training.seed < 3:
            records.append(entry)
    monkeypatch.setattr(command, "scale_of", lambda _: SCALE)
    assert command.main(["--until-decided", "f", "j", "--out", str(tmp_path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "undecided  f: QuacK is slightly worse than QK norm in MHA" in text
    assert "MHA, Muon, lr 0.1: QuacK (tau 1) - QK norm, validation loss: +0.1, 2 seeds, sd 0; 3 seeds in all" in text
    assert "3 runs left" in text
    assert command.main(["--until-decided", "nonsense", "--out", str(tmp_path)]) == 2
    assert "which claim? Some of a, b, c" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--retry"], ["--seeds", "5"]])
def test_options_of_studies_are_refused_with_claims(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--until-decided", *option]) == 2
    assert "--until-decided selects seeds itself" in capsys.readouterr().err


def test_a_decided_comparison_is_not_open() -> None:
    decided = ClaimPart(less, Comparison("x", -1.0, -1.1, -0.9, (-1.0, -1.0, -1.0)))
    claim = ClaimResult("x", "x", "own", "undecided", "tiny", "x", (decided,))
    assert plan([claim], {}).runs == []
