"""Warnings that name the line of the user's code that led to them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

PASSED_OVER = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line on the call stack that is not code of quacklr, torch or contextlib."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
