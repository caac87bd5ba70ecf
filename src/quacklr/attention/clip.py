"""QK clip (Kimi K2, Algorithm 1): after a step, heads whose largest logit was above a threshold are scaled back to it.

    gamma[h] = min(1, threshold / largest logit of head h since the last step)

    MHA   q[h] and k[h] by sqrt(gamma[h])
    MLA   uq[h] and uk[h] by sqrt(gamma[h]), qr[h] by gamma[h]; weights that all heads read (dq, dkv, kr) do not change

In terms of logit paths: the product of each path is scaled by gamma[h], in equal parts by the weights that belong to
head h alone. A key block that a group of heads shares is scaled by the square root of the group's largest gamma, and
each query by the remaining factor, so that no head shrinks by more than its own gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment, validate_not_attached_twice
from quacklr.attention.interceptor import SUPPORTED, AttentionInterceptor
from quacklr.attention.logits import HeadAxes, Logits, head_axes, last_axis
from quacklr.core.local import local_boxes, original
from quacklr.core.path import LogitPath
from quacklr.core.rule import validate_number
from quacklr.core.step_scaler import is_idle, steps_on_stack
from quacklr.core.weight import Weight, distinct
from quacklr.find.discover import validate_controls
from quacklr.sharded import collectives
from quacklr.util.caller import warn
from quacklr.util.modules import named_modules, run_uncompiled

_attached: WeakSet[QKClip] = WeakSet()
_running: list[nn.Module] = []  # the recorded modules whose forward is running, innermost last

NO_MODEL = "QK clip records the logits of a model: pass the model, or the paths that logit_paths(model, batch) returns"
REPLICAS = "QK clip cannot record the logits of the replicas of DataParallel; use DistributedDataParallel"
UNSEEN = f"QK clip saw no attention logits in training mode before this step, so it cannot clip: {SUPPORTED}"
SPENT = "QK clip saw no training forward since the last step, so it does not clip: eval mode, or step() called twice?"
STUCK = "QK clip cannot scale all terms of the logits of {}: each weight of a term is frozen (LoRA) or serves all heads"
NOT_RECORDED = "QK clip saw no logits of {} before this step, so they are not clipped"
MERGED = (
    "{}: its logits have heads and batch in one axis, so QK clip cannot see which entry belongs to which head; give "
    "the heads an axis of their own, (batch, heads, queries, keys), or train with batches of one sequence"
)


class QKClip(AbstractContextManager["QKClip"]):
    """Kimi K2's QK clip on a model and the optimizer (or optimizers) that train it.

        clip = QKClip(model, optimizer, threshold=100.0)     # once; the training loop stays as it was

    The largest logit of each head is taken over all training forwards since the last step: all micro-batches, all ranks
    of DistributedDataParallel or FSDP2. For this, all logits are computed a second time. Heads whose largest logit is
    not above the threshold (it may be negative) stay bitwise as they are. Forwards in eval mode or without gradients do
    not count. The attention modules of a compiled model run uncompiled, because a graph does not expose its logits.
    Frozen weights are not scaled. There is no device synchronisation. With `threshold=inf` nothing is scaled, and
    `max_logits()` shows the largest logits.

    `optimizer` and `verify` are those of QuacK. If no table has the model's attention, pass the paths that
    `logit_paths(model, batch)` measures instead of the model.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        threshold: float = 100.0,
        *,
        verify: bool = True,
    ) -> None:
        validate_number("threshold", threshold, "the largest logit allowed", infinite=True)
        self.threshold = threshold
        self._attachment = attachment = Attachment(model, optimizer, linear=False, verify=verify)
        self.optimizers, module, engine = attachment.optimizers, attachment.module, attachment.engine
        if module is None or isinstance(module, nn.DataParallel):
            raise ValueError(NO_MODEL if module is None else REPLICAS)
        validate_controls(attachment.found, module)
        collectives.validate_no_tensor_parallel(module, "QK clip", engine.tensor_parallel)
        weights = [weight for path in attachment.paths for weight in path.weights]
        attachment.control(weights)
        others = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(weights, [weight for other in others for weight in other._canonical], "QKClip")
        self._paths = attachment.by_module
        self._canonical: dict[Weight, Weight] = distinct(weights)
        parts = [part for weight in self._canonical for part in weight.parts]
        boxes = [(part, box) for part in parts for box in local_boxes(part.param)]
        self._boxes = [(part, box, part.blocks_in(box).to(part.param.device)) for part, box in boxes]
        of_engine = engine.data_groups if collectives.is_distributed() else None
        self._groups = of_engine or collectives.groups_of(module)
        collectives.warn_if_alone(self._groups, "QK clip")
        if stuck := [name or "the model" for name, each in self._paths.items() if not all(map(scalable, each))]:
            warn(STUCK.format(", ".join(stuck)))
        self._maxima: dict[Optimizer, dict[str, Tensor]] = {each: {} for each in self.optimizers}
        self._stepped: dict[Optimizer, set[int]] = {}  # ids of the parameters that stepped since the last forward
        self._warned = False
        self._checks_steps = True
        modules, paths = dict(named_modules(module)), self._paths
        eager: Any = torch.compiler.disable
        self._hooks: list[Any] = [RecordedForward(n, modules[n], paths[n][0].heads, self._record) for n in paths]
        self._hooks += [each.register_step_pre_hook(eager(self._before)) for each in self.optimizers]
        self._hooks += [each.register_step_post_hook(eager(self._after)) for each in self.optimizers]
        _attached.add(self)

    def _record(self, name: str, max_H: Tensor) -> None:
        """Update the maxima of each optimizer since its last step. NaN and inf do not count."""
        max_H = max_H.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        for optimizer, maxima in self._maxima.items():
            if self._stepped.pop(optimizer, None) is not None:
                maxima.clear()
            maxima[name] = torch.maximum(maxima[name], max_H) if name in maxima else max_H

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._checks_steps and not is_idle(optimizer):
            self._attachment.before_step()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if steps_on_stack(optimizer) > 1:  # a step that calls the step of its parent class runs the hooks twice
            return
        idle = is_idle(optimizer)
        if self._checks_steps and not idle:
            self._checks_steps = not self._attachment.after_step(optimizer)
        params = self._attachment.in_groups.by(optimizer)
        stepped = self._stepped.get(optimizer)
        if stepped is None:  # else an engine steps the next part of the parameters
            self._maxima[optimizer] = self._reduced(self._maxima[optimizer], idle)
        elif not stepped.isdisjoint(params):  # the maxima were used by an earlier step
            if not idle:
                self._maxima[optimizer].clear()
                warn(SPENT)
            return
        self._stepped[optimizer] = params | (stepped or set())
        factor_of = self._factors(self._maxima[optimizer])
        for part, box, block_of_row in self._boxes:
            if part in factor_of and id(part.param) in params and part.param.requires_grad:
                rows, of_block = part.rows_first(box), factor_of[part].to(block_of_row.device)
                factor = torch.where(block_of_row >= 0, of_block[block_of_row.clamp(min=0)], 1.0)
                rows.mul_(factor.view(-1, *[1] * (rows.ndim - 1)))  # 16 bits are multiplied in float32

    def _factors(self, maxima: Mapping[str, Tensor]) -> dict[Weight, Tensor]:
        """For each weight to scale, and its bias, the (blocks,) factors; the least, if several modules share it."""
        found: dict[Weight, Tensor] = {}
        for name, max_H in maxima.items():
            gamma_H = torch.where(max_H > self.threshold, self.threshold / max_H, 1.0)
            for weight, factor_B in factors(self._paths[name], gamma_H).items():
                for part in self._canonical[weight].parts:
                    found[part] = torch.minimum(found[part], factor_B) if part in found else factor_B
        return found

    def _reduced(self, maxima: dict[str, Tensor], idle: bool) -> dict[str, Tensor]:
        """The maxima over all ranks. A rank without any takes part in the all-reduce, because the others wait."""
        if self._groups:
            device = original(next(iter(self._canonical)).param).device
            none = {name: torch.full((each[0].heads,), -torch.inf, device=device) for name, each in self._paths.items()}
            found = zip(none, collectives.all_reduce(list((none | maxima).values()), self._groups, "MAX"), strict=True)
            maxima = {name: of for name, of in found if name in maxima or bool((of > -torch.inf).any())}
        if not maxima and not idle:
            raise RuntimeError(UNSEEN)
        missing = [name or "the model" for name in self._paths if name not in maxima]
        if missing and not self._warned:
            self._warned = True
            warn(NOT_RECORDED.format(", ".join(missing)))
        return maxima

    def max_logits(self) -> dict[str, Tensor]:
        """For each attention module, (heads,): the largest logits since the last step.

        Between a step and the next training forward, these are the logits that the step used.
        """
        return dict(self._maxima[self.optimizers[0]])

    def remove(self) -> None:
        """Remove the hooks, and unwrap the forwards."""
        _attached.discard(self)
        self._attachment.remove()
        for each in self._hooks:
            each.remove()

    def __exit__(self, *exception: object) -> None:
        self.remove()


