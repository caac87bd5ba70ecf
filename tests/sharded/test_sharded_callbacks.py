"""Trainer and Lightning in several processes: sharded by FSDP2 or replicated, saved, and resumed.

Judge: the uninterrupted training. Accelerate has no FSDP on the CPU, so its processes are told that they are GPUs'.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from crew import Crew
from lightning_model import Regression, batches
from models import assert_equal
from quacklr import Paper, spectral
from quacklr.integrations.lightning import QuacKCallback as LightningCallback
from quacklr.integrations.transformers import QuacKCallback
from sharding import whole

Trained = tuple[list[Tensor], list[dict[str, float]]]
STEPS, SAVED = 5, 3


@contextmanager
def launched(rank: int, size: int) -> Iterator[None]:
    """The environment that torchrun gives a process; afterwards accelerate knows of nothing."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    words = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, {name: str(value) for name, value in given.items()} | words):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def turn_fsdp_on() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, head_dim=2)
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def trained_by_trainer(
    rank: int,
    size: int,
    folder: Path,
    kind: str,
    settings: Mapping[str, Any],
    resume: Path | None = None,
) -> Trained:
    tokens = torch.randint(8, (40, 6), generator=torch.Generator().manual_seed(1))
    fsdp_config = {"version": 2, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharded: dict[str, Any] = {} if kind == "DDP" else {"fsdp": True, "fsdp_config": fsdp_config}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    steps: dict[str, Any] = {"max_steps": STEPS, "save_steps": SAVED, "learning_rate": 0.05}
    batch = {"per_device_train_batch_size": 4 // size, "ddp_find_unused_parameters": False}
    with launched(rank, size):
        args = TrainingArguments(output_dir=str(folder), **quiet | steps | batch | sharded | dict(settings))
        if sharded:
            turn_fsdp_on()
        trainer = Trainer(
            model=make_llama(),
            args=args,
            train_dataset=[{"input_ids": row, "labels": row.roll(1)} for row in tokens],
            eval_dataset=[{"input_ids": row, "labels": row.roll(1)} for row in tokens[:4]],
            callbacks=[QuacKCallback(rule=Paper(2.0, norm=spectral))],
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        assert isinstance(trainer.model, nn.Module)
        params = list(trainer.model.parameters())
        assert all(isinstance(param, DTensor) == (kind != "DDP") for param in params)
        return [whole(param) for param in params], [row for row in trainer.state.log_history if "loss" in row]


def rates(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["quack/rate_min"], row["quack/rate_max"]) for row in rows]


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}


@pytest.mark.parametrize(("kind", "settings"), [("FULL_STATE_DICT", BEST), ("SHARDED_STATE_DICT", {}), ("DDP", {})])
def test_a_training_resumed_by_trainer_is_bitwise_the_uninterrupted_one(
    two: Crew, tmp_path: Path, kind: str, settings: Mapping[str, Any]
) -> None:
    uninterrupted = two(trained_by_trainer, 2, tmp_path / "whole", kind, settings)
    checkpoint = tmp_path / f"whole/checkpoint-{SAVED}"
    resumed = two(trained_by_trainer, 2, tmp_path / "resumed", kind, settings, checkpoint)
    for (weights, rows), (all_weights, all_rows) in zip(resumed, uninterrupted, strict=True):
        assert len(rows) == STEPS
        assert rates(rows) == rates(all_rows)
        assert_equal(weights, all_weights)


class Sharded(Regression):
    """All of it is one attention, sharded by FSDP2; no validation."""

    validation_step = LightningModule.validation_step  # type: ignore[assignment]

    def configure_model(self) -> None:
        if not isinstance(self.attention.q.weight, DTensor):
            self.out = nn.Identity()  # type: ignore[assignment]
            fully_shard(self.attention, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def trained_by_lightning(rank: int, folder: Path, distributed: bool, checkpoint: Path | None = None) -> Trained:
    left_out: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    model, callback = Sharded(), LightningCallback(rule=Paper(2.0, norm=spectral))
    with launched(rank, 2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)  # Lightning calls torch as of old
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty", UserWarning)
        trainer = LightningTrainer(
            default_root_dir=folder,
            callbacks=[callback, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            strategy=ModelParallelStrategy(save_distributed_checkpoint=distributed),
            accelerator="cpu",
            devices=2,
            max_epochs=3,
            use_distributed_sampler=False,
            **left_out,
        )
        trainer.fit(model, DataLoader(batches(), batch_size=None), ckpt_path=checkpoint)  # type: ignore[arg-type]
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert callback.quack is not None
        rows = [{name: float(rate.sum()) for name, rate in callback.quack.rates().items()}]
        return [whole(param) for param in model.parameters()], rows


@pytest.mark.parametrize("distributed", [True, False], ids=["a file for each process", "one file"])
def test_a_fit_resumed_by_lightning_is_bitwise_the_uninterrupted_one(
    two: Crew, tmp_path: Path, distributed: bool
) -> None:
    uninterrupted = two(trained_by_lightning, tmp_path, distributed)
    resumed = two(trained_by_lightning, tmp_path, distributed, tmp_path / "epoch=0.ckpt")
    for (weights, rows), (all_weights, all_rows) in zip(resumed, uninterrupted, strict=True):
        assert rows == all_rows
        assert_equal(weights, all_weights)
