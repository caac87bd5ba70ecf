"""Muon. Judges: torch.optim.Muon, in bf16; and the same algorithm line by line, one matrix after another."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models import assert_equal
from muon_by_hand import reference, reference_step
from quacklr import QuacK, mha, packed
from quacklr.lab.optim import Muon, muon, newton_schulz, orthogonalise

SHAPES = [(24, 24), (16, 40), (40, 16), (24, 24), (12, 16)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": "rms"},
    {"nesterov": False},
    {"weight_decay": 0.5},
    {"scale": "rms", "nesterov": False, "momentum": 0.8, "weight_decay": 0.1},
]


def make(shapes: list[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=dtype).requires_grad_() for shape in shapes]


def give_gradients(params: list[Tensor], step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for param in params:
        transposed = torch.randn(param.shape[::-1], generator=random, dtype=param.dtype)
        param.grad = transposed.T  # not contiguous


def cut_gradients(whole: list[Tensor], blocks: list[Tensor]) -> None:
    """The gradient of each block, cut from that of its parameter."""
    grads = [grad for param in whole if param.grad is not None for grad in param.grad.chunk(4)]
    for block, grad in zip(blocks, grads, strict=True):
        block.grad = grad


def run(optimizer: Optimizer, params: list[Tensor], *steps: int) -> list[Tensor]:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def with_singular_values(values: Tensor, columns: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, len(values), generator=random).double() for n in (len(values), columns))
    return (torch.linalg.qr(left).Q * values @ torch.linalg.qr(right).Q.T).float()


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 0.02), (torch.bfloat16, 1e-3)])  # bf16 as on a GPU
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_steps_as_torch_does_within_bf16(
    options: dict[str, Any], dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (muon, newton_schulz):
        monkeypatch.setattr(module, "precision", lambda _: dtype)
    ours, theirs, start = make(), make(), make()
    same = {"weight_decay": 0.0, **options}
    scale = {"rms": "match_rms_adamw", "jordan": "original"}[same.pop("scale", "jordan")]
    run(Muon(ours, lr=0.1, **options), ours, *range(6))
    run(torch.optim.Muon(theirs, lr=0.1, adjust_lr_fn=scale, **same), theirs, *range(6))
    for mine, torchs, old in zip(ours, theirs, start, strict=True):
        assert (mine - torchs).norm() < near * (mine - old).norm()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_equal_the_algorithm_in_plain_python(options: dict[str, Any]) -> None:
    ours, theirs = make(dtype=torch.float64), make(dtype=torch.float64)
    run(Muon(ours, lr=0.1, **options), ours, *range(4))
    buffers = [torch.zeros_like(param) for param in theirs]
    for step in range(4):
        give_gradients(theirs, step)
        for param, buffer in zip(theirs, buffers, strict=True):
            assert param.grad is not None
            reference_step(param.detach(), param.grad, buffer, 0.1, options)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(128, 128), (512, 128), (128, 512), (32, 128), (30, 59), (1, 5)], ids=str)
def test_an_update_is_that_of_an_fp32_newton_schulz(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    updates_BRC = torch.randn(3, *shape, generator=random) * torch.tensor([1e-6, 1, 1e6]).view(3, 1, 1)
    for mine, update in zip(orthogonalise(updates_BRC), updates_BRC, strict=True):
        torch.testing.assert_close(mine, reference(update), rtol=0, atol=1e-5)


@pytest.mark.parametrize("columns", [128, 512])
def test_nearly_singular_updates_are_as_exact_as_in_fp32(columns: int) -> None:
    rank = torch.arange(128.0)
    spectra = [1 / (rank + 1), 10 ** (-rank / 20), torch.where(rank < 1, 1.0, 1e-3), torch.where(rank < 8, 1.0, 0.0)]
    for values in spectra:
        update = with_singular_values(values, columns)
        torch.testing.assert_close(
            orthogonalise(update[None])[0].double(), reference(update.double()), rtol=0, atol=1e-5
        )


def test_singular_values_end_in_the_known_band() -> None:
    values = torch.logspace(0, -2, 64)
    for update in (with_singular_values(values, 64), with_singular_values(values, 200)):
        singular = torch.linalg.svdvals(orthogonalise(update[None])[0])
        assert singular.min() > 0.68
        assert singular.max() < 1.21


@pytest.mark.parametrize("shape", [(16, 24, 24), (8, 64, 16), (8, 32, 128), (5, 3, 7), (4, 128, 512)], ids=str)
def test_a_matrix_gives_the_same_bits_alone_in_a_batch_and_again(shape: tuple[int, ...]) -> None:
    updates_BRC = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept = updates_BRC.clone()
    together = orthogonalise(updates_BRC)
    assert_equal(updates_BRC, kept)
    assert_equal(torch.cat([orthogonalise(update_RC[None]) for update_RC in updates_BRC]), together)
    assert_equal(orthogonalise(kept, overwrite=True), together)


def test_the_precision_is_the_devices_and_never_less_than_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert orthogonalise(torch.ones(1, 2, 3, dtype=dtype)).dtype == expected

    class OnGpu:
        dtype, device = torch.float32, torch.device("cuda")

    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, yes=supported, **__: yes)
        assert newton_schulz.precision(OnGpu()) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", ["jordan", "rms"])
def test_blocks_step_as_separate_parameters(scale: Any) -> None:
    whole = make([(24, 16), (40, 16)])
    blocks = [part.clone().requires_grad_() for param in whole for part in param.detach().chunk(4)]
    one, many = Muon(whole, lr=0.1, scale=scale, blocks=4), Muon(blocks, lr=0.1, scale=scale)
    for step in range(3):
        give_gradients(whole, step)
        cut_gradients(whole, blocks)
        one.step()
        many.step()
    assert_equal(torch.cat(whole), torch.cat(blocks))


def test_groups_share_a_batch_and_keep_their_settings() -> None:
    settings: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.3, "momentum": 0.5, "scale": "rms", "weight_decay": 0.1}]
    together, apart = make([(16, 40)] * 2), make([(16, 40)] * 2)
    groups = [{"params": [param], **setting} for param, setting in zip(together, settings, strict=True)]
    optimizer = Muon(groups, lr=1.0)
    others = [Muon([param], **setting) for param, setting in zip(apart, settings, strict=True)]
    for step in range(3):
        give_gradients(together, step)
        give_gradients(apart, step)
        for each in (optimizer, *others):
            each.step()
    assert_equal(together, apart)


def test_equal_shapes_are_orthogonalised_at_once_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(update_BRC: Tensor, *, overwrite: bool) -> Tensor:
        seen.append(tuple(update_BRC.shape))
        return orthogonalise(update_BRC, overwrite=overwrite)

    monkeypatch.setattr(muon, "orthogonalise", watched)
    params, bounded = make(), make()
    for each, most in ((params, Muon.max_stack_numel), (bounded, 24 * 24 + 1)):
        optimizer = Muon([{"params": each[:3], "lr": 0.1}, {"params": each[3:], "lr": 0.2}], lr=0.1)
        optimizer.split({each[1]: 2, each[2]: 5})
        optimizer.max_stack_numel = most
        run(optimizer, each, 0)
    assert sorted(seen[:4]) == [(1, 12, 16), (2, 8, 40), (2, 24, 24), (5, 8, 16)]
    assert sorted(seen[4:]) == [(1, 12, 16), (1, 24, 24), (1, 24, 24), (2, 8, 40), (5, 8, 16)]
    assert_equal(bounded, params)


def test_a_resumed_run_continues_bitwise_also_after_a_split() -> None:
    through, before, after = make(), make(), make()
    straight, first, second = (Muon(zip("abcde", params, strict=True), lr=0.1) for params in (through, before, after))
    for optimizer, params in ((straight, through), (first, before), (second, after)):
        optimizer.split({params[0]: 4, params[4]: 3})
        cut = {group["blocks"]: group["param_names"] for group in optimizer.param_groups}
        assert cut == {4: ["a"], 1: ["b", "c", "d"], 3: ["e"]}
    expected = run(straight, through, 0, 1, 2, 3)
    halfway = run(first, before, 0, 1)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for param, value in zip(after, halfway, strict=True):
        param.data.copy_(value)
    assert_equal(run(second, after, 2, 3), expected)


def test_a_step_is_linear_in_lr() -> None:
    moves = []
    for factor in (1.0, 0.375):
        params = make(dtype=torch.float64)
        optimizer = Muon(params, lr=0.1, weight_decay=0.3)
        before = run(optimizer, params, 0)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        moves.append([(now - old) / factor for now, old in zip(run(optimizer, params, 1), before, strict=True)])
    torch.testing.assert_close(moves[1], moves[0], rtol=1e-12, atol=1e-14)


def test_quack_over_heads_as_blocks_is_a_learning_rate_for_each_head() -> None:
    torch.manual_seed(0)
    q, k = (nn.Linear(16, 16, bias=False, dtype=torch.float64) for _ in range(2))
    whole: list[Tensor] = [q.weight, k.weight]
    heads = [part.clone().requires_grad_() for weight in whole for part in weight.detach().chunk(4)]
    one, many = Muon(whole, lr=0.1, blocks=4), Muon([{"params": [head]} for head in heads], lr=0.1)
    adamw = torch.optim.AdamW(nn.RMSNorm(16).parameters())
    quack = QuacK(mha(*packed(q, ("q", 4, 4)), *packed(k, ("k", 4, 4))), [one, adamw], tau=0.7)
    for step in range(4):
        rates = torch.cat(list(quack.rates().values())).tolist()
        for group, rate in zip(many.param_groups, rates, strict=True):
            group["lr"] = 0.1 * rate
        give_gradients(whole, step)
        cut_gradients(whole, heads)
        one.step()
        many.step()
    torch.testing.assert_close(torch.cat(whole), torch.cat(heads), rtol=1e-6, atol=1e-8)
    assert max(abs(rate / 0.7 - 1) for rate in rates) > 0.01  # the rates were not just tau


def test_a_parameter_without_a_gradient_stays_and_a_closure_gives_the_loss() -> None:
    moved, still = make([(4, 6), (4, 6)])
    optimizer = Muon([moved, still], lr=0.1)
    before = [moved.detach().clone(), still.detach().clone()]

    def closure() -> float:
        loss = moved.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == before[0].square().sum().item()
    assert_equal(still.detach(), before[1])
    assert not torch.equal(moved.detach(), before[0])
    assert still not in optimizer.state


def test_a_gradient_of_zeros_and_an_lr_of_zero_move_nothing() -> None:
    (param,) = make([(6, 4)])
    start = param.detach().clone()
    param.grad = torch.zeros(6, 4)
    Muon([param], lr=0.1).step()
    assert_equal(run(Muon([param], lr=0.0, weight_decay=1.0), [param], 0), [start])


def test_what_muon_cannot_step_is_refused_by_name() -> None:
    square, vector = torch.ones(4, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"matrices, but norm\.weight has shape \(4,\); give it to AdamW"):
        Muon([("norm.weight", vector)], lr=0.1)
    with pytest.raises(ValueError, match=r"rows of q of shape \(4, 4\) cannot be cut into 3 equal blocks"):
        Muon([("q", square)], lr=0.1, blocks=3)
    with pytest.raises(ValueError, match="scale must be one of jordan, rms, ratio, not 'adam'"):
        Muon([square], lr=0.1, scale="adam")  # type: ignore[arg-type]
    optimizer = Muon([square], lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter has shape \(4,\)"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1


def test_a_split_that_cannot_be_is_refused() -> None:
    params = make([(4, 6), (4, 6)])
    optimizer = Muon([params[0]], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(4, 6\) is to be split but is not this Muon's"):
        optimizer.split({params[1]: 2})
    with pytest.raises(ValueError, match="cannot be cut into 3 equal blocks"):
        optimizer.split({params[0]: 3})
    run(optimizer, params[:1], 0)
    with pytest.raises(ValueError, match="before its first step and before load_state_dict"):
        optimizer.split({params[0]: 2})
