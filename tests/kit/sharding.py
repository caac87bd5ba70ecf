"""Sharded parameters beside the same ones in one process: the layouts, the steps on them, and what is compared.

A layout is its global parameters, the paths over them, and for each parameter a word of one letter a mesh dimension:

    "0" "1" "2"  Shard(0), Shard(1), ...     "r"  Replicate     "s"  FSDP2's strided Shard(0), in front of TP's Shard(0)
    "-"          the parameter's mesh has no such dimension; "" or "--": it is a plain tensor, the same on every rank

Gradients are global and given, so that both sides take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from quacklr import Budget, ConstantTau, LogitPath, Paper, QuacK, Rule, Weight, mha, mla, packed, spectral

Params = Mapping[str, Tensor]
TAU = 0.5


@dataclass(frozen=True)
class Layout:
    """`shapes` of the global parameters, `paths` over them, `places` as above; `floor` is the rule's."""

    shapes: Mapping[str, tuple[int, ...]]
    paths: Callable[[Params], list[LogitPath]]
    places: Mapping[str, str]
    mesh: tuple[int, ...] = (4,)
    floor: float = 0.0
    adapts: bool = True
    frozen: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Run:
    """What a run shows: all of it global, in plain tensors. `rates` are those before each step, and after the last."""

    rates: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]
    rate_of: dict[str, Tensor | None]
    state: dict[str, Any]
    collectives: list[int]


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh for all tasks of a rank: each new one would make process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def placed(tensor: Tensor, word: str, shape: tuple[int, ...]) -> Tensor:
    """The shard of a global tensor that this rank owns."""
    names = [name for name, letter in zip(("dp", "tp"), word, strict=False) if letter != "-"]
    if not names:
        return tensor.clone()
    mesh = mesh_of(shape) if len(names) == len(shape) else mesh_of(shape)[names[0]]
    return distribute_tensor(tensor, mesh, [placement(letter) for letter in word if letter != "-"], src_data_rank=None)


def placement(letter: str) -> Placement:
    if letter == "s":
        return _StridedShard(0, split_factor=2)
    return Replicate() if letter == "r" else Shard(int(letter))


def like(tensor: Tensor, param: Tensor) -> Tensor:
    """A global tensor, laid out as a parameter is."""
    if not isinstance(param, DTensor):
        return tensor.clone()
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the global tensor; on every rank, so all must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def gradient(of: Tensor, step: int, index: int) -> Tensor:
    """Global; some rows' are large and others' small, whichever dimension they lie along, so that heads part."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    value = torch.randn(of.shape, generator=generator)
    for dim, size in enumerate(of.shape):
        value *= 3 * torch.rand(size, generator=generator).pow(2).view([-1 if d == dim else 1 for d in range(of.ndim)])
    return value.to(of.dtype)


def parameters(layout: Layout, sharded: bool) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    params = {}
    for name, shape in layout.shapes.items():
        value = torch.randn(shape, generator=generator).to(layout.dtype) * (name not in layout.zeros)
        value = placed(value, layout.places.get(name, ""), layout.mesh) if sharded else value
        params[name] = nn.Parameter(value, requires_grad=name not in layout.frozen)
    return params


RULES: dict[str, Callable[[Layout], Rule]] = {
    "frobenius": lambda layout: Paper(TAU, floor=layout.floor) if layout.adapts else ConstantTau(TAU),
    "spectral": lambda layout: Paper(TAU, norm=spectral, floor=layout.floor),
    "budget": lambda _: Budget(0.3),
}


def run(layout: Layout, rule: str, kind: str, sharded: bool) -> Run:
    """Three steps with given gradients. What is frozen grows between them, as by another's hand."""
    params = parameters(layout, sharded)
    train = [param for param in params.values() if param.requires_grad]
    optimizer: Any = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[kind](train, lr=0.5, foreach=False)
    rates, history, collectives = [], [], []
    with QuacK(layout.paths(params), optimizer, rule=RULES[rule](layout)) as quack:
        state = quack.state_dict()
        for step in range(3):
            rates.append(quack.rates())
            set_gradients(params, step)
            with CommDebugMode() as comm:
                optimizer.step()
            collectives.append(comm.get_total_counts())
            with torch.no_grad():
                for index, param in enumerate(params.values()):
                    if not param.requires_grad:
                        param.add_(like(gradient(param, step, index), param))
            history.append({name: whole(param) for name, param in params.items()})
        rates.append(quack.rates())
        rate_of = {name: quack.rate_of(param) for name, param in params.items()}
    return Run(rates, history, rate_of, state, collectives)


