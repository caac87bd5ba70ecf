"""QuacK in TRL's SFTTrainer: add the callback of transformers' Trainer, as for DPOTrainer and other trainers of TRL."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from quacklr.integrations.transformers import QuacKCallback

WORDS = ["the", "duck", "swims", "over", "a", "quiet", "lake", "and", "then", "it", "looks", "at", "another", "one"]


def tokenizer() -> Any:
    """One token for each word."""
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model_for(words: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(words), **sizes, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def main() -> None:
    callback = QuacKCallback(tau=1.0)
    words = tokenizer()
    texts = Dataset.from_list([{"text": " ".join(WORDS[i:] + WORDS[:i])} for i in range(len(WORDS))])
    with TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            max_length=32,
        )
        trainer = SFTTrainer(
            model_for(words), args=settings, train_dataset=texts, processing_class=words, callbacks=[callback]
        )
        trainer.train()

    print(callback.quack)
    assert "not verified" not in str(callback.quack)
    logged = [row["quack/rate_min"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 8
    assert logged[-1] < logged[0] <= 1, "weights grow, so rates shrink"


if __name__ == "__main__":
    main()
