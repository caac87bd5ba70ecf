"""QuacK tests on small parameters whether an optimizer is linear in lr. Judge: by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from models import Separate
from quacklr import QuacK


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
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                self.move(At(param, param.grad, group["lr"], state, group))

    def move(self, at: At) -> None:
        raise NotImplementedError


class CoupledDecay(StandIn):
    """The momentum holds gradients of the current weights, and no copy of them."""

    def move(self, at: At) -> None:
        at.state["m"] = 0.9 * at.state.get("m", torch.zeros_like(at.grad)) + at.grad + 0.1 * at.param
        at.param.sub_(at.state["m"], alpha=at.lr)


class StochasticRounding(StandIn):
    """Both trajectories need the same random numbers."""

    def move(self, at: At) -> None:
        at.param.sub_(at.grad + torch.randn_like(at.grad), alpha=at.lr)


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


class SlowWeights(StandIn):
    """Lookahead built in."""

    def move(self, at: At) -> None:
        slow = at.state.setdefault("slow", at.param.clone())
        at.param.sub_(at.grad, alpha=at.lr)
        if at.state["step"] % 6 == 0:
            slow.lerp_(at.param, 0.5)
            at.param.copy_(slow)


class CappedLr(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(at.grad, alpha=min(at.lr, at.group.get("cap", 0.03)))


def by_hand(cls: type[StandIn], rates: list[float]) -> float:
    """How far scaled steps are off steps with a scaled lr, relative to the distance travelled."""
    ends = []
    for scale in (True, False):
        torch.manual_seed(0)
        start = torch.randn(5, 3, dtype=torch.float64)
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


def attached(cls: type[Optimizer], bias: bool = False, **settings: Any) -> None:
    """Attach QuacK, and remove it."""
    model = nn.Sequential(Separate(bias=bias))
    QuacK(model, cls(model.parameters(), **settings), tau=1.0).remove()


@pytest.mark.parametrize("cls", [CoupledDecay, StochasticRounding, SinceTheStart])
def test_an_optimizer_that_is_linear_in_lr_is_accepted_without_a_warning(cls: type[StandIn]) -> None:
    assert by_hand(cls, [0.5, 1.5, 0.25, 1.0, 0.75] * 4) < 1e-4
    attached(cls)


@pytest.mark.parametrize("cls", [Averaged, SlowWeights, CappedLr])
def test_an_optimizer_that_keeps_weights_or_for_which_lr_is_no_factor_is_refused(cls: type[StandIn]) -> None:
    assert by_hand(cls, [0.5] * 20) > 0.01
    with pytest.raises(ValueError, match=rf"^{cls.__name__} is not linear in lr \(on small parameters its .*% off"):
        attached(cls)


def test_linearity_depends_on_the_settings_in_defaults_and_in_attributes() -> None:
    class Flagged(StandIn):
        def __init__(self, params: Any, averages: bool) -> None:
            super().__init__(params)
            self.averages = averages

        def move(self, at: At) -> None:
            (Averaged if self.averages else CoupledDecay).move(self, at)  # type: ignore[arg-type]

    attached(CappedLr, cap=1.0)
    attached(Flagged, averages=False)
    with pytest.raises(ValueError, match="Flagged is not linear"):
        attached(Flagged, averages=True)


def test_only_param_groups_with_weights_on_a_path_matter_and_each_has_its_settings() -> None:
    model = Separate()
    groups = [{"params": [model.q.weight, model.k.weight], "cap": 1.0}, {"params": [model.v.weight], "lr": None}]
    QuacK(nn.Sequential(model), CappedLr(groups), tau=1.0).remove()
    groups = [{"params": [model.v.weight, model.q.weight], "cap": 1.0}, {"params": [model.k.weight], "cap": 0.01}]
    with pytest.raises(ValueError, match="CappedLr is not linear"):
        QuacK(nn.Sequential(model), CappedLr(groups), tau=1.0)


def test_steps_of_vectors_are_measured_if_a_bias_is_on_a_path() -> None:
    class OnlyMatrices(StandIn):
        def move(self, at: At) -> None:
            (CoupledDecay if at.param.ndim == 2 else Averaged).move(self, at)  # type: ignore[arg-type]

    attached(OnlyMatrices)
    with pytest.raises(ValueError, match="OnlyMatrices is not linear"):
        attached(OnlyMatrices, bias=True)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.05), 1e-6])
def test_an_lr_may_be_0_or_a_tensor_or_so_small_that_steps_are_rounded(lr: Any) -> None:
    attached(CoupledDecay, lr=lr)
    with pytest.raises(ValueError, match="Averaged is not linear"):
        attached(Averaged, lr=lr)


def test_during_a_warmup_the_lr_after_it_is_used() -> None:
    model = nn.Sequential(Separate())
    optimizer = CappedLr(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3)
    with pytest.raises(ValueError, match="CappedLr is not linear"):
        QuacK(model, optimizer, tau=1.0)


class NeedsTheModel(StandIn):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)
        self.inside = model


class MovesNothing(StandIn):
    def move(self, at: At) -> None:
        at.param.add_(0)


class NotFinite(StandIn):
    def move(self, at: At) -> None:
        at.param.sub_(at.grad / 0)


class WithoutLr(CoupledDecay):
    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"eta": 0.1})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: NeedsTheModel(params, nn.Linear(2, 2)), "TypeError: .*'model'"),
        (MovesNothing, "RuntimeError: its step moves nothing"),
        (NotFinite, "RuntimeError: its steps are not finite"),
        (WithoutLr, "ValueError: its param groups have no lr"),
    ],
)
def test_an_optimizer_that_cannot_be_run_triggers_a_warning_with_the_reason(make: Any, reason: str) -> None:
    model = nn.Sequential(Separate())
    warned = rf"could not be tested on small parameters \({reason}.*no copy of the weights"
    with pytest.warns(UserWarning, match=warned) as seen:
        QuacK(model, make(model.parameters()), tau=1.0).remove()
    assert seen[0].filename == __file__


def test_the_optimizer_and_the_random_numbers_are_unchanged() -> None:
    model = nn.Sequential(Separate())
    optimizer = StochasticRounding(model.parameters(), betas=[0.9])
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    weights = [param.detach().clone() for param in model.parameters()]
    settings, numbers = [{**group} for group in optimizer.param_groups], torch.get_rng_state()
    QuacK(model, optimizer, tau=1.0).remove()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert optimizer.param_groups == settings
    assert not optimizer.state
    assert not calls
    assert all(torch.equal(param, weight) for param, weight in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.device("meta")])
def test_it_works_in_inference_mode_and_with_another_default_device(around: Any) -> None:
    model = nn.Sequential(Separate())
    optimizer = Averaged(model.parameters())
    with around(), pytest.raises(ValueError, match="Averaged is not linear"):
        QuacK(model, optimizer, tau=1.0)


def test_zero_redundancy_optimizer_is_as_linear_as_its_inner_optimizer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, as it imports it
        from torch.distributed.optim import ZeroRedundancyOptimizer
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(Separate())
        QuacK(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1), tau=1.0).remove()
        with pytest.raises(ValueError, match="Averaged is not linear"):
            QuacK(model, ZeroRedundancyOptimizer(model.parameters(), Averaged, lr=0.1), tau=1.0)
    finally:
        dist.destroy_process_group()


def test_kernels_that_the_cpu_does_not_have_are_not_used() -> None:
    model = nn.Sequential(Separate())
    optimizer = type("Mine", (torch.optim.AdamW,), {})(model.parameters(), fused=True)
    optimizer.param_groups[0]["capturable"] = True  # for a GPU
    QuacK(model, optimizer, tau=1.0).remove()
