"""transformers' Trainer: `Trainer(..., callbacks=[QuacKCallback()])`, and `trainer.train()` as ever.

QuacK's state travels in the optimizer's: one more entry of the first param group in each checkpoint's `optimizer.pt`.
Trainer tells a callback neither which folder it resumes from nor of every checkpoint it writes (not of those on
SIGTERM, of others only after they were pushed), but whoever has the optimizer's state has QuacK's too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from quacklr.integrations.attaching import Attaching

KEY = "quack"


class QuacKCallback(Attaching, TrainerCallback):
    """Attaches QuacK to the trainer's optimizer while it trains.

    The options are those of `quacklr.QuacK`; and `paths`, a function of the model, for one whose attention QuacK does
    not find by itself: `paths=lambda model: logit_paths(model, batch)`.

    Rates are relative to the weights that `trainer.train()` starts from. `trainer.train(resume_from_checkpoint=...)`
    continues the rates of the run that wrote the checkpoint, bitwise. A checkpoint without them, made with
    `save_only_model` or without this callback, is told by a warning, and rates start from tau at its weights. So they
    do when the same trainer trains a second time. A model that QuacK refuses is a ValueError when training begins.

    The smallest and the largest rate are logged with the loss, as `quack/rate_min` and `quack/rate_max`, to the console
    and to `trainer.state.log_history`. (The trackers of `report_to` are called before this callback and do not see
    them.) `quack` is the live QuacK.
    """

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: weights and optimizer are loaded and on their device, and no step was taken yet."""
        saved = kwargs["optimizer"].param_groups[0].pop(KEY, {})
        resumed, current = state.global_step > 0, saved.get("step") == state.global_step  # older: trained on without us
        self._state = state
        quack = self._attach(
            kwargs["model"], kwargs["optimizer"], saved["state"] if resumed and current else None, resumed
        )
        self._saving = quack.optimizers[0].register_state_dict_post_hook(self._add_state)

    def _add_state(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        assert self.quack is not None
        state_dict["param_groups"][0][KEY] = {"step": self._state.global_step, "state": self.quack.state_dict()}

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the range of rates to what is logged of a training step."""
        logs = kwargs["logs"]
        if self.quack is not None and "loss" in logs:
            rates = torch.cat(list(self.quack.rates().values()))
            seen = {"quack/rate_min": rates.min().item(), "quack/rate_max": rates.max().item()}
            logs |= seen
            state.log_history[-1] |= seen

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach; `quack` stays to be looked at."""
        self._detach()

    @override
    def _detach(self) -> None:
        super()._detach()
        if self.quack is not None:
            self._saving.remove()
