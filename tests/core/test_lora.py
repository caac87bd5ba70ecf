"""Rates with LoRA (peft), parametrised weights, and weights that are not rated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from limit_by_hand import NATS, Weights, alone, judge_block, made_by, norm, same, sigma, weights
from quacklr import Budget, LogitPath, QuacK, Weight, logit_paths
from quacklr.find.discover import found_by_table
from stand_ins_kit import HF, Known, Model

TOKENS = torch.randint(90, (2, 6), generator=torch.Generator().manual_seed(0))
LLAMA = "base_model.model.model.layers.0.self_attn"
ADAPTER = ("lora_A.default", "lora_B.default")


def llama(**lora: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=90,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return get_peft_model(model, LoraConfig(r=3, **lora)) if lora else model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def head_norms(matrix: Tensor, size: int = 8) -> Tensor:
    return matrix.detach().view(-1, size, matrix.shape[1]).flatten(1).norm(dim=1)


def test_lora_of_queries_and_keys_attaches_and_its_rates_are_those_of_the_paths_by_hand() -> None:
    model = llama(target_modules=["q_proj", "k_proj"])
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    quack = QuacK(model, optimizer, tau=1.0)
    attention = model.get_submodule(LLAMA)
    q, k = attention.q_proj, attention.k_proj

    def sensitivity() -> tuple[Tensor, Tensor]:
        a_q, a_k = (each.lora_A["default"].weight.detach().norm() for each in (q, k))
        b_q, b_k = (head_norms(each.lora_B["default"].weight) for each in (q, k))
        base_q, base_k = head_norms(q.base_layer.weight), head_norms(k.base_layer.weight)
        of_q = a_q * torch.maximum(base_k, b_k * a_k).repeat_interleave(2)
        of_k = a_k * torch.maximum(base_q, b_q * a_q).view(2, 2).amax(1)
        return of_q, of_k

    first = sensitivity()
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(torch.randn_like(parameter))
    now = sensitivity()
    names = [f"{LLAMA}.{role}_lora_B" for role in ("q", "k")]
    expected = {name: s0 / s for name, s0, s in zip(names, first, now, strict=True)}
    torch.testing.assert_close(quack.rates(), expected)
    assert f"{LLAMA}.q_lora_A: starts with a zero partner" in repr(quack)
    assert f"{LLAMA}.q: frozen" in repr(quack)


def test_under_lora_only_the_rows_of_b_step_slower() -> None:
    model = llama(target_modules=["q_proj"])
    q = model.get_submodule(LLAMA).q_proj
    a, b = q.lora_A["default"].weight, q.lora_B["default"].weight
    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    QuacK(model, optimizer, tau=0.25)
    before = [each.detach().clone() for each in (a, b)]
    for each in (a, b):
        each.grad = torch.ones_like(each)
    optimizer.step()
    torch.testing.assert_close(before[0] - a, torch.ones_like(a))  # on a path, but not rated
    torch.testing.assert_close(before[1] - b, torch.full_like(b, 0.25))


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning")
def test_the_table_for_lora_is_what_is_measured() -> None:
    logit_paths(llama(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), {"input_ids": TOKENS})
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=90, bos_token_id=0, eos_token_id=0)
    base: Any = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
    paths = logit_paths(model, {"input_ids": TOKENS})  # a table that is wrong would be an error
    assert len(paths) == 4
    assert {weight.name.rpartition(".")[2] for path in paths for weight in path.weights} == {
        *("q", "k", "q_lora_B", "k_lora_B", "q_k_lora_A")
    }


def test_merged_or_switched_off_adapters_are_not_counted_and_other_variants_are_not_guessed() -> None:
    model = llama(target_modules=["q_proj"])
    model.merge_adapter()
    assert len(found_by_table(model)[LLAMA].paths) == 1
    model.unmerge_adapter()
    assert len(found_by_table(model)[LLAMA].paths) == 2
    assert found_by_table(llama(target_modules=["q_proj"], use_dora=True))[LLAMA].unknown


def test_a_weight_that_is_not_rated_has_no_rate_and_needs_no_optimizer() -> None:
    q, k = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    block = torch.tensor([0, 0, 1, 1])
    path = LogitPath((Weight("q", q, block), Weight("k", k, block, rated=False)), heads=2)
    quack = QuacK([path], torch.optim.SGD([q], lr=1.0), tau=1.0)
    with torch.no_grad():
        k[:2] *= 4
    torch.testing.assert_close(quack.rates(), {"q": torch.tensor([0.25, 1.0])})
    assert quack.rate_of(k) is None
    with torch.no_grad():
        q.zero_()  # k then has no bound, but it has no rate either
    QuacK([path], torch.optim.SGD([q, k], lr=1.0), tau=1.0)


def attentions(model: nn.Module) -> list[Any]:
    return [model.get_submodule(f"model.layers.{i}.self_attn") for i in (0, 1)]


def test_weight_norm_is_measured_to_its_gains_and_spectral_norm_to_nothing() -> None:
    model = Model(HF, Known(), Known())
    first, second = attentions(model)
    first.q_proj = parametrizations.weight_norm(first.q_proj)
    second.q_proj, second.k_proj = (parametrizations.spectral_norm(p) for p in (second.q_proj, second.k_proj))
    u = second.q_proj.parametrizations.weight[0]._u.clone()
    paths = logit_paths(model, TOKENS % 61)
    assert torch.equal(second.q_proj.parametrizations.weight[0]._u, u)  # power iterations go on when it is read
    assert [weight.param.shape for weight in paths[0].weights] == [(32, 1), (16, 32)]
    assert list(paths.left_alone) == ["model.layers.1.self_attn"]
    quack = QuacK(paths, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)
    with torch.no_grad():
        first.q_proj.parametrizations.weight.original0[8:16] *= 5
    assert quack.rates()["model.layers.0.self_attn.k"].tolist() == pytest.approx([0.2, 1], rel=0.1)


def test_a_weight_made_of_two_parameters_is_left_alone_by_name() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(32, 32))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.shift

    model = Model(HF, Known(), Known())
    attention, _ = attentions(model)
    nn.utils.parametrize.register_parametrization(attention.q_proj, "weight", Shifted())
    with pytest.warns(UserWarning, match="attention is left alone in 1 of 2 modules"):
        left_alone = logit_paths(model, TOKENS % 61).left_alone
    assert "does not follow the scale of just one" in left_alone["model.layers.0.self_attn"]


def test_a_budget_bounds_the_change_of_the_merged_weights() -> None:
    """The adapter's factor alpha / r is part of the change."""
    model = llama(target_modules=["q_proj", "k_proj"], lora_alpha=24)
    attention = model.get_submodule(LLAMA)
    optimizer = torch.optim.AdamW(trained(model), lr=0.1)

    def merged() -> list[Tensor]:
        """Of each head: query and key weights, with adapters."""
        found = []
        for projection in (attention.q_proj, attention.k_proj):
            weight = projection.base_layer.weight + projection.get_delta_weight("default")
            found.append(weight.detach().double().view(-1, 8, 32))
        return [found[0], found[1].repeat_interleave(2, 0)]

    largest = 0.0
    with QuacK(model, optimizer, rule=Budget(0.02)):
        for _ in range(4):
            (q, k), _ = merged(), model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            new_q, new_k = merged()
            change = (new_q.mT @ new_k - q.mT @ k).flatten(1).norm(dim=1) / 8**0.5
            largest = max(largest, float(change.max()))
            assert (change < 0.02).all()
    assert largest > 0.001


