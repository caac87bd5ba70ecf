"""Signals that stop a long job: the job finishes its current step and saves it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that receives the number of the first SIGINT (Ctrl-C) or SIGTERM.

    A second Ctrl-C raises KeyboardInterrupt if it comes more than a second later: torchrun forwards a signal that the
    process may already have received.
    """
    caught: list[int] = []
    first_at = time.monotonic()

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal first_at
        if not caught:
            caught.append(signum)
            first_at = time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - first_at > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    handlers: dict[signal.Signals, Any] = {signal.SIGINT: handle, signal.SIGTERM: handle}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