def set_gradients(params: Mapping[str, nn.Parameter], step: int) -> None:
    for index, param in enumerate(params.values()):
        if param.requires_grad:
            param.grad = like(gradient(param, step, index), param)


def moved(run: Run) -> float:
    """How far a rate went from tau."""
    return max(float((rate / TAU - 1).abs().max()) for rates in run.rates for rate in rates.values())


def spread(rates: Mapping[str, Tensor]) -> float:
    """How far the rates of a weight's heads lie apart, in the weight where they do most."""
    return max((float(rate.max() / rate.min()) - 1 for rate in rates.values()), default=0.0)


def assert_same_rates(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-6) -> None:
    assert list(found) == list(wanted)
    for name, rate in wanted.items():
        assert type(found[name]) is Tensor, name
        torch.testing.assert_close(found[name], rate, rtol=rtol, atol=0)


def assert_same_run(found: Run, wanted: Run, rtol: float = 1e-6) -> None:
    """Every step's rates, every parameter after it, the rate of every row, and what a checkpoint would say."""
    assert_same_rates(found.state.get("sensitivity", {}), wanted.state.get("sensitivity", {}), rtol)
    for here, there in zip(found.rates, wanted.rates, strict=True):
        assert_same_rates(here, there, rtol)
    for here, there in zip(found.params, wanted.params, strict=True):
        for name, param in there.items():
            torch.testing.assert_close(here[name], param, rtol=10 * rtol, atol=10 * rtol)
    for name, rate in wanted.rate_of.items():
        mine = found.rate_of[name]
        assert type(mine) is type(rate), name
        if mine is not None and rate is not None:
            assert mine.shape == rate.shape
            torch.testing.assert_close(mine, rate, rtol=rtol, atol=0)


def full(heads: int, size: int, groups: int | None = None, dim: int = 0) -> dict[str, tuple[int, ...]]:
    rows = {"q": heads * size, "k": (groups or heads) * size}
    return {name: (8, count) if dim else (count, 8) for name, count in rows.items()}


