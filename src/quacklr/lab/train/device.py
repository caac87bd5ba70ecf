"""The device of a run: selection, peak memory, FLOPs utilization, and a description of the environment."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import quacklr
from quacklr.lab.config import Config, Machine
from quacklr.lab.errors import UserError

H100, A100, B200 = 989e12, 312e12, 2250e12
PEAK_FLOPS = {"GH200": H100, "H200": H100, "H100": H100, "A100": A100, "L40S": 362e12, "4090": 165e12, "B200": B200}
"""Dense bf16 FLOPs per second, by a part of the device name, from the vendors' tables."""


def device_of(machine: Machine) -> torch.device:
    """The device that the options select; UserError if this machine does not have it. Also sets the thread count.

    With several processes on a machine, `cuda` gives each its own GPU.
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
        reuse_freed_memory()
    return device


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore torch's thread count at the end; `device_of` sets that of the run."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reuse_freed_memory() -> None:
    """Make glibc reuse freed memory between steps instead of returning it to the system.

    glibc does so for blocks up to the size of the largest freed block, at most 32 MB. For a small model, new pages cost
    as much time as the arithmetic. No effect with other C libraries.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def memory(device: torch.device) -> float:
    """Peak memory so far in GB: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return round(used / 1e9, 3)


def mfu(size: int, config: Config, tokens_per_second: float, device: torch.device) -> float | None:
    """Model FLOPs utilization; None if the peak is not known.

    A token takes 6 FLOPs per parameter, and 6 per attended element of each past position.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    if peak is None:
        return None
    past = config.shape.context / 2
    attended = config.shape.layers * config.attention.attended * past
    return 6 * (size + attended) * tokens_per_second / peak


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for `environment.json`; no names of machines or people."""
    packages = {}
    for name in ("torch", "numpy", "tyro", "rich", "tokenizers", "pyarrow"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "quacklr": quacklr.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
