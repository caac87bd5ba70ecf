"""Bad input: one clear ValueError that names the weight and the way out, and the optimizer left exactly as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Latent, Separate, layers
from quacklr import ConstantTau, Limit, LogitPath, Paper, QuacK, Rule, Weight, check, mha, mla, packed


def param(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape))


def q(rows: Any = (0, 0, 1, 1), **options: Any) -> Weight:
    return Weight("layer.q", param(4, 3), torch.as_tensor(rows), **options)


def row(name: str, rows: int, blocks: int = 1, bias: bool = False) -> Weight:
    b = nn.Parameter(torch.ones(rows)) if bias else None
    return Weight(name, nn.Parameter(torch.ones(rows, 2)), torch.arange(rows) // (rows // blocks), bias=b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: q([0, 0, 1]), "layer.q: block_of_row must be 4 whole numbers, one for each row"),
        (lambda: q([[0, 0], [1, 1]]), "layer.q: block_of_row must be 4 whole numbers"),
        (lambda: q([0.0, 0.0, 1.0, 1.0]), "layer.q: block_of_row must be 4 whole numbers"),
        (lambda: q([True, False, True, False]), "layer.q: block_of_row must be 4 whole numbers"),
        (lambda: q([0, 0, -2, 1]), "layer.q: block_of_row must be 4 .* number the blocks from 0"),
        (lambda: q([-1, -1, -1, -1]), "layer.q: block_of_row must be 4 .* number the blocks from 0"),
        (lambda: q([0, 0, 2, 2]), "layer.q: block_of_row must be 4 whole numbers, .* from 0 without gaps"),
        (lambda: q(dim=2), r"layer.q: dim=2, but its parameter has shape \(4, 3\)"),
        (lambda: q(bias=param(3)), "layer.q.bias: block_of_row must be 3 whole numbers"),
        (lambda: q(bias=Weight("b", param(4), torch.tensor([0, 1, 1, 1]))), "layer.q: its bias must have as many rows"),
        (lambda: packed(param(5, 3), ("q", 2, 2)), "q: segments of 1 x 4 rows, but the parameter has 5"),
        (lambda: packed(nn.Linear(2, 4), "q", 2, 2), "q: a segment is .name, blocks, rows of a block."),  # type: ignore[arg-type]
        (lambda: packed(nn.Linear(2, 4), ("q", 2, 4 / 2)), "a segment is .name, blocks, rows of a block."),  # type: ignore[arg-type]
        (lambda: packed(nn.Linear(2, 4), ("q", -2, -2)), "two positive whole numbers"),
        (lambda: LogitPath((), 2), "a path needs at least one weight"),
        (lambda: LogitPath((q(),), 3), "layer.q: 3 heads cannot read 2 blocks in equal runs; pass block_of_head"),
        (lambda: LogitPath((q(),), 0), "layer.q: heads=0; the number of heads"),
        (lambda: LogitPath((q(),), 2.0), "heads=2.0; the number of heads"),  # type: ignore[arg-type]
        (lambda: LogitPath((q(),), 2, ("ab",)), "layer.q: block_of_head must give each of 2 heads one"),  # type: ignore[arg-type]
        (lambda: LogitPath((q(),), 2, (torch.tensor([0, 2]),)), "layer.q: block_of_head must give each of 2 heads one"),
        (lambda: LogitPath((q(),), 2, (torch.tensor([0]),)), "layer.q: block_of_head must give each of 2 heads"),
        (lambda: LogitPath((q(),), 2, (None, None)), "layer.q: 1 weights, but block_of_head has 2 entries"),
        (
            lambda: LogitPath((row("dq", 2), row("uq", 4, bias=True), row("k", 4)), 1),
            "^uq: its bias adds a term that the weights before it are not on",
        ),
        (lambda: mha(row("q", 8, 4), row("k", 8, 2)), r"q has \[2\] rows a block and k has \[4\]"),
        (lambda: mla(row("uq", 2), row("uk", 2), row("qr", 2), row("kr", 1)), r"qr has \[2\] rows a block and kr has"),
        (lambda: Paper(norm="spectral"), "norm='spectral': a norm is a function"),  # type: ignore[arg-type]
        (lambda: Paper(floor=-1.0), "floor=-1.0: .* must be 0 or a positive number"),
        (lambda: Paper(floor=None), "floor=None: .* must be 0 or a positive number"),  # type: ignore[arg-type]
        *[
            (lambda tau=tau: ConstantTau(tau), f"tau={tau!r}: .* must be a pos")
            for tau in (0.0, float("inf"), "1", True)
        ],
    ],
)
def test_a_weight_a_path_or_a_rule_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


MODEL = nn.Sequential(Separate())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: QuacK(MODEL, o, o), r"several optimizers are given as a list: QuacK\(model, \[first, second\]\)"),
        (lambda o: QuacK(MODEL, o, tau=1.0, rule=Paper()), r"tau=1.0 is short for rule=Paper\(tau=1.0\), and rule="),
        (lambda o: QuacK(MODEL, o, rule=Paper), "a rule is Paper"),  # type: ignore[arg-type]
        (lambda o: QuacK("gpt", o, tau=1.0), "the model must be an nn.Module or a list of LogitPath, not str"),  # type: ignore[arg-type]
        (lambda o: QuacK(o, MODEL, tau=1.0), "the model must be an nn.Module or a list of LogitPath, not SGD"),  # type: ignore[arg-type]
        (lambda o: QuacK([], o, tau=1.0), "there is no path to control: the list of paths is empty"),
        (
            lambda o: QuacK(mha(Weight("q", param(2, 3), [0, 1]), Weight("q", param(2, 4), [0, 1])), o, tau=1.0),  # type: ignore[arg-type]
            "^q: two different weights have this name",
        ),
    ],
)
def test_a_wrong_call_says_what_is_wrong(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torch.optim.SGD(MODEL.parameters(), lr=0.1))


def set_rows(weight: Tensor, value: float) -> None:
    with torch.no_grad():
        weight[4:8] = value


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda model: nn.init.zeros_(model.q.weight),
            "^0.k: its partner 0.q is all zeros, so .* no bound; .* floor=c",
        ),
        (lambda model: set_rows(model.q.weight, 0.0), "^0.k: its partner 0.q is all zeros"),
        (lambda model: set_rows(model.k.weight, torch.nan), "^0.k: holds NaN or inf"),
        (lambda model: set_rows(model.q.weight, torch.inf), "^0.q: holds NaN or inf"),
    ],
)
def test_weights_without_a_bound_are_refused_and_no_hook_is_attached(
    spoil: Callable[[Separate], None], message: str
) -> None:
    attention = Separate()
    model = nn.Sequential(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    spoil(attention)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=message):
        QuacK(model, optimizer, tau=1.0)
    assert optimizer.state_dict() == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    if "floor" in message:
        QuacK(model, optimizer, rule=Paper(floor=0.1))  # the way out works, and the refused one is not in the way


def test_a_zero_in_a_chain_names_the_weight_that_is_zero() -> None:
    model = Latent()
    nn.init.zeros_(model.uk.weight)
    with pytest.raises(ValueError, match="^uq: its partner uk is all zeros"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)


def test_a_parameter_in_none_of_the_optimizers_is_refused_by_name() -> None:
    model = nn.Sequential(Separate(bias=True))
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "0.k.weight"], lr=0.1)
    none = r"^0.k: its parameter is in none of the optimizers given; .* requires_grad_\(False\)"
    with pytest.raises(ValueError, match=none):
        QuacK(model, optimizer, tau=1.0)
    matrices, biases = (torch.optim.SGD([p for p in model.parameters() if p.ndim == n], lr=0.1) for n in (2, 1))
    with pytest.raises(ValueError, match="^0.q.bias: its parameter is in none"):
        QuacK(model, matrices, tau=1.0)
    QuacK(model, [matrices, biases], tau=1.0)


def test_a_second_quack_on_the_same_weights_is_refused_until_the_first_is_removed() -> None:
    model = nn.Sequential(Separate())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = QuacK(model, optimizer, tau=1.0)
    with pytest.raises(ValueError, match=r"^0.q: another QuacK is attached .* \(as 0.q\); call remove\(\)"):
        QuacK(model, optimizer, tau=1.0)
    QuacK(model, torch.optim.AdamW(model.parameters()), tau=1.0)  # another optimizer's steps are its own
    first.remove()
    QuacK(model, optimizer, tau=1.0)


@pytest.mark.parametrize("waits", [False, True])
def test_a_rule_is_for_one_quack_also_after_it_was_removed(waits: bool) -> None:
    """It would keep the sensitivities of the first model. That model may not even have run its first batch."""

    def attach(rule: Rule) -> QuacK:
        model = nn.Sequential(nn.Linear(16, 16) if waits else Separate())
        return QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), rule=rule)

    for rule in (Paper(), Limit()):
        for _ in range(2):
            attach(copy.copy(rule)).remove()  # as callbacks do
        first = attach(rule)
        model, refused = nn.Sequential(Separate()), "was given to another QuacK, .*; make a new rule$"
        for removed in (False, True):
            with pytest.raises(ValueError, match=refused):
                attach(rule)
            with pytest.raises(ValueError, match=refused):
                check(model, torch.optim.SGD(model.parameters()), torch.randn(1, 4, 16), rule=rule)
            if not removed:
                first.remove()


def test_two_quacks_may_share_an_optimizer_but_no_weight() -> None:
    first, second = Separate(), Separate()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    QuacK(nn.ModuleList([first]), optimizer, tau=0.5)
    QuacK(nn.ModuleList([second]), optimizer, tau=0.1)
    with pytest.raises(ValueError, match=r"^0.q: another QuacK is attached"):
        QuacK(nn.ModuleList([second]), optimizer, tau=1.0)
    before = [param.detach().clone() for param in (*first.parameters(), *second.parameters())]
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for attention, tau in ((first, 0.5), (second, 0.1)):
        for name, parameter in attention.named_parameters():
            moved = before.pop(0) - parameter.detach()
            expected = 0.1 * (tau if name[0] in "qk" else 1.0)
            torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-5, atol=1e-6)


def test_two_weights_that_claim_one_row_are_refused() -> None:
    shared = param(4, 3)
    weights = Weight("a", shared, torch.tensor([0, 0, 1, 1])), Weight("b", shared, torch.tensor([0, 1, 1, -1]))
    with pytest.raises(ValueError, match="^b and a claim the same rows; declare them as one Weight"):
        QuacK([LogitPath(weights, 2)], torch.optim.SGD([shared], lr=0.1), tau=1.0)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="^0.q: its parameter is on the meta device"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)


def test_a_model_that_is_all_frozen_is_refused() -> None:
    model = layers(1, Separate).requires_grad_(False)
    with pytest.raises(ValueError, match="0.q and all others on a path are frozen, so there is nothing to control"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)


def test_a_wrong_declaration_names_its_module() -> None:
    class Wrong(Separate):
        def logit_paths(self) -> Any:
            return None

    model = nn.ModuleDict({"attention": Wrong()})
    with pytest.raises(ValueError, match=r"logit_paths\(\) of attention must return a list of LogitPath, not NoneType"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)
