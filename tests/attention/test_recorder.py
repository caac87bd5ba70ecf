"""A recorded model behaves like the plain one: compiled, copied, saved, wrapped by others, and afterwards."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab_runs import block
from models import assert_equal
from quacklr import LogitPath, QKClip, Weight, logit_paths
from quacklr.lab.model import MHA, Decoder, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
FULL = MHA(heads=4, kv_heads=4, head_dim=8)
TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))


def clipping(threshold: float = 1.0) -> tuple[Decoder, torch.optim.Optimizer, QKClip]:
    model = build(SHAPE, FULL, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, QKClip(model, optimizer, threshold)


def train(forward: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward(TOKENS).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_is_clipped_as_the_plain_one_in_every_layer(when: str) -> None:
    plain, optimizer, clip = clipping()
    train(plain, optimizer)
    model = build(SHAPE, FULL, seed=0)
    compiled: Any = torch.compile(model, backend="aot_eager") if when != "in place" else model
    other = torch.optim.SGD(model.parameters(), lr=0.01)
    if when == "before":  # it has run, and is compiled, when the clip comes
        compiled(TOKENS)
    if when == "in place":
        for layer in model.blocks:
            layer.compile(backend="aot_eager")
    other_clip = QKClip(compiled if when == "before" else model, other, threshold=1.0)
    train(compiled, other)
    for name, largest in clip.max_logits().items():
        torch.testing.assert_close(other_clip.max_logits()[name], largest, rtol=1e-4, atol=1e-5)
    for one, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_a_copy_and_a_saved_model_are_not_listened_to() -> None:
    model, _, clip = clipping()
    model(TOKENS)
    recorded = clip.max_logits()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False), copy.deepcopy(copy.deepcopy(model))):
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        assert not torch.allclose(other(TOKENS), model(TOKENS))  # it runs its own weights
        assert other.state_dict().keys() == model.state_dict().keys()
    assert_equal(torch.stack([*clip.max_logits().values()]), torch.stack([*recorded.values()]))


def test_afterwards_the_model_is_as_it_was() -> None:
    model, optimizer, clip = clipping()
    attention = block(model).attention
    assert inspect.signature(attention.forward) == inspect.signature(type(attention).forward.__get__(attention))
    clip.remove()
    assert "forward" not in vars(attention)
    optimizer.param_groups[0]["lr"] = 0.0
    before = attention.q.weight.detach().clone()
    train(model, optimizer)
    assert_equal(attention.q.weight, before)
    assert clip.max_logits() == {}


def test_one_that_somebody_wrapped_meanwhile_is_no_longer_listened_to() -> None:
    model, _, clip = clipping()
    attention, calls = block(model).attention, list[int]()
    inner = attention.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    attention.forward = counted
    clip.remove()
    model(TOKENS)
    assert calls == [1]
    assert clip.max_logits() == {}


def test_a_second_clip_on_the_same_optimizer_is_refused_until_the_first_is_removed() -> None:
    model, optimizer, clip = clipping()
    with pytest.raises(ValueError, match=r"another QKClip is attached to its parameter.*remove\(\)"):
        QKClip(model, optimizer)
    clip.remove()
    QKClip(model, optimizer)


class Dotted(nn.Module):
    """Its roles have dots in their names, and its weights lie in modules below it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        q, k = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in self.proj)
        return nn.functional.scaled_dot_product_attention(q, k, k)

    def logit_paths(self) -> list[LogitPath]:
        heads = torch.arange(2).repeat_interleave(4)
        weights = [Weight(f"proj.{i}", self.proj[i].get_parameter("weight"), heads) for i in range(2)]
        return [LogitPath(tuple(weights), heads=2)]


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
def test_an_attention_whose_roles_have_dots_is_found(given: bool) -> None:
    torch.manual_seed(0)
    attention = Dotted()
    model = nn.Sequential(nn.Linear(8, 8), attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(logit_paths(model) if given else model, optimizer, threshold=1e-6)
    before = attention.proj[0].get_parameter("weight").detach().clone()
    model(torch.randn(2, 5, 8)).square().mean().backward()
    optimizer.step()
    (largest,) = clip.max_logits().values()
    expected = before * (1e-6 / largest).sqrt().repeat_interleave(4)[:, None]
    torch.testing.assert_close(attention.proj[0].get_parameter("weight"), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's own
def test_what_is_compiled_inside_of_an_attention_is_recorded_too() -> None:
    class Inside(Dotted):
        def __init__(self) -> None:
            super().__init__()
            self.attend: Any = torch.compile(self.written, backend="aot_eager")

        @staticmethod
        def written(q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.mT).softmax(-1) @ k

        def forward(self, x: Tensor) -> Tensor:
            q, k = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in self.proj)
            attended: Tensor = self.attend(q, k)
            return attended

    torch.manual_seed(0)
    model, x = Inside(), torch.randn(2, 5, 8)
    clip = QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x)
    q, k = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in model.proj)
    torch.testing.assert_close(clip.max_logits()[""], (q @ k.mT).amax((0, 2, 3)).detach())


def test_another_attention_in_the_module_with_other_heads_is_not_the_one_that_is_meant() -> None:
    class Two(Dotted):
        def forward(self, x: Tensor) -> Tensor:
            three = torch.stack([10 * x] * 3, 1)
            nn.functional.scaled_dot_product_attention(three, three, three)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(2, 5, 8)
    clip = QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x)
    q, k = (proj(x).unflatten(-1, (2, 4)).transpose(1, 2) for proj in model.proj)
    torch.testing.assert_close(clip.max_logits()[""], (q @ k.mT).amax((0, 2, 3)).detach() / 2)


def test_an_optimizer_that_is_not_linear_in_lr_is_clipped_too() -> None:
    model = build(SHAPE, FULL, seed=0)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.0)
    clip = QKClip(model, optimizer, threshold=1.0)
    train(model, optimizer, steps=1)
    largest = torch.stack(list(clip.max_logits().values()))
    assert (largest > 1).all()
    train(model, optimizer, steps=1)
    torch.testing.assert_close(clip.max_logits()["blocks.0.attention"], torch.ones(4))
