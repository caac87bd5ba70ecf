"""What a projection module multiplies its input by: one weight, or with LoRA a sum of chains of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from quacklr.core.weight import Segment, Weight, packed
from quacklr.find.parameter_rows import weight_of
from quacklr.find.rules.evidence import is_trusted

PACKAGES = {"transformers", "megatron", "transformer_engine"}
LINEAR = {
    "FalconLinear",
    "ColumnParallelLinear",
    "TEColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TELinear",
}
Chain = tuple[Weight, ...]  # from the one next to the logit to the one that reads the input


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionWeight:
    """One term of a projection: a weight whose rows are the output, and what its input goes through before."""

    weight: Tensor
    bias: Tensor | None = None
    dim: int = 0
    before: Weight | None = None
    suffix: str = ""
    originals: dict[int, str] | None = None  # the parameters that the weight is computed from, if it is

    def cut(self, segments: Sequence[Segment], repeat: int) -> dict[str, list[Chain]]:
        """The chains of each named segment of its rows."""
        weights = packed(self.weight, *segments, repeat=repeat, dim=self.dim, bias=self.bias)
        before: Chain = ()
        if self.before is not None:
            before = (replace(self.before, name="_".join([*(weight.name for weight in weights), self.before.name])),)
        return {weight.name: [(*self._finished(weight), *before)] for weight in weights}

    def _finished(self, weight: Weight) -> Chain:
        """The weight, of the parameter that it is computed from; nothing if that one's scale does not matter."""
        if self.originals is not None:
            masks = [(weight.block_of_row == block).view(-1, 1) for block in range(weight.blocks)]
            found = weight_of(self.weight, masks, self.originals)
            if found is None:
                return ()
            source = found[0]
            weight = replace(weight, param=source.param, block_of_row=source.block_of_row, dim=source.dim)
        return (replace(weight, name=weight.name + self.suffix),)


def projection_weights(projection: nn.Module | Tensor | None) -> list[ProjectionWeight]:
    """The terms of a projection; none if it is not one that we can read."""
    module: Any = projection
    if isinstance(module, nn.Parameter):
        return [ProjectionWeight(module)] if module.ndim == 2 else []
    if not isinstance(module, nn.Module):
        return []
    if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
        return _lora(module)
    if [name for name, _ in module.named_children()] == ["linear"] and not hasattr(module, "weight"):
        return projection_weights(module.linear)
    return _plain(module)


def _plain(module: Any) -> list[ProjectionWeight]:
    """A linear layer, or a convolution that is one."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, nn.Parameter)):
        return []
    if is_parametrized(module, "weight") and weight.ndim == 2:
        return [_parametrized(module, bias)]
    pointwise = isinstance(module, nn.Conv1d | nn.Conv2d) and set(module.kernel_size) == {1}
    known = type(module).__name__ if is_trusted(module, PACKAGES) else ""
    linear = weight.ndim == 2 and (type(module).forward is nn.Linear.forward or known in LINEAR)
    transposed = weight.ndim == 2 and known == "Conv1D"  # transformers'
    if not isinstance(weight, nn.Parameter) or not (pointwise or linear or transposed) or _is_hooked(module):
        return []
    return [ProjectionWeight(weight, bias, dim=1 if transposed else 0)]


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody may change what it makes. FSDP2 and tensor parallelism do not: they only send it around."""
    makers = [str(getattr(hook, "__module__", "")) for hook in module._forward_hooks.values()]
    return not all(maker.startswith("torch.distributed.") for maker in makers)


def _lora(module: Any) -> list[ProjectionWeight]:
    """peft: base + sum of B A. A starts with a zero partner, so Lemma 1 gives it no rate; it counts all the same."""
    found = projection_weights(module.base_layer)
    if module.merged or module.disable_adapters:
        return found
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        if adapter in getattr(module, "lora_variant", {}):
            return []
        a, b = module.lora_A[adapter], module.lora_B[adapter]
        if not isinstance(a, nn.Linear) or not isinstance(b, nn.Linear) or b.bias is not None:
            return []
        suffix = "" if adapter == "default" else f"_{adapter}"
        name = f"lora_A{suffix}"
        before = Weight(name, a.weight, torch.zeros(a.weight.shape[0], dtype=torch.long), rated=False)
        found.append(ProjectionWeight(b.weight, before=before, suffix=f"_lora_B{suffix}"))
    return found


def _parametrized(module: Any, bias: Tensor | None) -> ProjectionWeight:
    """torch.nn.utils.parametrize: the weight as it is computed now."""
    with torch.enable_grad():
        weight = module.weight
    originals = {id(p): name for name, p in module.parametrizations.weight.named_parameters()}
    return ProjectionWeight(weight, bias, originals=originals)
