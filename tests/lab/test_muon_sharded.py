"""Muon on DTensors. Judges: the plain Muon on whole tensors in one process, and the algorithm in plain Python."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from crew import Crew
from models import assert_equal
from muon_by_hand import reference_step
from quacklr.lab.model import MHA, MLA, Shape, build
from quacklr.lab.optim import Muon, MuonRecipe, muon, optimizers, orthogonalise
from quacklr.lab.optim.shard_exchange import shard_shapes, shard_specs

SHAPES = [(24, 24), (16, 40), (24, 24), (40, 16), (24, 24), (8, 40), (16, 40)]
UNEVEN = [(10, 8), (3, 8), (10, 8), (5, 8), (1, 6), (10, 8), (3, 8)]
OPTIONS: list[dict[str, Any]] = [
    {"weight_decay": 0.5},
    {"scale": "rms", "nesterov": False, "momentum": 0.8, "weight_decay": 0.1},
    {"blocks": 4},
    {"blocks": 8, "scale": "rms"},
]
Case = dict[str, Any]
ROWS: Case = {"mesh": (2,), "placements": [Shard(0)]}


def numbers(shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=random, dtype=dtype) for shape in shapes]


mesh_of = functools.cache(functools.partial(init_device_mesh, "cpu"))  # each one makes process groups


def spread(whole: Tensor, case: Case) -> Tensor:
    """As a DTensor, if the case has a mesh."""
    if "mesh" not in case:
        return whole.clone()
    return distribute_tensor(whole.clone(), mesh_of(case["mesh"]), case["placements"], src_data_rank=None)


def parameters(case: Case, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [nn.Parameter(spread(whole, case)) for whole in numbers(shapes, 0, case.get("dtype", torch.float32))]


def give_gradients(params: list[Tensor], case: Case, step: int) -> None:
    grads = numbers([param.shape for param in params], step + 1, params[0].dtype)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        param.grad = None if i in case.get("without", ()) else spread(grad, {**case, **case.get("grads", {})})


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def stepped(_: int, case: Case) -> list[Tensor]:
    """Parameters after four steps, on the mesh of the case or, without one, in one process."""
    params = parameters(case, case.get("shapes", SHAPES))
    optimizer = Muon(params, lr=0.1, **case.get("options", {}))
    optimizer.split({params[i]: 2 for i in case.get("split", ())})
    optimizer.max_stack_numel = case.get("most", Muon.max_stack_numel)
    for step in range(4):
        give_gradients(params, case, step)
        optimizer.step()
    return [whole(param) for param in params]


def assert_near(mine: Tensor, wanted: Tensor) -> None:
    assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def assert_as_one_process(crew: Crew, case: Case) -> None:
    expected = stepped(0, {key: value for key, value in case.items() if key not in ("mesh", "grads")})
    for found in crew(stepped, case):
        for mine, wanted in zip(found, expected, strict=True):
            assert_near(mine, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_step_as_whole_matrices_in_one_process(two: Crew, dim: int, options: dict[str, Any]) -> None:
    assert_as_one_process(two, {**ROWS, "placements": [Shard(dim)], "options": options})


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_sharded_steps_equal_the_algorithm_in_plain_python(two: Crew, options: dict[str, Any]) -> None:
    params, buffers = numbers(SHAPES, 0, torch.float64), [torch.zeros(shape).double() for shape in SHAPES]
    for step in range(4):
        for param, grad, buffer in zip(params, numbers(SHAPES, step + 1, torch.float64), buffers, strict=True):
            reference_step(param, grad, buffer, 0.1, options)
    for found in two(stepped, {**ROWS, "options": options, "dtype": torch.float64}):
        torch.testing.assert_close(found, params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        {"mesh": (4,), "placements": [Shard(0)]},
        {"mesh": (4,), "placements": [Shard(1)]},
        {"mesh": (4,), "placements": [Shard(0)], "most": 1, "split": (2, 5)},  # one shape of block, two of matrix
        {"mesh": (2, 2), "placements": [Replicate(), Shard(0)], "split": (2, 5)},
        {"mesh": (2, 2), "placements": [Shard(1), Replicate()]},
        {"mesh": (2, 2), "placements": [Replicate(), Replicate()]},
        {"mesh": (4, 1), "placements": [Shard(0), Shard(0)]},
        {"mesh": (4, 1), "placements": [Replicate(), Shard(0)]},  # one rank has all shards
        {"mesh": (4,), "placements": [Shard(0)], "without": (0, 4)},
        {"mesh": (4,), "placements": [Shard(0)], "grads": {"placements": [Replicate()]}},  # not as FSDP makes them
        {"mesh": (4,), "placements": [Shard(0)], "grads": {"placements": [Partial()]}},
    ],
    ids=str,
)
def test_uneven_and_empty_shards_replicas_and_missing_or_odd_gradients(four: Crew, case: Case) -> None:
    assert_as_one_process(four, {**case, "shapes": UNEVEN, "options": {"weight_decay": 0.2}})


def sizes(rank: int, dim: int) -> list[tuple[Any, Any]]:
    found = []
    for shape in [(length, 3) if dim == 0 else (3, length) for length in range(1, 14)]:
        tensor: Any = spread(torch.zeros(shape), {"mesh": (4,), "placements": [Shard(dim)]})
        found.append((shard_shapes(shape, *shard_specs(tensor))[rank], tuple(tensor.to_local().shape)))
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_the_sizes_of_shards_are_those_dtensor_makes(four: Crew, dim: int) -> None:
    assert all(ours == torchs for found in four(sizes, dim) for ours, torchs in found)


def collectives(_: int, case: Case, shapes: list[tuple[int, int]]) -> list[int]:
    """The number of collectives in the first and in the second step."""
    params, counts = parameters(case, shapes), []
    optimizer = Muon(params, lr=0.1, **case.get("options", {}))
    for step in range(2):
        give_gradients(params, case, step)
        with CommDebugMode() as comm:
            optimizer.step()
        counts.append(comm.get_total_counts())
    return counts


@pytest.mark.parametrize(
    ("case", "shapes", "expected"),
    [
        (ROWS, [(8, 8)] * 6, 2),
        (ROWS, [(8, 8)] * 12, 2),
        ({**ROWS, "placements": [Shard(1)]}, [(8, 8)] * 12, 2),
        ({**ROWS, "options": {"blocks": 4}}, [(8, 8)] * 2, 2),
        (ROWS, [(8, 8), (8, 4), (4, 8)] * 3, 6),
        ({**ROWS, "placements": [Replicate()]}, [(8, 8)] * 6, 0),
        ({"mesh": (2, 1), "placements": [Replicate(), Shard(0)]}, [(8, 8)] * 6, 0),
        ({}, [(8, 8)] * 6, 0),  # plain tensors
    ],
    ids=str,
)
def test_a_step_has_two_collectives_a_shape(two: Crew, case: Case, shapes: Any, expected: int) -> None:
    assert two(collectives, case, shapes) == [[expected] * 2] * 2


def owned(_: int, most: int) -> list[int]:
    """How many matrices this rank orthogonalised at a time, for shapes whose count is no multiple of four."""
    case, seen = {"mesh": (4,), "placements": [Shard(0)]}, []

    def watched(update_BRC: Tensor, *, overwrite: bool) -> Tensor:
        seen.append(len(update_BRC))
        return orthogonalise(update_BRC, overwrite=overwrite)

    params = parameters(case, [(8, 8)] * 3 + [(8, 4)] * 6 + [(4, 4)] + [(4, 8)] * 9)
    optimizer = Muon(params, lr=0.1)
    optimizer.max_stack_numel = most
    give_gradients(params, case, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonalise", watched)
        optimizer.step()
    return seen


def test_no_rank_owns_more_than_one_matrix_more_than_another(four: Crew) -> None:
    for most, at_once in ((Muon.max_stack_numel, 3), (64, 2)):  # two matrices of 4 x 8 numbers
        ranks = four(owned, most)
        assert [sum(seen) for seen in ranks] == [5, 5, 5, 4]
        assert max(max(seen) for seen in ranks) == at_once


DECODER = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.2)
GQA, LATENT = MHA(heads=4, kv_heads=2, head_dim=8), MLA(4, nope_dim=6, rope_dim=4, v_head_dim=6, d_cq=10, d_ckv=9)


def trained(rank: int, attention: MHA | MLA, ranks: int, dim: int = 0) -> dict[str, Tensor]:
    """Parameters after three steps on this rank's half of every batch, or in one process on all of it."""
    model = build(DECODER, attention, seed=0)
    if ranks > 1:
        for module in (*model.blocks, model):
            fully_shard(module, shard_placement_fn=lambda param: Shard(dim if param.ndim > 1 else 0))
    made = optimizers(MuonRecipe(lr=0.05, rest_lr=0.01, weight_decay=0.1), model)
    for step in range(3):
        tokens = torch.randint(0, 50, (4, 13), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(("attention", "dim"), [(GQA, 0), (GQA, 1), (LATENT, 0)], ids=str)
def test_a_decoder_under_fully_shard_trains_as_in_one_process(two: Crew, attention: MHA | MLA, dim: int) -> None:
    expected = trained(0, attention, 1)
    for found in two(trained, attention, 2, dim):
        for name, wanted in expected.items():
            assert_near(found[name], wanted)


def resumed(_: int) -> tuple[list[Tensor], list[Tensor]]:
    """Four steps without a break; and two steps, a save, a load into new parameters, and two steps."""
    through, before = parameters(ROWS, UNEVEN), parameters(ROWS, UNEVEN)
    straight, first = Muon(through, lr=0.1), Muon(before, lr=0.1)
    for step in range(4):
        if step == 2:
            file = io.BytesIO()
            torch.save((before, first.state_dict()), file)
            file.seek(0)
            before, state = torch.load(file, weights_only=False)
            first = Muon(before, lr=0.1)
            first.load_state_dict(state)
        for params, optimizer in ((through, straight), (before, first)):
            give_gradients(params, ROWS, step)
            optimizer.step()
    return [whole(param) for param in through], [whole(param) for param in before]


def test_a_saved_state_continues_bitwise(two: Crew) -> None:
    for straight, resumed_there in two(resumed):
        assert_equal(resumed_there, straight)


def checkpointed(_: int, ranks: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    if ranks > 1:
        fully_shard(model)
    optimizer = Muon(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 6)).square().sum().backward()
        optimizer.step()
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]


