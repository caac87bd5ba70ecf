"""The training loop: a generator of rows, one a step. It opens no file and knows no method.

    for row in Session(config, corpus).rows(): ...          # {"step": 1, "loss": ..., "lr": ..., ...}

Between rows `tensors()` and `rest()` are all that a later session needs to go on bitwise.
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

from quacklr.distributed.collectives import fully_sharded
from quacklr.lab.config import Config
from quacklr.lab.data import Corpus, batch, fixed
from quacklr.lab.errors import UserError
from quacklr.lab.methods import alter, attach
from quacklr.lab.model import build
from quacklr.lab.optim import factor, optimizers, set_lr
from quacklr.lab.train.device import device_of, memory, mfu
from quacklr.lab.train.parallel import clip_gradients, distributed, micro_batch
from quacklr.lab.train.statistics import LogitProbe, number, weight_row
from quacklr.lab.train.tensors import tensors_of
from quacklr.lab.train.world import world

Row = dict[str, Any]


class Session:
    """One run in memory."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config = config = with_vocabulary(config, corpus)
        self.device = device_of(config.machine)
        self.world = world()
        self.model = build(config.shape, config.attention, config.training.seed, self.device)
        self.model.recompute = config.machine.recompute
        alter(config.method, self.model)
        self.trained = distributed(self.model, config.machine, self.world)
        self.optimizers = optimizers(config.optimizer, self.model)
        self.attached = attach(config.method, self.trained, self.optimizers)
        self.forward: Any = torch.compile(self.trained) if config.machine.compile else self.trained
        self.train_tokens = corpus.tokens("train")
        self.val_BT = fixed(corpus.tokens("val"), config.watch.eval_sequences, config.shape.context)
        self.bytes_per_token = corpus.bytes_per_token("val")
        probe_BT = fixed(corpus.tokens("probe"), config.watch.probe_sequences, config.shape.context)
        self.probe = LogitProbe(self.model, probe_BT[:, :-1].to(self.device))
        self.step = 0
        self.first_val_loss: float | None = None

    @property
    def size(self) -> int:
        """How many parameters the model has."""
        return sum(param.numel() for param in self.model.parameters())

    def rows(self) -> Iterator[Row]:
        """Train from where it stands to the end; a row for the start, then one a step. Ends early if it diverges."""
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
        return row | self._verdict(row)

    def _update(self) -> Row:
        """One optimizer step over all micro-batches."""
        config = self.config
        times = factor(config.schedule, self.step, config.training.steps)
        set_lr(self.optimizers, times)
        tokens_BT = batch(self.train_tokens, config.training.seed, self.step, config.sequences, config.shape.context)
        mine_BT = self.world.share(tokens_BT).to(self.device)
        parts = mine_BT.split(config.training.micro_batch)
        losses = []
        for micro_BT in parts:
            with micro_batch(self.trained, last=micro_BT is parts[-1]):
                loss = self._loss(micro_BT) / (len(mine_BT) / len(micro_BT))
                loss.backward()
            losses.append(loss.detach())
        norm = clip_gradients(self.model, config.training.grad_clip or math.inf)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        (loss_of_all,) = self.world.total(float(torch.stack(losses).sum()))
        return {"loss": loss_of_all / self.world.size, "grad_norm": norm, "lr": config.optimizer.lr * times}

    def _loss(self, tokens_BT: Tensor) -> Tensor:
        with self._precision():
            return self.forward(tokens_BT[:, :-1], tokens_BT[:, 1:])

    def _precision(self) -> AbstractContextManager[Any]:
        if self.config.machine.precision == "bf16" and not fully_sharded(self.model):
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def _validate(self) -> Row:
        """Loss on the validation set, in nats a token and in bits a byte."""
        self.model.eval()
        parts = self.val_BT.split(self.config.training.micro_batch)
        mine = 0.0
        for first in range(0, len(parts), self.world.size):  # all processes take part in every forward
            place = first + self.world.rank
            part_BT = parts[min(place, len(parts) - 1)]
            loss = float(self._loss(part_BT.to(self.device)))
            mine += loss * len(part_BT) if place < len(parts) else 0.0
        self.model.train()
        loss = self.world.total(mine)[0] / len(self.val_BT)
        return {"val_loss": loss, "val_bpb": loss / math.log(2) / self.bytes_per_token}

    def _speed(self, seconds: float) -> Row:
        rate = self.config.training.batch_tokens / seconds
        row = {"tokens": (self.step + 1) * self.config.training.batch_tokens, "tokens_per_second": number(rate)}
        share = mfu(self.size, self.config, rate / self.world.size, self.device)
        return row | {"memory_gb": memory(self.device)} | ({"mfu": number(share)} if share is not None else {})

    def _verdict(self, row: Row) -> Row:
        """Whether the run is lost: a loss that is no number, or a validation loss above that of the untrained model."""
        if not math.isfinite(row["loss"]):
            return {"diverged": f"the loss is {row['loss']} at step {self.step}"}
        val, first = row.get("val_loss", 0.0), self.first_val_loss
        if not math.isfinite(val):
            return {"diverged": f"the validation loss is {val} at step {self.step}"}
        if first is not None and self.step > self.config.schedule.warmup and not val <= first:
            return {"diverged": f"the validation loss is {val:.3f} at step {self.step}, above its start {first:.3f}"}
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Of all that decides what comes next, the tensors of model and optimizers, which may be sharded."""
        return tensors_of(self.model, self.optimizers)

    def rest(self) -> dict[str, Any]:
        """The others, which are the same on every rank."""
        return {
            "step": self.step,
            "first_val_loss": self.first_val_loss,
            "method": self.attached.state_dict() if self.attached else {},
            "probe": self.probe.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_rest(self, rest: dict[str, Any]) -> None:
        """Go on from a `rest()`; the tensors have been filled before."""
        if self.attached:
            self.attached.load_state_dict(rest["method"])
        self.probe.load_state_dict(rest["probe"])
        self.step, self.first_val_loss = rest["step"], rest["first_val_loss"]
        torch.set_rng_state(rest["rng"])


def with_vocabulary(config: Config, corpus: Corpus) -> Config:
    """The configuration with as many embeddings as the corpus needs, if it does not say."""
    vocab = config.shape.vocab or corpus.vocab
    if vocab < corpus.vocab:
        raise UserError(
            f"--vocab {vocab} is less than the {corpus.vocab} tokens of {config.training.corpus}; leave it out"
        )
    return replace(config, shape=replace(config.shape, vocab=vocab))
