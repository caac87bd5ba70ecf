"""Measuring attention whose logits are a function of its products: mixed heads are declined, others are found.

The tests change the rows of one head at a time. Heads are mixed if a logit, relative to the others of its row, changes
with the rows of two heads. For this, learned tensors are random, not zero or the identity.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr import logit_paths
from quacklr.find.measure.assemble import NotRowsError, measured_paths, weight_of
from stand_ins_kit import HF, WIDTH, Model, Plain, causal

SAMPLE = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))
NAME = "model.layers.0.self_attn"
HEADS, SIZE = 4, 8


class Function(nn.Module):
    """A function of the logits z (B, H, I, J), what is attended to, queries and keys (BH, I, K), and weights."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.learned = nn.ParameterList(parameters)

    def forward(self, **given: Tensor) -> Tensor:
        wanted = [name for name in inspect.signature(self.function).parameters if name in given] or ["z"]
        return self.function(*(given[name] for name in wanted), *self.learned)


def start(*shape: int, of: str) -> Tensor:
    """A learned tensor as it starts: random, zero, or the identity of the first two dims."""
    if of == "zero":
        return torch.zeros(shape)
    if of == "identity" and len(shape) > 1:
        eye = torch.eye(shape[0], shape[1])
        return eye.view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape).clone()
    return torch.randn(shape)


def over_heads(z: Tensor, weight: Tensor) -> Tensor:
    return F.linear(z.movedim(1, -1), weight).movedim(-1, 1)


# each is made for a way in which its parameters start; `z` are logits (B, H, I, J)
MIXING: dict[str, Callable[[str], Function]] = {
    "linear, residual": lambda of: Function(lambda z, w: z + over_heads(z, w), start(4, 4, of=of)),
    "convolution in two groups": lambda of: Function(
        lambda z, w: z + F.conv2d(z, w, groups=2), start(4, 2, 1, 1, of=of if of != "identity" else "zero")
    ),
    "einsum of a weight": lambda of: Function(lambda z, w: z + torch.einsum("gh,bhij->bgij", w, z), start(4, 4, of=of)),
    "two layers": lambda of: Function(
        lambda z, u, w: z + over_heads(F.gelu(over_heads(z, u)), w), start(8, 4, of=of), start(4, 8, of=of)
    ),
    "flip": lambda _: Function(lambda z: z + 0.5 * z.flip(1)),
    "mean": lambda _: Function(lambda z: z + z.mean(1, keepdim=True)),
    "layer norm, residual": lambda _: Function(lambda z: z + F.layer_norm(z.movedim(1, -1), (4,)).movedim(-1, 1)),
    "a learned amount a head": lambda of: Function(lambda z, a: z + torch.tanh(a) * z.flip(1), start(4, 1, 1, of=of)),
    "weights of a softmax over heads": lambda _: Function(lambda z: z * z.softmax(1)),
    "written in place": lambda _: Function(lambda z: written(z)),
    "by the input, residual": lambda of: Function(
        lambda z, x, w: z + ((x @ w).unflatten(-1, (4, 4)) @ z.movedim(1, 2)).movedim(2, 1), start(WIDTH, 16, of=of)
    ),
    "baddbmm": lambda _: Function(
        lambda z, q, k: torch.baddbmm(z.flip(1).flatten(0, 1), q, k.mT, beta=0.5, alpha=2.0).view_as(z)
    ),
}
OF_ITS_OWN: dict[str, Callable[[str], Function]] = {
    "as it is": lambda _: Function(lambda z: z),
    "temperature": lambda of: Function(lambda z, a: z * a.exp(), start(4, 1, 1, of=of)),
    "capped": lambda _: Function(lambda z: 5 * torch.tanh(z / 5)),
    "less its largest": lambda _: Function(lambda z: z - z.amax(-1, keepdim=True)),
    "heads in another order": lambda _: Function(lambda z: z.roll(1, dims=1)),
    "sum over keys": lambda _: Function(lambda z: z.cumsum(3)),
    "convolved over queries and keys, residual": lambda of: Function(
        lambda z, w: z + F.conv2d(z, w, padding="same", groups=4), start(4, 1, 3, 3, of=of)
    ),
    "projected over keys": lambda of: Function(lambda z, w: z + F.linear(z, w), start(5, 5, of=of)),
    "masked": lambda _: Function(lambda z: z.clone().masked_fill_(torch.ones(5, 5).triu(1) > 0, -9.0)),
    "a gate of its own": lambda _: Function(lambda z: z * torch.sigmoid(z)),
}


def written(z: Tensor) -> Tensor:
    """The first head's logits are added to the last's, in place."""
    z = z.clone()
    z[:, -1] += z[:, 0]
    return z


