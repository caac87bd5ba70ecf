"""Measurements and tables on imitations of published attention code, against paths written by hand."""

from __future__ import annotations

import pytest

from quacklr import logit_paths
from quacklr.find.discover import found_by_table
from quacklr.find.finding import chains
from quacklr.find.first_batch import FirstBatch
from quacklr.find.measure.assemble import measured_paths
from quacklr.util.modules import named_parameters
from stand_ins import CASES, Case, call


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_measured_is_the_truth(case: Case) -> None:
    model, sample = case.build()
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    measured = {name: chains(finding.paths, names) for name, finding in measured_paths(model, sample).items()}
    truth = {name: set().union(*heads) for name, heads in case.chains().items()}
    assert {name: seen for name, seen in measured.items() if seen} == truth


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_table_says_is_the_truth_or_nothing(case: Case) -> None:
    model, _ = case.build()
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    truth = {name: set().union(*heads) for name, heads in case.chains().items()}
    for name, finding in found_by_table(model).items():
        if not finding.unknown:
            assert chains(finding.paths, names) == truth.get(name, set()), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_found_on_the_first_batch_is_the_truth(case: Case) -> None:
    model, sample = case.build()
    batch = FirstBatch(model, found_by_table(model))
    call(model, sample)
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    truth = {name: set().union(*heads) for name, heads in case.chains().items()}
    found = batch.measure() if truth else {}
    assert found is not None
    assert {name: chains(finding.paths, names) for name, finding in found.items() if finding.paths} == truth


@pytest.mark.parametrize("name", ["torchtitan, separate", "torchtitan, fused"])
def test_the_layouts_of_training_systems_attach_without_a_sample(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    assert len(logit_paths(case.build()[0])) == len(case.truth)


def test_nanochat_is_measured_to_norm_queries_and_keys() -> None:
    (case,) = [case for case in CASES if case.name == "nanochat"]
    with pytest.raises(ValueError, match="QK norm"):
        logit_paths(*case.build())