def factors(paths: list[LogitPath], gamma_H: Tensor) -> dict[Weight, Tensor]:
    """For each weight to scale, the (blocks,) factors: those along a path multiply to gamma for every head."""
    found: dict[Weight, Tensor] = {}
    for path in paths:
        left_H, rest = gamma_H, []
        for weight, read in scalable(path):
            read_H = read.to(gamma_H.device)
            if weight in found:  # scaled for another path already, as with LoRA; no other weight may grow to compensate
                left_H = (left_H / found[weight][read_H]).clamp(max=1)
            else:
                rest.append((weight, read_H))
        for done, (weight, read_H) in enumerate(rest):
            common_B = torch.zeros(weight.blocks, device=gamma_H.device)
            common_B = common_B.scatter_reduce(0, read_H, left_H, "amax", include_self=False)
            found[weight] = common_B ** (1 / (len(rest) - done))
            left_H = left_H / found[weight][read_H]
    return found


def scalable(path: LogitPath) -> list[tuple[Weight, Tensor]]:
    """The trained weights of a path that belong to one head, or to a group of heads, and the block each head reads.

    Weights of a group come first. If there is only one head, a chain of more than two weights is scaled without its
    first and last weight, because these make values too.
    """
    inner = path.weights[1:-1] or path.weights
    single_head = inner if path.heads == 1 else ()
    found = [
        (weight, read)
        for weight, read in zip(path.weights, path.reads, strict=True)
        if (weight.blocks > 1 or weight in single_head) and any(part.param.requires_grad for part in weight.parts)
    ]
    return sorted(found, key=lambda pair: pair[0].blocks)