class Written(Plain):
    """Four heads whose rows are in any order; a function is applied to their logits."""

    def __init__(self, *functions: Function, layout: str, rows: list[int], groups: int = 4) -> None:
        super().__init__(groups=groups)
        self.functions, self.layout = nn.ModuleList(functions), layout
        self.register_buffer("order", torch.tensor(rows))
        self.register_buffer("key_order", torch.tensor([row for row in rows if row < groups * SIZE]))
        self.logits = torch.zeros(())

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        if self.layout == "einsum":
            return torch.einsum("bhid,bhjd->bhij", q, k)
        if self.layout == "merged":
            return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (-1, HEADS))
        if self.layout == "heads first":
            one, other = (each.transpose(0, 1).flatten(0, 1) for each in (q, k))
            unused = one.new_full((1, 1, 1), torch.nan)  # as in Megatron, whose buffer is not initialised
            return torch.baddbmm(unused, one, other.mT, beta=0).unflatten(0, (HEADS, -1)).transpose(0, 1)
        if self.layout == "heads last":
            return torch.einsum("bhid,bhjd->bijh", q, k).movedim(-1, 1)
        return q @ k.mT

    def forward(self, hidden_states: Tensor) -> Tensor:
        order, key_order = self.get_buffer("order"), self.get_buffer("key_order")
        q = self.split(self.q_proj(hidden_states)[..., order])
        k = self.split(self.k_proj(hidden_states)[..., key_order]).repeat_interleave(self.num_key_value_groups, 1)
        v = self.split(self.v_proj(hidden_states)).repeat_interleave(self.num_key_value_groups, 1)
        self.logits = self.product(q, k)
        for function in self.functions:
            self.logits = function(z=self.logits, x=hidden_states, q=q.flatten(0, 1), k=k.flatten(0, 1))
        return self.o_proj((self.logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


def heads_moved_by_rows(attention: Written, param: nn.Parameter, rows: list[int]) -> set[int]:
    """The heads whose softmax changes if these rows change. The measurement is judged by it."""
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()

    def probabilities() -> Tensor:
        attention(x)
        return attention.logits.softmax(-1)

    with torch.no_grad():
        before, was = probabilities(), param.clone()
        param[rows] += 0.1 * torch.randn(param[rows].shape, dtype=torch.double)
        moved = (probabilities() - before).abs().amax((0, 2, 3)) > 1e-9
        param.copy_(was)
    return set(moved.nonzero().flatten().tolist())


def judged(attention: Written) -> tuple[bool, dict[tuple[str, int], set[int]]]:
    """Whether heads are mixed, and the heads that change with each row of q and k, with random learned tensors."""
    attention = copy.deepcopy(attention).double()
    with torch.no_grad():
        for param in attention.functions.parameters():
            param.copy_(torch.randn(param.shape))
    weights = {name: attention.get_parameter(name) for name in ("q_proj.weight", "k_proj.weight")}
    moved = {
        (name, row): heads_moved_by_rows(attention, param, [row])
        for name, param in weights.items()
        for row in range(len(param))
    }
    mixed = any(len(heads) > 1 for (name, _), heads in moved.items() if name == "q_proj.weight")
    return mixed, {row: heads for row, heads in moved.items() if heads}


def read(model: nn.Module, finding: Any) -> dict[tuple[str, int], set[int]]:
    """For every row of q and k, the heads that read it according to the paths; heads are numbered by their query."""
    names = {id(param): name.removeprefix(f"{NAME}.") for name, param in model.named_parameters()}
    found: dict[tuple[str, int], set[int]] = {}
    (path,) = finding.paths
    for weight, blocks in zip(path.weights, path.reads.tolist(), strict=True):
        for row, block in enumerate(weight.block_of_row.tolist()):
            heads = {head for head, own in enumerate(blocks) if own == block}
            found[names[id(weight.param)], row] = heads
    return found


def same_partition(one: dict[tuple[str, int], set[int]], other: dict[tuple[str, int], set[int]]) -> bool:
    """Whether two descriptions are equal but for the numbers of heads, in all rows of the first."""
    pairs = {(frozenset(one[row]), frozenset(other[row])) for row in one}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def assert_measured_as_judged(attention: Written) -> bool:
    mixed, moved = judged(attention)
    model = Model(HF, attention)
    (finding,) = measured_paths(model, SAMPLE).values()
    if mixed:
        assert finding.unknown
        assert "mixes the logits of its heads" in finding.reason
    else:
        assert not finding.reason
        found = read(model, finding)
        assert len(found) == 32 + attention.k_proj.get_parameter("weight").shape[0]
        assert same_partition(moved, found)
    return mixed


def starts(functions: dict[str, Callable[[str], Function]]) -> list[Any]:
    """Every function with every way in which its parameters can start."""
    return [
        pytest.param(make(of), id=f"{name}, {of}")
        for name, make in functions.items()
        for of in ("random", "zero", "identity")
        if of == "random" or make(of).learned
    ]


ROWS = random.Random(0).sample(range(32), 32)
LAYOUTS = ["matmul", "einsum", "merged", "heads first", "heads last"]


@pytest.mark.parametrize("function", starts(MIXING))
def test_heads_that_are_mixed_in_any_way_are_refused(function: Function) -> None:
    assert assert_measured_as_judged(Written(function, layout="matmul", rows=ROWS))


@pytest.mark.parametrize("function", starts(OF_ITS_OWN | {"masked with infinity": lambda _: Function(causal)}))
def test_a_logit_may_be_any_function_of_its_own_heads_products(function: Function) -> None:
    assert not assert_measured_as_judged(Written(function, layout="matmul", rows=ROWS))


@pytest.mark.parametrize("seed", range(8))
def test_functions_of_logits_in_any_order_and_layout_are_measured_as_they_are_judged(seed: int) -> None:
    """The measurement is compared with softmaxes after a change of rows."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    own = draw.choices(list(OF_ITS_OWN.values()), k=draw.choice([0, 1, 2]))
    chosen = own + draw.choices(list(MIXING.values()), k=seed % 2)
    draw.shuffle(chosen)
    functions = [make(draw.choice(["random", "zero", "identity"])) for make in chosen]
    rows, groups = draw.sample(range(32), 32), draw.choice([4, 2, 1])
    attention = Written(*functions, layout=draw.choice(LAYOUTS), rows=rows, groups=groups)
    assert_measured_as_judged(attention)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["linear, residual", "flip", "baddbmm"])
def test_two_tokens_are_enough_to_see_that_heads_are_mixed(name: str, shape: tuple[int, int]) -> None:
    model = Model(HF, Written(MIXING[name]("zero"), layout="matmul", rows=ROWS))
    (finding,) = measured_paths(model, SAMPLE[: shape[0], : shape[1]]).values()
    assert "mixes the logits of its heads" in finding.reason


class Scores(nn.Module):
    """Products of queries and keys, in a module without weights."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT


class Talk(nn.Module):
    """Mixes heads and takes the softmax, in a module of its own."""

    def __init__(self, mixes: bool = True) -> None:
        super().__init__()
        self.mix, self.mixes = nn.Conv2d(HEADS, HEADS, 1, bias=False), mixes

    def forward(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits + self.mix(logits) if self.mixes else logits, dim=-1)


class InParts(Plain):
    """The product is made in one module, the softmax in another."""

    def __init__(self, mixes: bool) -> None:
        super().__init__(groups=4)
        self.scores, self.talk = Scores(), Talk(mixes)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.talk(self.scores(query, key)) @ value


class ByMask(Plain):
    """The fused kernel gets another head's logits as its mask."""

    def __init__(self, mixes: bool) -> None:
        super().__init__(groups=4)
        self.mixes = mixes

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        added = query @ key.mT
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added.flip(1) if self.mixes else added)


class InOneEinsum(Plain):
    """The product and the mixing in one call."""

    def __init__(self, mixes: bool) -> None:
        super().__init__(groups=4)
        self.mix = nn.Parameter(torch.eye(4) if mixes else torch.ones(4))
        self.equation = "bhid,bhjd,gh->bgij" if mixes else "bhid,bhjd,h->bhij"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.einsum(self.equation, query, key, self.mix).softmax(-1) @ value


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("kind", [InParts, ByMask, InOneEinsum])
def test_where_heads_are_mixed_does_not_matter(kind: Callable[[bool], nn.Module], mixes: bool) -> None:
    (finding,) = measured_paths(Model(HF, kind(mixes)), SAMPLE).values()
    assert ("mixes the logits of its heads" in finding.reason) == mixes
    assert [weight.blocks for path in finding.paths for weight in path.weights] == ([] if mixes else [4, 4])


def test_mixed_heads_are_left_alone_with_a_warning_and_the_rest_attaches() -> None:
    model = Model(HF, Written(MIXING["flip"]("zero"), layout="matmul", rows=ROWS), Plain())
    with pytest.warns(UserWarning, match="mixes the logits of its heads"):
        assert [path.weights[0].name for path in logit_paths(model, SAMPLE)] == ["model.layers.1.self_attn.q"]


@pytest.mark.parametrize("rows", [([0, 1], [1, 2], [3]), ([0], [1, 2], [2, 3])])
def test_heads_that_share_some_of_their_rows_are_mixed(rows: tuple[list[int], ...]) -> None:
    param = nn.Parameter(torch.ones(4, 3))
    masks = [torch.isin(torch.arange(4), torch.tensor(each))[:, None] for each in rows]
    with pytest.raises(NotRowsError, match="heads share some rows of w, but not all that they read"):
        weight_of(param, masks, {id(param): "w"})
