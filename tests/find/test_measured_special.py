"""Measuring special attentions: gates, learned keys and scales, experts, casts, norms over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr import logit_paths
from quacklr.find.measure.assemble import measured_paths
from quacklr.util import autograd
from stand_ins_kit import HF, Known, Model, Plain

SAMPLE = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))


class Written(Plain):
    """Logits are written into a tensor, as in TRL's chunked loss: torch does not differentiate such functions."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = key.repeat_interleave(2, 1)
        logits = query.new_empty(*query.shape[:3], key.shape[2])
        with torch.no_grad():
            torch.matmul(query, key.mT, out=logits)
        return F.softmax(logits, dim=-1) @ value.repeat_interleave(2, 1)


def test_functions_that_write_into_a_tensor_are_measured() -> None:
    (finding,) = measured_paths(Model(HF, Written()), SAMPLE).values()
    assert [[weight.name for weight in path.weights] for path in finding.paths] == [["q", "k"]]


class Positions(Plain):
    """As DETR: learned positions are added to the input in the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 32))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states + self.positions)


def test_learned_positions_of_the_input_are_not_part_of_a_chain() -> None:
    (finding,) = measured_paths(Model(HF, Positions()), SAMPLE).values()
    assert [[weight.name for weight in path.weights] for path in finding.paths] == [["q", "k"]]


class Pooling(nn.Module):
    """Attends to the residual stream itself, without weights or norms."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_weights_of_other_layers_are_not_taken_for_queries_of_an_attention_that_has_none() -> None:
    model = Model(HF, Pooling(), Pooling(), Plain(), norm=lambda _: nn.Identity())
    assert [name for name, finding in measured_paths(model, SAMPLE).items() if finding.paths] == [
        "model.layers.2.self_attn"
    ]


class Gate(Plain):
    """Queries go through a gate: the logit is not linear in the gate's weights, so they are on no path."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.open = torch.sigmoid(self.gate(hidden_states)).unsqueeze(1)
        return super().forward(hidden_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query * self.open, key, value)


class Scale(Gate):
    """Queries are scaled by a number a head, part of which is learned, and not counted as a weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.bias = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.open = hidden_states[:, None, :, :1] + self.bias
        return Plain.forward(self, hidden_states)


class Slots(nn.Module):
    """Attends to learned keys alone."""

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.slots = nn.Linear(32, 32), nn.Parameter(torch.randn(6, 32))

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = torch.cat([x[:, :0], self.slots.expand(len(x), -1, -1)], dim=1).unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (Gate(), {("q_proj.weight", 0, 4), ("k_proj.weight", 0, 2)}),
        (Scale(), {("q_proj.weight", 0, 4), ("k_proj.weight", 0, 2)}),
        (Slots(), {("to_query.weight", 0, 4), ("slots", 1, 4)}),
    ],
    ids=["gate", "scale", "learned keys"],
)
def test_only_what_a_logit_is_linear_in_is_on_its_path(attention: nn.Module, expected: set[Any]) -> None:
    (finding,) = measured_paths(Model(HF, attention), SAMPLE).values()
    names = {parameter: name for name, parameter in attention.named_parameters()}
    (path,) = finding.paths
    assert {(names[w.param], w.dim, w.blocks) for w in path.weights} == expected  # type: ignore[index]


class Repeats(Plain):
    """As FastSpeech: tokens are repeated a predicted number of times, which random activations do not give."""

    def __init__(self) -> None:
        super().__init__()
        self.durations = nn.Linear(32, 1)
        nn.init.zeros_(self.durations.weight)
        nn.init.ones_(self.durations.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        times = self.durations(hidden_states).squeeze(-1).round().long()
        if (times < 0).any():
            raise RuntimeError("repeats can not be negative")
        return super().forward(hidden_states)


def test_a_model_that_cannot_run_on_random_activations_runs_on_real_ones() -> None:
    (finding,) = measured_paths(Model(HF, Repeats()), SAMPLE).values()
    assert [[weight.blocks for weight in path.weights] for path in finding.paths] == [[4, 2]]


class Eager(Plain):
    """Its logits are written out, and changed by a function of them, queries and keys."""

    def __init__(self, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(groups=4)
        self.change = change

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.change(query @ key.mT, query, key).softmax(-1) @ value


class OneEinsum(Plain):
    """Its logits are one einsum of queries, keys and learned numbers; or queries are a product themselves."""

    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__(groups=4)
        self.equation, self.scale = equation, nn.Parameter(torch.randn(shape))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.equation:
            return F.scaled_dot_product_attention((query @ key.mT) @ key, key, value)
        return torch.einsum(self.equation, query, key, self.scale).softmax(-1) @ value


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("...id,...jd,d->...ij", (8,)), ("bhid,bhjd,d->bhij", (8,)), ("...id,...jd,...->...ij", (2, 4)), ("", ())],
)
def test_an_einsum_of_three_factors_is_measured(equation: str, shape: tuple[int, ...]) -> None:
    (finding,) = measured_paths(Model(HF, OneEinsum(equation, *shape)), SAMPLE).values()
    assert [str(path) for path in finding.paths] == (["q . k"] if equation else [])
    assert ("in other ways" in finding.reason) == (not equation)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a, _q, _k: a - a.amax(-1, keepdim=True), ""),
        (lambda a, _q, _k: a / a.std(-1, keepdim=True), "QK norm"),
        (lambda a, q, k: a / (q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2)), "in other ways"),
        (lambda a, _q, _k: a.sqrt(), "not linear"),
        (lambda a, _q, _k: (a - a.detach()).sqrt(), "not finite"),
    ],
    ids=["less a maximum", "divided by a deviation", "divided by norms", "a root", "not finite"],
)
def test_what_is_done_to_logits_after_the_product_counts(change: Any, why: str) -> None:
    (finding,) = measured_paths(Model(HF, Eager(change)), SAMPLE).values()
    assert (why in finding.reason) if why else len(finding.paths) == 1


