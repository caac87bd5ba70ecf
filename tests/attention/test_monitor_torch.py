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


class Called(nn.Module):
    """nn.MultiheadAttention, called in one way on queries and perhaps other keys; what it gives is kept."""

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
    "plain": Way(),
    "bool mask": Way({"attn_mask": ~LOWER}, ALL & LOWER),
    "float mask": Way({"attn_mask": additive(LOWER)}, ALL & LOWER),
    "float mask of -1e4": Way({"attn_mask": additive(LOWER, -1e4)}, ALL & LOWER),
    "float mask of finfo.min": Way({"attn_mask": additive(LOWER, torch.finfo(torch.float32).min)}, ALL & LOWER),
    "mask for each head": Way({"attn_mask": ~EACH_HEAD}, EACH_HEAD.view(B, H, T, T)),
    "float mask for each head": Way({"attn_mask": additive(EACH_HEAD)}, EACH_HEAD.view(B, H, T, T)),
    "causal": Way({"attn_mask": ~LOWER, "is_causal": True}, ALL & LOWER),
    "position bias": Way({"attn_mask": BIAS}, ALL, bias=BIAS),
    "padded": Way({"key_padding_mask": PADDED}, NOT_PADDED),
    "padded, float": Way({"key_padding_mask": additive(~PADDED)}, NOT_PADDED),
    "padded, causal": Way({"key_padding_mask": PADDED, "attn_mask": ~LOWER}, NOT_PADDED & LOWER),
    "padded, is_causal": Way({"key_padding_mask": PADDED, "attn_mask": ~LOWER, "is_causal": True}, NOT_PADDED & LOWER),
    "bias_kv": Way({"attn_mask": ~LOWER}, nn.functional.pad(ALL & LOWER, (0, 1), value=True), {"add_bias_kv": True}),
    "zero_attn": Way({}, nn.functional.pad(ALL, (0, 1), value=True), {"add_zero_attn": True}),
    "no bias": Way(build={"bias": False}),
}


def built(way: Way, batch_first: bool, call: Given, **more: Any) -> Called:
    torch.manual_seed(0)
    model = Called({**way.build, **more, "batch_first": batch_first}, {**way.call, **call})
    return changed(model, 0.3)


@torch.no_grad()
def changed(model: Any, by: float) -> Any:
    for parameter in model.parameters():
        parameter.add_(by * torch.randn_like(parameter))
    return model


def assert_as_by_hand(
    model: nn.Module, probe: Any, layers: dict[str, Callable[[], tuple[by_hand.Written, Tensor]]]
) -> None:
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


def inputs() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("training", [True, False], ids=["train, batch first", "eval, tokens first"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("way", WAYS)
def test_multihead_attention_is_as_by_hand(way: str, need_weights: bool, training: bool) -> None:
    batch_first, call = training, {"need_weights": need_weights, "average_attn_weights": training}
    model = built(WAYS[way], batch_first, call).train(training)
    x = inputs() if batch_first else inputs().transpose(0, 1).contiguous()

    def hand() -> tuple[by_hand.Written, Tensor]:
        written, bias = by_hand.multihead(model.attention, inputs()), WAYS[way].bias
        written = written if bias is None else by_hand.Written(written.logits_BHIJ + bias, *written_rest(written))
        model.eval()
        out = model(x)[0].detach()  # with gradients: the slow path
        model.train(training)
        written.check(WAYS[way].allowed, out if batch_first else out.transpose(0, 1))
        return written, WAYS[way].allowed

    assert_as_by_hand(model, x, {"attention": hand})


def written_rest(written: by_hand.Written) -> tuple[Tensor, Tensor, Tensor | None]:
    return written.values_BHJK, written.out_DD, written.out_bias_D


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_unbatched_sequence_is_as_by_hand(need_weights: bool) -> None:
    model = built(Way(), True, {"need_weights": need_weights, "attn_mask": ~LOWER})
    pairs = (ALL & LOWER)[:1]

    def hand() -> tuple[by_hand.Written, Tensor]:
        written = by_hand.multihead(model.attention, inputs()[:1])
        model.eval()
        written.check(pairs, model(inputs()[0])[0].detach()[None])
        model.train()
        return written, pairs

    assert_as_by_hand(model, inputs()[0], {"attention": hand})


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("width", [D, 12], ids=["one weight", "three weights"])
def test_keys_of_another_sequence_are_as_by_hand(need_weights: bool, width: int) -> None:
    sizes = {} if width == D else {"kdim": width, "vdim": width}
    model = built(Way(), True, {"need_weights": need_weights}, **sizes)
    keys = torch.randn(B, KEYS, width, generator=torch.Generator().manual_seed(2))
    pairs = torch.ones(B, 1, T, KEYS, dtype=torch.bool)

    def hand() -> tuple[by_hand.Written, Tensor]:
        written = by_hand.multihead(model.attention, inputs(), keys)
        model.eval()
        written.check(pairs, model(inputs(), keys)[0].detach())
        model.train()
        return written, pairs

    assert_as_by_hand(model, (inputs(), keys), {"attention": hand})


def inputs_of(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[str, Tensor]:
    return {name: given["hidden_states"] for name, ((given, _),) in by_hand.calls(model, names, run).items()}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval: the fast path"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "not nested"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "not padded"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_the_layers_of_an_encoder_are_as_by_hand(padded: bool, nested: bool, training: bool) -> None:
    """Right padding, which is what nested tensors are for. Judge: what goes in on the slow path, with gradients on."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.1, batch_first=True)
    model = changed(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), 0.3).train(training)
    padding = PADDED.flip(1) if padded else None
    pairs = ALL if padding is None else ~padding[:, None, None].expand(B, 1, T, T)
    names = [f"layers.{i}.self_attn" for i in range(2)]
    probe: Given = {"src": inputs(), "src_key_padding_mask": padding}

    def hand(name: str) -> tuple[by_hand.Written, Tensor]:
        model.eval()
        with torch.enable_grad():
            x = inputs_of(model, names, lambda: model(**probe))[name]
        model.train(training)
        return by_hand.multihead(model.get_submodule(name), x), pairs

    assert_as_by_hand(model, probe, {name: partial(hand, name) for name in names})


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_decoder_layers_own_and_cross_attention_are_as_by_hand(training: bool) -> None:
    torch.manual_seed(0)
    model = changed(nn.TransformerDecoderLayer(D, H, 24, dropout=0.1, batch_first=True), 0.3).train(training)
    memory = torch.randn(B, KEYS, D, generator=torch.Generator().manual_seed(2))
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    probe = {"tgt": inputs(), "memory": memory, "tgt_mask": mask, "tgt_is_causal": True}

    def hand(name: str) -> tuple[by_hand.Written, Tensor]:
        model.eval()
        (((given, out),),) = by_hand.calls(model, [name], lambda: model(**probe)).values()
        model.train(training)
        own = name == "self_attn"
        written = by_hand.multihead(model.get_submodule(name), given["hidden_states"], None if own else memory)
        pairs = ALL & LOWER if own else torch.ones(B, 1, T, KEYS, dtype=torch.bool)
        written.check(pairs, out)
        return written, pairs

    names = ("self_attn", "multihead_attn")
    assert_as_by_hand(model, probe, {name: partial(hand, name) for name in names})


def test_the_fast_path_is_on_again_after_measuring() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(D, H, 24, batch_first=True).eval()
    on = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        before = model(inputs())
        LogitMonitor(model, inputs()).measure()
        assert torch.backends.mha.get_fastpath_enabled() == on
        assert_equal(model(inputs()), before)
