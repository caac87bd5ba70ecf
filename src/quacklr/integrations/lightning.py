"""A callback for Lightning: `Trainer(callbacks=[QuacKCallback()])`."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from quacklr.integrations.callback import CallbackBase

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]


class QuacKCallback(CallbackBase, Callback):
    """Attaches QuacK to the module's optimizers during `trainer.fit()`.

    The options are those of `quacklr.QuacK`; and `paths`, a function of the module, if QuacK does not find its
    attention: `paths=lambda module: logit_paths(module.model, batch)`. `quack` is the attached QuacK.

    Rates are relative to the weights at the start of `trainer.fit()`. QuacK's state is saved in the checkpoint with
    those of the other callbacks; `trainer.fit(..., ckpt_path=...)` continues the rates of the saved run, bitwise. A
    checkpoint made without this callback triggers a warning, and rates start from tau at its weights, as they do in a
    second `fit` without `ckpt_path`.

    For rules that measure it, the trainer's loggers get the largest change of logits in nats that a step asked for, by
    attention, as `quack/change/<name>`, every `log_every_n_steps`.
    """

    _saved: dict[str, Any] | None = None
    _logged = 0

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's state until there are optimizers to attach to."""
        self._saved = state_dict

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state for Lightning's checkpoints, also for those saved by hand after `fit`."""
        return self._saved or (self.quack.state_dict() if self.quack is not None else {})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. Weights and optimizers are loaded and on their device, and no step was taken yet."""
        saved, self._saved = self._saved, None
        resumed = trainer.ckpt_path is not None and trainer.global_step > 0
        self._attach(pl_module, trainer.optimizers, saved, resumed)

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the changes of logits, once for each step of the optimizer that Lightning logs."""
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.loggers and step % every == 0 and step != self._logged:
            changes = {f"quack/change/{name}": each for name, each in self._changes().items()}
            for logger in trainer.loggers if changes else ():
                logger.log_metrics(changes, step)
            self._logged = step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach; `quack` stays readable."""
        self._detach()
