"""Each method does to the model and to the steps what it says, and all of them train."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab_runs import ATTENTIONS, METHODS, PAIRS, block, make_corpus, small
from quacklr import QKClip, QuacK
from quacklr.lab.data import Corpus, open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.methods import (
    Budget,
    ConstantTau,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    QuacKAndClip,
    SigmaReparametrised,
    SoftCap,
    rates,
)
from quacklr.lab.model import MHA, MLA, Shape, build
from quacklr.lab.model.sigma import reparametrise
from quacklr.lab.train.session import Session


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(str(make_corpus(tmp_path_factory.mktemp("corpus"))))


def session(corpus: Corpus, method: Method, attention: str = "mha") -> Session:
    return Session(small(corpus.folder, method, ATTENTIONS[attention]), corpus)


@pytest.mark.parametrize(("attention", "method"), PAIRS)
def test_every_method_learns(corpus: Corpus, method: str, attention: str) -> None:
    rows = list(session(corpus, METHODS[method], attention).rows())
    assert rows[-1]["step"] == 36
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 1.5


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_methods_differ_in_nothing_else_so_all_begin_with_the_same_loss(corpus: Corpus, attention: str) -> None:
    """QK norm, sigma-Reparam and the cap change the function; the others the steps only."""
    same = ["default", "quack", "constant-tau", "budget", "qk-clip", "muon-split", "compositional-muon", "bounded-step"]
    first = [list(islice(session(corpus, METHODS[name], attention).rows(), 2))[1]["loss"] for name in same]
    assert len(set(first)) == 1


def test_quack_and_constant_tau_are_the_librarys(corpus: Corpus) -> None:
    adapting, constant = (session(corpus, method) for method in (Quack(tau=0.5, norm="spectral"), ConstantTau(0.25)))
    for each in (adapting, constant):
        list(islice(each.rows(), 5))
    assert isinstance(adapting.attached, QuacK)
    assert repr(adapting.attached.rule) == "Paper(tau=0.5, norm=spectral)"
    found = torch.cat(list(rates(adapting.attached).values()))
    assert (found != 0.5).all()
    assert torch.cat(list(rates(constant.attached).values())).unique().tolist() == [0.25]


def test_taken_literally_quack_gives_rates_to_what_latent_norms_cut_off(corpus: Corpus) -> None:
    spec = ATTENTIONS["mla"]
    assert isinstance(spec, MLA)
    found = []
    for method in (Quack(), Quack(literal=True)):
        config = small(corpus.folder, method, replace(spec, latent_norm=True))
        found.append({name.rpartition(".")[2] for name in rates(Session(config, corpus).attached)})
    assert found == [{"uq", "uk", "qr", "kr"}, {"dq", "dkv", "uq", "uk", "qr", "kr"}]


def frobenius_of(*matrices: Tensor) -> float:
    """The product of the Frobenius norms."""
    return math.prod(float(matrix.detach().norm()) for matrix in matrices)


def rate_of_growth(session: Session, products: Callable[[Any], float]) -> float:
    """The growth of a product of norms in block 0 from the start of training, inverted; the start is built again."""
    start = build(session.model.shape, session.config.attention, session.config.training.seed)
    return products(block(start)) / products(block(session.model))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_quack_for_all_products_gives_rates_to_values_output_projections_and_the_mlp(
    corpus: Corpus, attention: str
) -> None:
    """Each rate is judged by norms computed by hand: those of the weights that it is multiplied with."""
    trained = session(corpus, Quack(products="all"), attention)
    list(islice(trained.rows(), 6))
    found = {name.removeprefix("blocks.0."): rate for name, rate in rates(trained.attached).items() if ".0." in name}
    latent = attention == "mla"
    roles = ("dq", "uq", "uk", "dkv", "qr", "kr", "o", "uv") if latent else ("q", "k", "o", "v")
    assert set(found) == {
        *(f"attention.{role}" for role in roles),
        *(f"feed_forward.{role}" for role in ("up", "gate", "down")),
    }

    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        norms = {
            "o": lambda b, rows=rows: (
                frobenius_of(b.attention.uv.weight[rows], b.attention.dkv.weight)
                if latent
                else frobenius_of(b.attention.v.weight)
            ),
            "uv": lambda b, rows=rows: frobenius_of(b.attention.o.weight[:, rows], b.attention.dkv.weight),
        }
        for role in ("o", "uv") if latent else ("o",):
            expected = rate_of_growth(trained, norms[role])
            assert float(found[f"attention.{role}"][head]) == pytest.approx(expected, rel=1e-4)
    grown = rate_of_growth(trained, lambda b: frobenius_of(b.feed_forward.down.weight))
    assert float(found["feed_forward.up"]) == float(found["feed_forward.gate"]) == pytest.approx(grown, rel=1e-4)
    larger = rate_of_growth(
        trained, lambda b: max(frobenius_of(b.feed_forward.up.weight), frobenius_of(b.feed_forward.gate.weight))
    )
    assert float(found["feed_forward.down"]) == pytest.approx(larger, rel=1e-4)


def test_quack_for_values_leaves_the_mlp_alone(corpus: Corpus) -> None:
    names = {name.rpartition(".")[2] for name in rates(session(corpus, Quack(products="values")).attached)}
    assert names == {"q", "k", "o", "v"}


def test_quack_with_qk_norm_has_both(corpus: Corpus) -> None:
    both, norm = session(corpus, Quack(together="qk-norm")), session(corpus, QKNorm())
    assert {name.rpartition(".")[2] for name in rates(both.attached)} == {"q", "k"}
    first = [list(islice(each.rows(), 2))[1]["loss"] for each in (both, norm)]
    assert first[0] == first[1], "the models are the same"
    assert not rates(norm.attached)


def test_quack_with_sigma_reparam_leaves_queries_and_keys_to_quack(corpus: Corpus) -> None:
    both = session(corpus, Quack(together="sigma-reparam"), "mla")
    with_gain = {
        name.split(".parametrizations")[0].rsplit(".")[-1]
        for name, _ in both.model.named_parameters()
        if "gain" in name
    }
    assert with_gain == {"uv", "o", "gate", "up", "down"}
    assert {name.rpartition(".")[2] for name in rates(both.attached)} == {"dq", "uq", "qr", "dkv", "uk", "kr"}


def test_a_budget_with_qk_clip_does_both_and_its_state_is_quacks(corpus: Corpus) -> None:
    runs = {method: session(corpus, method) for method in (Budget(threshold=0.01), Budget(), QKClipping(0.01))}
    for run in runs.values():
        list(islice(run.rows(), 8))
    both, budget, clip = runs.values()
    sizes = [float(block(run.model).attention.q.weight.detach().norm()) for run in (both, budget, clip)]
    assert sizes[0] < 0.5 * sizes[1], "it is clipped"
    assert sizes[0] != sizes[2], "its steps are scaled"
    assert rates(both.attached)
    assert isinstance(both.attached, QuacKAndClip)
    state = both.attached.state_dict()
    assert state == both.attached.quack.state_dict()
    both.attached.load_state_dict(state)


def test_products_and_a_second_method_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--products all and --together qk-norm"):
        Quack(products="all", together="qk-norm")


def test_qk_clip_is_the_librarys(corpus: Corpus) -> None:
    clipped = session(corpus, METHODS["qk-clip"])
    assert isinstance(clipped.attached, QKClip)
    assert clipped.attached.threshold == 100.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's own
def test_qk_clip_clips_compiled_runs(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = small(corpus.folder, QKClipping(threshold=1e-4), ATTENTIONS["mla"])
    machines = [replace(config.machine, compile=each) for each in (True, False)]
    runs = [Session(replace(config, machine=machine), corpus) for machine in machines]
    runs.append(session(corpus, METHODS["default"], "mla"))
    for run in runs:
        list(islice(run.rows(), 4))
    compiled, plain, default = (block(run.model).attention.uq.weight.detach() for run in runs)
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-6)
    assert compiled.norm() < 0.5 * default.norm()


def test_constant_tau_of_one_is_bitwise_the_default(corpus: Corpus) -> None:
    one, other = (session(corpus, method) for method in (ConstantTau(tau=1.0), METHODS["default"]))
    list(islice(one.rows(), 8)), list(islice(other.rows(), 8))
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_muon_split_steps_each_head_as_a_matrix_of_its_own(corpus: Corpus) -> None:
    """After one step from the same gradient, a head of the split run moved as a separate matrix would."""
    split = session(corpus, MuonSplit(), "mla")
    before = {name: param.detach().clone() for name, param in split.model.named_parameters()}
    list(islice(split.rows(), 2))
    for role, blocks in (("uq", 2), ("qr", 2), ("uk", 2), ("uv", 2), ("dq", 1), ("kr", 1)):
        name = f"blocks.0.attention.{role}.weight"
        moved = (split.model.get_parameter(name).detach() - before[name]).unflatten(0, (blocks, -1))
        for head in moved:  # an orthogonalised matrix has singular values about 1, times lr and scale
            values = torch.linalg.svdvals(head)
            scale = 0.05 / 4 * max(1, head.shape[0] / head.shape[1]) ** 0.5
            assert 0.5 * scale < values[0] < 1.3 * scale


def largest_singular_value(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.detach())[0])


def test_sigma_reparam_uses_weights_whose_largest_singular_value_is_the_gain(corpus: Corpus) -> None:
    """Nearly: one power iteration a step runs after weights that Muon moves fast."""
    trained = session(corpus, SigmaReparametrised())
    linears: list[Any] = [module for module in trained.model.modules() if hasattr(module, "parametrizations")]
    assert len(linears) == 2 * 7
    for linear in linears:
        assert largest_singular_value(linear.weight) == pytest.approx(1, rel=0.02)
    list(trained.rows())
    for linear in linears:
        gain = float(linear.parametrizations["weight"][0].gain.detach())
        assert gain != 1
        assert largest_singular_value(linear.weight) == pytest.approx(abs(gain), rel=0.3)


def test_sigma_reparam_of_queries_and_keys_leaves_the_rest(corpus: Corpus) -> None:
    trained = session(corpus, SigmaReparametrised(scope="qk"), "mla")
    names = {
        name.split(".parametrizations")[0].rsplit(".")[-1]
        for name, _ in trained.model.named_parameters()
        if "gain" in name
    }
    assert names == {"dq", "uq", "qr", "dkv", "uk", "kr"}


def test_the_gradient_of_sigma_reparam_flows_through_sigma() -> None:
    """Scaling the raw weight changes nothing, so the gradient along the weight itself is zero."""
    linear: Any = torch.nn.Linear(6, 5, bias=False)
    reparametrise(linear)
    linear.eval()  # u and v held fixed, as the gradient takes them
    linear(torch.randn(3, 6)).square().sum().backward()
    raw = linear.parametrizations["weight"].original
    assert float((raw.grad * raw.detach()).sum()) == pytest.approx(0, abs=1e-5)
    assert float(raw.grad.norm()) > 0.01


@pytest.mark.parametrize("spec", [MHA(), MLA()], ids=["mha", "mla"])
def test_scaling_queries_does_nothing_under_a_scale_free_method(spec: MHA | MLA) -> None:
    from quacklr.lab.methods import alter

    shape, role = Shape(vocab=64, layers=1), "q" if isinstance(spec, MHA) else "uq"
    for method in (QKNorm(), SigmaReparametrised(scope="qk")):
        model = build(shape, spec, seed=0)
        alter(method, model)
        model.eval()
        attention = block(model).attention
        assert attention.scale_free
        assert attention.logit_paths() == []
        if isinstance(method, QKNorm) and isinstance(spec, MHA):
            x = torch.randn(1, 8, 128)
            before = attention(x, model.rotary)
            with torch.no_grad():
                getattr(attention, role).weight.mul_(5)
            torch.testing.assert_close(attention(x, model.rotary), before, rtol=1e-3, atol=1e-5)


def test_a_cap_bounds_what_the_softmax_sees(corpus: Corpus) -> None:
    capped = session(corpus, SoftCap(cap=0.02))
    rows = list(capped.rows())
    assert max(value for row in rows if "logits" in row for layer in row["logits"]["max"] for value in layer) <= 0.02


def test_the_loop_treats_one_large_micro_batch_as_many_small_ones(corpus: Corpus) -> None:
    base = small(Path(corpus.folder), Quack(), ATTENTIONS["mla"])
    ends = []
    for micro in (8, 2):
        config = replace(base, training=replace(base.training, micro_batch=micro))
        ends.append([row["loss"] for row in islice(Session(config, corpus).rows(), 1, 7)])
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)