class Casted(nn.Linear):
    """Its weight follows the dtype of what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x).to(x))


def test_weights_cast_to_an_activation_are_weights() -> None:
    attention = Known()
    attention.q_proj, attention.k_proj = Casted(32, 32).double(), Casted(32, 16).double()
    (finding,) = measured_paths(Model(HF, attention), SAMPLE).values()
    assert [weight.blocks for weight in finding.paths[0].weights] == [4, 2]
    with pytest.raises(ValueError, match="q_proj is not a projection that we can read"):
        logit_paths(Model(HF, attention))  # what its forward does is not known


class Experts(nn.Module):
    """Every token's query is made by one of three experts; some may get none."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.experts, self.kv, self.used = nn.Parameter(torch.randn(3, 32, 32)), nn.Linear(32, 32), used

    def forward(self, x: Tensor) -> Tensor:
        parts = [*x.chunk(self.used, dim=1), *[x[:, :0]] * (3 - self.used)]
        q = torch.cat([F.linear(part, expert) for part, expert in zip(parts, self.experts, strict=True)], dim=1)
        q, k = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, self.kv(x)))
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def test_experts_that_saw_no_token_are_not_taken_for_values() -> None:
    """Rows of an expert that the sample did not reach would silently have rate 1."""
    (finding,) = measured_paths(Model(HF, Experts(used=3)), SAMPLE).values()
    assert len(finding.paths) == 3
    assert finding.paths[0].weights[0].dim == (0, 1)
    (finding,) = measured_paths(Model(HF, Experts(used=2)), SAMPLE).values()
    assert "some experts had no token" in finding.reason


class Memories(Plain):
    """Learned keys beside those of tokens, in the shapes in which they are stored."""

    def __init__(self, shape: tuple[int, ...], learned_first: bool = True) -> None:
        super().__init__()
        self.mem_k, self.learned_first = nn.Parameter(torch.zeros(shape)), learned_first

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory: Tensor = self.mem_k
        if memory.ndim == 2:  # (memories, heads * size), or (memories, size) for all heads
            memory = memory.unflatten(-1, (-1, 8)).transpose(0, 1)
        memory = memory.expand(len(key), key.shape[1], -1, -1)
        keys = torch.cat([memory, key] if self.learned_first else [key, memory], dim=2)
        values = torch.cat([torch.zeros_like(memory), value], dim=2)
        return super().attend(query, keys, values)


@pytest.mark.parametrize("sample", [SAMPLE, SAMPLE[:1, :2]], ids=lambda sample: str(tuple(sample.shape)))
@pytest.mark.parametrize("learned_first", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim", "block_of_row"),
    [
        ((2, 3, 8), 0, [0, 1]),
        ((1, 2, 3, 8), 1, [0, 1]),
        ((3, 16), 1, [0] * 8 + [1] * 8),
        ((3, 8), 0, [0, 0, 0]),
    ],
    ids=["head first", "batched", "heads side by side", "for all heads"],
)
def test_the_learned_keys_of_a_head_are_one_block_on_a_path_with_its_query(
    shape: tuple[int, ...], dim: int, block_of_row: list[int], learned_first: bool, sample: Tensor
) -> None:
    attention = Memories(shape, learned_first)
    (finding,) = measured_paths(Model(HF, attention), sample).values()
    by_key = {id(path.weights[-1].param): path for path in finding.paths}
    tokens, memories = by_key[id(attention.k_proj.weight)], by_key[id(attention.mem_k)]
    assert len(finding.paths) == 2
    assert tokens.weights[0] is memories.weights[0]
    assert (memories.weights[1].dim, memories.weights[1].block_of_row.tolist()) == (dim, block_of_row)
    if max(block_of_row):
        assert memories.reads.tolist() == tokens.reads.tolist()
    assert not attention.mem_k.any()


class OneByOne(torch.autograd.Function):
    """Doubles its input. Its backward reads a number, so gradients of several heads cannot go through it at once."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (2 if gradients[0].sum().item() else 0)


class Doubled(Plain):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(OneByOne.apply(query), key, value)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("most", [1, 2**24])
@pytest.mark.parametrize("kind", [Plain, Doubled])
def test_heads_are_the_same_whether_they_are_measured_together_or_one_after_another(
    kind: type[Plain], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "MOST", most)
    (finding,) = measured_paths(Model(HF, kind()), SAMPLE).values()
    assert [w.block_of_row.tolist() for w in finding.paths[0].weights] == [
        [row // 8 for row in range(n)] for n in (32, 16)
    ]
    assert finding.paths[0].reads.tolist() == [[0, 1, 2, 3], [0, 0, 1, 1]]
