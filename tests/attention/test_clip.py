"""QK clip equals Kimi K2's Algorithm 1, written out head by head, and touches nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lab_runs import block
from models import assert_equal
from quacklr import LogitPath, QKClip, logit_paths, mha, packed
from quacklr.attention.clip import factors
from quacklr.attention.clip import gamma as gamma_of
from quacklr.lab.model import MHA, MLA, Decoder, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
FULL = MHA(heads=4, kv_heads=4, head_dim=8)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
MQA = MHA(heads=4, kv_heads=1, head_dim=8)
LATENT = MLA(heads=3, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (3, 12), generator=generator) for _ in range(count)]


def first_logits(model: Decoder, tokens: Tensor) -> Tensor:
    """(B, H, I, J) of the first block by hand, -inf in the future."""
    a, x = block(model).attention, block(model).attention_norm(model.embedding(tokens))
    if isinstance(getattr(a, "kv_heads", None), int):
        q = model.rotary(a.q(x).unflatten(-1, (4, 8)))
        k = model.rotary(a.k(x).unflatten(-1, (a.kv_heads, 8))).repeat_interleave(4 // a.kv_heads, dim=2)
        logit = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    else:
        q, k = a.uq(a.dq(x)).unflatten(-1, (3, 8)), a.uk(a.dkv(x)).unflatten(-1, (3, 8))
        turned, shared = model.rotary(a.qr(a.dq(x)).unflatten(-1, (3, 4))), model.rotary(a.kr(x)[:, :, None])[:, :, 0]
        logit = torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,bjd->bhij", turned, shared)
        logit = logit / 12**0.5
    return logit + torch.full((12, 12), -torch.inf).triu(1)


def one_step(spec: MHA | MLA, threshold: float | None, micro_batches: int = 3) -> tuple[Decoder, Decoder, list[float]]:
    """The model after a clipped step, after the same step without, and each head's gamma by Kimi's formula.

    Without a threshold it is one that some heads pass and others do not.
    """
    clipped, plain = build(SHAPE, spec, seed=0), build(SHAPE, spec, seed=0)
    with torch.no_grad():
        heads = torch.cat([first_logits(plain, tokens).amax((0, 2, 3))[None] for tokens in batches(micro_batches)])
    largest = heads.amax(0).tolist()
    threshold = threshold or sum(largest) / len(largest)
    for model in (clipped, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        clip = QKClip(model, optimizer, threshold) if model is clipped else None
        for tokens in batches(micro_batches):
            model(tokens).square().mean().backward()
        optimizer.step()
        if clip:
            clip.remove()
    return clipped, plain, [min(1.0, threshold / each) for each in largest]


def rows(model: Decoder, role: str, head: int, heads: int) -> Tensor:
    weight: Tensor = getattr(block(model).attention, role).weight.detach()
    return weight.unflatten(0, (heads, -1))[head]


def test_mha_is_scaled_by_the_root_of_gamma_on_both_sides() -> None:
    clipped, plain, gammas = one_step(FULL, threshold=None)
    assert min(gammas) < max(gammas) == 1
    for head, gamma in enumerate(gammas):
        root = gamma**0.5
        for role in "qk":
            torch.testing.assert_close(rows(clipped, role, head, 4), root * rows(plain, role, head, 4))


@pytest.mark.parametrize("threshold", [None, 2.0], ids=["some heads", "all heads"])
def test_mla_is_scaled_as_in_kimi_k2(threshold: float | None) -> None:
    clipped, plain, gammas = one_step(LATENT, threshold)
    assert min(gammas) < 1
    assert (max(gammas) < 1) == (threshold is not None)
    for head, gamma in enumerate(gammas):
        for role, factor in (("uq", gamma**0.5), ("uk", gamma**0.5), ("qr", gamma)):
            torch.testing.assert_close(rows(clipped, role, head, 3), factor * rows(plain, role, head, 3))
    for role in ("dq", "dkv", "kr", "uv", "o"):
        one, other = (getattr(block(model).attention, role).weight for model in (clipped, plain))
        assert_equal(one, other)


@pytest.mark.parametrize("threshold", [None, 5.0], ids=["some heads", "all heads"])
@pytest.mark.parametrize("spec", [FULL, GQA, MQA], ids=["MHA", "GQA", "MQA"])
def test_every_heads_product_shrinks_by_its_own_gamma_and_no_weight_grows(spec: MHA, threshold: float | None) -> None:
    clipped, plain, gammas = one_step(spec, threshold)
    assert min(gammas) < 1
    for head, gamma in enumerate(gammas):
        group = head // (4 // spec.kv_heads)
        q, k = (rows(model, "q", head, 4) for model in (clipped, plain))
        q_factor = float(q.norm() / k.norm())
        k_factor = float(
            rows(clipped, "k", group, spec.kv_heads).norm() / rows(plain, "k", group, spec.kv_heads).norm()
        )
        assert q_factor * k_factor == pytest.approx(gamma, rel=1e-5)
        assert max(q_factor, k_factor) < 1 + 1e-6


def test_below_the_threshold_nothing_changes_bitwise() -> None:
    clipped, plain, gammas = one_step(GQA, threshold=1e4)
    assert min(gammas) == 1
    for one, other in zip(clipped.parameters(), plain.parameters(), strict=True):
        assert_equal(one, other)


def test_mla_with_one_head_is_scaled_as_with_many() -> None:
    spec = MLA(heads=1, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8)
    model = build(SHAPE, spec, seed=0)
    paths = logit_paths(model).by_module["blocks.0.attention"]
    scaled = factors(paths, torch.tensor([0.25]))
    found = {weight.name.rsplit(".")[-1]: float(factor) for weight, factor in scaled.items()}
    assert found == {"uq": 0.5, "uk": 0.5, "qr": 0.25}


def test_values_and_everything_off_the_paths_is_untouched() -> None:
    clipped, plain, _ = one_step(GQA, threshold=0.5)
    for (name, one), other in zip(clipped.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other) == (not name.endswith(("attention.q.weight", "attention.k.weight"))), name


def test_maxima_that_are_not_above_zero_do_no_harm() -> None:
    for largest in (-3.0, 0.0, float("nan"), float("inf"), -float("inf")):
        assert_equal(gamma_of(torch.tensor([largest]), 1e-3), torch.ones(1))


def test_the_maximum_is_forgotten_after_a_step_and_not_by_a_forward_without_gradients() -> None:
    model = build(SHAPE, FULL, seed=0)
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.0),
        torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.0),
    ]
    clip = QKClip(model, optimizers, threshold=1e4)
    first, second = batches(2)
    for tokens, expected in ((first, [first]), (second, [first, second])):
        model(tokens).square().mean().backward()
        with torch.no_grad():
            model(batches(3)[2])
        wanted = torch.stack([first_logits(model, each).amax((0, 2, 3)) for each in expected]).amax(0)
        torch.testing.assert_close(clip.max_logits()["blocks.0.attention"], wanted.detach())
    for optimizer in optimizers:
        optimizer.step()
    model(second).square().mean().backward()
    torch.testing.assert_close(
        clip.max_logits()["blocks.0.attention"], first_logits(model, second).amax((0, 2, 3)).detach()
    )


def test_under_autocast_the_maxima_are_in_float32() -> None:
    model, (tokens,) = build(SHAPE, FULL, seed=0), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(model, optimizer, threshold=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens).square().mean().backward()
    largest = clip.max_logits()["blocks.0.attention"]
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest, first_logits(model, tokens).amax((0, 2, 3)).detach(), rtol=0.02, atol=0.02)
    optimizer.step()


def test_a_second_step_without_a_forward_does_not_clip_again() -> None:
    model = build(SHAPE, FULL, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    clip = QKClip(model, optimizer, threshold=0.5)
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    once = block(model).attention.q.weight.detach().clone()
    with pytest.warns(UserWarning, match="saw no training forward since the last step"):
        optimizer.step()
    assert clip.max_logits() == {}
    assert_equal(block(model).attention.q.weight, once)


def test_a_clip_that_sees_no_logits_says_so_instead_of_doing_nothing() -> None:
    class Attention(torch.nn.Module):
        """Attends by a softmax that is written out to the last."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            weight = (self.q(x) @ self.k(x).mT).exp()
            return (weight / weight.sum(-1, keepdim=True)) @ x

        def logit_paths(self) -> list[LogitPath]:
            return mha(*packed(self.q, ("q", 1, 16)), *packed(self.k, ("k", 1, 16)))

    attention = Attention()
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    QKClip(attention, optimizer)
    attention(torch.randn(2, 5, 16)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"saw no attention logits in training mode before this step.*flash attention"
    ):
        optimizer.step()


def test_an_attention_that_is_never_heard_is_named_once() -> None:
    model = torch.nn.ModuleList([build(SHAPE, FULL, seed=0), build(SHAPE, FULL, seed=1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QKClip(model, optimizer)
    for expected in (True, False):
        model[0](batches(1)[0]).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [("1.blocks.0.attention" in str(each.message)) for each in caught] == [True] * expected


def test_an_optimizer_that_does_not_step_the_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="its parameter is in none of the optimizers given"):
        QKClip(build(SHAPE, FULL, seed=0), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_a_threshold_that_means_nothing_is_refused() -> None:
    model = build(SHAPE, FULL, seed=0)
    with pytest.raises(ValueError, match="threshold=-1"):
        QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1), threshold=-1)
