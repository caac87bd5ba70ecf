"""Paths that `logit_paths` returned are verified on the first batch, in any list, and found again by their names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Separate
from quacklr import LogitPath, QuacK, logit_paths
from quacklr.core.path import mha
from quacklr.core.weight import packed
from quacklr.find import discover
from quacklr.find.finding import Finding
from quacklr.find.tables import by_table

X_BTD = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Four heads of separate projections. Row r belongs to head r // 4, or to head r % 4 if `interleaved`."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.interleaved = interleaved

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (4, 4)).permute((0, 3, 1, 2) if self.interleaved else (0, 2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class InTable(Attention):
    """The table knows this class."""


def by_names(module: Any) -> Finding | None:
    """A table that assumes consecutive rows, which is wrong if they are interleaved."""
    if type(module) is not InTable:
        return None
    return Finding(mha(*packed(module.q, ("q", 4, 4)), *packed(module.k, ("k", 4, 4))))


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "by_table", lambda module: by_names(module) or by_table(module))


def replaced(model: nn.Module) -> None:
    """Every parameter is a new object."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def attached(model: nn.Module, paths: Any, **options: Any) -> tuple[QuacK, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return QuacK(paths, optimizer, tau=1.0, **options), optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X_BTD).square().mean().backward()
    optimizer.step()


def origins(quack: QuacK) -> list[str]:
    """The column "found" of the table."""
    return [re.split("  +", line)[2] for line in repr(quack).splitlines() if "[4]" in line]


def stack(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


LISTS: dict[str, Callable[[Any], Any]] = {
    "as returned": lambda paths: paths,
    "a plain list": list,
    "another order": lambda paths: paths[::-1],
    "a part": lambda paths: paths[:1],
}


@pytest.mark.parametrize("changed", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("replace", [False, True], ids=["same parameters", "replaced"])
def test_paths_of_a_table_are_verified_on_the_first_batch(changed: Any, replace: bool) -> None:
    for wrong in (False, True):
        model = stack(InTable(wrong), InTable())
        paths = changed(logit_paths(model))
        if replace:
            replaced(model)
        quack, optimizer = attached(model, paths)
        assert set(origins(quack)) == {"by table"}
        if wrong:
            with pytest.raises(ValueError, match="^0: the table for InTable is wrong here; it says .*"):
                step(model, optimizer)
        else:
            step(model, optimizer)
            assert origins(quack) == ["verified"] * len(paths)
        quack.remove()


def test_measured_paths_are_measured_again_on_the_first_batch() -> None:
    model = stack(Attention(), Attention())
    paths = logit_paths(model, X_BTD)
    for paths_now, wrong in ((paths, False), (list(paths), False), (list(paths), True)):
        vars(model[1])["interleaved"] = wrong  # the model was changed since
        quack, optimizer = attached(model, paths_now)
        assert origins(quack) == ["measured", "measured"]
        if wrong:
            with pytest.raises(ValueError, match="^1: what was measured before for Attention is wrong here; it says"):
                step(model, optimizer)
        else:
            step(model, optimizer)
            assert origins(quack) == ["measured", "measured"]
            assert "not verified" not in repr(quack)
        quack.remove()


def test_each_path_of_a_list_has_an_origin_of_its_own() -> None:
    model = stack(Separate(), InTable(), Attention(), Separate())
    model.get_submodule("3").logit_paths = None  # type: ignore[assignment]
    own = model.get_submodule("3")
    assert isinstance(own, Separate)
    by_hand = mha(*packed(own.q, ("3.q", 4, 4)), *packed(own.k, ("3.k", 4, 4)))
    part = nn.Sequential(model[0], model[1])
    first = logit_paths(part)
    assert [path.origin[1] for path in first] == ["0", "1"]
    quack, optimizer = attached(model, [*(p for p in logit_paths(model, X_BTD) if p.origin[1] != "3"), *by_hand])
    assert origins(quack) == ["declared", "verified", "measured", "given"]
    step(model, optimizer)
    assert origins(quack) == ["declared", "verified", "measured", "given"]


def test_paths_are_located_again_by_name_in_any_list() -> None:
    model = stack(Attention(), Attention())
    paths = logit_paths(model, X_BTD)
    old = {id(parameter) for parameter in model.parameters()}
    replaced(model)
    quack, optimizer = attached(model, list(paths))
    step(model, optimizer)
    now = {id(parameter) for parameter in model.parameters()}
    assert {id(part.param) for part in quack.rule.paths.parts} <= now - old
    assert all(bool((rate < 1.5).all()) for rate in quack.rates().values())


def test_paths_of_a_copy_are_used_as_they_are_given() -> None:
    model = stack(InTable(interleaved=True))
    copied, paths = copy.deepcopy((model, list(logit_paths(model))))
    quack, optimizer = attached(copied, paths)
    step(copied, optimizer)
    assert {id(part.param) for part in quack.rule.paths.parts} <= {id(each) for each in copied.parameters()}


def test_paths_of_two_models_are_located_in_none_and_used_as_they_are() -> None:
    one, other = stack(InTable()), stack(InTable())
    paths: list[LogitPath] = []
    for name, model in (("one", one), ("other", other)):
        paths += logit_paths(nn.ModuleDict({name: model}))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    with QuacK(paths, optimizer, tau=1.0) as quack:
        assert len(quack.rates()) == 4
