"""The kit that makes tiny models: small configs, random batches; and the names of layouts in docs/models.md."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM

from sample import sample_for
from small_config import default_config, shrink

CONFIG: Any = LlamaConfig  # its types do not know all of its arguments


def test_a_random_batch_has_every_token_but_the_special_ones() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = CONFIG(**sizes, vocab_size=6, bos_token_id=0, eos_token_id=[2, 3], pad_token_id=5)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    assert set(sample_for(model)["input_ids"].flatten().tolist()) == {1, 4}


def test_a_small_config_keeps_kinds_of_layers_and_has_token_ids_within_its_vocabulary() -> None:
    overrides = {2: {"intermediate_size": 5504}}
    config = CONFIG(num_hidden_layers=5, intermediate_size=11008, per_layer_config=overrides, pad_token_id=31999)
    small: Any = shrink(config)
    assert [layer.intermediate_size for layer in small.per_layer_config] == [96, 48]  # layers 0 and 2
    assert (small.vocab_size, small.pad_token_id) == (256, 31999 % 256)
    deepseek: Any = shrink(DeepseekV3Config(num_hidden_layers=9, first_k_dense_replace=4))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)  # layers 0 and 4
    gemma: Any = shrink(default_config("gemma3n_text"))  # of 35 layers the last 15 share keys, and each fifth is full
    assert (gemma.layer_types[-2:], gemma.num_kv_shared_layers) == (["sliding_attention", "full_attention"], 2)
