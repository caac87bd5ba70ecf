"""A callback for transformers' Trainer: `Trainer(..., callbacks=[QuacKCallback()])`.

QuacK's state in a checkpoint is an entry of `trainer_state.json`, which every process reads. Trainer writes it after
the optimizer's state. A callback cannot write a file of its own in time: it does not get the folder of the checkpoint,
is called only after the push to the hub, and is not called at all on SIGTERM. Nor can the state be in `optimizer.pt`:
loading the state of a sharded optimizer drops entries that the new optimizer does not have.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from io import BytesIO
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from quacklr.integrations.callback import CallbackBase

KEY = "quack"


class QuacKCallback(CallbackBase, TrainerCallback):
    """Attaches QuacK to the trainer's optimizer during `trainer.train()`.

    The options are those of `quacklr.QuacK`; and `paths`, a function of the model, if QuacK does not find its
    attention: `paths=lambda model: logit_paths(model, batch)`. `quack` is the attached QuacK.

    Rates are relative to the weights at the start of `trainer.train()`. `trainer.train(resume_from_checkpoint=...)`
    continues the rates of the saved run, bitwise. A checkpoint without QuacK's state, made with `save_only_model` or
    without this callback, triggers a warning: rates are then relative to the weights of the checkpoint, and start at
    tau. A second `trainer.train()` of the same trainer also starts at tau.

    Logged with the loss, to the console and to `trainer.state.log_history`: the smallest and the largest rate,
    `quack/rate_min` and `quack/rate_max`; and for rules that measure it, the largest change of logits in nats that the
    step asked for, `quack/change_max`. The history has it also for each attention, `quack/change/<name>`. The trackers
    of `report_to` do not get these numbers: they are called before this callback.
    """

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach. Weights and optimizer are loaded and on their device, and no step was taken yet."""
        self._state: Any
        self._state, step, loaded = state, state.global_step, None
        saved = self._state.stateful_callbacks.pop(KEY, None)
        if saved is not None and saved["step"] == step > 0:  # else of an older step: training continued without QuacK
            loaded = torch.load(BytesIO(b64decode(saved["state"])), map_location="cpu", weights_only=True)
        quack = self._attach(kwargs["model"], kwargs["optimizer"], loaded, step > 0)
        self._saving = quack.optimizers[0].register_state_dict_post_hook(self._add_state)

    def _add_state(self, *_: Any) -> None:
        """Add QuacK's state to a checkpoint. Trainer saves the optimizer's state before its own."""
        assert self.quack is not None
        torch.save(self.quack.state_dict(), buffer := BytesIO())  # as text for JSON: values are exact
        text = b64encode(buffer.getvalue()).decode("ascii")
        self._state.stateful_callbacks[KEY] = {"step": self._state.global_step, "state": text}

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the range of rates, and the largest change of logits, to the log of a training step."""
        logs = kwargs["logs"]
        rates_of = self.quack.rates() if self.quack is not None and "loss" in logs else {}
        if rates_of:
            rates = torch.cat(list(rates_of.values()))
            extremes = {"quack/rate_min": rates.min().item(), "quack/rate_max": rates.max().item()}
            changes = self._changes()
            if changes:
                extremes["quack/change_max"] = max(changes.values())
            logs |= extremes
            state.log_history[-1] |= extremes | {f"quack/change/{name}": each for name, each in changes.items()}

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach; `quack` stays readable."""
        self._detach()

    @override
    def _detach(self) -> None:
        super()._detach()
        if self.quack is not None:
            self._saving.remove()