class RecordedForward:
    """The wrapped forward of a module: calls `on_max(name, max_H)` in training mode with gradients.

    An attention with another number of heads is ignored. A deep copy or a pickle of the module has its plain forward.
    """

    def __init__(self, name: str, module: nn.Module, heads: int, on_max: Callable[[str, Tensor], None]) -> None:
        self.name, self.module, self.heads, self.on_max, self.records = name, module, heads, on_max, True
        self.before = vars(module).get("forward")
        self.__wrapped__ = module.forward  # read by inspect.signature
        self._run: Any = torch.compiler.disable(self._recorded)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, recorded in training."""
        return self._run(args, kwargs)

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if not (self.records and self.module.training and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)
        _running.append(self.module)
        try:
            with run_uncompiled(), AttentionInterceptor(self._on_logits, self._axes_of):
                return self.__wrapped__(*args, **kwargs)
        finally:
            _running.pop()

    def _axes_of(self, lead: tuple[int, ...]) -> HeadAxes:
        """Two leading axes are (B, H) by convention, also if B is H: a batch of training may have any size."""
        return last_axis(lead) if len(lead) == 2 else head_axes(lead, self.heads)

    def _on_logits(self, logits: Logits) -> None:
        heads = logits.shape[1]
        if _running[-1] is not self.module:  # the logits of a recorded module inside of this one
            return
        if not logits.heads_known and heads % self.heads == 0:
            raise ValueError(MERGED.format(self.name or "the model"))
        if heads == self.heads:
            maxima = [logit_BHIJ[..., : logits.keys].amax((0, 2, 3)) for _, _, logit_BHIJ in logits.chunks()]
            self.on_max(self.name, torch.stack(maxima).amax(0))

    def remove(self) -> None:
        """Restore the module's own forward. If another wrapper calls this one, it stays, without recording."""
        self.records = False
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def __reduce__(self) -> Any:
        return plain_forward, (self.module, self.before)


def plain_forward(module: nn.Module, before: Any) -> Any:
    """The forward of a module that is not recorded: `before` if the instance had one, else that of its class."""
    return MethodType(type(module).forward, module) if before is None else before
