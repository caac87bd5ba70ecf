"""Bad input: one clear ValueError that names the weight and the way out, and the optimizer left exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models import Latent, Separate
from quacklr import LogitPath, Paper, QuacK, Weight, mha, packed


def param(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape))


def q(rows: Any = (0, 0, 1, 1), **options: Any) -> Weight:
    return Weight("layer.q", param(4, 3), torch.as_tensor(rows), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: q([0, 0, 1]), "layer.q: block_of_row must be 4 whole numbers, one for each row"),
        (lambda: q([[0, 0], [1, 1]]), "layer.q: block_of_row must be 4 whole numbers"),
        (lambda: q([0.0, 0.0, 1.0, 1.0]), "layer.q: block_of_row must be 4 whole numbers"),
        (lambda: q([0, 0, -2, 1]), "layer.q: block_of_row must number the blocks from 0"),
        (lambda: q([-1, -1, -1, -1]), "layer.q: block_of_row must number the blocks from 0"),
        (lambda: q([0, 0, 2, 2]), "layer.q: block_of_row must number the blocks from 0 without gaps"),
        (lambda: q(dim=2), r"layer.q: dim=2, but its parameter has shape \(4, 3\)"),
        (lambda: q(bias=param(3)), "layer.q.bias: block_of_row must be 3 whole numbers"),
        (lambda: q(bias=Weight("b", param(4), torch.tensor([0, 1, 1, 1]))), "layer.q: its bias must have as many rows"),
        (lambda: packed(param(5, 3), ("q", 2, 2)), "q: segments of 1 x 4 rows, but the parameter has 5"),
        (
            lambda: packed(param(12, 3), ("q", 1, 2), ("k", 1, 2), repeat=2),
            "q k: segments of 2 x 4 rows, but .* has 12",
        ),
        (lambda: LogitPath((), 2), "a path needs at least one weight"),
        (lambda: LogitPath((q(),), 3), "layer.q: 3 heads cannot read 2 blocks in equal runs; pass block_of_head"),
        (lambda: LogitPath((q(),), 0), "layer.q: heads=0; the number of heads"),
        (
            lambda: LogitPath((q(),), 2, (torch.tensor([0, 2]),)),
            "layer.q: block_of_head must give each of 2 heads one of its 2",
        ),
        (lambda: LogitPath((q(),), 2, (torch.tensor([0]),)), "layer.q: block_of_head must give each of 2 heads"),
        (lambda: LogitPath((q(),), 2, (None, None)), "layer.q: 1 weights, but block_of_head has 2 entries"),
    ],
)
def test_a_weight_or_path_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def zero_query(model: Separate) -> None:
    nn.init.zeros_(model.q.weight)


def zero_head(model: Separate) -> None:
    with torch.no_grad():
        model.q.weight[4:8] = 0


def not_a_number(model: Separate) -> None:
    with torch.no_grad():
        model.k.weight[0, 0] = torch.nan


def infinite(model: Separate) -> None:
    with torch.no_grad():
        model.q.weight[0, 0] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (None, {"tau": -1.0}, "tau=-1.0: .* must be a positive number"),
        (None, {"tau": 0.0}, "tau=0.0: .* must be a positive number"),
        (None, {"tau": float("nan")}, "tau=nan: .* must be a positive number"),
        (None, {"tau": float("inf")}, "tau=inf: .* must be a positive number"),
        (None, {"floor": -1.0}, "floor=-1.0: .* must be 0 or a positive number"),
        (zero_query, {}, "^0.k: its partner 0.q is all zeros, so its rate has no bound; .* floor=c"),
        (zero_head, {}, "^0.k: its partner 0.q is all zeros"),
        (not_a_number, {}, "^0.k: holds NaN or inf"),
        (infinite, {}, "^0.q: holds NaN or inf"),
    ],
)
def test_weights_without_a_bound_are_refused_and_no_hook_is_attached(
    spoil: Callable[[Separate], None] | None, options: dict[str, Any], message: str
) -> None:
    attention = Separate()
    model = nn.Sequential(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if spoil:
        spoil(attention)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=message):
        QuacK(model, optimizer, rule=Paper(**options))
    assert optimizer.state_dict() == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    if spoil in (None, zero_query, zero_head):
        QuacK(model, optimizer, rule=Paper(floor=0.1))  # the way out works, and the refused one is not in the way


def test_a_zero_in_a_chain_names_every_weight_that_is_zero() -> None:
    model = Latent()
    nn.init.zeros_(model.uk.weight)
    with pytest.raises(ValueError, match="^uq: its partner uk is all zeros"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_in_none_of_the_optimizers_is_refused_by_name() -> None:
    attention = Separate(bias=True)
    model = nn.Sequential(attention)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "0.k.weight"], lr=0.1)
    with pytest.raises(
        ValueError, match=r"^0.k: its parameter is in none of the optimizers given; .* requires_grad_\(False\)"
    ):
        QuacK(model, optimizer)
    no_biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    with pytest.raises(ValueError, match="^0.q.bias: its parameter is in none"):
        QuacK(model, no_biases)
    QuacK(model, [no_biases, torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)])


def test_a_second_quack_on_the_same_weights_is_refused_until_the_first_is_removed() -> None:
    model = nn.Sequential(Separate())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = QuacK(model, optimizer)
    with pytest.raises(ValueError, match=r"^0.q: another QuacK is attached .* \(as 0.q\); call remove\(\)"):
        QuacK(model, optimizer)
    QuacK(model, torch.optim.AdamW(model.parameters()))  # another optimizer's steps are its own
    first.remove()
    QuacK(model, optimizer)


def test_two_quacks_may_share_an_optimizer_but_no_weight() -> None:
    first, second = Separate(), Separate()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    QuacK(nn.ModuleList([first]), optimizer, tau=0.5)
    QuacK(nn.ModuleList([second]), optimizer, tau=0.1)
    with pytest.raises(ValueError, match=r"^0.q: another QuacK is attached .* \(as 0.q\); call remove\(\)"):
        QuacK(nn.ModuleList([second]), optimizer)
    before = [param.detach().clone() for param in (*first.parameters(), *second.parameters())]
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for attention, tau in ((first, 0.5), (second, 0.1)):
        for name, parameter in attention.named_parameters():
            moved = before.pop(0) - parameter.detach()
            expected = 0.1 * (tau if name[0] in "qk" else 1.0)
            torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-5, atol=1e-6)


def test_two_weights_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="^q: two different weights have this name"):
        QuacK(mha(Weight("q", param(2, 3), [0, 1]), Weight("q", param(2, 4), [0, 1])), torch.optim.SGD([param(1)]))  # type: ignore[arg-type]


def test_two_weights_that_claim_one_row_are_refused() -> None:
    shared = param(4, 3)
    paths = [
        LogitPath(
            (Weight("a", shared, torch.tensor([0, 0, 1, 1])), Weight("b", shared, torch.tensor([0, 1, 1, -1]))), 2
        )
    ]
    with pytest.raises(ValueError, match="^b and a claim the same rows; declare them as one Weight"):
        QuacK(paths, torch.optim.SGD([shared], lr=0.1))


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="^0.q: its parameter is on the meta device"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))