def attention(heads: int, groups: int | None = None, dim: int = 0) -> Callable[[Params], list[LogitPath]]:
    """Separate q and k; with their biases, where there are any."""

    def paths(params: Params) -> list[LogitPath]:
        q, k = (
            packed(
                params[name], (name, blocks, params[name].shape[dim] // blocks), dim=dim, bias=params.get(f"{name}b")
            )
            for name, blocks in (("q", heads), ("k", groups or heads))
        )
        return mha(*q, *k)

    return paths


def fused(params: Params) -> list[LogitPath]:
    return mha(*packed(params["qkv"], ("q", 4, 3), ("k", 2, 3), (None, 2, 3), bias=params.get("b")))


def latent(params: Params) -> list[LogitPath]:
    sizes = {"dq": (1, 6), "dkv": (1, 6), "kr": (1, 2), "uq": (4, 3), "uk": (4, 3), "qr": (4, 2)}
    return mla(**{role: packed(params[role], (role, *size))[0] for role, size in sizes.items()})


def tied(params: Params) -> list[LogitPath]:
    """Two layers read one key."""
    (k,) = packed(params["k"], ("k", 3, 5))
    return [path for name in ("q", "q2") for path in mha(packed(params[name], (name, 3, 5))[0], k)]


def stacked(params: Params) -> list[LogitPath]:
    """A matrix a head: rows along the first two dimensions."""
    of_row = torch.arange(3).repeat_interleave(5)
    q, k = (Weight(name, params[name], of_row, dim=(0, 1)) for name in "qk")
    return mha(q, k)


def bunched(params: Params) -> list[LogitPath]:
    """Blocks of different sizes, out of order, with rows between them that are no one's; rows are planes."""
    q = Weight("q", params["q"], torch.tensor([2, 2, -1, 0, 0, 0, 1, -1, 2]))
    k = Weight("k", params["k"], torch.tensor([0, 0, 0, 1, 2, 2, 2]))
    return [
        LogitPath((q, k), heads=3),
        LogitPath((k, q), heads=4, block_of_head=[torch.tensor([0, 2, 2, 1]), torch.arange(4) % 3]),
    ]


def other_bias(params: Params) -> list[LogitPath]:
    """The query's bias is a part of a longer vector, laid out in another way."""
    of_row = torch.arange(4).repeat_interleave(3)
    bias = Weight("bias", params["qb"], torch.cat([torch.full((3,), -1), of_row.flip(0)]))
    return mha(Weight("q", params["q"], of_row, bias=bias), *packed(params["k"], ("k", 4, 3)))


MLA = {"dq": (6, 8), "dkv": (6, 8), "kr": (2, 8), "uq": (12, 6), "uk": (12, 6), "qr": (8, 6)}
TP_FSDP = {"dq": "0-", "dkv": "0-", "kr": "0-", "uq": "s0", "uk": "s0", "qr": "s0"}
BOTH, TWO = {"q": (12, 8), "k": (12, 8), "qb": (12,), "kb": (12,)}, (2, 2)
BACK = {"q": (8, 12), "k": (8, 12), "qb": (12,), "kb": (12,)}

LAYOUTS = {
    "whole heads": Layout(full(4, 3), attention(4), {"q": "0", "k": "0"}),
    "cut inside a head": Layout(full(3, 5), attention(3), {"q": "0", "k": "0"}),
    "one row for four ranks": Layout({"q": (3, 8), "k": (1, 8)}, attention(3, 1), {"q": "0", "k": "0"}),
    "columns": Layout(full(3, 5), attention(3), {"q": "1", "k": "1"}),
    "rows of one and columns of the other": Layout(full(3, 5), attention(3), {"q": "0", "k": "1"}),
    "rows and columns": Layout(full(3, 5), attention(3), {"q": "01", "k": "10"}, TWO),
    "columns twice": Layout(full(3, 5), attention(3), {"q": "11", "k": "00"}, TWO),
    "HSDP": Layout(full(3, 5), attention(3), {"q": "r0", "k": "r0"}, TWO),
    "HSDP, the other way": Layout(full(3, 5), attention(3), {"q": "0r", "k": "r1"}, TWO),
    "replicas only": Layout(full(3, 5), attention(3), {"q": "rr", "k": "--"}, TWO),
    "query sharded, key plain": Layout(full(3, 5), attention(3), {"q": "0"}),
    "grouped, each on a mesh dimension of its own": Layout(full(4, 3, 2), attention(4, 2), {"q": "0-", "k": "-0"}, TWO),
    "TP x FSDP": Layout(full(4, 3, 2), attention(4, 2), {"q": "s0", "k": "s0"}, TWO),
    "bias as its weight": Layout(BOTH, attention(4), dict.fromkeys(BOTH, "0")),
    "bias of columns": Layout(BOTH, attention(4), {"q": "1", "k": "1", "qb": "r", "kb": "0"}),
    "bias on another dimension": Layout(BOTH, attention(4), {"q": "0r", "k": "10", "qb": "-0", "kb": "00"}, TWO),
    "only the bias is sharded": Layout(BOTH, attention(4), {"qb": "0", "kb": "0"}),
    "a bias of another layout": Layout({**BOTH, "qb": (15,)}, other_bias, {"q": "0", "k": "0", "qb": "0"}),
    "transposed, columns": Layout(BACK, attention(4, dim=1), {"q": "1", "k": "10", "qb": "0", "kb": "r0"}, TWO),
    "fused": Layout({"qkv": (24, 8), "b": (24,)}, fused, {"qkv": "0", "b": "0"}),
    "fused, a bias apart": Layout({"qkv": (24, 8), "b": (24,)}, fused, {"qkv": "01", "b": "0r"}, TWO),
    "MLA": Layout(MLA, latent, dict.fromkeys(MLA, "0")),
    "MLA, TP x FSDP": Layout(MLA, latent, TP_FSDP, TWO),
    "tied": Layout({"q": (15, 8), "q2": (15, 8), "k": (15, 8)}, tied, {"q": "0", "q2": "1", "k": "0"}),
    "stacked, rows and columns": Layout({"q": (3, 5, 4), "k": (3, 5, 4)}, stacked, {"q": "01", "k": "12"}, TWO),
    "bunched, columns": Layout({"q": (9, 2, 6), "k": (7, 12)}, bunched, {"q": "21", "k": "r1"}, TWO),
    "frozen latents": Layout(MLA, latent, TP_FSDP, TWO, frozen=("dq", "uk", "kr")),
    "a floor": Layout(full(3, 5), attention(3), {"q": "0", "k": "1"}, floor=2.0, zeros=("k",)),
    "tau for good": Layout(full(3, 5), attention(3), {"q": "0", "k": "0"}, adapts=False),
    "float64": Layout(full(3, 5), attention(3), {"q": "0", "k": "1"}, dtype=torch.float64),
}
