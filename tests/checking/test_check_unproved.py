"""What the check did not show is not proved: nothing that is missing, zero or no number makes it `ok`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from check_runs import X_BTD, checked, named, stack
from models import Separate
from quacklr import LogitPath, check, logit_paths, packed
from quacklr.checking.layer_report import Fault, LayerReport
from quacklr.checking.report import CheckReport
from quacklr.checking.steps import Change

GOOD = {"measured": 0.1, "bound": 0.2}


def change(**of: float) -> Change:
    """Of two heads, the second as said."""
    numbers = GOOD | of
    measured, bound = (torch.tensor([GOOD[name], numbers[name]], dtype=torch.float64) for name in GOOD)
    return Change(measured, bound, torch.zeros(2), *torch.zeros(2, 2, dtype=torch.bool))


def report_of(*layers: dict[str, Any], **of: Any) -> CheckReport:
    good: dict[str, Any] = {"unobserved": "", "start": change(), "plain": change(), "quack": change(), "row_faults": []}
    checked = [LayerReport(str(number), 2, **good | each) for number, each in enumerate(layers)]
    return CheckReport(tuple(checked), 4.0, 1, {}, **of)


def cases() -> Iterator[tuple[str, CheckReport]]:
    yield "no layer", report_of()
    yield "a layer that does not run", report_of({}, {"unobserved": "not seen"})
    yield "a fault", report_of({}, {"row_faults": [Fault((0,), "head 0 is moved by others")]})
    yield "a rule that was measured otherwise", report_of({}, contradiction="the rule is wrong here")
    for when, name, value in itertools.product(("start", "plain", "quack"), GOOD, (math.nan, math.inf)):
        yield f"{when} {name} {value}", report_of({}, {when: change(**{name: value})})
    yield "no step with QuacK", report_of({}, {"quack": change(measured=0.0, bound=0.0)})


CASES = dict(cases())


def test_what_is_shown_is_ok() -> None:
    assert report_of({}, {}).ok
    assert report_of(
        {}, {"trains": False, **dict.fromkeys(("start", "plain", "quack"), change(measured=0.0, bound=0.0))}
    ).ok
    assert report_of({}, unmeasured="flex attention is not seen").ok


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_shown_is_not_ok_and_the_last_line_says_so(case: str) -> None:
    assert not CASES[case].ok
    last = str(CASES[case]).splitlines()[-1]
    assert last.startswith(("wrong", "not shown", "correct, as far as shown"))


class Hidden(Separate):
    """Its first head looks at nothing."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (each.transpose(1, 2) for each in self.qk(x_BTD))
        first = torch.arange(4).view(4, 1, 1) == 0
        shares = (q @ k.mT).masked_fill(first, -1e9).softmax(-1)
        return (shares @ self.v(x_BTD).unflatten(2, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


class NotANumber(Separate):
    """The logits of its first head are NaN, and nothing is made of them."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (each.transpose(1, 2) for each in self.qk(x_BTD))
        logits = q @ k.mT
        logits = torch.cat([logits[:, :1].detach() * torch.nan, logits[:, 1:]], 1)
        shares = logits.softmax(-1).nan_to_num()
        return (shares @ self.v(x_BTD).unflatten(2, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


class Shorter(Separate):
    """Every time another number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = itertools.cycle([3, 4, 5])

    def __deepcopy__(self, memo: dict[int, Any]) -> Shorter:
        copy = Shorter()
        copy.load_state_dict(self.state_dict())
        memo |= {id(one): other for one, other in zip(self.parameters(), copy.parameters(), strict=True)}
        return copy

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD[:, : next(self.lengths)])


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Hidden, "some heads see no key"),
        (NotANumber, "its logits are not finite"),
        (Shorter, "not the same twice"),
    ],
)
def test_logits_that_cannot_be_compared_show_nothing(kind: type[Separate], word: str) -> None:
    report = check(model := stack(kind, 1), SGD(model.parameters(), lr=0.1), X_BTD, steps=1)
    assert not report.ok
    assert word in str(report).splitlines()[1]


def optimizers(model: Any) -> Iterator[tuple[Optimizer, Any]]:
    first_only = lambda model, x: model[0](x).square().mean()  # noqa: E731
    yield SGD(model.parameters(), lr=0.1), first_only
    yield AdamW(model.parameters(), lr=0.1), first_only
    yield SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=0.1), None


def test_rows_that_take_no_step_though_they_train_are_not_shown_to_be_right() -> None:
    model = stack(Separate)
    for optimizer, loss in optimizers(model):
        report = check(model, optimizer, X_BTD, loss=loss, steps=1)
        assert not report.ok
        assert not any(layer.faults for layer in report.layers)
        lines = str(report).splitlines()
        assert lines[2].endswith("its rows took no step: no gradient, or lr is 0")
        assert lines[-1].startswith("correct, as far as shown: 1 layer, 4 heads;")


def test_a_batch_that_runs_no_attention_shows_nothing() -> None:
    """As a batch of text for a model of text and images whose paths are in its eyes."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.text = Separate(), nn.Linear(16, 16)

        def forward(self, x_BTD: Tensor, images: bool = False) -> Tensor:
            return self.attention(x_BTD) if images else self.text(x_BTD)

    report = check(model := Beside(), SGD(model.parameters(), lr=0.1), X_BTD, steps=1)
    assert not report.ok
    assert str(report).splitlines()[-1].startswith("not shown: the batch runs none of these layers")


def test_no_paths_are_no_proof() -> None:
    with pytest.raises(ValueError, match="no path"):
        checked(stack(Separate), [])


class Routed(nn.Module):
    """As JetMoe: two of three experts make a token's queries, for the two keys each; so there are four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(0.3 * torch.randn(3, 8, 16))
        self.router, self.kv = nn.Linear(16, 3, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        chosen_BT2 = self.router(x_BTD).topk(2).indices
        by_expert = torch.stack([x_BTD @ expert.T for expert in self.experts], 2)
        q_BT2D = by_expert.gather(2, chosen_BT2[..., None].expand(-1, -1, -1, 8))
        q = q_BT2D.unflatten(3, (2, 4)).flatten(2, 3).transpose(1, 2)
        k, v = (each.unflatten(2, (2, 4)).transpose(1, 2).repeat(1, 2, 1, 1) for each in self.kv(x_BTD).chunk(2, 2))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_routed_queries_are_not_called_wrong() -> None:
    model = stack(Routed, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    report = check(model, optimizer, X_BTD[:, :2], paths=logit_paths(model, X_BTD), steps=1)
    assert not report.ok
    assert not any(layer.faults for layer in report.layers)
    assert "attends with several heads for each of these" in str(report).splitlines()[1]


def test_heads_that_share_a_key_are_not_taken_for_one() -> None:
    """Two heads for each key: paths that say one head for each key are wrong, though every row is right."""
    model = stack(lambda: Separate(groups=2), 1)
    q, k = packed(model[0].q, ("q", 2, 8)), packed(model[0].k, ("k", 2, 4))
    paths = [LogitPath(named(0, *q, *k), 2)]
    assert check(model, SGD(model.parameters(), lr=0.1), X_BTD, paths=paths, steps=1).layers[0].wrong.all()
