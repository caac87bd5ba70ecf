"""The training loop: a generator of rows, one per step. It opens no file and is the same for all methods.

    for row in Session(config, corpus).rows(): ...          # {"step": 1, "loss": ..., "lr": ..., ...}

Between rows, `tensors()` and `extra_state()` are the state from which another session continues bitwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quacklr import QKClip
from quacklr.lab.config import Config
from quacklr.lab.data import Corpus, batch, evaluation_batch
from quacklr.lab.errors import UserError
from quacklr.lab.methods import alter, attach
from quacklr.lab.model import build
from quacklr.lab.optim import factor, optimizers, set_lr
from quacklr.lab.train.device import device_of, memory, mfu
from quacklr.lab.train.parallel import clip_gradients, micro_batch, parallelize
from quacklr.lab.train.rows import Row
from quacklr.lab.train.statistics import LogitProbe, rounded, weight_row
from quacklr.lab.train.tensors import named_tensors
from quacklr.lab.train.world import world
from quacklr.sharded.collectives import fully_sharded


class Session:
    """One run: model, optimizers, method, data and probe."""

    def __init__(self, config: Config, corpus: Corpus, device: torch.device | None = None) -> None:
        self.config = config = with_vocabulary(config, corpus)
        self.device = device or device_of(config.machine)
        self.world = world()
        self.model = build(config.shape, config.attention, config.training.seed, self.device)
        self.model.recompute = config.machine.recompute
        alter(config.method, self.model)
        self.trained = parallelize(self.model, config.machine, self.world)
        self.optimizers = optimizers(config.optimizer, self.model)
        self.attached = attach(config.method, self.trained, self.optimizers)
        self.forward: Any = torch.compile(self.trained) if config.machine.compile else self.trained
        self.train_tokens = corpus.tokens("train")
        self.val_BT = evaluation_batch(corpus.tokens("val"), config.watch.eval_sequences, config.shape.context)
        self.bytes_per_token = corpus.bytes_per_token("val")
        probe_BT = evaluation_batch(corpus.tokens("probe"), config.watch.probe_sequences, config.shape.context)
        self.probe = LogitProbe(self.trained, probe_BT[:, :-1].to(self.device))
        self.step = 0
        self.first_val_loss: float | None = None

    @property
    def size(self) -> int:
        """Number of parameters of the model."""
        return sum(param.numel() for param in self.model.parameters())

    def rows(self) -> Iterator[Row]:
        """Train from the current step to the last, with a row for step 0 and each step. Ends if the run diverges."""
        if self.first_val_loss is None:
            yield self._start()
        while self.step < self.config.training.steps:
            row = self._train()
            yield row
            if "diverged" in row:
                return

    def _start(self) -> Row:
        row: Row = {"step": 0, "logits": self.probe.before_step(0)}
        row |= weight_row(self.model, self.attached) | self._validate()
        self.first_val_loss = row["val_loss"]
        return row

    def _train(self) -> Row:
        step, watch, last = self.step + 1, self.config.watch, self.config.training.steps
        probed = step % watch.probe_every == 0 or step == last
        if probed:
            self.probe.before_step(self.step)
        began = time.perf_counter()
        row: Row = {"step": step} | self._update()
        row |= self._speed(time.perf_counter() - began)
        self.step = step
        if probed:
            row |= self.probe.after_step() | weight_row(self.model, self.attached)
        if step % watch.eval_every == 0 or step == last:
            row |= self._validate()
        return row | self._divergence(row)

    def _update(self) -> Row:
        """One optimizer step over all micro-batches of this rank."""
        config = self.config
        lr_factor = factor(config.schedule, self.step, config.training.steps)
        set_lr(self.optimizers, lr_factor)
        tokens_BT = batch(self.train_tokens, config.training.seed, self.step, config.sequences, config.shape.context)
        local_BT = self.world.local_rows(tokens_BT).to(self.device)
        parts = local_BT.split(config.training.micro_batch)
        losses = []
        for micro_BT in parts:
            with micro_batch(self.trained, last=micro_BT is parts[-1]):
                loss = self._loss(micro_BT) / (len(local_BT) / len(micro_BT))
                loss.backward()
            losses.append(loss.detach())
        norm = clip_gradients(self.model, config.training.grad_clip or math.inf)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total_loss = self.world.all_reduce_sum(float(torch.stack(losses).sum()))
        return {"loss": total_loss / self.world.size, "grad_norm": norm, "lr": config.optimizer.lr * lr_factor}

    def _loss(self, tokens_BT: Tensor) -> Tensor:
        with self._precision():
            return self.forward(tokens_BT[:, :-1], tokens_BT[:, 1:])

    def _precision(self) -> AbstractContextManager[Any]:
        if self.config.machine.precision == "bf16" and not fully_sharded(self.model):
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def _validate(self) -> Row:
        """Loss on the validation set, in nats per token and in bits per byte."""
        self.model.eval()
        parts = self.val_BT.split(self.config.training.micro_batch)
        local_loss = 0.0
        for first in range(0, len(parts), self.world.size):  # a forward pass is collective, so every rank makes it
            index = first + self.world.rank
            part_BT = parts[min(index, len(parts) - 1)]
            loss = float(self._loss(part_BT.to(self.device)))
            local_loss += loss * len(part_BT) if index < len(parts) else 0.0
        self.model.train()
        loss = self.world.all_reduce_sum(local_loss) / len(self.val_BT)
        return {"val_loss": loss, "val_bpb": loss / math.log(2) / self.bytes_per_token}

    def _speed(self, seconds: float) -> Row:
        rate = self.config.training.batch_tokens / seconds
        row: Row = {"tokens": (self.step + 1) * self.config.training.batch_tokens, "tokens_per_second": rounded(rate)}
        utilization = mfu(self.size, self.config, rate / self.world.size, self.device)
        row |= {"memory_gb": memory(self.device)}
        return row | ({"mfu": rounded(utilization)} if utilization is not None else {})

    def _divergence(self, row: Row) -> Row:
        """The reason if the run diverged: a loss is not finite, or after warmup val_loss is above its first value."""
        if not math.isfinite(row["loss"]):
            return {"diverged": f"the loss is {row['loss']} at step {self.step}"}
        val, first = row.get("val_loss", 0.0), self.first_val_loss
        if not math.isfinite(val):
            return {"diverged": f"the validation loss is {val} at step {self.step}"}
        if first is not None and self.step > self.config.schedule.warmup and not val <= first:
            return {"diverged": f"the validation loss is {val:.3f} at step {self.step}, above its start {first:.3f}"}
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the model and the optimizers, which may be sharded."""
        return named_tensors(self.model, self.optimizers)

    def extra_state(self) -> dict[str, Any]:
        """The rest of the state, which is equal on every rank."""
        return {
            "step": self.step,
            "first_val_loss": self.first_val_loss,
            "method": {} if self.attached is None or isinstance(self.attached, QKClip) else self.attached.state_dict(),
            "probe": self.probe.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore an `extra_state()`, after the tensors."""
        if self.attached is not None and not isinstance(self.attached, QKClip):  # QK clip has no state
            self.attached.load_state_dict(state["method"])
        self.probe.load_state_dict(state["probe"])
        self.step, self.first_val_loss = state["step"], state["first_val_loss"]
        torch.set_rng_state(state["rng"])


def with_vocabulary(config: Config, corpus: Corpus) -> Config:
    """The configuration with the vocabulary size of the corpus, unless it has one."""
    vocab = config.shape.vocab or corpus.vocab
    if vocab < corpus.vocab:
        raise UserError(
            f"--vocab {vocab} is less than the {corpus.vocab} tokens of {config.training.corpus}; leave it out"
        )
    return replace(config, shape=replace(config.shape, vocab=vocab))