def rows_by_head(held: Weights, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The frozen rows, A (all heads have the same) and B."""
    base, a, b = (held[f"{LLAMA}.{name}_proj.{part}.weight"].double() for part in ("base_layer", *ADAPTER))
    base, b = (rows.unflatten(0, (-1, 8)).repeat_interleave(32 // len(rows), 0) for rows in (base, b))
    return base, a.expand(4, -1, -1), b


def asked_by_hand(old: Weights, own: Weights) -> Tensor:
    """Formula (4) of docs/theory.md. Each side of a logit is the frozen rows + 4 B A, so it is a sum of four paths."""
    sides = []
    for name in "qk":
        (base, a, b), (_, own_a, own_b) = rows_by_head(old, name), rows_by_head(own, name)
        moves = sigma(own_b - b) * 8**0.5 * norm(a) + norm(b) * sigma(own_a - a) * 3**0.5
        sides.append((norm(base) + 4 * norm(b) * norm(a) / 3**0.5, 4 * moves / 3**0.5))
    (q, dq), (k, dk) = sides
    return (dq * k + q * dk) / 8  # sqrt(8) of the logit's scale, and sqrt(8) of the inner size


@pytest.mark.parametrize("b_is_zero", [False, True])
@pytest.mark.parametrize("lr", [0.1, 1e-6])
def test_the_default_limits_a_and_b_as_the_formula_says_or_does_nothing(b_is_zero: bool, lr: float) -> None:
    model = llama(target_modules=["q_proj", "k_proj"], lora_alpha=12, init_lora_weights=b_is_zero)
    make = made_by(torch.optim.AdamW, lr=lr)
    optimizer = make(model)
    QuacK(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        old, own = weights(model), alone(model, optimizer, make)
        optimizer.step()
        new = weights(model)
        if lr == 1e-6:
            same(new, own)
            continue
        merged = [[base + 4 * b @ a for base, a, b in (rows_by_head(at, name) for name in "qk")] for at in (old, new)]
        (q, k), (new_q, new_k) = merged
        assert (norm(new_q.mT @ new_k - q.mT @ k) / 8**0.5 <= NATS * 1.001).all()
        most = NATS / asked_by_hand(old, own)
        for name, part, count in (("q", 0, 1), ("q", 1, 4), ("k", 0, 1), ("k", 1, 2)):
            key = f"{LLAMA}.{name}_proj.{ADAPTER[part]}.weight"
            rows = (held[key].double().unflatten(0, (count, -1)) for held in (old, own, new))
            slack = (
                3 if b_is_zero else 1.2
            )  # with small B the change is of second order, and norms of B grow by the step
            for before, plain, after, limit in zip(*rows, most.view(count, -1).amin(1), strict=True):
                assert judge_block(before, plain, after, float(limit), slack) < 0.9
