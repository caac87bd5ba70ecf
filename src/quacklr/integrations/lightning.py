"""Lightning: `Trainer(callbacks=[QuacKCallback()])`, and `trainer.fit(...)` as ever."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from quacklr.integrations.attaching import Attaching

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]


class QuacKCallback(Attaching, Callback):
    """Attaches QuacK to the module's optimizers, one or several, while it fits.

    The options are those of `quacklr.QuacK`; and `paths`, a function of the module, for one whose attention QuacK does
    not find by itself: `paths=lambda module: logit_paths(module.model, batch)`.

    Rates are relative to the weights that `trainer.fit()` starts from. QuacK's state is in the checkpoint, among those
    of the callbacks; `trainer.fit(..., ckpt_path=...)` continues the rates of the run that wrote it, bitwise. A
    checkpoint made without this callback is told by a warning, and rates start from tau at its weights. So they do in
    a second `fit` without `ckpt_path`. A model that QuacK refuses is a ValueError when training starts.

    `quack` is the live QuacK.
    """

    _saved: dict[str, Any] | None = None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's state until there are optimizers to attach to."""
        self._saved = state_dict

    @override
    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints, those that are saved by hand after `fit` too."""
        return self._saved or (self.quack.state_dict() if self.quack is not None else {})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: weights and optimizers are loaded and on their device, and no step was taken yet."""
        saved, self._saved = self._saved, None
        resumed = trainer.ckpt_path is not None and trainer.global_step > 0
        self._attach(pl_module, trainer.optimizers, saved, resumed)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach; `quack` stays to be looked at."""
        self._detach()
