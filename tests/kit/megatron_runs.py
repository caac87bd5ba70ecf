"""Megatron-core's real GPTModel and optimizers on the CPU: its names of CUDA are those of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SIZES = {"num_layers": 3, "hidden_size": 42, "num_attention_heads": 6, "kv_channels": 6}
MLA_SIZES = {
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "num_layers": 2,
    "hidden_size": 42,
    "num_attention_heads": 6,
}


class CudaIsCpu(TorchFunctionMode):
    """Tensors say that they are on CUDA, and devices that are asked for are the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is Tensor.cuda:
            return args[0]
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = "cpu" if str(kwargs["device"]) != "meta" else "meta"
        args = tuple("cpu" if isinstance(each, str) and each.startswith("cuda") else each for each in args)
        return func(*args, **kwargs)


class NotInstalled:
    """In place of a class of Transformer Engine."""


@contextmanager
def on_the_cpu(tensor_parallel: int = 1) -> Iterator[None]:
    """Megatron's process groups, on gloo, and its code on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # type: ignore[import-untyped]
        from megatron.core import tensor_parallel as tp

        fork = patch.object(tp.random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
        device = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
        from megatron.core.transformer import multi_latent_attention as mla  # type: ignore[import-untyped]

        no_te = patch.object(mla, "TELinear", NotInstalled)
        with fork, device, no_te, CudaIsCpu():
            parallel_state.initialize_model_parallel(tensor_parallel, distributed_timeout_minutes=10)
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()


class Product(nn.Module):
    """softmax(q k) v, for queries and values of different sizes."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q_TBHD: Tensor, k_TBHD: Tensor, v_TBHD: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q_TBHD, k_TBHD, v_TBHD))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def gpt(
    qk_norm: bool = False,
    mla: bool = False,
    dtype: torch.dtype = torch.float32,
    tensor_parallel: int = 1,
    query_groups: int = 3,
) -> Any:
    """A GPTModel by the local spec. With `mla`, the product of attention is our own: the local one cannot do it."""
    from megatron.core.models.gpt import GPTModel  # type: ignore[import-untyped]
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-untyped]
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    torch.manual_seed(0)
    kind, sizes = (MLATransformerConfig, MLA_SIZES) if mla else (TransformerConfig, SIZES)
    sizes = sizes | ({} if mla else {"num_query_groups": query_groups})
    config = kind(
        **sizes,
        ffn_hidden_size=20,
        use_cpu_initialization=True,
        add_qkv_bias=not mla,
        qk_layernorm=qk_norm,
        init_method_std=0.15,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, multi_latent_attention=mla)
    if mla:
        spec.submodules.self_attention.submodules.core_attention = Product
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=12, position_embedding_type="rope")


def loss_of(model: Any, step: int) -> Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(12).expand(2, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=tokens).float().mean()


def megatron_optimizer(model: Any, kind: str, distributed: bool = True, **options: Any) -> tuple[Any, Any]:
    """The model in Megatron's DistributedDataParallel, and the optimizer that it makes."""
    from megatron.core import distributed as ddp
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # type: ignore[import-untyped]

    settings = ddp.DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    wrapped = ddp.DistributedDataParallel(model.config, settings, model)
    dtype = next(model.parameters()).dtype
    lr = 1.0 if kind == "sgd" else 0.03
    numbers = {"lr": lr, "weight_decay": 0.1, "adam_eps": 1e-4, "sgd_momentum": 0.5, "clip_grad": 0.0}
    kinds = {"use_distributed_optimizer": distributed, "bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    return wrapped, get_megatron_optimizer(OptimizerConfig(optimizer=kind, **numbers, **kinds, **options), [wrapped])


def torch_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """The optimizer that `megatron_optimizer` has inside, on whole parameters."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-4, weight_decay=0.1)


def backward(model: Any, optimizer: Any, number: int) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss_of(model, number).backward()
    model.finish_grad_sync()
