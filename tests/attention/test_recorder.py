"""A recorded model behaves like the plain one: compiled, copied, saved, wrapped by others, and afterwards."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from models import assert_equal
from quacklr import LogitPath, QKClip, Weight, logit_paths

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Its roles have dots in their names, and its weights lie in modules below it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])

    def parts(self, x: Tensor) -> list[Tensor]:
        return [proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in self.proj]

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.parts(x)
        return scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)

    def logit_paths(self) -> list[LogitPath]:
        heads = torch.arange(2).repeat_interleave(4)
        weights = [Weight(f"proj.{i}", self.proj[i].get_parameter("weight"), heads) for i in range(2)]
        return [LogitPath(tuple(weights), heads=2)]

    def largest(self, x: Tensor) -> Tensor:
        q, k = self.parts(x)
        return (q @ k.mT).amax((0, 2, 3)).detach() / 2


class Two(Attention):
    """Another attention in its forward has three heads."""

    def forward(self, x: Tensor) -> Tensor:
        three = torch.stack([10 * x] * 3, 1)
        scaled_dot_product_attention(three, three, three)
        return super().forward(x)


class Nested(Attention):
    """A recorded attention in its forward has as many heads; it is measured, because it does not declare its own."""

    logit_paths: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner(10 * x)


class CompiledInside(Attention):
    """The part of its forward that computes the logits is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Any = torch.compile(self.written, backend="aot_eager")

    @staticmethod
    def written(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / 2).softmax(-1) @ k

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attend(*self.parts(x))
        return attended


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("kind", [Attention, Two, Nested, CompiledInside])
def test_the_attention_that_is_recorded_is_the_one_of_the_module(kind: type[Attention]) -> None:
    model: Any = nn.Sequential(kind())
    paths = logit_paths(model, X) if kind is Nested else model
    clip = QKClip(paths, torch.optim.SGD(model.parameters(), lr=0.1))
    model(X)
    torch.testing.assert_close(clip.max_logits()["0"], model[0].largest(X))


def clipping() -> tuple[Any, torch.optim.Optimizer, QKClip]:
    model = nn.Sequential(Attention(), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, QKClip(model, optimizer, 0.05)


def train(forward: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        forward(X).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_is_clipped_as_the_plain_one_in_every_layer(when: str) -> None:
    plain, optimizer, clip = clipping()
    train(plain, optimizer)
    model = nn.Sequential(Attention(), Attention())
    compiled: Any = torch.compile(model, backend="aot_eager") if when != "in place" else model
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "before":  # it has run, and is compiled, when the clip comes
        compiled(X)
    if when == "in place":
        for layer in model:
            layer.compile(backend="aot_eager")
    other_clip = QKClip(compiled if when == "before" else model, other, 0.05)
    train(compiled, other)
    torch.testing.assert_close(other_clip.max_logits(), clip.max_logits(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-4, atol=1e-5)


def test_a_copy_and_a_saved_model_are_not_listened_to() -> None:
    model, _, clip = clipping()
    model(X)
    recorded = clip.max_logits()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False), copy.deepcopy(copy.deepcopy(model))):
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        assert not torch.allclose(other(X), model(X))  # it runs its own weights
        assert other.state_dict().keys() == model.state_dict().keys()
    assert_equal(clip.max_logits(), recorded)


def test_afterwards_the_model_is_as_it_was() -> None:
    model, optimizer, clip = clipping()
    attention = model[0]
    assert inspect.signature(attention.forward) == inspect.signature(type(attention).forward.__get__(attention))
    clip.remove()
    assert "forward" not in vars(attention)
    optimizer.param_groups[0]["lr"] = 0.0
    before = attention.proj[0].weight.detach().clone()
    train(model, optimizer)
    assert_equal(attention.proj[0].weight, before)
    assert clip.max_logits() == {}


@pytest.mark.parametrize("first", [True, False], ids=["before the clip", "after the clip"])
def test_a_forward_that_somebody_else_wrapped_stays_and_is_no_longer_recorded(first: bool) -> None:
    model, calls = nn.Sequential(Attention()), list[int]()

    def wrap() -> Any:
        inner = model[0].forward

        def counted(*args: Any) -> Any:
            calls.append(1)
            return inner(*args)

        model[0].forward = counted
        return counted

    wrapper = wrap() if first else None
    clip = QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapper = wrapper or wrap()
    clip.remove()
    model(X)
    assert vars(model[0])["forward"] is wrapper
    assert calls == [1]
    assert clip.max_logits() == {}
