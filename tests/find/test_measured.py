"""Measuring the attention of a model: its paths, no side effects on the model, and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quacklr import LogitPath, QuacK, logit_paths
from quacklr.find.discover import found_by_table
from quacklr.find.finding import chains
from quacklr.find.measure.assemble import measured_paths
from quacklr.lab.model import MHA, MLA, Shape, build
from quacklr.util.modules import named_parameters
from stand_ins_kit import HF, Known, Model, Plain, called

SAMPLE = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))


def rows(model: nn.Module, paths: list[LogitPath]) -> set[Any]:
    return chains(paths, {id(parameter): name for name, parameter in named_parameters(model)})


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 12}, {"add_bias_kv": True}], ids=str)
def test_multihead_attention_of_torch_is_measured_as_its_rule_says(need_weights: bool, options: dict[str, Any]) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, vdim=options.get("kdim"), **options)

        def forward(self, q: Tensor, kv: Tensor) -> Tensor:
            out: Tensor = self.attention(q, kv, kv, need_weights=need_weights)[0]
            return out

    model, sample = Attends(), (torch.randn(3, 2, 16), torch.randn(5, 2, options.get("kdim", 16)))
    measured = measured_paths(model, sample)["attention"]
    ruled = found_by_table(model)["attention"]
    assert rows(model, list(measured.paths)) == rows(model, list(ruled.paths)) != set()


@called("LlamaAttention", "transformers.models.llama")
class Odd(Plain):
    """Heads in the opposite order, which neither names nor shapes show."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query.flip(1), key, value)


def test_a_rule_that_is_wrong_is_an_error_that_shows_both() -> None:
    model = Model(HF, Odd())
    assert len(logit_paths(model)) == 1  # by table, wrongly
    wrong = r"^model\.layers\.0\.self_attn: the table for \w+ is wrong here; it says that a head reads .*k_proj\.weight"
    with pytest.raises(
        ValueError, match=wrong + r"\[0:8\] and .*q_proj.*, but the measurement says that a head reads .*\[0:8\]"
    ):
        logit_paths(model, SAMPLE)


