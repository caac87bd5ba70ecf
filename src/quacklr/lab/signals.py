"""Signals that ask a long job to stop: it ends after what it is doing, and saves that."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def signals() -> Iterator[list[int]]:
    """A list that a first Ctrl-C or SIGTERM puts its number into; a second Ctrl-C, a second later, stops at once.

    torchrun sends every process what the system may have sent it already, so the same signal can come twice.
    SIGHUP, which says that the terminal is gone, is ignored: nothing that happens to the terminal ends a run.
    """
    caught: list[int] = []
    began = time.monotonic()

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal began
        if not caught:
            caught.append(signum)
            began = time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - began > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    handlers: dict[signal.Signals, Any] = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGHUP: signal.SIG_IGN}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
