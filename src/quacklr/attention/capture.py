"""Capture the attention logits of a model while it runs, under the names of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from quacklr.attention.axes import HeadAxes
from quacklr.attention.interceptor import AttentionInterceptor
from quacklr.attention.logits import Logits
from quacklr.util.module_stack import module_stack
from quacklr.util.modules import run_uncompiled


@contextmanager
def capture_logits(
    model: nn.Module,
    on_logits: Callable[[str, Logits], None],
    heads: Mapping[str, int],
    axes_of: Callable[[tuple[int, ...], int | None], HeadAxes],
) -> Iterator[None]:
    """While entered, every attention of the model calls `on_logits(name of its module, logits)`.

    The module is the innermost one whose forward is running. `heads`: the number of heads of modules, where it is
    known. `axes_of(lead, heads)`: which leading axes of logits are heads. Compiled code runs uncompiled.
    """

    def axes(lead: tuple[int, ...]) -> HeadAxes:
        return axes_of(lead, next((heads[name] for name in reversed(running.modules) if name in heads), None))

    with (
        module_stack(model) as running,
        run_uncompiled(),
        AttentionInterceptor(lambda logits: on_logits(running.modules[-1], logits), axes),
    ):
        yield
