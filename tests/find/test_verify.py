"""Rules are verified once, on the first training batch, before a step is scaled, and without side effects."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crew import Crew
from models import Separate, assert_equal
from quacklr import LogitMonitor, QKClip, QuacK, logit_paths
from quacklr.find import discover
from quacklr.util.modules import Arguments

RULED = "quacklr.find.discover.by_rule"


class Runs:
    """The shapes of inputs. Its list is not an attribute of a module, so it is not restored."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []


class Attention(nn.Module):
    """Separate projections of four heads, known to a rule; `split` says how rows are split into heads."""

    def __init__(self, split: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split = 4, 4, split
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.runs = Runs()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.runs.shapes.append(tuple(x.shape))
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def consecutive(x: Tensor) -> Tensor:
    return x.unflatten(2, (4, 4)).transpose(1, 2)


def interleaved(x: Tensor) -> Tensor:
    """Row r belongs to head r % 4."""
    return x.unflatten(2, (4, 4)).permute(0, 3, 1, 2)


class Model(nn.Module):
    def __init__(self, split: Callable[[Tensor], Tensor] = consecutive, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Attention(split) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x, mask))
        return x


def made(split: Callable[[Tensor], Tensor] = consecutive, **options: Any) -> tuple[Model, Any, QuacK]:
    torch.manual_seed(0)
    model = Model(split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, QuacK(model, optimizer, **options)


def tokens(seed: int = 0, batch: int = 5, length: int = 12) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    optimizer.zero_grad()
    model(*args, **kwargs).square().mean().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def _rule_that_reads_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that assumes consecutive rows whatever the forward does, for verification to contradict."""
    from quacklr.core.path import mha
    from quacklr.core.weight import packed
    from quacklr.find.finding import Finding

    def by_rule(module: Any) -> Finding | None:
        if not isinstance(module, Attention):
            return None
        return Finding(mha(*packed(module.q_proj, ("q", 4, 4)), *packed(module.k_proj, ("k", 4, 4))))

    monkeypatch.setattr(RULED, by_rule)


def test_a_right_rule_is_verified_at_the_first_step_on_a_few_tokens_and_once() -> None:
    model, optimizer, quack = made()
    assert "layers.0   by rule" in repr(quack)
    assert "not verified yet" in repr(quack)
    step(model, optimizer, tokens())
    assert "layers.0   verified" in repr(quack)
    assert "not verified" not in repr(quack)
    step(model, optimizer, tokens())
    runs = model.layers[0].runs.shapes
    assert runs == [(5, 12, 16), (2, 8, 16), (5, 12, 16)]


def test_a_wrong_rule_is_an_error_before_anything_is_scaled_and_says_how_to_take_what_was_measured() -> None:
    model, optimizer, _ = made(interleaved)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # it does not go on in silence after the first error
        with pytest.raises(
            ValueError, match=r"layers.0: the rule for Attention is wrong here; it says .*q_proj.weight\[0:4\]"
        ):
            step(model, optimizer, tokens())
    assert_equal([p for n, p in model.named_parameters()], [before[n] for n, _ in model.named_parameters()])
    with pytest.raises(
        ValueError, match=r"the measurement says .*0:1, 4:5, 8:9, 12:13.*logit_paths\(model, batch, rules=False\)"
    ):
        step(model, optimizer, tokens())


def test_what_was_measured_can_be_taken() -> None:
    torch.manual_seed(0)
    model = Model(interleaved)
    with pytest.raises(ValueError, match=r"is wrong here.*logit_paths\(model, batch, rules=False\)"):
        logit_paths(model, tokens())
    paths = logit_paths(model, tokens(), rules=False)
    assert paths[0].weights[0].block_of_row.tolist() == [0, 1, 2, 3] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(paths, optimizer)
    assert "layers.0   measured" in repr(quack)
    step(model, optimizer, tokens())


def test_without_a_batch_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="rules=False takes what is measured, so it needs a batch"):
        logit_paths(Model(), rules=False)


def test_verification_can_be_switched_off() -> None:
    model, optimizer, quack = made(interleaved, verify=False)
    step(model, optimizer, tokens())
    assert "not verified: verify=False" in repr(quack)
    assert model.layers[0].runs.shapes == [(5, 12, 16)]


def test_paths_that_were_given_or_declared_are_not_measured() -> None:
    model = nn.Sequential(Separate())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer) as quack:
        assert "0          declared" in repr(quack)
        assert not model._forward_pre_hooks
    quack = QuacK(list(logit_paths(model)), optimizer)
    assert "0          given" in repr(quack)


def test_verifying_leaves_a_run_bitwise_as_it_was() -> None:
    results = []
    for verify in (True, False):
        model, optimizer, _ = made(verify=verify)
        for i in range(3):
            step(model, optimizer, tokens(i))
        results.append([*model.state_dict().values(), torch.rand(3)])
    assert_equal(*results)


def test_hooks_are_gone_after_the_first_step_or_with_remove() -> None:
    for removed in (True, False):
        model, optimizer, quack = made()
        assert any(module._forward_pre_hooks for module in model.modules())
        if removed:
            quack.remove()
        else:
            step(model, optimizer, tokens())
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_can_be_copied_and_saved_before_its_first_batch() -> None:
    model, optimizer, quack = made()
    ema = copy.deepcopy(model)
    for hooked in model.modules():
        torch.save(list(hooked._forward_pre_hooks.values()), io.BytesIO())
    ema(tokens(batch=3))
    assert "not verified yet" in repr(quack)
    step(model, optimizer, tokens())
    assert "layers.0   verified" in repr(quack)


def test_the_batch_that_a_monitor_is_given_is_a_batch() -> None:
    model, optimizer, quack = made()
    LogitMonitor(model, tokens(1)).measure()
    ids = tokens()
    gradient = torch.autograd.grad(model(ids).square().mean(), list(model.parameters()))
    for param, of_param in zip(model.parameters(), gradient, strict=True):
        param.grad = of_param
    optimizer.step()
    assert "layers.0   verified" in repr(quack)


def test_a_part_of_the_model_that_a_trainer_calls_is_measured_alone() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.unused = Model(), Model()

    torch.manual_seed(0)
    task = Task()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    quack = QuacK(task, optimizer)
    with pytest.warns(UserWarning, match=r"^unused.layers.0 and 1 more: .* it did not attend in the first batch"):
        step(task.model, optimizer, tokens())
    assert "model.layers.0   verified" in repr(quack)
    assert "unused.layers.{0-1}: not verified: it did not attend in the first batch" in repr(quack)


def test_a_step_without_any_forward_says_that_there_was_no_batch() -> None:
    model, optimizer, quack = made()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match=r"^layers.0 and 1 more: .* no batch was seen before the first step"):
        optimizer.step()
    assert "not verified: no batch was seen before the first step" in repr(quack)


def test_masks_are_cut_with_the_tokens() -> None:
    model, optimizer, quack = made()
    step(model, optimizer, tokens(), mask=torch.ones(5, 1, 12, 12).tril().bool())
    assert "layers.0   verified" in repr(quack)
    assert (2, 8, 16) in vars(model.layers[0])["runs"].shapes


def test_a_model_that_does_not_run_on_a_slice_runs_on_whole_examples() -> None:
    class Windows(Model):
        def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            if ids.shape[1] % 12:
                raise ValueError("the length must be a multiple of 12")
            return super().forward(ids, mask, **kwargs)

    torch.manual_seed(0)
    model = Windows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    step(model, optimizer, tokens())
    assert "layers.0   verified" in repr(quack)
    assert (2, 12, 16) in vars(model.layers[0])["runs"].shapes


def test_a_model_that_cannot_be_measured_says_so_and_trains() -> None:
    class Once(Model):
        def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            if len(ids) != 5:
                raise ValueError("five examples please")
            return super().forward(ids, mask, **kwargs)

    torch.manual_seed(0)
    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    with pytest.warns(UserWarning, match=r"^layers.0 and 1 more: .* five examples please"):
        step(model, optimizer, tokens())
    assert "layers.{0-1}: not verified: Once failed on the sample: ValueError: five examples please" in repr(quack)
    step(model, optimizer, tokens())


def compiled_whole(model: Model) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[return-value]


def compiled_by_layer(model: Model) -> nn.Module:
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    model.layers[1].compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_by_layer])
@pytest.mark.parametrize("split", [consecutive, interleaved])
def test_compiled_models_are_verified(compiled: Any, split: Any) -> None:
    torch.manual_seed(0)
    model = compiled(Model(split))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    if split is interleaved:
        with pytest.raises(ValueError, match=r"^layers.0: the rule for Attention is wrong here"):
            step(model, optimizer, tokens())
    else:
        step(model, optimizer, tokens())
        step(model, optimizer, tokens())
        assert "verified" in repr(quack)
        assert "not verified" not in repr(quack)


def test_a_model_that_is_compiled_in_place_is_not_verified_which_is_a_warning() -> None:
    torch.manual_seed(0)
    model = Model()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"^layers.0 and 1 more: .* source of Attention, .* compiled in place.*"):
        quack = QuacK(model, optimizer)
    assert "not verified: the model was compiled in place" in repr(quack)
    quack.remove()
    QuacK(model, optimizer, verify=False)  # without a warning


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_a_model_that_is_compiled_after_attaching_is_not_verified_which_is_a_warning() -> None:
    model, optimizer, quack = made()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"no batch was seen before the first step"):
        step(compiled, optimizer, tokens())
    assert "not verified: no batch was seen" in repr(quack)
    step(compiled, optimizer, tokens())  # one warning


def test_classes_of_projects_that_were_judged_need_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, quack = made()
    monkeypatch.setattr(Attention, "__module__", "transformers.models.some")
    quack.remove()
    quack = QuacK(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert "not verified: no batch was seen" in repr(quack)


def test_an_attention_that_no_rule_knows_is_a_warning_at_the_first_step() -> None:
    class Unknown(Attention):
        pass

    torch.manual_seed(0)
    model = Model()
    model.layers.append(Unknown(consecutive))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ruled: Any = vars(discover)["by_rule"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RULED, lambda module: None if isinstance(module, Unknown) else ruled(module))
        QuacK(model, optimizer)
    with pytest.warns(UserWarning, match=r"^layers.2: attention was measured in a Unknown that no rule knows"):
        step(model, optimizer, tokens())


def test_mixed_heads_contradict_a_rule() -> None:
    def mixed(x: Tensor) -> Tensor:
        return (x + x.roll(4, -1)).unflatten(2, (4, 4)).transpose(1, 2)

    model, optimizer, _ = made(mixed)
    with pytest.raises(
        ValueError, match=r"layers.0: the rule for Attention is wrong here; .* the measurement says: .*mixed"
    ):
        step(model, optimizer, tokens())


def replicated(_: int) -> str:
    torch.manual_seed(0)
    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with QuacK(wrapped, optimizer) as quack:
        step(wrapped, optimizer, tokens())
        return repr(quack)


def test_under_ddp_every_rank_verifies(two: Crew) -> None:
    assert all("verified" in each and "not verified" not in each for each in two(replicated))


def test_gradients_are_left_as_they_were() -> None:
    model, optimizer, _ = made()
    model(tokens()).square().mean().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 1e-30
    optimizer.step()
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], [g for g in before if g is not None])


@pytest.mark.parametrize(
    ("args", "shapes"),
    [
        ((torch.zeros(5, 12, dtype=torch.long),), [(2, 8)]),
        ((torch.zeros(5, 12, 16),), [(2, 8, 16)]),
        ((torch.zeros(12, dtype=torch.long),), [(12,)]),
        ((torch.zeros(5, 12),), [(2, 12)]),
        ((torch.zeros(5, 3, 32, 32),), [(2, 3, 32, 32)]),
        ((torch.zeros(3, 5, 12, dtype=torch.long), torch.zeros(5, 12, dtype=torch.long)), [(3, 2, 8), (2, 8)]),
        ((torch.zeros(5, 12, dtype=torch.long), torch.zeros(3, 5, 12, dtype=torch.long)), [(2, 8), (3, 2, 8)]),
        ((torch.zeros(5, 12, dtype=torch.long), [torch.zeros(5, 1, 12, 12)]), [(2, 8), (2, 1, 8, 8)]),
        ((torch.zeros(5, 12, dtype=torch.long), {"y": torch.zeros(5, 9, dtype=torch.long)}), [(2, 8), (2, 8)]),
        ((torch.zeros(5, 12, 16), torch.zeros(5, 9, 16)), [(2, 8, 16), (2, 9, 16)]),
        ((torch.zeros(1, 4, dtype=torch.long),), [(1, 4)]),
    ],
)
def test_which_slice_of_a_batch_is_kept(args: tuple[Any, ...], shapes: list[tuple[int, ...]]) -> None:
    from quacklr.find.first_batch import _examples, slices

    first = next(slices(_examples(Arguments(args, {"flag": True, "text": "a"}))))
    assert [tuple(tensor.shape) for tensor in first.tensors()] == shapes
    assert first.kwargs == {"flag": True, "text": "a"}


def test_no_warning_where_all_is_verified() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, _ = made()
        step(model, optimizer, tokens())


def test_qk_clip_verifies_rules_too() -> None:
    for split in (consecutive, interleaved):
        torch.manual_seed(0)
        model = Model(split)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        QKClip(model, optimizer)
        if split is consecutive:
            step(model, optimizer, tokens())
            continue
        with pytest.raises(ValueError, match="layers.0: the rule for Attention is wrong here"):
            step(model, optimizer, tokens())
        with QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False):
            pass
        assert not any(module._forward_pre_hooks for module in (model, *model.layers))


@pytest.mark.parametrize("split", [consecutive, interleaved])
def test_a_batch_that_a_closure_runs_inside_of_the_step_is_verified_before_the_step_is_scaled(split: Any) -> None:
    """Lightning steps this way."""
    model, optimizer, quack = made(split)

    def closure() -> Tensor:
        loss: Tensor = model(tokens()).square().mean()
        loss.backward()
        return loss

    if split is consecutive:
        optimizer.step(closure)
        assert "layers.0   verified" in repr(quack)
        return
    for _ in range(2):
        with pytest.raises(ValueError, match="layers.0: the rule for Attention is wrong here"):
            optimizer.step(closure)


def test_what_a_sample_is_too_small_to_show_contradicts_no_rule() -> None:
    """Behind a ReLU some queries have no gradient: more tokens would show all rows."""

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(2, (4, 4)).transpose(1, 2).relu()

    model, optimizer, quack = made(cut)
    step(model, optimizer, tokens())
    assert "layers.0   verified" in repr(quack)


def test_a_model_that_changes_itself_on_short_inputs_is_as_it_was() -> None:
    """As transformers' BigBird, which replaces its attention by another on short inputs, for good."""

    class Switches(Model):
        kind = "sparse"

        def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            if ids.shape[1] < 12:
                self.kind, self.layers[0] = "full", Attention(consecutive)
            return super().forward(ids, mask, **kwargs)

    torch.manual_seed(0)
    model = Switches()
    first = model.layers[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QuacK(model, optimizer)
    with pytest.warns(UserWarning, match=r"^layers.0: .* did not attend"):
        step(model, optimizer, tokens())
    assert model.kind == "sparse"
    assert model.layers[0] is first
