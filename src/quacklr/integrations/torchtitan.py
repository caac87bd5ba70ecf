"""QuacK in torchtitan: `with_quack(model_spec)` returns the model spec of a config with QuacK in it.

torchtitan calls the spec's `post_optimizer_build_fn` once the model is sharded and initialised and its optimizers are
made, and loads checkpoints later. So QuacK's state is a part of the state of the optimizers, which the checkpointer
saves and loads. Where only weights are loaded (`initial_load_path`, or weights of Hugging Face), QuacK is attached
again before the first step, and rates are relative to the loaded weights.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.quack import QuacK

BuildFn = Callable[[Any, list[nn.Module], Any], None]
KEY = "quack"


def with_quack(model_spec: Any, **settings: Any) -> Any:
    """A copy of a torchtitan ModelSpec that attaches QuacK; `settings` are the options of `quacklr.QuacK`.

    A `post_optimizer_build_fn` that the spec has already, as that of models with experts, is called first.
    """
    hook = QuacKBuildFn(model_spec.post_optimizer_build_fn, **settings)
    return replace(model_spec, post_optimizer_build_fn=hook)


class QuacKBuildFn:
    """A `post_optimizer_build_fn`: attaches QuacK to the optimizers, and adds its state to theirs.

    `before` is another such function, which is called first. `quack` is the attached QuacK.
    """

    quack: QuacK

    def __init__(self, before: BuildFn | None = None, **settings: Any) -> None:
        self._before, self._settings = before, settings

    def __call__(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        """Attach QuacK. `optimizers` is torchtitan's OptimizersContainer."""
        if self._before is not None:
            self._before(optimizers, model_parts, parallel_dims)
        if len(model_parts) > 1:
            raise ValueError(
                f"this rank has {len(model_parts)} parts of the model, as with an interleaved pipeline of torchtitan, "
                "which QuacK does not support; use a schedule with one part for each rank"
            )
        self._model, self._optimizers = model_parts[0], list(optimizers)
        self._attach()
        self._first_step = optimizers.register_step_pre_hook(self._before_first_step)
        self._state_dict, self._load_state_dict = optimizers.state_dict, optimizers.load_state_dict
        optimizers.state_dict, optimizers.load_state_dict = self._with_state, self._load_with_state

    def remove(self) -> None:
        """Remove QuacK: later steps are not scaled."""
        self._first_step.remove()
        self.quack.remove()

    def _before_first_step(self, *_: Any) -> None:
        """Attach again: weights may have been loaded since. A loaded state removes this hook."""
        self.remove()
        self._attach()

    def _attach(self) -> None:
        settings = {name: copy(each) for name, each in self._settings.items()}
        self.quack = QuacK(self._model, self._optimizers, **settings)

    def _with_state(self) -> dict[str, Any]:
        return {**self._state_dict(), KEY: self.quack.state_dict()}

    def _load_with_state(self, state_dict: dict[str, Any]) -> None:
        self.quack.load_state_dict(state_dict[KEY])
        self._load_state_dict({name: value for name, value in state_dict.items() if name != KEY})
        self._first_step.remove()