class Mixer(nn.Module):
    """Its projections have names that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.alpha, self.beta, self.gamma))
        return self.delta(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        ({"words": SAMPLE}, r"^Model failed on the sample: TypeError: .*words.*; a sample is what the model is called"),
        (SAMPLE + 1000, r"^Model failed on the sample: IndexError"),
    ],
    ids=["name", "out of range"],
)
def test_a_sample_that_does_not_fit_is_one_clear_error_and_nothing_is_attached(sample: Any, error: str) -> None:
    model = Model(HF, Plain()).train()
    with pytest.raises(ValueError, match=error):
        logit_paths(model, sample)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_attention_is_an_error_with_a_sample_too() -> None:
    with pytest.raises(
        ValueError, match=r"^Linear: no softmax attention was seen in a forward of the sample\. .*Mamba.* eager"
    ):
        logit_paths(nn.Linear(2, 2), torch.randn(3, 2))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_wrapped_and_compiled_models_are_found_under_their_own_names() -> None:
    model = Model(HF, Known(), Known())
    expected = [str(path) for path in logit_paths(model)]
    layer = model.get_submodule("model.layers")
    compiled: Any = torch.compile(model, backend="eager")
    for wrapped in (DistributedDataParallel(model), compiled, DistributedDataParallel(compiled)):
        assert [str(path) for path in logit_paths(wrapped)] == expected
        assert [str(path) for path in logit_paths(wrapped, SAMPLE)] == expected
    part: Any = torch.compile(layer.get_submodule("0"), backend="eager")
    layer.add_module("0", part)
    assert [str(path) for path in logit_paths(model, SAMPLE)] == expected


@pytest.mark.parametrize(
    "spec",
    [
        MHA(heads=4, kv_heads=2, head_dim=8),
        MLA(heads=3, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8),
        MLA(heads=3, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8, latent_norm=True),
    ],
    ids=["GQA", "MLA", "latent norms"],
)
def test_what_the_lab_declares_is_what_is_measured(spec: MHA | MLA) -> None:
    model = build(Shape(d_model=32, layers=1, d_ff=48, context=12, vocab=61), spec, seed=0)
    declared = found_by_table(model)["blocks.0.attention"]
    measured = measured_paths(model, SAMPLE)["blocks.0.attention"]
    assert rows(model, list(measured.paths)) == rows(model, list(declared.paths))


def test_measured_paths_list_what_is_left_alone_too() -> None:
    normed: Any = Plain()
    normed.q_norm, normed.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
    normed.attend = lambda q, k, v: Plain.attend(normed, normed.q_norm(q), normed.k_norm(k), v)
    model = Model(HF, normed, Mixer(), Plain())
    paths = logit_paths(model, SAMPLE)
    assert [path.weights[0].name[13:15] for path in paths] == ["1.", "2."]  # in the model's order
    quack = QuacK(paths, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)
    assert "model.layers.0.self_attn: QK norm" in repr(quack)
    assert repr(paths[1]).startswith("LogitPath(model.layers.2.self_attn.q . model.layers.2.self_attn.k: 4 heads)")
    assert repr(paths[1].weights[1]).endswith("16 rows of (16, 32), 2 blocks)")


def test_an_attention_that_the_sample_did_not_run_is_still_listed() -> None:
    model = Model(HF, Plain())
    model.add_module("tower", Mixer())
    with pytest.warns(UserWarning, match="first tower: not recognised, and not seen to attend"):
        assert len(logit_paths(model, SAMPLE)) == 1


class Merging(nn.Linear):
    """As LoRA in loralib: weights are merged when `eval()` is called."""

    def train(self, mode: bool = True) -> Any:
        raise AssertionError(f"train({mode}) was called")


def test_modes_frozen_parameters_and_hooks_stay_as_they_were() -> None:
    attention = Plain()
    model = Model(HF, attention, Plain()).train()
    attention.v_proj = Merging(32, 16, bias=False)
    frozen = attention.q_proj.get_parameter("weight").requires_grad_(False)
    modes = [module.training for module in model.modules()]
    assert logit_paths(model, SAMPLE)[0].weights[0].param is frozen
    assert [module.training for module in model.modules()] == modes
    assert [p for p in model.parameters() if not p.requires_grad] == [frozen]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_compiled_attention_is_found_by_table_when_it_is_the_whole_model() -> None:
    compiled: Any = torch.compile(Known(), backend="eager")
    assert [str(path) for path in logit_paths(compiled)] == ["q . k"]


def test_a_gradient_that_rounding_cancels_in_one_direction_is_not_missing() -> None:
    """In bf16, some of the many entries have a gradient of exactly 0 in a random direction."""
    model = build(Shape(d_model=128, layers=1, d_ff=48, context=64, vocab=61), MHA(4, 2, 16), seed=0).bfloat16()
    sample = torch.randint(61, (4, 64), generator=torch.Generator().manual_seed(0))
    found = measured_paths(model, sample)["blocks.0.attention"]
    assert (found.reason, len(found.paths)) == ("", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_as_full_precision_is(dtype: torch.dtype) -> None:
    spec = MLA(heads=3, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=96, d_ckv=64, latent_norm=True)
    model = build(Shape(d_model=128, layers=1, d_ff=48, context=12, vocab=61), spec, seed=0)
    full = rows(model, list(measured_paths(model, SAMPLE)["blocks.0.attention"].paths))
    assert rows(model.to(dtype), list(measured_paths(model, SAMPLE)["blocks.0.attention"].paths)) == full


def test_nothing_but_torch_is_needed() -> None:
    script = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")
import torch
from quacklr import logit_paths
layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
assert len(logit_paths(layer, torch.randn(3, 1, 8))) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
