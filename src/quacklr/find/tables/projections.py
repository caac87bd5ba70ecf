"""The weights that a projection module multiplies its input by: one weight, or with LoRA a sum of chains of weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Segment, Weight, packed
from quacklr.find.tables.facts import is_trusted

PACKAGES = {"transformers", "megatron", "transformer_engine"}
LINEAR = re.compile(r"FalconLinear|TELinear|(TE|TELayerNorm)?ColumnParallelLinear")
Chain = tuple[Weight, ...]  # from the weight next to the logit to the one that reads the input


class ProjectionWeight(NamedTuple):
    """One term of a projection: a weight whose rows are its output. The input goes through `before` first."""

    weight: Tensor
    bias: Tensor | None = None
    dim: int = 0
    before: Chain = ()
    suffix: str = ""

    @property
    def rows(self) -> int:
        """The number of outputs."""
        return self.weight.shape[self.dim]


def chains(terms: Sequence[ProjectionWeight], *segments: Segment, repeat: int = 1) -> dict[str, list[Chain]]:
    """The chains of each named segment of a projection's rows, one for each term of the projection."""
    found: dict[str, list[Chain]] = {name: [] for name, _, _ in segments if name is not None}
    for term in terms:
        weights = packed(term.weight, *segments, repeat=repeat, dim=term.dim, bias=term.bias)
        names = "_".join(weight.name for weight in weights)
        before = [replace(each, name=f"{names}_{each.name}") for each in term.before]
        for weight in weights:
            found[weight.name].append((replace(weight, name=weight.name + term.suffix), *before))
    return found


def joined(
    q: Sequence[Chain], k: Sequence[Chain], before_q: Sequence[Chain] = ((),), before_k: Sequence[Chain] = ((),)
) -> list[LogitPath]:
    """One path for each pair of a query chain and a key chain, each extended by every chain before it."""
    parts = product(q, before_q, k, before_k)
    chained = [(*earlier[::-1], *of_q[::-1], *of_k, *before) for of_q, earlier, of_k, before in parts]
    return [LogitPath(chain, max(weight.blocks for weight in chain)) for chain in chained]


def projection_weights(projection: nn.Module | Tensor | None) -> list[ProjectionWeight]:
    """The terms of a projection; empty if it is of no known kind."""
    module: Any = projection
    if isinstance(module, nn.Parameter):
        return [ProjectionWeight(module)] if module.ndim == 2 else []
    if not isinstance(module, nn.Module):
        return []
    module = module._modules.get("_fsdp_wrapped_module", module)  # FSDP1 may wrap single projections
    if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
        return _lora(module)
    if [name for name, _ in module.named_children()] == ["linear"] and not hasattr(module, "weight"):
        return projection_weights(module.linear)
    return _plain(module)


def _plain(module: Any) -> list[ProjectionWeight]:
    """A linear layer, or a convolution with kernel size 1; not one with a parametrised weight.

    A forward hook may change the output. Those of FSDP2, tensor parallelism and ZeRO only communicate.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    hooks = [str(getattr(hook, "__module__", "")) for hook in module._forward_hooks.values()]
    changed = not all(package.startswith(("torch.distributed.", "deepspeed.")) for package in hooks)
    if changed or not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter | None):
        return []
    pointwise = isinstance(module, nn.Conv1d | nn.Conv2d) and set(module.kernel_size) == {1}
    known = type(module).__name__ if is_trusted(module, PACKAGES) else ""
    transposed = weight.ndim == 2 and known == "Conv1D"  # transformers'
    linear = weight.ndim == 2 and (type(module).forward is nn.Linear.forward or LINEAR.fullmatch(known))
    return [ProjectionWeight(weight, bias, dim=int(transposed))] if pointwise or linear or transposed else []


def _lora(module: Any) -> list[ProjectionWeight]:
    """A LoRA layer of peft, base + sum of B A.

    A has no rate, because its partner B starts at zero (Lemma 1). It counts in the rates of its partners.
    """
    found = projection_weights(module.base_layer)
    if module.merged or module.disable_adapters:
        return found
    for adapter in [each for each in module.active_adapters if each in module.lora_A]:
        a, b = module.lora_A[adapter], module.lora_B[adapter]
        is_plain = isinstance(a, nn.Linear) and isinstance(b, nn.Linear) and b.bias is None
        if not is_plain or adapter in getattr(module, "lora_variant", {}):
            return []
        suffix = "" if adapter == "default" else f"_{adapter}"
        one_block = torch.zeros(a.weight.shape[0], dtype=torch.long)
        before = Weight(f"lora_A{suffix}", a.weight, one_block, rated=False, gain=float(module.scaling[adapter]))
        found.append(ProjectionWeight(b.weight, before=(before,), suffix=f"_lora_B{suffix}"))
    return found
