"""The report of a model of which a small one is measured, and of weights that layers share or that come from LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM

from quacklr import LogitPath, mha, packed
from quacklr.inspect import from_transformers
from quacklr.inspect.report import ModelReport, report
from quacklr.inspect.sample import sample_for
from quacklr.inspect.show import show
from quacklr.inspect.small_config import default_config, shrink
from quacklr.inspect.target import SMALL, BadTargetError, Target

HEADS, SIZE = 2, 4
CONFIG: Any = LlamaConfig  # its types do not know all of its arguments


class HomeMadeAttention(nn.Module):
    """Rows of kv are all keys, then all values. Does not declare its paths."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.stream, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.stream(x_BTD), *self.kv(x_BTD).chunk(2, 2)
        heads = (part.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for part in qkv)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def declare(made: HomeMadeAttention, key_first: bool = True) -> HomeMadeAttention:
    """Add a declaration; it is wrong unless `key_first`."""

    def logit_paths() -> Sequence[LogitPath]:
        (q,) = packed(made.stream, ("q", HEADS, SIZE))
        rows = (("k", HEADS, SIZE), (None, HEADS, SIZE))
        (k,) = packed(made.kv, *(rows if key_first else rows[::-1]))
        return mha(q, k)

    made.logit_paths = logit_paths  # type: ignore[assignment]
    return made


def declaring(key_first: bool = True) -> HomeMadeAttention:
    return declare(HomeMadeAttention(), key_first)


def measured(model: Sequence[nn.Module], small: Sequence[nn.Module]) -> ModelReport:
    torch.manual_seed(0)
    batch = torch.randn(2, 5, HEADS * SIZE)
    return report(Target(nn.Sequential(*model), lambda: (nn.Sequential(*small), batch), SMALL), measure=True)


def test_a_layer_is_compared_with_those_layers_of_the_small_model_that_rules_treat_alike() -> None:
    found = measured([declaring(), declaring(), HomeMadeAttention()], small=[HomeMadeAttention(), declaring()])
    assert [layer.comparison.word for layer in found.layers] == ["agrees", "agrees", "only measured"]
    assert found.exit_code == 0
    assert found.summary().startswith("QuacK(model, optimizer) attaches to 2 attention layers")
    assert found.summary().endswith("1 more with a batch: QuacK(logit_paths(model, batch), optimizer)")


def test_of_several_layers_in_the_small_model_the_one_that_differs_counts() -> None:
    found = measured([declaring()], small=[declaring(), declaring(key_first=False), declaring()])
    assert [layer.comparison.agrees for layer in found.layers] == [False]
    assert [layer.module for layer in found.different] == ["1"]
    assert found.exit_code == 1


def by_rule(model: nn.Module) -> ModelReport:
    return report(Target(model, lambda: (model, None)), measure=False)


def test_a_layer_names_the_weights_that_an_earlier_layer_has_too_and_they_count_once() -> None:
    one, two, three = HomeMadeAttention(), HomeMadeAttention(), HomeMadeAttention()
    two.stream = three.stream = one.stream
    three.kv = one.kv
    found = by_rule(nn.Sequential(*(declare(each) for each in (one, two, three))))
    shared = ["", ", q shared with 0", ", shared with 0"]
    assert [layer.layout for layer in found.layers] == [f"separate q, [k|v]{which}" for which in shared]
    assert found.numbers == (3 * 8 * 8, (8 + 16 + 16) * 8)


def test_rows_of_queries_and_keys_in_one_parameter_are_counted_with_their_biases() -> None:
    found = by_rule(nn.Sequential(nn.MultiheadAttention(16, 2)))
    assert found.numbers == (2 * 16 * (16 + 1), 4 * 16 * (16 + 1))


def test_lora_is_a_word_in_the_layout_and_its_factors_are_not_listed() -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=9)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    found = by_rule(get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "k_proj"])))
    assert [layer.layout for layer in found.layers] == ["separate q, k with LoRA"]


def test_the_package_that_transformers_misses_is_named_and_not_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy_import(_: str) -> Any:  # as transformers' lazy modules raise it
        missing = ModuleNotFoundError("No module named 'a_package'", name="a_package")
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from missing

    monkeypatch.setattr(from_transformers, "default_config", lazy_import)
    with pytest.raises(BadTargetError, match="^llama: transformers needs a_package: pip install a_package$"):
        from_transformers.from_type("llama")


def test_a_random_batch_has_every_token_but_the_special_ones() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = CONFIG(**sizes, vocab_size=6, bos_token_id=0, eos_token_id=[2, 3], pad_token_id=5)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    assert set(sample_for(model)["input_ids"].flatten().tolist()) == {1, 4}


def test_many_names_without_a_pattern_are_the_first_and_their_number() -> None:
    model = nn.ModuleDict({str(n * n): nn.MultiheadAttention(2, 1) for n in range(30)})
    assert [line.split("  ")[1] for line in show(by_rule(model), "mine").splitlines()[3:4]] == ["0, ... (30)"]


def test_a_small_config_keeps_proportions_of_layers_and_has_token_ids_within_its_vocabulary() -> None:
    config = CONFIG(
        num_hidden_layers=5,
        intermediate_size=11008,
        per_layer_config={2: {"intermediate_size": 5504}},
        pad_token_id=31999,
        eos_token_id=[300, 2],
    )
    small: Any = shrink(config)
    assert [layer.intermediate_size for layer in small.per_layer_config] == [96, 48]  # layers 0 and 2
    assert (small.vocab_size, small.pad_token_id, small.eos_token_id) == (256, 31999 % 256, [300 % 256, 2])


def test_a_small_config_keeps_the_first_layers_that_are_dense_and_the_last_that_share_keys() -> None:
    deepseek: Any = shrink(DeepseekV3Config(num_hidden_layers=9, first_k_dense_replace=4))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)  # layers 0 and 4
    gemma: Any = shrink(default_config("gemma3n_text"))  # of 35 layers the last 15 share keys, and each fifth is full
    assert (gemma.layer_types[-2:], gemma.num_kv_shared_layers) == (["sliding_attention", "full_attention"], 2)
