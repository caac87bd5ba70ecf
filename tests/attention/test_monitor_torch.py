"""The monitor's numbers for torch's own attention, in each way it is called, are those of its weights cut by hand.

Shapes: B batch, T tokens, D width, H heads; a mask is True where a query may look unless it is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import by_hand
from models import assert_equal
from quacklr import LogitMonitor

B, T, D, H = 2, 6, 16, 4
KEYS = 5  # of another sequence
Given = dict[str, Any]
Layers = dict[str, Callable[[], tuple[by_hand.Written, Tensor]]]


class Called(nn.Module):
    """nn.MultiheadAttention, called in one way on queries and perhaps other keys."""

    def __init__(self, build: Given, call: Given) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, dropout=0.1, **build)
        self.call = call

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Any:
        keys = x if keys is None else keys
        return self.attention(x, keys, keys, **self.call)


LOWER = torch.ones(T, T, dtype=torch.bool).tril()
PADDED = torch.tensor([[False] * T, [True] * 2 + [False] * (T - 2)])  # True: may not be looked at
EACH_HEAD = (torch.arange(B * H * T * T) * 7 % 3 > 0).view(B * H, T, T) | torch.eye(T, dtype=torch.bool)
BIAS = torch.randn(T, T, generator=torch.Generator().manual_seed(3))  # added to the logits: a position bias
ALL = torch.ones(B, 1, T, T, dtype=torch.bool)
NOT_PADDED = ~PADDED[:, None, None].expand(B, 1, T, T)


def additive(seen: Tensor, value: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, value)


@dataclass(frozen=True)
class Way:
    """How the layer is built and called, and what its queries may look at."""

    call: Given = field(default_factory=dict)
    allowed: Tensor = field(default_factory=lambda: ALL)
    build: Given = field(default_factory=dict)
    bias: Tensor | None = None


WAYS = {
    "plain": Way(build={"bias": False}),
    "float mask of -1e4": Way({"attn_mask": additive(LOWER, -1e4)}, ALL & LOWER),
    "mask for each head": Way({"attn_mask": ~EACH_HEAD}, EACH_HEAD.view(B, H, T, T)),
    "float mask for each head": Way({"attn_mask": additive(EACH_HEAD)}, EACH_HEAD.view(B, H, T, T)),
    "causal": Way({"attn_mask": ~LOWER, "is_causal": True}, ALL & LOWER),
    "position bias": Way({"attn_mask": BIAS}, ALL, bias=BIAS),
    "padded": Way({"key_padding_mask": PADDED, "attn_mask": ~LOWER}, NOT_PADDED & LOWER),
    "padded, float": Way({"key_padding_mask": additive(~PADDED)}, NOT_PADDED),
    "bias_kv": Way({"attn_mask": ~LOWER}, nn.functional.pad(ALL & LOWER, (0, 1), value=True), {"add_bias_kv": True}),
    "zero_attn": Way({}, nn.functional.pad(ALL, (0, 1), value=True), {"add_zero_attn": True}),
    "tokens first": Way(build={"batch_first": False}),
}


def built(way: Way, call: Given, **more: Any) -> Called:
    torch.manual_seed(0)
    return changed(Called({"batch_first": True, **way.build, **more}, {**way.call, **call}), 0.3)


@torch.no_grad()
def changed(model: Any, by: float) -> Any:
    for parameter in model.parameters():
        parameter.add_(by * torch.randn_like(parameter))
    return model


def assert_as_by_hand(model: nn.Module, probe: Any, layers: Layers) -> None:
    """Two measurements, apart by a random change of weights; the mode stays what it was."""
    monitor, mode = LogitMonitor(model, probe), model.training
    before: dict[str, by_hand.Written] = {}
    for _ in range(2):
        now = {name: hand() for name, hand in layers.items()}
        stats = monitor.measure()
        assert list(stats) == list(layers)
        for name, (written, pairs) in now.items():
            by_hand.assert_measured(stats[name], by_hand.statistics(written, pairs, before.get(name)), name)
        before = {name: written for name, (written, _) in now.items()}
        changed(model, 0.05)
        assert model.training == mode


def assert_multihead(model: Called, x: Tensor, keys: Tensor | None, pairs: Tensor, bias: Tensor | None = None) -> None:
    """`x` is (B, T, D), and (T, D) for one sequence."""
    is_first = model.attention.batch_first
    probe = [each if is_first else each.transpose(0, 1).contiguous() for each in (x, keys) if each is not None]

    def hand() -> tuple[by_hand.Written, Tensor]:
        written = by_hand.multihead(model.attention, x if x.ndim == 3 else x[None], keys)
        if bias is not None:
            written = by_hand.Written(
                written.logits_BHIJ + bias, written.values_BHJK, written.out_DD, written.out_bias_D
            )
        model.eval()
        out = model(*probe)[0].detach()  # with gradients: the slow path
        model.train()
        out = out if x.ndim == 3 else out[None]
        written.check(pairs, out if is_first else out.transpose(0, 1))
        return written, pairs

    assert_as_by_hand(model, tuple(probe), {"attention": hand})


def inputs() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("way", WAYS)
def test_multihead_attention_is_as_by_hand(way: str, need_weights: bool) -> None:
    model = built(WAYS[way], {"need_weights": need_weights})
    assert_multihead(model, inputs(), None, WAYS[way].allowed, WAYS[way].bias)


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_unbatched_sequence_is_as_by_hand(need_weights: bool) -> None:
    model = built(Way(), {"need_weights": need_weights, "attn_mask": ~LOWER})
    assert_multihead(model, inputs()[0], None, (ALL & LOWER)[:1])


@pytest.mark.parametrize("width", [D, 12], ids=["one weight", "three weights"])
def test_keys_of_another_sequence_are_as_by_hand(width: int) -> None:
    model = built(Way(), {}, **({} if width == D else {"kdim": width, "vdim": width}))
    keys = torch.randn(B, KEYS, width, generator=torch.Generator().manual_seed(2))
    assert_multihead(model, inputs(), keys, torch.ones(B, 1, T, KEYS, dtype=torch.bool))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "not nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_the_layers_of_an_encoder_are_as_by_hand_and_its_fast_path_is_on_again(nested: bool) -> None:
    """Right padding, which is what nested tensors are for. Judge: what goes in on the slow path, with gradients on."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.1, batch_first=True)
    model = changed(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), 0.3).eval()
    padding = PADDED.flip(1)
    names = [f"layers.{i}.self_attn" for i in range(2)]
    probe: Given = {"src": inputs(), "src_key_padding_mask": padding}

    def hand(name: str) -> tuple[by_hand.Written, Tensor]:
        with torch.enable_grad():
            ((given, _),) = by_hand.calls(model, [name], lambda: model(**probe))[name]
        written = by_hand.multihead(model.get_submodule(name), given["hidden_states"])
        return written, ~padding[:, None, None].expand(B, 1, T, T)

    assert_as_by_hand(model, probe, {name: partial(hand, name) for name in names})
    with torch.no_grad():
        before = model(**probe)
        LogitMonitor(model, probe).measure()
        assert torch.backends.mha.get_fastpath_enabled()
        assert_equal(model(**probe), before)
