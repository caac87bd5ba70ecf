"""Logits computed with caches equal those of the whole sequence, and caches have the expected size."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decode_by_hand import by_hand, normed_products_from_latents, qkv_latent
from lab_runs import block
from quacklr import QuacK
from quacklr.lab.config import KINDS
from quacklr.lab.errors import UserError
from quacklr.lab.methods import AbsorbedQKNorm, Default, Method, QKNorm, SoftCap, alter
from quacklr.lab.model import MHA, MLA, Decoder, Shape, build
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.decoder import build_empty
from quacklr.lab.presets import PRESETS
from quacklr.lab.train.command import main as train

SHAPE = Shape(d_model=48, layers=2, d_ff=80, context=24, vocab=101, init_std=0.2)
SIZES: dict[str, Any] = {"heads": 3, "nope_dim": 16, "rope_dim": 8, "v_head_dim": 12, "d_cq": 20, "d_ckv": 14}
ATTENTIONS: dict[str, MHA | MLA] = {
    "MHA": MHA(heads=3, kv_heads=3, head_dim=16),
    "GQA": MHA(heads=6, kv_heads=2, head_dim=16),
    "MLA": MLA(**SIZES),
    "MLA with latent norms": MLA(**SIZES, latent_norm=True),
}
METHODS: dict[str, Method] = {name: kind() for name, kind in KINDS["method"].items()} | {"soft-cap": SoftCap(1.5)}
PAIRS = [(a, m) for a in ATTENTIONS for m in METHODS if "MLA" in a or m != "absorbed-qk-norm"]
OTHERS = ("default", "qk-norm", "absorbed-qk-norm", "soft-cap", "sigma-reparam")  # the rest compute what default does
CHUNKS = (3, 1, 7, 1, 5, 2, 5)


def tokens(batch: int = 2, positions: int = 24) -> Tensor:
    return torch.randint(0, 101, (batch, positions), generator=torch.Generator().manual_seed(1))


def perturbed(spec: MHA | MLA, method: Method, shape: Shape = SHAPE) -> Decoder:
    """A model with random weights and gains far from 1."""
    model = build(shape, spec, seed=0)
    alter(method, model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
            else:
                param.copy_(torch.rand(param.shape, generator=generator) * 1.5 + 0.5)
    return model.eval().requires_grad_(False)


def gone_on(model: Decoder, read: Tensor, sizes: list[int]) -> dict[int, Tensor]:
    """The logits after each chunk, by its last position."""
    caches, ends = model.caches(len(read)), [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return {end - 1: model.decode_step(read[:, start:end], caches) for start, end in pairwise(ends)}


def every_way(model: Decoder, read: Tensor) -> dict[str, dict[int, Tensor]]:
    long = read.shape[1]
    ways = {"one by one": gone_on(model, read, [1] * long), "odd chunks": gone_on(model, read, list(CHUNKS))}
    ways |= {f"{n}, then one by one": gone_on(model, read, [n] + [1] * (long - n)) for n in (2, 11, long)}
    ways |= {f"4, then {n}, then one": gone_on(model, read, [4, n, 1]) for n in (2, 3, 5, 8, 13, 19)}
    return ways | {"no cache": dict(enumerate(model(read).unbind(1)))}


@pytest.mark.parametrize(("attention", "method"), PAIRS)
def test_cached_absorbed_and_uncached_logits_agree_position_by_position(attention: str, method: str) -> None:
    """To 1e-5 of the largest: the whole forward is off by up to 4e-6 itself, which is rounding: see the next test."""
    model = perturbed(ATTENTIONS[attention], METHODS[method])
    expected = by_hand(model, tokens(), getattr(METHODS[method], "cap", None))
    size = expected.abs().max()
    assert size > 5
    for way, logits in every_way(model, tokens()).items():
        for position, logits_BV in logits.items():
            off = (logits_BV - expected[:, position]).abs().max() / size
            assert off < 1e-5, f"{way}: off by {off:.1e} at position {position}"


@pytest.mark.parametrize(("attention", "method"), [(a, m) for a, m in PAIRS if m in OTHERS])
def test_cached_and_uncached_logits_differ_by_rounding_only(attention: str, method: str) -> None:
    """In float64 it is a hundred million times smaller."""
    model = perturbed(ATTENTIONS[attention], METHODS[method]).double()
    expected = model(tokens())
    for way, logits in every_way(model, tokens()).items():
        for position, logits_BV in logits.items():
            torch.testing.assert_close(logits_BV, expected[:, position], rtol=0, atol=1e-12, msg=f"{way}, {position}")


class Made(TorchDispatchMode):
    """The sizes of all new allocations, in fp32 elements."""

    def __init__(self, model: nn.Module) -> None:
        start: Any = super().__init__  # which has no types
        start()
        self._old = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._old:
                self.sizes.append(tensor.untyped_storage().nbytes() // 4)
        return out


def numbers(spec: MHA | MLA, method: Method) -> float:
    """Cached elements per position and layer, from the allocations themselves."""
    model = perturbed(spec, method)
    with Made(model) as made:
        caches = model.caches(batch=3, positions=7)
    told = sum(cache.bytes_per_position for cache in caches) / 4
    assert told * 3 * 7 == sum(made.sizes)
    return told / SHAPE.layers


def test_a_cache_has_the_expected_elements_per_position() -> None:
    assert numbers(ATTENTIONS["MHA"], Default()) == numbers(ATTENTIONS["MHA"], QKNorm()) == 2 * 3 * 16
    assert numbers(ATTENTIONS["GQA"], Default()) == numbers(ATTENTIONS["GQA"], SoftCap()) == 2 * 2 * 16
    for spec in (ATTENTIONS["MLA"], ATTENTIONS["MLA with latent norms"]):
        for method in METHODS.values():
            wanted = {QKNorm: 3 * (16 + 8) + 3 * 12, AbsorbedQKNorm: 14 + 8 + 3}.get(type(method), 14 + 8)
            assert numbers(spec, method) == wanted, method


@pytest.mark.parametrize(
    ("preset", "method", "wanted"),
    [
        ("paper-mha", Default(), 4096),
        ("paper-mla", Default(), 320),
        ("paper-mla", QKNorm(), 6144),
        ("paper-mla", AbsorbedQKNorm(), 352),
    ],
)
def test_caches_of_the_papers_models_have_the_expected_size(preset: str, method: Method, wanted: int) -> None:
    model = build_empty(PRESETS[preset].shape, PRESETS[preset].attention, "meta")
    alter(method, model)
    assert [cache.bytes_per_position / 4 for cache in model.caches()] == [wanted] * 14


LONG = Shape(d_model=32, layers=2, d_ff=24, context=1024, vocab=64, init_std=0.2)
MANY_HEADS = MLA(heads=8, nope_dim=16, rope_dim=8, v_head_dim=16, d_cq=20, d_ckv=14)


@pytest.mark.parametrize("method", [Default(), AbsorbedQKNorm(), SoftCap(1.5)])
def test_decoding_a_token_computes_no_keys_or_values_of_earlier_ones(method: Method) -> None:
    """No allocation is larger than the latents, 14 + 8 elements a position; a key of all heads has 8 * 16."""
    model, read = perturbed(MANY_HEADS, method, LONG), tokens(2, 1001) % 64
    caches = model.caches(batch=2, positions=1001)
    model.decode_step(read[:, :1000], caches)
    seen: list[int] = []
    for attention in model.attentions().values():
        for up in (attention.get_submodule("uk"), attention.get_submodule("uv")):
            up.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[-2]))
    with Made(model) as made:
        model.decode_step(read[:, 1000:], caches)
    assert max(made.sizes) <= 2 * 1001 * (14 + 8)
    assert max(seen, default=0) <= 1


def test_plain_qk_norm_caches_whole_keys() -> None:
    model = perturbed(ATTENTIONS["MLA"], QKNorm(), Shape(**vars(SHAPE) | {"layers": 1}))
    caches, read = model.caches(2), tokens()
    model.decode_step(read, caches)
    a, x = block(model).attention, block(model).attention_norm(model.embedding(read))
    made = torch.cat([a.uk(a.dkv(x)).unflatten(-1, (3, -1)), a.kr(x)[:, :, None].expand(-1, -1, 3, -1)], dim=-1)
    content = (made / (made.square().mean(-1, keepdim=True) + 1e-6).sqrt() * a.k_norm.weight)[..., :16]
    keys = held(model, caches[0])[next(n for n, (_, x) in a.cache_layout().items() if x == 24)]
    torch.testing.assert_close(keys[..., :16], content.transpose(1, 2))


def held(model: Decoder, cache: Cache) -> dict[str, Tensor]:
    """The tensors in a cache of the first layer."""
    room = block(model).attention.cache_layout()
    nothing = {name: torch.empty(2, heads, 0, size) for name, (heads, size) in room.items()}
    return dict(zip(nothing, cache.append(**nothing), strict=True))


@pytest.mark.parametrize(("attention", "method"), [(a, m) for a, m in PAIRS if m in OTHERS])
def test_later_tokens_do_not_change_cached_entries(attention: str, method: str) -> None:
    """Other rows of the batch, or a rewound cache, do not change a bit."""
    model, read = perturbed(ATTENTIONS[attention], METHODS[method]), tokens()
    caches, fresh = model.caches(2), model.caches(2)
    model.decode_step(read[:, :9], caches)
    before = {name: kept.clone() for name, kept in held(model, caches[0]).items()}
    model.decode_step(read[:, 9:10], caches)
    model.decode_step(read[:, 10:17], caches)
    for cache in caches:
        cache.length = 9
    after = held(model, caches[0])
    assert all(torch.equal(kept, after[name]) for name, kept in before.items())
    model.decode_step(torch.stack([read[0, :9], (read[1, :9] + 1) % 101]), fresh)
    new = torch.stack([read[0, 17:18], read[1, 17:18]])
    one, other = model.decode_step(new, caches), model.decode_step(new, fresh)
    assert torch.equal(one[0], other[0])
    assert not torch.allclose(one[1], other[1])


def test_positions_continue_from_the_cache_and_affect_only_the_rotary_part() -> None:
    model = perturbed(ATTENTIONS["MLA"], Default(), Shape(**vars(SHAPE) | {"layers": 1}))
    straight, shifted = model.caches(2), model.caches(2)
    model.decode_step(tokens()[:, 1:3], straight)
    model.decode_step(tokens()[:, :2], shifted)
    model.decode_step(tokens()[:, 2:3], shifted)
    one, other = held(model, straight[0]), held(model, shifted[0])
    (latent, turned), (later_latent, later_turned) = (
        torch.cat(list(each.values()), dim=-1).split([14, 8], dim=-1) for each in (one, other)
    )
    torch.testing.assert_close(latent, later_latent[:, :, 1:])
    first, second = turned.double().split(4, dim=-1)
    angle = 1e6 ** (-torch.arange(4, dtype=torch.float64) / 4)  # of one position more
    sine, cosine = angle.sin(), angle.cos()
    further = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    torch.testing.assert_close(later_turned[:, :, 1:], further.float())


@pytest.mark.parametrize("attention", ["GQA", "MLA"])
def test_a_full_context_is_refused(attention: str) -> None:
    model = perturbed(ATTENTIONS[attention], Default())
    caches = model.caches(2)
    model.decode_step(tokens()[:, :23], caches)
    with pytest.raises(UserError, match="a sequence of 25 tokens, but the model's context is 24"):
        model.decode_step(tokens()[:, :2], caches)
    model.decode_step(tokens()[:, 23:], caches)
    with pytest.raises(UserError, match="a sequence of 25 tokens, but the model's context is 24"):
        model.decode_step(tokens()[:, :1], caches)


@pytest.mark.parametrize("attention", ["GQA", "MLA"])
@pytest.mark.parametrize("new", [1, 2])
def test_appending_to_a_full_cache_is_an_error(attention: str, new: int) -> None:
    model = perturbed(ATTENTIONS[attention], Default())
    caches = model.caches(2, positions=5)
    model.decode_step(tokens()[:, :5], caches)
    with pytest.raises((UserError, RuntimeError, ValueError)):
        model.decode_step(tokens()[:, 5 : 5 + new], caches)


def louder(model: Decoder, role: str) -> Decoder:
    """The model after the rows of each head of a weight were scaled by a different factor."""
    rng = random.Random(3)
    for attention in model.attentions().values():
        linear, heads = attention.matrices()[role]
        for rows in linear.weight.chunk(heads):
            rows.mul_(rng.uniform(2, 5))
    return model


def test_plain_qk_norm_too_could_be_decoded_from_latents() -> None:
    a, x = block(perturbed(ATTENTIONS["MLA"], QKNorm())).attention, torch.randn(2, 9, 48, dtype=torch.float64)
    q, k, _ = qkv_latent(a, x)
    torch.testing.assert_close(normed_products_from_latents(a, x), torch.einsum("bthd,bshd->bhts", q, k))


@pytest.mark.parametrize("role", ["uk", "kr", "uq", "qr", "dq"])
def test_under_absorbed_qk_norm_logits_are_free_of_the_scale_of_each_head(role: str) -> None:
    plain, apart = (perturbed(ATTENTIONS["MLA"], method) for method in (Default(), AbsorbedQKNorm()))
    before = plain(tokens()), apart(tokens())
    one, other = gone_on(louder(plain, role), tokens(), [24]), gone_on(louder(apart, role), tokens(), [1] * 24)
    assert not torch.allclose(one[23], before[0][:, 23], atol=0.1)
    torch.testing.assert_close(other[23], before[1][:, 23], rtol=0, atol=1e-4)


def test_under_absorbed_qk_norm_there_is_nothing_for_quack_to_control() -> None:
    model = perturbed(ATTENTIONS["MLA"], AbsorbedQKNorm()).requires_grad_(True)
    with pytest.raises(ValueError, match="no attention that QuacK can control"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_absorbed_qk_norm_without_latents_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert train(["--method", "absorbed-qk-norm", "--attention", "mha", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert "--method absorbed-qk-norm is about latents, so it needs --attention mla" in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert not (tmp_path / "run").exists()


def test_caches_are_filled_under_activation_checkpointing() -> None:
    model, read = perturbed(ATTENTIONS["MLA"], Default()), tokens()
    model.recompute = True
    caches = model.caches(2)
    model.decode_step(read[:, :9], caches)
    assert [cache.length for cache in caches] == [9, 9]
    torch.testing.assert_close(model.decode_step(read[:, 9:10], caches), model(read)[:, 9], rtol=1e-4, atol=1e-4)
