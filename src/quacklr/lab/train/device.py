"""The machine under a run: which device, how much memory it took, how near its peak it works."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import quacklr
from quacklr.lab.config import Config, Machine
from quacklr.lab.errors import UserError

PEAK = {
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "B200": 2250e12,
}
"""Dense bf16 operations a second, by a part of the device's name, from its makers' tables."""


def device_of(machine: Machine) -> torch.device:
    """The device that the options mean; UserError if this machine has none.

    Of several processes on a machine, each has a GPU of its own, if they are not told which.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if machine.device == "auto" else machine.device
    if name.startswith("cuda:") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"--device {name} would give all processes the same GPU; --device cuda gives each its own")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(name)
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    if device.type == "cpu":
        keep_memory()
    return device


@contextmanager
def threads_restored() -> Iterator[None]:
    """Afterwards torch has as many threads as before: `device_of` sets those that a run asks for."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Let the C library reuse memory between steps, instead of giving it back to the system and taking it anew.

    glibc does so for blocks up to the largest that was ever freed, 32 MB at most; fresh pages cost a small model as
    much as its arithmetic. Other C libraries are not changed by it.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def memory(device: torch.device) -> float:
    """The most memory used so far, in GB: of the GPU if there is one, otherwise of the process."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return round(used / 1e9, 3)


def mfu(size: int, config: Config, tokens_per_second: float, device: torch.device) -> float | None:
    """Share of the GPU's peak: a token takes 6 operations a parameter, and 6 a number attended of a past position."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((value for part, value in PEAK.items() if part in name), None)
    if peak is None:
        return None
    past = config.shape.context / 2
    attended = config.shape.layers * config.attention.attended * past
    return 6 * (size + attended) * tokens_per_second / peak


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge a run's numbers: versions and hardware, no names of machines or people."""
    packages = {}
    for name in ("torch", "numpy", "tyro", "rich", "tokenizers", "pyarrow"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "quacklr": quacklr.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
