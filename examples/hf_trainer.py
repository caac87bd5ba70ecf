"""QuacK in transformers' Trainer: add one callback; every checkpoint of Trainer then contains QuacK's state."""

from __future__ import annotations

import shutil
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from quacklr.integrations.transformers import QuacKCallback

STEPS, VOCAB = 20, 16


def tokens() -> list[dict[str, list[int]]]:
    """Sequences that repeat what they began with."""
    rows = torch.randint(VOCAB, (64, 8), generator=torch.Generator().manual_seed(0)).repeat(1, 2).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(folder: str, quack: QuacKCallback) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=8,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return Trainer(model, settings, train_dataset=tokens(), callbacks=[quack])


def main() -> None:
    callback = QuacKCallback(tau=1.0)
    with TemporaryDirectory() as folder:
        whole = make_trainer(folder, callback)
        whole.train()
        shutil.rmtree(f"{folder}/checkpoint-{STEPS}")  # as if it had been stopped after step 16
        resumed = make_trainer(folder, QuacKCallback(tau=1.0))
        resumed.train(resume_from_checkpoint=True)

    print(callback.quack)
    assert whole.model is not None
    assert resumed.model is not None
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "stopped and resumed is bitwise the whole run"
    logged = [row["quack/rate_min"] for row in whole.state.log_history if "loss" in row]
    assert logged == sorted(logged, reverse=True), "weights grow, so rates shrink"


if __name__ == "__main__":
    main()
