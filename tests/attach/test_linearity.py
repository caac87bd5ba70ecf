"""`validate_linear` tests on small parameters whether an optimizer is linear in lr. Judge: by hand."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from models import Separate
from quacklr import QuacK
from quacklr.attach.optimizers import TOLERANCE


class At(NamedTuple):
    """The inputs of an update."""

    param: Tensor
    grad: Tensor
    lr: float
    state: dict[str, Any]
    group: dict[str, Any]


class StandIn(Optimizer):
    """An optimizer whose update is one method."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    self.move(At(param, param.grad, group["lr"], state, group))

    def move(self, at: At) -> None:
        raise NotImplementedError


def momentum(state: dict[str, Any], grad: Tensor, factor: float = 0.9) -> Tensor:
    """The updated momentum."""
    state["m"] = factor * state.get("m", torch.zeros_like(grad)) + grad
    return state["m"]


class Momentum(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(momentum(at.state, at.grad), alpha=at.lr)


class CoupledDecay(StandIn):
    """Coupled weight decay: the momentum holds gradients of the current weights, and no copy of them."""

    def move(self, at: At) -> None:
        at.param.sub_(momentum(at.state, at.grad + 0.1 * at.param), alpha=at.lr)


class Trust(StandIn):
    """The step is as long as the weights, as in LARS and LAMB."""

    def move(self, at: At) -> None:
        at.param.sub_(at.grad * at.param.norm() / at.grad.norm(), alpha=at.lr)


class StochasticRounding(StandIn):
    """Both trajectories need the same random numbers."""

    def move(self, at: At) -> None:
        at.param.sub_(at.grad + torch.randn_like(at.grad), alpha=at.lr)


class InSingle(StandIn):
    """Works only with fp32 parameters, so its steps are rounded."""

    def move(self, at: At) -> None:
        at.state.setdefault("m", torch.zeros(at.grad.shape, dtype=torch.float32)).lerp_(at.grad, 0.1)
        at.param.sub_(at.state["m"] + 0.01 * at.param, alpha=at.lr)


class SinceTheStart(StandIn):
    """Keeps the weights at the start to measure the distance from them, which is equal in both runs."""

    def move(self, at: At) -> None:
        start = at.state.setdefault("start", at.param.clone())
        at.param.sub_(at.grad * (1e-3 + (at.param - start).norm()) / at.grad.norm(), alpha=at.lr)


class Averaged(StandIn):
    """The weights are an average of iterates."""

    def move(self, at: At) -> None:
        average = at.state.setdefault("average", at.param.clone())
        average.lerp_(at.param - at.lr * at.grad, 0.3)
        at.param.copy_(average)


class ScheduleFree(StandIn):
    """Gradients at a point between the iterate and its average."""

    def move(self, at: At) -> None:
        z, x = at.state.setdefault("z", at.param.clone()), at.state.setdefault("x", at.param.clone())
        z.sub_(at.grad, alpha=at.lr)
        x.lerp_(z, 1 / at.state["step"])
        at.param.copy_(0.1 * z + 0.9 * x)


class DualAveraging(StandIn):
    """The weights at the start plus the sum of all gradients, as in MADGRAD and FTRL."""

    def move(self, at: At) -> None:
        start = at.state.setdefault("start", at.param.clone())
        at.param.copy_(start - at.lr * momentum(at.state, at.grad, 1.0) / at.state["step"] ** 0.5)


class SlowWeights(StandIn):
    """Lookahead built in."""

    def move(self, at: At) -> None:
        slow = at.state.setdefault("slow", at.param.clone())
        at.param.sub_(at.grad, alpha=at.lr)
        if at.state["step"] % at.group.get("k", 6) == 0:
            slow.lerp_(at.param, 0.5)
            at.param.copy_(slow)


class LastMove(StandIn):
    """Momentum as the difference between the last two weights."""

    def move(self, at: At) -> None:
        last = at.param - at.state.get("before", at.param)
        at.state["before"] = at.param.clone()
        at.param.add_(0.9 * last - at.lr * at.grad)


class StepFromDistance(StandIn):
    """A step size for all parameters, from sums of gradients that are weighted by lr, as in D-Adaptation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)

    @torch.no_grad()
    def step(self, *_: Any) -> None:  # type: ignore[override]
        params = [(param, group["lr"]) for group in self.param_groups for param in group["params"]]
        size = self.state[params[0][0]].setdefault("size", 1e-3)
        totals = [momentum(self.state[param], size * lr * param.grad, 1.0) for param, lr in params]
        above = sum(float(total.square().sum()) for total in totals)
        below = sum(float((total * param.grad).sum()) for total, (param, _) in zip(totals, params, strict=True))
        self.state[params[0][0]]["size"] = max(size, above / below)
        for param, lr in params:
            param.sub_(param.grad, alpha=size * lr)


class CappedLr(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(at.grad, alpha=min(at.lr, at.group.get("cap", 0.03)))


class CappedTrust(StandIn):
    """A ratio that is clipped after it was divided by lr."""

    def move(self, at: At) -> None:
        at.param.sub_(at.grad, alpha=at.lr * min(1.0, 0.03 / at.lr))


class OnASphere(StandIn):
    """The norm of the weights stays what it was."""

    def move(self, at: At) -> None:
        norm = at.param.norm()
        at.param.sub_(at.grad * norm / at.grad.norm(), alpha=at.lr)
        at.param.mul_(norm / at.param.norm())


class NoLr(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(at.grad, alpha=0.01)


LINEAR_ONES = [Momentum, CoupledDecay, Trust, StochasticRounding, InSingle, SinceTheStart]
WEIGHTS_KEPT = [Averaged, ScheduleFree, DualAveraging, SlowWeights, LastMove]
NOT_A_FACTOR = [StepFromDistance, CappedLr, CappedTrust, OnASphere, NoLr]


def by_hand(cls: type[StandIn], rates: list[float]) -> float:
    """How far scaled steps are off steps with a scaled lr, relative to the distance travelled."""
    ends = []
    for scale in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        dtype = torch.float32 if cls is InSingle else torch.float64
        start = torch.randn(5, 3, dtype=dtype)
        param = nn.Parameter(start.clone())
        optimizer = cls([param])
        lr = optimizer.param_groups[0]["lr"]
        for rate in rates:
            optimizer.param_groups[0]["lr"] = lr if scale else lr * rate
            param.grad, before = torch.randn_like(param) + 1, param.detach().clone()
            optimizer.step()
            if scale:
                param.data = before + rate * (param.detach() - before)
        ends.append(param.detach())
    return float((ends[0] - ends[1]).norm() / (ends[1] - start).norm())


def attached(cls: type[StandIn], **settings: Any) -> None:
    """Attach QuacK, and remove it."""
    model = nn.Sequential(Separate())
    QuacK(model, cls(model.parameters(), **settings)).remove()


CONSTANT, CHANGING = [0.5] * 20, [0.5, 1.5, 0.25, 1.0, 0.75] * 4


@pytest.mark.parametrize("cls", LINEAR_ONES)
def test_an_optimizer_that_is_linear_in_lr_is_accepted_without_a_warning(cls: type[StandIn]) -> None:
    assert by_hand(cls, CHANGING) < 1e-4
    attached(cls)


@pytest.mark.parametrize("cls", [*WEIGHTS_KEPT, *NOT_A_FACTOR])
def test_an_optimizer_that_keeps_weights_or_for_which_lr_is_no_factor_is_refused(cls: type[StandIn]) -> None:
    assert by_hand(cls, CONSTANT) > TOLERANCE
    with pytest.raises(
        ValueError, match=rf"^{cls.__name__} is not linear in lr \(on small parameters its steps .*% off"
    ):
        attached(cls)


def test_linearity_depends_on_the_settings_in_defaults_and_in_attributes() -> None:
    attached(CappedLr, cap=1.0)

    class Flagged(StandIn):
        def __init__(self, params: Any, averages: bool) -> None:
            super().__init__(params)
            self.averages = averages

        def move(self, at: At) -> None:
            (Averaged if self.averages else Momentum).move(self, at)  # type: ignore[arg-type]

    attached(Flagged, averages=False)
    with pytest.raises(ValueError, match="Flagged is not linear"):
        attached(Flagged, averages=True)


def test_only_param_groups_with_weights_on_a_path_matter() -> None:
    model = Separate()
    groups = [{"params": [model.q.weight, model.k.weight], "cap": 1.0}, {"params": [model.v.weight]}]
    QuacK(nn.Sequential(model), CappedLr(groups)).remove()
    groups = [{"params": [model.v.weight, model.q.weight], "cap": 1.0}, {"params": [model.k.weight], "cap": 0.01}]
    with pytest.raises(ValueError, match="CappedLr is not linear"):
        QuacK(nn.Sequential(model), CappedLr(groups))


def test_steps_of_vectors_are_measured_if_a_bias_is_on_a_path() -> None:
    class OnlyMatrices(Momentum):
        def move(self, at: At) -> None:
            (Momentum if at.param.ndim == 2 else Averaged).move(self, at)  # type: ignore[arg-type]

    attached(OnlyMatrices)
    model = nn.Sequential(Separate(bias=True))
    with pytest.raises(ValueError, match="OnlyMatrices is not linear"):
        QuacK(model, OnlyMatrices(model.parameters()))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0), torch.tensor(0.05)])
def test_an_lr_may_be_0_or_a_tensor(lr: Any) -> None:
    attached(Momentum, lr=lr)
    with pytest.raises(ValueError, match="Averaged is not linear"):
        attached(Averaged, lr=lr)


def test_during_a_warmup_the_lr_after_it_is_used() -> None:
    model = nn.Sequential(Separate())
    optimizer = CappedLr(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3)
    assert optimizer.param_groups[0]["lr"] < 0.03
    with pytest.raises(ValueError, match="CappedLr is not linear"):
        QuacK(model, optimizer)


@pytest.mark.parametrize("lr", [1e-5, 1e-6])
def test_rounding_is_no_deviation_and_a_small_lr_does_not_hide_one(lr: float) -> None:
    attached(InSingle, lr=lr)
    with pytest.raises(ValueError, match="ScheduleFree is not linear"):
        attached(ScheduleFree, lr=lr)


class NeedsTheModel(StandIn):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)
        self.inside = model


class Raises(StandIn):
    def step(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("only on a full moon")


class MovesNothing(StandIn):
    def move(self, at: At) -> None:
        at.param.add_(0)


class NotFinite(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(at.grad / 0)


class WithoutLr(Momentum):
    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"eta": 0.1})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: NeedsTheModel(params, nn.Linear(2, 2)), "TypeError: .*'model'"),
        (Raises, "RuntimeError: only on a full moon"),
        (MovesNothing, "RuntimeError: its step moves nothing"),
        (NotFinite, "RuntimeError: its steps are not finite"),
        (WithoutLr, "ValueError: its param groups have no lr"),
    ],
)
def test_an_optimizer_that_cannot_be_run_triggers_a_warning_with_the_reason(make: Any, reason: str) -> None:
    model = nn.Sequential(Separate())
    with pytest.warns(
        UserWarning, match=rf"could not be tested on small parameters \({reason}.*no copy of the weights"
    ) as seen:
        QuacK(model, make(model.parameters())).remove()
    assert seen[0].filename == __file__


def test_groups_on_no_path_need_no_lr() -> None:
    model = Separate()
    groups = [{"params": [model.q.weight, model.k.weight]}, {"params": [model.v.weight], "lr": None}]
    QuacK(nn.Sequential(model), Momentum(groups)).remove()


def test_the_optimizer_and_the_random_numbers_are_unchanged() -> None:
    model = nn.Sequential(Separate())
    optimizer = StochasticRounding(model.parameters(), betas=[0.9])
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    weights = [param.detach().clone() for param in model.parameters()]
    settings, numbers = [{**group} for group in optimizer.param_groups], torch.get_rng_state()
    QuacK(model, optimizer).remove()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert optimizer.param_groups == settings
    assert not optimizer.state
    assert not calls
    assert all(torch.equal(param, weight) for param, weight in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_it_works_without_gradients_in_inference_mode_and_with_another_default_device(around: Any) -> None:
    model = nn.Sequential(Separate())
    optimizer = Averaged(model.parameters())
    with around(), pytest.raises(ValueError, match="Averaged is not linear"):
        QuacK(model, optimizer)


def test_zero_redundancy_optimizer_is_as_linear_as_its_inner_optimizer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, as it imports it
        from torch.distributed.optim import ZeroRedundancyOptimizer
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(Separate())
        QuacK(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)).remove()
        with pytest.raises(ValueError, match="Averaged is not linear"):
            QuacK(model, ZeroRedundancyOptimizer(model.parameters(), Averaged, lr=0.1))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.1), "foreach": False}])
def test_other_kernels_are_tested(options: dict[str, Any]) -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = nn.Sequential(Separate())
    optimizer = Mine(model.parameters(), **options)
    optimizer.param_groups[0]["capturable"] = True  # for a GPU
    QuacK(model, optimizer).remove()
