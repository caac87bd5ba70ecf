"""The parts of a decoder that methods change: its linear layers, and the products of its weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quacklr import LogitPath
from quacklr.lab.model import Attention, FeedForward
from quacklr.lab.optim.compositional import Factor
from quacklr.util.modules import named_modules


def linears(model: nn.Module) -> list[nn.Linear]:
    """All linear layers."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def logit_linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that compute queries and keys."""
    return [attention.matrices()[role][0] for attention in attentions_of(model) for role in attention.logit_roles]


def mlp_paths(model: nn.Module) -> list[LogitPath]:
    """The products of weights in every MLP, with weights named `<module>.<role>`."""
    modules = [(name, module) for name, module in named_modules(model) if isinstance(module, FeedForward)]
    return [path for name, module in modules for path in module.product_paths(name)]


def attentions_of(model: nn.Module) -> list[Attention]:
    """All attention modules."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def factors(attention: Attention) -> Iterator[tuple[Factor, Factor]]:
    """The products of an attention's weights. In the output projection, a head is a range of columns, not of rows."""
    matrices = attention.matrices()
    for one, other in attention.product_roles:
        second = Factor(matrices[other][0].weight, matrices[other][1])
        first = (
            Factor(attention.o.weight, attention.o.in_features // (second.param.shape[0] // second.blocks), True)
            if one == "o"
            else Factor(matrices[one][0].weight, matrices[one][1])
        )
        yield first, second
