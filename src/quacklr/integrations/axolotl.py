"""A plugin for axolotl. In the config file of a run:

plugins:
  - quacklr.integrations.axolotl.QuacKPlugin
quack:                # options of quacklr.QuacK; may be left out
  tau: 1.0
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
from pydantic import BaseModel

from quacklr import Budget, ConstantTau, Limit, Paper
from quacklr.integrations.transformers import QuacKCallback

RULES = {"tau": Paper, "constant_tau": ConstantTau, "limit": Limit, "budget": Budget}


class QuacKArgs(BaseModel):
    """The entry of the config file: `quack`, one of RULES with its number, and `verify`."""

    quack: dict[str, Any] | None = None


class QuacKPlugin(BasePlugin):  # type: ignore[misc]
    """Adds the callback for transformers' Trainer to the trainer that axolotl makes."""

    def get_input_args(self) -> str:
        """The class that validates the plugin's part of the config file."""
        return f"{__name__}.QuacKArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:  # noqa: ARG002
        """The callback, with the options of the config file."""
        options = dict(cfg.quack or {})
        rules = [rule(options.pop(name)) for name, rule in RULES.items() if name in options]
        if len(rules) > 1:
            raise ValueError(f"quack: choose one of {', '.join(RULES)}")
        return [QuacKCallback(rule=next(iter(rules), None), **options)]
