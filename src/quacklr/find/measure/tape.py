"""A forward, recorded as what attention logits are made of: projections, products of two of them, and softmaxes.

While a Tape is entered, the output of everything that multiplies an activation by a weight is replaced by random
numbers that stand for it: a leaf. What becomes of a leaf up to the next one is then a short graph of its own, whatever
the model, and differentiating through it costs next to nothing. Random numbers, since a weight that starts at zero,
or a norm's epsilon, must not hide anything.

    projection    linear, matmul, einsum, addmm, convolution of an activation with a weight; a learned tensor that is
                  added or concatenated to activations as it is
    product       matmul, einsum, baddbmm of two activations: q . k
    attention     scaled_dot_product_attention, or a softmax over the last dimension of something made of products

What multiplies logits between a product and the softmax (talking heads, a convolution over keys) looks like a
projection or a product, but is a function of the logits. That is seen at the softmax; such calls are kept by number,
and a second tape runs them as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from quacklr.find.measure.einsum import Labels, contracted, labels_of_einsum, labels_of_matmul
from quacklr.find.measure.records import Attention, MadeOf, Product, Projection, Side
from quacklr.util.autograd import leaves_of
from quacklr.util.module_stack import ModuleStack
from quacklr.util.torch_functions import (
    ADD,
    ADDED_MATMUL,
    CONCATENATE,
    CONVOLUTION,
    LOGSUMEXP,
    MATMUL,
    MULTIHEAD,
    SDPA,
    SOFTMAX,
    bound,
    multihead_opened,
    tensors_in,
)

CLAMP: set[Any] = {torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_}
BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias")
LIKE: set[Any] = {Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as}  # of an activation


class Tape(TorchFunctionMode):
    """While entered, records projections and products, and hands every attention to a listener."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor],
        running: ModuleStack,
        listener: Callable[[Attention], None],
        random: bool = True,
        scale: float = 1.0,
        as_written: Collection[int] = (),
        root_attends: bool = False,
    ) -> None:
        super().__init__()
        self.weights = {id(parameter): parameter for parameter in parameters}  # and what is made of them
        self.constants = {id(buffer): buffer for buffer in buffers}  # and what is made of them alone
        self.running, self.listener, self.random = running, listener, random
        self.scale, self.as_written = scale, as_written  # of leaves; projections and products that are none, by number
        self.root_attends = root_attends  # whether the model itself may be the module that attends
        self.projections: dict[int, Projection] = {}
        self.products: dict[int, Product] = {}
        self.outputs: dict[int, tuple[Tensor, Projection]] = {}  # what was returned for a projection
        self.of_logits: set[int] = set()  # projections and products that are functions of logits, by number
        self.count = 0  # of projections and products
        self.idle: list[Tensor] = []  # weights that were given nothing to project, as experts without a token
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; what it returns may be a leaf that stands for it."""
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            with self:
                return multihead_opened(*args, **kwargs)
        tensors = tensors_in([*args, *kwargs.values()])
        if not tensors:
            return func(*args, **kwargs)
        if all(id(t) in self.weights or id(t) in self.constants for t in tensors) and func is not F.linear:
            return self._known(func(*args, **kwargs), any(id(t) in self.weights for t in tensors))
        # whatever is checkpointed, or without gradients; detached, or what is saved would keep its own graph alive
        with torch.enable_grad(), saved_tensors_hooks(torch.detach, _same):
            return self._run(func, args, kwargs)

    def _known(self, output: Any, learned: bool) -> Any:
        """What is made of weights and constants alone is a weight, or a constant."""
        (self.weights if learned else self.constants).update({id(tensor): tensor for tensor in tensors_in([output])})
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is SDPA:
            return self._attend_fused(*args, **kwargs)
        if func in SOFTMAX and self._attend(*bound(args, kwargs, "input", "dim")):
            return func(*args, **kwargs).detach()
        if func is F.batch_norm:
            return self._normed_by_batch(*bound(args, kwargs, *BATCH_NORM))
        if func in LOGSUMEXP:
            self._attend(*bound(args, kwargs, "input", "dim"))
        first, second = bound(args, kwargs, "input", "other")
        if func in CLAMP and first.requires_grad:  # clipped entries have no gradient, but are of the same rows
            return first
        if func in ADD and (biased := self._biased(first, second)) is not None:
            return biased
        if func in LIKE and self._is_weight(first):
            return self._known(func(*args, **kwargs), learned=True)
        if func in ADD or func in CONCATENATE:
            args = [self._learned(arg) for arg in args]
        return self._recorded(func, args, kwargs)

    def _normed_by_batch(self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, *_: Any) -> Tensor:
        """As in training, where it cuts a chain as every norm does; with one value a channel, as in eval mode."""
        training = x.numel() > x.shape[1]
        return F.batch_norm(x, None if training else mean, None if training else var, weight, bias, training)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The output, or its leaf if it is a projection or a product."""
        if func is F.linear or func in CONVOLUTION:
            output = func(*args, **kwargs)
            x, weight, bias = bound(args, kwargs, "input", "weight", "bias")
            axis = output.ndim - 1 if func is F.linear else output.ndim - weight.ndim + 1
            return self._project(output, x, weight, bias, ((axis, 0),)) if self._is_weight(weight) else output
        if func in ADDED_MATMUL:
            return self._multiply_and_add(func, args, kwargs)
        if func is torch.einsum and isinstance(args[0], str):
            return self._einsum(args[0], *tensors_in(args[1:]))
        output = func(*args, **kwargs)
        if func in MATMUL:
            left, right = bound(args, kwargs, "input", "other")
            return self._multiply(output, left, right, None, labels_of_matmul(left.ndim, right.ndim))
        return output

    def _multiply_and_add(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """addmm and baddbmm. What is added is a bias if it is a weight; otherwise it stays beside the leaf."""
        added, left, right = bound(args, kwargs, "input", "mat1", "mat2")
        left, right = kwargs.get("batch1", left), kwargs.get("batch2", right)
        labels = labels_of_matmul(left.ndim, right.ndim)
        if self._is_weight(added) and (self._is_weight(left) or self._is_weight(right)):
            return self._multiply(func(*args, **kwargs), left, right, added, labels)
        beta = kwargs.get("beta", 1)
        output = func(added.detach(), left, right, beta=0, alpha=kwargs.get("alpha", 1))
        return self._multiply(output, left, right, None, labels) + beta * added

    def _einsum(self, equation: str, *factors: Tensor) -> Tensor:
        """Of more than two factors, two at a time: first two activations that are summed over an axis of their own."""
        pairs = sorted(
            combinations(range(len(factors)), 2), key=lambda two: any(self._is_weight(factors[i]) for i in two)
        )
        for i, j in pairs if len(factors) > 2 else []:
            if (both := contracted(equation, i, j)) is not None:
                rest = [factor for n, factor in enumerate(factors) if n not in (i, j)]
                return self._einsum(both[1], *rest, self._einsum(both[0], factors[i], factors[j]))
        output = torch.einsum(equation, *factors)
        if len(factors) != 2:
            return output
        left, right = factors
        return self._multiply(output, left, right, None, labels_of_einsum(equation, left.ndim, right.ndim))

    def _multiply(self, output: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, labels: Labels) -> Tensor:
        """A projection if one factor is a weight, a product if both are activations that come from leaves."""
        if self._is_weight(right):
            return self._project(output, left, right, bias, labels.kept(of_right=True))
        if self._is_weight(left):
            return self._project(output, right, left, bias, labels.kept(of_right=False))
        if not (left.requires_grad and right.requires_grad) or (axes := labels.summed()) is None:
            return output
        product = self._product(output, Side(left, axes[0]), Side(right, axes[1]))
        return output if product is None else product.leaf.clone()

    def _product(self, output: Tensor, q: Side, k: Side) -> Product | None:
        self.count += 1
        if self.count in self.as_written:
            return None
        product = Product(self._leaf(output, signed=self.scale != 1), output, q, k, self.running.calls, self.count)
        self.products[id(product.leaf)] = product
        return product

    def _project(
        self, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rows: tuple[tuple[int, int], ...]
    ) -> Tensor:
        self.count += 1
        if self.count in self.as_written:
            return output
        if not output.numel():
            self.idle.append(weight)
        bias = bias if bias is not None and self._is_weight(bias) else None
        projection = Projection(self._leaf(output), output, x, weight, bias, rows, self.running.calls, self.count)
        self.projections[id(projection.leaf)] = projection
        returned = projection.leaf.clone()  # so that the model may write into it
        self.outputs[id(returned)] = returned, projection
        return returned

    def _biased(self, left: Any, right: Any) -> Tensor | None:
        """The output of a projection to which a bias of its rows is added: it is taken for the projection's own."""
        for output, bias in ((left, right), (right, left)):
            returned, projection = self.outputs.get(id(output), (None, None))
            if projection is None or projection.bias is not None or not self._is_weight(bias) or bias.ndim != 1:
                continue
            if projection.rows == ((output.ndim - 1, projection.rows[0][1]),) and len(bias) == output.shape[-1]:
                projection.bias = bias
                return returned
        return None

    def _learned(self, arg: Any) -> Any:
        """Learned tensors that join activations as they are, replaced by their leaves."""
        if isinstance(arg, list | tuple):
            return [self._learned(each) for each in arg]
        if not self._is_weight(arg):
            return arg
        rows = tuple((axis, axis) for axis in range(arg.ndim))
        projection = Projection(self._leaf(arg), None, None, arg, None, rows, self.running.calls, -1)
        self.projections[id(projection.leaf)] = projection
        return projection.leaf.clone()

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        query, key = self._learned(query), self._learned(key)
        groups = query.shape[-3] // key.shape[-3] if kwargs.get("enable_gqa") else 1
        k = key.repeat_interleave(groups, dim=-3) if groups > 1 else key
        if query.requires_grad and k.requires_grad:
            product = self._product(query @ k.mT, Side(query, query.ndim - 1), Side(k, k.ndim - 1))
            assert product is not None
            biased = attn_mask if attn_mask is not None and attn_mask.requires_grad else None
            logits = product.leaf.clone() if biased is None else product.leaf + biased
            self._attend(logits, -1, fused=biased is None)
        mask = None if attn_mask is None else attn_mask.detach()
        return SDPA(query.detach(), key.detach(), value, mask, *args, **kwargs).detach()

    def _attend(self, logits: Tensor, dim: int | None, fused: bool = False) -> bool:
        """Whether a softmax is an attention: over the last dimension of something made of products."""
        if logits.ndim < 3 or dim not in (-1, logits.ndim - 1):
            return False
        direct = [self.products[leaf] for leaf in map(id, leaves_of(logits)) if leaf in self.products]
        nearby = [product for product in self.products.values() if self._is_nearby(product, logits)]
        module, call = self._attending(direct or nearby)
        made_of = MadeOf(call, self.projections, {id(product.leaf): product for product in direct + nearby})
        if not (direct or nearby) or not made_of.search(logits):
            return False
        for product in made_of.products:
            del self.products[id(product.leaf)]
        self.of_logits |= made_of.between
        if not made_of.between:
            self.listener(Attention(logits, direct, module, call, fused))
        return True

    def _is_nearby(self, product: Product, logits: Tensor) -> bool:
        """Whether a softmax may be over this product, changed by a projection.

        It was made in the same call of a module, with the same queries and keys; or around it, in the same shape.
        """
        calls, shape = self.running.calls, product.output.shape
        if product.calls == calls:
            return set(logits.shape[-2:]) <= set(shape)
        around = all(one == other for one, other in zip(product.calls, calls, strict=False))
        return around and sorted(logits.shape) == sorted(shape)

    def _attending(self, products: Sequence[Product]) -> tuple[str, int]:
        """The innermost module running that also made a query (or a key, where queries are made of nothing)."""
        for sides in ([product.q for product in products], [product.k for product in products]):
            leaves = [id(leaf) for side in sides for leaf in leaves_of(side.tensor)]
            made = {call for leaf in leaves if leaf in self.projections for call in self.projections[leaf].calls}
            for name, call in zip(self.running.modules[::-1], self.running.calls[::-1], strict=True):
                if call in made and (name or self.root_attends):
                    return name, call
        return "", 0

    def _is_weight(self, tensor: Any) -> bool:
        return id(tensor) in self.weights

    def _leaf(self, output: Tensor, signed: bool = False) -> Tensor:
        """Random numbers in the place of an output. Positive ones, since after a ReLU others have no gradient."""
        if not self.random and output.any():
            return (output.detach() * self.scale).requires_grad_()
        if output.device not in self.generators:
            self.generators[output.device] = torch.Generator(output.device).manual_seed(0)
        generator = self.generators[output.device]
        leaf = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device) * self.scale
        return (leaf if signed else leaf.abs_()).requires_grad_()


def _same(tensor: Tensor) -> Tensor:
    return tensor
