"""TARGET, as a person types it, to a model: who is asked in which order, and what is said when nobody knows it.

package.module:factory, file.py:factory     Python; has a colon
config.json, or a folder with one           transformers
a model type, a hub id in the cache         transformers
a model's name                              timm
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

SMALL = "a small model of the same kind"


class BadTargetError(Exception):
    """A sentence that names what is wrong with a target and the way out."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model to look at, perhaps on the meta device; and how to get one that runs, with a batch for it.

    `measured_on` says what that one is, if it is not the model itself; `optimizers` train it, if it came with any.
    """

    model: nn.Module
    runnable: Callable[[], tuple[nn.Module, Any]]
    measured_on: str = ""
    optimizers: Any = None


def resolve(name: str) -> Target:
    """The model that a name stands for. BadTargetError if there is none, or more than one."""
    from quacklr.inspect import from_factory, from_timm, from_transformers

    if ":" in name:
        return from_factory.target(name)
    folder = (Path(name) / "config.json").is_file()
    if Path(name).is_file() or (folder and not from_transformers.is_type(name)):
        return from_transformers.of_file(name)
    if folder:
        raise BadTargetError(f"{name} is a type of transformers and a folder here; write ./{name} for the folder")
    if from_transformers.is_type(name):
        return from_transformers.of_type(name)
    if "/" in name:
        return from_transformers.of_cache(name)
    if from_timm.is_model(name):
        return from_timm.target(name)
    raise BadTargetError(_unknown(name, from_transformers.types(), from_timm.unavailable()))


def _unknown(name: str, types: list[str], timm_unavailable: str) -> str:
    tried = [
        "no file or folder with a config.json",
        "no model type of transformers" if types else "transformers is not installed (pip install transformers)",
        f"timm could not be asked ({timm_unavailable})" if timm_unavailable else "no model of timm",
    ]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), types, n=3)
    perhaps = f"; did you mean {' or '.join(close)}?" if close else "; a model of yours is package.module:factory"
    return f"{name}: {', '.join(tried)}{perhaps}"


def told(error: BaseException) -> str:
    """An exception in one line: its kind, the first sentence of its message, and where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) < 300 else message[:300] + ' ...'}{where}"
