"""Records the projections, products and softmaxes of a forward pass: all that attention logits are computed from.

While a Tape is entered, the output of each projection and product is replaced by random numbers, a new leaf of the
autograd graph. The graph from one leaf to the next is short in every model, so derivatives are cheap. The numbers are
random so that a weight that is initialised to zero, or the epsilon of a norm, does not hide a dependence.

    projection    linear, matmul, einsum, addmm, convolution of an activation with a weight; a learned tensor that is
                  added or concatenated to activations
    product       matmul, einsum, baddbmm of two activations: q . k
    attention     scaled_dot_product_attention, or a softmax over the last dimension of a tensor computed from products

An operation between a product and the softmax (talking heads, a convolution over keys) looks like a projection or a
product, but is a function of the logits. The tape recognises it only at the softmax, and keeps its number. In a second
forward pass the outputs of these operations are not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from quacklr.find.measure.records import Attention, Axes, Factor, Product, Projection, products_behind, recorded_in
from quacklr.util import torch_functions as ops
from quacklr.util.modules import ModuleStack
from quacklr.util.torch_functions import ProductLabels, bound, tensors_in

CLAMP: set[Any] = {torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_}
BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias")
LIKE: set[Any] = {Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as}
"""Functions that take the dtype or the shape of a second tensor. Applied to a weight, the result is still a weight."""


class Options(NamedTuple):
    """How a Tape records."""

    random: bool = True  # leaves are random numbers, not the outputs that they replace
    scale: float = 1.0  # of the leaves
    not_replaced: frozenset[int] = frozenset()  # numbers of projections and products whose outputs stay
    root_attends: bool = False  # the model itself may be the attention module


class Tape(TorchFunctionMode):
    """While entered, records projections and products, and calls `on_attention` for every attention.

    After the pass, `on_logits` has the numbers of operations on logits that the pass replaced, and `idle` the weights
    that no token was multiplied with, as those of experts without a token.
    """

    def __init__(
        self, model: nn.Module, running: ModuleStack, on_attention: Callable[[Attention, Tape], None], options: Options
    ) -> None:
        super().__init__()
        self.running, self.on_attention, self.options = running, on_attention, options
        self.weights: dict[int, Tensor] = {id(each): each for each in model.parameters()}  # and what is made of them
        self.constants = {id(each): each for each in model.buffers()}  # and what is made of them alone
        self.projections: dict[int, Projection] = {}
        self.products: dict[int, Product] = {}
        self.outputs: dict[int, tuple[Tensor, Projection]] = {}  # the tensors returned to the model in place of outputs
        self.on_logits: set[int] = set()
        self.idle: list[Tensor] = []
        self.count = 0  # of projections, products and learned tensors
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. It may return a leaf instead of its output."""
        kwargs = kwargs or {}
        if func is ops.MULTIHEAD:
            with self:
                return ops.multihead_opened(*args, **kwargs)
        tensors = tensors_in([*args, *kwargs.values()])
        if not tensors:
            return func(*args, **kwargs)
        sources = tensors[:1] if func in LIKE else tensors
        if all(id(t) in self.weights or id(t) in self.constants for t in sources) and func is not F.linear:
            output = func(*args, **kwargs)
            alike = self.weights if any(map(self._is_weight, sources)) else self.constants
            alike.update({id(tensor): tensor for tensor in tensors_in([output])})
            return output
        # gradients are enabled even where the model disables them; detached saved tensors keep no graph alive
        with torch.enable_grad(), saved_tensors_hooks(torch.detach, lambda tensor: tensor):
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(out := kwargs.get("out"), Tensor):  # torch does not differentiate functions that write into `out`
            return out.copy_(self._run(func, args, {name: each for name, each in kwargs.items() if name != "out"}))
        if func is ops.SDPA:
            return self._attend_fused(*args, **kwargs)
        if func in ops.SOFTMAX and self._attend(*bound(args, kwargs, "input", "dim")):
            return func(*args, **kwargs).detach()
        if func is F.batch_norm:  # in training mode it removes the scale of its input
            x, mean, var, weight, bias = bound(args, kwargs, *BATCH_NORM)
            training = x.numel() > x.shape[1]  # not if a channel has one value
            return func(x, None if training else mean, None if training else var, weight, bias, training)
        if func in ops.LOGSUMEXP:
            self._attend(*bound(args, kwargs, "input", "dim"))
        first, second = bound(args, kwargs, "input", "other")
        if func in CLAMP and first.requires_grad:  # clipped entries have no gradient, but depend on the same rows
            return first
        if func in ops.ADD and (biased := self._add_bias(first, second)) is not None:
            return biased
        if func in ops.ADD or func in ops.CONCATENATE:
            args = [self._replace_learned(arg) for arg in args]
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function; if it is a projection or a product, record it and return its leaf."""
        if func in ops.CONVOLUTION:
            x, weight, bias = bound(args, kwargs, "input", "weight", "bias")
            output = func(*args, **kwargs)
            rows = ((output.ndim - weight.ndim + 1, 0),)
            return self._project(output, x, weight, bias, rows) if self._is_weight(weight) else output
        product = ops.product_of(func, args, kwargs)
        if product is not None and len(product.factors) > 2 and isinstance(args[0], str):
            return self._in_pairs(args[0], product.factors)
        if product is None or product.labels is None:
            return func(*args, **kwargs)
        added, factors = product.summand, product.factors
        is_bias = func is F.linear or (self._is_weight(added) and any(map(self._is_weight, factors)))
        if added is None or is_bias:
            return self._multiply(func(*args, **kwargs), factors, added, product.labels)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        output = func(added.detach(), *factors, beta=0, alpha=alpha)
        leaf = self._multiply(output, factors, None, product.labels)
        return leaf + beta * added if beta else leaf  # with beta=0, `added` may be uninitialised memory

    def _in_pairs(self, equation: str, factors: Sequence[Tensor]) -> Any:
        """An einsum of more than two factors, computed in pairs, so that q . k is a product."""
        labels, out = ops.explicit_labels(equation, [factor.ndim for factor in factors])
        weights = [i for i, factor in enumerate(factors) if self._is_weight(factor)]
        if (first := ops.first_pair(labels, out, weights)) is None:
            return torch.einsum(equation, *factors)
        i, j, kept = first
        pair = f"{labels[i]},{labels[j]}->{kept}", factors[i], factors[j]
        sums = not set(labels[i] + labels[j]) <= set(kept)
        product = self._record(torch.einsum, pair, {}) if sums else torch.einsum(*pair)
        rest = [n for n in range(len(factors)) if n not in (i, j)]
        then = ",".join([*(labels[n] for n in rest), kept])
        return self._record(torch.einsum, (f"{then}->{out}", *(factors[n] for n in rest), product), {})

    def _multiply(
        self, output: Tensor, factors: Sequence[Tensor], bias: Tensor | None, labels: ProductLabels
    ) -> Tensor:
        """Record a projection if one factor is a weight, or a product if both are activations that depend on leaves."""
        left, right = factors
        for weight, x in ((right, left), (left, right)):
            if self._is_weight(weight):
                return self._project(output, x, weight, bias, labels.kept_axes(of_right=weight is right))
        are_activations = all(each.requires_grad and not isinstance(each, nn.Parameter) for each in factors)
        if not are_activations or len(labels.summed_axes()) != 1:  # a parameter that is not the model's is neither
            return output
        return self._product(output, left, right, labels).clone()

    def _product(self, output: Tensor, left: Tensor, right: Tensor, labels: ProductLabels) -> Tensor:
        """Record a product. The result is its leaf."""
        self.count += 1
        if self.count in self.options.not_replaced:
            return output
        ((q_axis, k_axis),) = labels.summed_axes()
        q = Factor((self.count, "q"), left, q_axis, labels.kept_axes(of_right=False))
        k = Factor((self.count, "k"), right, k_axis, labels.kept_axes(of_right=True))
        leaf = self._leaf(output, self.options.scale, signed=self.options.scale != 1)
        self.products[id(leaf)] = Product(leaf, output, q, k, self.running.calls, self.count)
        return leaf

    def _project(
        self, output: Tensor | None, x: Tensor | None, weight: Tensor, bias: Tensor | None, rows: Axes
    ) -> Tensor:
        """Record a projection, or a learned tensor, which has no output. The result is a copy of its leaf."""
        self.count += 1
        if output is not None and self.count in self.options.not_replaced:
            return output
        if output is not None and not output.numel():
            self.idle.append(weight)
        leaf = self._leaf(weight, 1.0) if output is None else self._leaf(output, self.options.scale)
        bias = bias if self._is_weight(bias) else None
        key = self.count, "output"
        projection = Projection(leaf, output, x, weight, bias, rows, self.running.calls, self.count, key)
        self.projections[id(leaf)] = projection
        returned = leaf.clone()  # so that the model may write into it
        self.outputs[id(returned)] = returned, projection
        return returned

    def _add_bias(self, left: Any, right: Any) -> Tensor | None:
        """The output of a projection to which the model adds a bias of its rows; the bias becomes the projection's."""
        for output, bias in ((left, right), (right, left)):
            returned, projection = self.outputs.get(id(output), (None, None))
            if projection is None or projection.bias is not None or not self._is_weight(bias) or bias.ndim != 1:
                continue
            if [axis for axis, _ in projection.rows] == [output.ndim - 1] and len(bias) == output.shape[-1]:
                projection.bias = bias
                return returned
        return None

    def _replace_learned(self, arg: Any) -> Any:
        """An argument with learned tensors, also those in lists, replaced by their leaves."""
        if isinstance(arg, list | tuple):
            return [self._replace_learned(each) for each in arg]
        if not self._is_weight(arg):
            return arg
        return self._project(None, None, arg, None, tuple((axis, axis) for axis in range(arg.ndim)))

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """scaled_dot_product_attention: record its product and its attention, and return its output."""
        query, key = self._replace_learned(query), self._replace_learned(key)
        groups = query.shape[-3] // key.shape[-3] if kwargs.get("enable_gqa") else 1
        k = key.repeat_interleave(groups, dim=-3) if groups > 1 else key
        if query.requires_grad and k.requires_grad:
            keys = k.mT
            leaf = self._product(query @ keys, query, keys, ops.matmul_labels(query.ndim, keys.ndim))
            biased = attn_mask if attn_mask is not None and attn_mask.requires_grad else None
            logits = leaf.clone() if biased is None else leaf + biased
            self._attend(logits, -1, self.products[id(leaf)], fused=biased is None)
        mask = None if attn_mask is None else attn_mask.detach()
        return ops.SDPA(query.detach(), key.detach(), value, mask, *args, **kwargs).detach()

    def _attend(self, logits: Tensor, dim: int | None, own: Product | None = None, fused: bool = False) -> bool:
        """Whether a softmax is an attention: it is over the last dimension of a tensor computed from products."""
        if logits.ndim < 3 or dim not in (-1, logits.ndim - 1):
            return False
        direct = recorded_in(logits, self.products)
        nearby = [product for product in self.products.values() if product.is_near(logits, self.running.calls)]
        if not direct and not nearby:
            return False
        module, call = self._attending(direct or nearby)
        near = {id(product.leaf): product for product in direct + nearby}
        products, between = products_behind(logits, {**self.projections, **near}, call, own)
        for product in products:
            del self.products[id(product.leaf)]
        self.on_logits |= between
        if products and not between:
            nested = own is not None and any(recorded_in(each.tensor, self.products) for each in (own.q, own.k))
            self.on_attention(Attention(logits, direct, module, call, fused, nested), self)
        return bool(products)

    def _attending(self, products: Sequence[Product]) -> tuple[str, int]:
        """The innermost running module, and its call, in which a query was projected, or else a key."""
        for factors in ([product.q for product in products], [product.k for product in products]):
            made = {c for factor in factors for p in recorded_in(factor.tensor, self.projections) for c in p.calls}
            for name, call in zip(self.running.modules[::-1], self.running.calls[::-1], strict=True):
                if call in made and (name or self.options.root_attends):
                    return name, call
        return "", 0

    def _is_weight(self, tensor: Any) -> bool:
        return id(tensor) in self.weights

    def _leaf(self, output: Tensor, scale: float, signed: bool = False) -> Tensor:
        """Random numbers to replace an output. They are positive by default, so that a ReLU has gradients."""
        if not self.options.random and output.any():
            return (output.detach() * scale).requires_grad_()
        device = output.device
        generator = self.generators.setdefault(device, torch.Generator(device).manual_seed(0))
        leaf = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=device)
        return (scale * (leaf if signed else leaf.abs_() + 0.5)).requires_grad_()
