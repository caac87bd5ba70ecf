"""A DeepSpeed engine on the ranks of a Crew, on the CPU with gloo; and its whole weights."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_runs import llama, loss_of, optimizer_of

os.environ["DS_ACCELERATOR"] = "cpu"
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}


def deepspeed_module() -> Any:
    """The package, with torch.distributed initialised already, and without its warnings and log lines."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # type: ignore[import-untyped]

        accelerator = deepspeed.accelerator.get_accelerator()
        accelerator.is_fp16_supported = lambda: True  # torch has fp16 on the CPU, which DeepSpeed does not use
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, which takes minutes
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls functions with new names
    return deepspeed


@contextmanager
def initialized(model: nn.Module, optimizer: Any, stage: int, dtype: str = "float32", **options: Any) -> Iterator[Any]:
    """An engine; `options` are those of the config, and "zero" those of its ZeRO."""
    zero = {"stage": stage, "reduce_bucket_size": 4000, **options.pop("zero", {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 6000, **zero}
    config = {**BASE, "zero_optimization": zero, **options}
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = deepspeed_module().initialize(model=model, optimizer=optimizer, config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def engine_of(kind: str, stage: int, dtype: str = "float32", **options: Any) -> AbstractContextManager[Any]:
    """The Llama in an engine."""
    model = llama(getattr(torch, dtype))
    return initialized(model, optimizer_of(model, kind), stage, dtype, **options)


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of DeepSpeed without torch's warnings about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", module="deepspeed")
        return function(*args, **kwargs)


def backward(engine: Any, number: int) -> None:
    quietly(lambda: engine.backward(loss_of(engine, number)))


def step(engine: Any) -> None:
    quietly(engine.step)


def train(engine: Any, numbers: Iterable[int]) -> Iterator[int]:
    """Take these steps, as the returned iterator is used."""
    for number in numbers:
        backward(engine, number)
        step(engine)
        yield number


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """The weights of the model, in every process; those of the 16-bit model, not the fp32 copies."""
    deepspeed = deepspeed_module()
    found = {}
    for name, param in engine.module.named_parameters():
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters([param], modifier_rank=None):
                found[name] = param.detach().clone()
        else:
            found[name] = param.detach().clone()
    return found


def make_universal(rank: int, folder: Path) -> None:
    """Convert the last checkpoint in a folder, as docs/scaling.md says."""
    if rank == 0:
        tag = (folder / "latest").read_text()
        tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        folders = ["--input_folder", str(folder / tag), "--output_folder", str(folder / f"{tag}_universal")]
        subprocess.run([*tool, *folders], check=True, capture_output=True)
        (folder / "latest_universal").write_text(f"{tag}_universal\n")
