"""Attention is verified or measured once, on a slice of the first batch, before a step, and without side effects."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crew import Crew
from models import Separate, assert_equal
from quacklr import LogitPath, QKClip, QuacK, check, logit_paths
from quacklr.core.path import mha
from quacklr.core.weight import packed
from quacklr.find import discover
from quacklr.find.discover import found_by_table
from quacklr.find.finding import Finding
from quacklr.find.first_batch import FirstBatch, first_examples, slices
from quacklr.util.modules import Arguments
from quacklr.util.torch_functions import tensors_in

RUNS: list[tuple[int, ...]] = []  # the shapes of the inputs of all attentions, in the order they ran


class Attention(nn.Module):
    """Separate projections of four heads; `split` says how rows are split into heads."""

    def __init__(self, split: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split = 4, 4, split
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        RUNS.append(tuple(x.shape))
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


def tokens(seed: int = 0, batch: int = 5, length: int = 12) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def by_names(module: Any) -> Finding | None:
    """A table that assumes consecutive rows whatever the forward does, for the measurement to contradict."""
    if not isinstance(module, Attention):
        return None
    return Finding(mha(*packed(module.q_proj, ("q", 4, 4)), *packed(module.k_proj, ("k", 4, 4))))


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "by_table", by_names)
    RUNS.clear()


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention is pending."""
    from quacklr.find.tables import by_table

    monkeypatch.setattr(discover, "by_table", by_table)


def started(model: nn.Module, **options: Any) -> FirstBatch:
    return FirstBatch(model, found_by_table(model), **options)


def origins(found: dict[str, Finding] | None) -> dict[str, str]:
    return {name: finding.origin for name, finding in (found or {}).items()}


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    optimizer.zero_grad()
    model(*args, **kwargs).square().mean().backward()
    optimizer.step()


VERIFIED = {"layers.0": "verified", "layers.1": "verified"}
WRONG = r"^layers.0: the table for Attention is wrong here; it says .*"


def test_a_right_table_is_verified_on_a_few_tokens_and_once() -> None:
    model = Model()
    batch = started(model)
    assert {finding.note for finding in batch.found.values()} == {
        "not verified yet: the first batch will be measured before the first step"
    }
    model(tokens())
    assert batch.has_batch
    assert origins(batch.measure()) == VERIFIED
    assert not any(finding.note for finding in batch.found.values())
    model(tokens())
    assert batch.measure() is None
    assert RUNS[::2] == RUNS[1::2] == [(5, 12, 16), (2, 8, 16), (5, 12, 16)]
    assert not hooked(model)


def test_a_wrong_table_is_the_same_error_in_every_place() -> None:
    model = Model(interleaved)
    batch = started(model)
    model(tokens())
    errors = []
    for _ in range(2):  # the next step raises again
        with pytest.raises(ValueError, match=WRONG) as error:
            batch.measure()
        errors.append(str(error.value))
    for place in (logit_paths, lambda *given: check(model, torch.optim.SGD(model.parameters(), lr=0.1), given[1])):
        with pytest.raises(ValueError, match=WRONG) as error:
            place(model, tokens())
        errors.append(str(error.value))
    assert len(set(errors)) == 1
    assert "q_proj.weight[0:4]" in errors[0]
    assert "0:1, 4:5, 8:9, 12:13" in errors[0]
    assert "logit_paths(model, batch, rules=False)" in errors[0]
    paths = logit_paths(model, tokens(), rules=False)
    assert paths[0].weights[0].block_of_row.tolist() == [0, 1, 2, 3] * 4


def test_mixed_heads_contradict_a_table_in_every_place() -> None:
    model = Model(lambda x: consecutive(x + x.roll(4, -1)))
    batch = started(model)
    model(tokens())
    for raises in (batch.measure, lambda: logit_paths(model, tokens())):
        with pytest.raises(ValueError, match=WRONG + "but the measurement says: .*mixed"):
            raises()


def test_quack_and_qk_clip_raise_before_anything_is_scaled() -> None:
    for attach in (QuacK, QKClip):
        torch.manual_seed(0)
        model = Model(interleaved)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, optimizer)
        before = copy.deepcopy(dict(model.named_parameters()))
        for _ in range(2):
            with pytest.raises(ValueError, match=WRONG):
                step(model, optimizer, tokens())
        assert_equal(list(model.parameters()), list(before.values()))


def test_without_a_batch_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="rules=False takes what is measured, so it needs a batch"):
        logit_paths(Model(), rules=False)


WAYS_OUT = r"; give the module a method logit_paths\(\), or measure .* QuacK\(logit_paths\(model, batch\), optimizer\)$"