def test_torch_distributed_checkpoint_assembles_the_momentum(two: Crew) -> None:
    torch.testing.assert_close(two(checkpointed, 2)[0], checkpointed(0, 1), rtol=1e-5, atol=1e-6)


def refused(rank: int) -> list[str]:
    mesh, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), init_device_mesh("cpu", (4,))
    both, ragged = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(4 if rank == 0 else 2, 8)
    fully_shard(parallelize_module(both, mesh["tensor"], {"0": ColwiseParallel()}), mesh=mesh["data"])
    params = [
        *both.parameters(),
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None),
        DTensor.from_local(torch.ones(2, 8), line, [_StridedShard(0, split_factor=2)]),
        DTensor.from_local(torch.ones(8, 8), line, [Partial()]),
        DTensor.from_local(ragged, line, [Shard(0)], shape=torch.Size((10, 8)), stride=(8, 1)),
    ]
    return [refusal(param) for param in params]


def refusal(param: Tensor) -> str:
    optimizer = Muon([("plain", torch.ones(2, 2))], lr=0.1)
    with pytest.raises(ValueError, match="blocks.0.q") as refused_so:
        optimizer.add_param_group({"params": [("blocks.0.q", param)]})
    assert len(optimizer.param_groups) == 1
    return str(refused_so.value)


def test_placements_that_an_exchange_cannot_assemble_are_refused_by_name(four: Crew) -> None:
    first, second, *_ = four(refused)
    for said in (*first[:4], *second[:4]):
        assert "sharded over one mesh dimension, but blocks.0.q is placed as (" in said
        assert "shard it by fully_shard without tensor parallelism, or give it to AdamW" in said
    assert "this rank has (4, 8) of blocks.0.q of shape (10, 8), but torch.chunk would give it (3, 8)" in first[4]


def test_one_process_does_not_load_dtensor() -> None:
    script = "import sys, quacklr.lab.optim; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