def compiled_in_place() -> Model:
    model = Model()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (Model, {"verify": False}, "verify=False"),
        (Model, {"gathers": True}, "the model is sharded"),
        (compiled_in_place, {}, r"the model was compiled in place, by model.compile\(\)"),
        (Model, {}, "no batch was seen before the first step .*"),
    ],
)
def test_what_cannot_be_measured_is_left_as_its_table_says_or_is_an_error(
    model: Any, options: dict[str, bool], why: str, request: pytest.FixtureRequest
) -> None:
    known, unknown = model(), model()
    batch = started(known, **options)
    batch.measure()
    assert origins(batch.found) == {"layers.0": "by table", "layers.1": "by table"}
    assert all(finding.note.startswith("not verified: ") for finding in batch.found.values())
    request.getfixturevalue("no_table")
    pending = r"^layers.0 and 1 more: no table has the class Attention, so it has to be measured, but "
    with pytest.raises(RuntimeError, match=pending + why + WAYS_OUT):
        started(unknown, **options).measure()


def test_a_model_of_which_nothing_is_known_and_that_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match="^Linear: no attention was found .*, and it cannot be measured: verify=Fals"
    ):
        started(nn.Linear(2, 2), verify=False)


def test_a_model_without_attention_is_an_error_after_its_first_batch() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    batch = started(model)
    model(torch.randn(3, 2))
    with pytest.raises(ValueError, match="^Sequential has no attention that QuacK can control: no module looks like"):
        batch.measure()


class FiveExamples(Model):
    def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if len(ids) != 5:
            raise ValueError("five examples please")
        return super().forward(ids, mask, **kwargs)


def test_a_model_that_fails_on_a_slice_is_left_as_its_table_says_or_is_an_error(request: pytest.FixtureRequest) -> None:
    why = "FiveExamples failed on the sample: ValueError: five examples please"
    for known in (True, False):
        if not known:
            request.getfixturevalue("no_table")
        model = FiveExamples()
        batch = started(model)
        model(tokens())
        if known:
            assert origins(batch.measure()) == {"layers.0": "by table", "layers.1": "by table"}
            assert batch.found["layers.0"].note.startswith(f"not verified: {why}")
            assert not hooked(model)
        else:
            with pytest.raises(
                RuntimeError, match=f"layers.0 and 1 more: .* has to be measured, but {why}.*{WAYS_OUT}"
            ):
                batch.measure()


def test_what_was_declared_is_compared_with_the_first_batch() -> None:
    model = nn.Sequential(Separate())
    batch = started(model)
    model(torch.randn(2, 3, 16))
    assert origins(batch.measure()) == {"0": "declared"}
    assert not hooked(model)


class WronglyDeclared(Separate):
    """Its heads are declared in another order, those of its key."""

    def logit_paths(self) -> list[LogitPath]:
        (path,) = super().logit_paths()
        return [replace(path, block_of_head=(None, torch.tensor([1, 0, 2, 3])))]


def test_a_wrong_declaration_is_the_same_error_in_every_place() -> None:
    model, x = nn.Sequential(WronglyDeclared()), torch.randn(2, 3, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    places: list[Callable[[], Any]] = [
        lambda: step(model, optimizer, x),
        lambda: logit_paths(model, x),
        lambda: check(model, optimizer, x),
        lambda: check(model, optimizer, x, paths=logit_paths(model)),
    ]
    errors = []
    for place in places:
        with pytest.raises(
            ValueError, match="^0: what is declared for WronglyDeclared is wrong here; it says"
        ) as error:
            place()
        errors.append(str(error.value))
    assert len(set(errors)) == 1
    quack.remove()
    for ways_out in (logit_paths(model, x, rules=False), model):
        with QuacK(ways_out, optimizer, verify=ways_out is not model) as quack:
            step(model, optimizer, x)
            assert ("measured" if ways_out is not model else "declared") in repr(quack)


def test_a_declaration_may_say_more_than_can_be_measured_or_nothing() -> None:
    class Nonlinear(Separate):
        def qk(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
            q, k = super().qk(x_BTD)
            return q * q, k

    class Excluded(Separate):
        def logit_paths(self) -> list[LogitPath]:
            return []

    model, x = nn.Sequential(Nonlinear(), Excluded()), torch.randn(2, 3, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for paths in (model, logit_paths(model, x), logit_paths(model, x, rules=False)[:1]):
        with QuacK(paths, optimizer) as quack:
            step(model, optimizer, x)
            assert list(quack.rates()) == ["0.q", "0.k"]


class TextAndImages(nn.Module):
    """Images run through layers of their own, and not every batch has some."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.images = Model(layers=1), Model(layers=1)

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        x: Tensor = self.text(ids)
        return x if images is None else x + self.images(images)


@pytest.mark.usefixtures("no_table")
def test_a_part_that_runs_in_a_later_batch_is_measured_then() -> None:
    model = TextAndImages()
    batch = started(model)
    model(tokens())
    assert origins(batch.measure()) == {"text.layers.0": "measured", "images.layers.0": "pending"}
    assert hooked(model) == ["", "images", "images.layers.0"]
    model(tokens())
    assert not batch.has_batch
    assert batch.measure() is None
    model(tokens(), tokens())
    assert origins(batch.measure()) == {"text.layers.0": "measured", "images.layers.0": "measured"}
    assert not hooked(model)


@pytest.mark.usefixtures("no_table")
def test_all_micro_batches_of_a_step_are_measured() -> None:
    model = TextAndImages()
    batch = started(model)
    model(tokens(), tokens())
    model(tokens())
    assert origins(batch.measure()) == {"text.layers.0": "measured", "images.layers.0": "measured"}
    model = TextAndImages()
    batch = started(model)
    model(tokens())
    model(tokens(), tokens())
    assert origins(batch.measure()) == {"text.layers.0": "measured", "images.layers.0": "measured"}


@pytest.mark.usefixtures("no_table")
def test_a_pending_part_with_gradients_of_another_process_is_an_error() -> None:
    model = TextAndImages()
    batch = started(model)
    model(tokens())
    batch.measure()
    for parameter in model.images.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"^images.layers.0: .*, but it steps, and no batch ran it in this process"):
        batch.measure()


@pytest.mark.usefixtures("no_table")
def test_a_part_of_the_model_that_a_trainer_calls_is_measured_alone() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.unused = Model(), Model()

    task = Task()
    batch = started(task)
    task.model(tokens())
    found = origins(batch.measure())
    assert found == {
        f"{part}.layers.{i}": origin
        for part, origin in (("model", "measured"), ("unused", "pending"))
        for i in range(2)
    }
    task.unused(tokens())
    assert set(origins(batch.measure()).values()) == {"measured"}
    assert not hooked(task)


@pytest.mark.usefixtures("no_table")
def test_what_looks_like_attention_and_does_not_attend_is_left_alone_with_a_warning() -> None:
    class Linear(Attention):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(q.softmax(-1) @ (k.softmax(-2).mT @ v))

    model = Model()
    model.layers[1] = Linear(consecutive)
    batch = started(model)
    model(tokens())
    with pytest.warns(UserWarning, match=r"left alone in 1 of 2 modules, first layers.1: not recognised, and not seen"):
        assert origins(batch.measure()) == {"layers.0": "measured", "layers.1": "measured"}
    assert not batch.found["layers.1"].paths


def test_a_model_can_be_copied_and_saved_before_its_first_batch() -> None:
    model = Model()
    batch = started(model)
    ema = copy.deepcopy(model)
    for each in model.modules():
        torch.save(list(each._forward_pre_hooks.values()), io.BytesIO())
    ema(tokens(batch=3))
    assert not batch.has_batch
    model(tokens())
    assert origins(batch.measure()) == VERIFIED


def test_masks_are_cut_with_the_tokens() -> None:
    model = Model()
    batch = started(model)
    model(tokens(), mask=torch.ones(5, 1, 12, 12).tril().bool())
    assert origins(batch.measure()) == VERIFIED
    assert (2, 8, 16) in RUNS


def test_a_model_that_does_not_run_on_a_slice_runs_on_whole_examples() -> None:
    class Windows(Model):
        def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            if ids.shape[1] % 12:
                raise ValueError("the length must be a multiple of 12")
            return super().forward(ids, mask, **kwargs)

    model = Windows()
    batch = started(model)
    model(tokens())
    assert origins(batch.measure()) == VERIFIED
    assert (2, 12, 16) in RUNS


def compiled_whole(model: Model) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[return-value]


def compiled_by_layer(model: Model) -> nn.Module:
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    model.layers[1].compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_by_layer])
def test_compiled_models_are_measured(compiled: Any) -> None:
    model = compiled(Model(interleaved))
    batch = started(model)
    model(tokens())
    assert origins(batch.measure()) == {"layers.0": "measured", "layers.1": "measured"}
    assert not hooked(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_a_model_that_is_compiled_after_attaching_has_no_batch() -> None:
    model = Model()
    batch = started(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    compiled(tokens())
    assert not batch.has_batch
    batch.measure()
    assert "no batch was seen" in batch.found["layers.0"].note


def replicated(_: int) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:  # other tests use this process too
        patch.setattr(discover, "by_table", by_names)
        wrapped = DistributedDataParallel(Model())
        batch = started(wrapped)
        wrapped(tokens())
        return origins(batch.measure())


def test_under_ddp_every_rank_verifies(two: Crew) -> None:
    assert two(replicated) == [VERIFIED, VERIFIED]


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
    first = next(slices(first_examples(Arguments(args, {"flag": True, "text": "a"}))))
    assert [tuple(tensor.shape) for tensor in tensors_in(first)] == shapes
    assert first.kwargs == {"flag": True, "text": "a"}


def test_what_a_sample_is_too_small_to_show_contradicts_no_table() -> None:
    """Behind a ReLU some queries have no gradient: more tokens would show all rows."""
    model = Model(lambda x: consecutive(x).relu())
    batch = started(model)
    model(tokens())
    assert origins(batch.measure()) == VERIFIED


def test_a_model_that_changes_itself_on_short_inputs_is_as_it_was() -> None:
    """As transformers' BigBird, which replaces its attention by another on short inputs, for good."""

    class Switches(Model):
        kind = "sparse"

        def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            if ids.shape[1] < 12:
                self.kind, self.layers[0] = "full", Attention(consecutive)
            return super().forward(ids, mask, **kwargs)

    model = Switches()
    first = model.layers[0]
    batch = started(model)
    model(tokens())
    batch.measure()
    assert batch.found["layers.0"].note == "not verified: it did not attend in the first batch"
    assert model.kind == "sparse"
    assert model.layers[0] is first
