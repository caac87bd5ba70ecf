"""Finding the attention of a model: modules that declare their paths, and classes of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DiaDecoderConfig, EsmConfig, EsmModel
from transformers.models.dia.modeling_dia import DiaSelfAttention

from models import Latent, Separate, train
from quacklr import LogitPath, QuacK, logit_paths
from quacklr.find.discover import found_by_table
from quacklr.util.modules import ModuleStack, module_stack, run
from quacklr.util.torch_functions import ADDED_MATMUL, MATMUL, SDPA, SOFTMAX
from tiny_models import OTHERS, build


def names(model: nn.Module) -> list[str]:
    return [weight.name for path in logit_paths(model) for weight in path.weights]


def test_a_module_that_declares_its_logit_is_believed_and_its_weights_named_after_it() -> None:
    model = nn.ModuleDict({"first": Separate(), "second": nn.Sequential(nn.Linear(2, 2), Latent())})
    mla = ["dq", "uq", "uk", "dkv", "dq", "qr", "kr"]
    assert names(model) == ["first.q", "first.k", *(f"second.1.{role}" for role in mla)]
    nope, rope = logit_paths(nn.Sequential(Latent()))
    assert nope.weights[0] is rope.weights[0]


def test_the_declaration_of_a_whole_model_is_not_searched_further() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Separate(), Separate()

        def logit_paths(self) -> list[LogitPath]:
            return self.used.logit_paths()

    assert names(Model()) == ["q", "k"]
    assert names(nn.Sequential(Model())) == ["0.q", "0.k"]


def test_a_module_used_twice_is_found_once() -> None:
    shared = Separate()
    assert names(nn.Sequential(shared, shared)) == ["0.q", "0.k"]


def heads_of(matrix: Tensor, heads: int) -> Tensor:
    return matrix.detach().view(heads, -1).norm(dim=1)


@pytest.mark.parametrize(("bias", "kdim"), [(True, None), (False, 5), (True, 5)])
def test_multihead_attention_of_torch_is_known(bias: bool, kdim: int | None) -> None:
    """The expected values are slices of torch's own parameters."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, bias=bias, kdim=kdim)
    quack = QuacK(module, torch.optim.SGD(module.parameters(), lr=0.1), tau=1.0)

    def norms() -> tuple[Tensor, Tensor]:
        if kdim is None:
            q, k = module.in_proj_weight[:8], module.in_proj_weight[8:16]
        else:
            q, k = module.q_proj_weight, module.k_proj_weight
        if bias:
            q, k = (torch.cat([w, module.in_proj_bias[i : i + 8, None]], 1) for w, i in ((q, 0), (k, 8)))
        return heads_of(q, 2), heads_of(k, 2)

    q0, k0 = norms()
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(torch.rand_like(param) * 10).add_(0.1)
    q, k = norms()
    torch.testing.assert_close(quack.rates(), {"q": k0 / k, "k": q0 / q})
    if bias:
        rate = quack.rate_of(module.in_proj_bias)
        assert rate is not None
        torch.testing.assert_close(
            rate, torch.cat([(k0 / k).repeat_interleave(4), (q0 / q).repeat_interleave(4), torch.ones(8)])
        )


class Normed(Separate):
    """Its logit does not depend on the scale of q and k."""

    def logit_paths(self) -> list[LogitPath]:
        return []


def test_attention_with_nothing_to_control_is_left_alone_and_listed() -> None:
    model = nn.Sequential(Separate(), Normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer, tau=0.5)
    assert list(quack.rates()) == ["0.q", "0.k"]
    assert "left alone:\n  1: declares no path" in repr(quack)
    with pytest.raises(ValueError, match=r"no attention that QuacK can control \(0: declares no path"):
        logit_paths(nn.Sequential(Normed()))


def test_the_table_shows_every_attention_with_its_logit_and_rates() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Separate(groups=2), "b": Latent()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer, tau=0.5)
    lines = repr(quack).splitlines()
    assert lines[0] == "QuacK(Paper(tau=0.5)) on AdamW"
    assert lines[1].split() == ["attention", "found", "heads", "logit", "rates", "now"]
    assert lines[2].split() == ["a", "declared", "4", "q[4]", "k[2]", "q", "0.5", "k", "0.5"]
    assert " ".join(lines[3].split()).startswith("b declared 4 dq uq[4] uk[4] dkv + dq qr[4] kr dq 0.5 uq 0.5")
    attention = model["a"]
    train(attention, optimizer, steps=3)
    assert ".." in repr(quack).splitlines()[2]


def test_paths_that_were_made_by_hand_are_a_line_for_each_attention() -> None:
    first, second = Separate(), Separate()
    renamed = [
        LogitPath(tuple(replace(weight, name=f"{weight.name}2") for weight in path.weights), path.heads)
        for path in second.logit_paths()
    ]
    parameters = [*first.parameters(), *second.parameters()]
    quack = QuacK([*first.logit_paths(), *renamed], torch.optim.SGD(parameters, lr=0.1), tau=1.0)
    lines = [line.split()[:5] for line in repr(quack).splitlines()[2:]]
    assert lines == [["(model)", "given", "4", f"q{i}[4]", f"k{i}[4]"] for i in ("", 2)]


class Scales(TorchFunctionMode):
    """By the running module, the derivative of the input of its softmax with respect to the product of q and k."""

    def __init__(self, running: ModuleStack) -> None:
        super().__init__()
        self.running, self.found = running, dict[str, float]()
        self.products: list[tuple[Tensor, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, self.running.modules[-1]
        output = func(*args, **kwargs)
        if func is SDPA:
            self.found[name] = kwargs["scale"] if kwargs.get("scale") is not None else args[0].shape[-1] ** -0.5
        elif func in MATMUL | ADDED_MATMUL | {torch.einsum}:
            self.products.append((output, kwargs.get("alpha", 1.0)))
        elif func in SOFTMAX:
            product, alpha = self.products[-1]
            (gradient,) = torch.autograd.grad(args[0].sum(), product, retain_graph=True)
            self.found[name] = abs(alpha) * float(gradient.abs().max())
        return output


@pytest.mark.parametrize("kind", ["granite", "t5", "gpt_neo", "whisper", "deepseek_v3", "mpt", "esm"])
def test_the_scale_of_the_logit_is_the_one_that_the_model_uses(kind: str) -> None:
    """Judged by a forward pass: the ratio of logits to the products of queries and keys as the weights make them."""
    model: Any
    if kind == "esm":
        sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = EsmConfig(vocab_size=33, intermediate_size=64, pad_token_id=1, **sizes)
        model = EsmModel(config)  # type: ignore[no-untyped-call]
        batch: Any = {"input_ids": torch.randint(4, 24, (2, 9))}
    else:
        model, batch = build(kind, OTHERS)
    found = {name: finding for name, finding in found_by_table(model).items() if finding.paths}
    scales_its_queries = kind in ("whisper", "esm")  # before the product, by 1 / sqrt(head size)
    with module_stack(model) as running, Scales(running) as scales:
        run(model, batch)
    assert scales.found.keys() & found.keys()
    for name in scales.found.keys() & found.keys():
        paths = found[name].paths
        size = sum(int(path.weights[path.meeting].rows_of_block[0]) for path in paths)
        scale = paths[0].scale if paths[0].scale is not None else size**-0.5
        wanted = scales.found[name] * (size**-0.5 if scales_its_queries else 1.0)
        assert scale == pytest.approx(wanted, rel=1e-5)


def test_a_scale_that_is_a_whole_number_is_read() -> None:
    """Dia's logits are not scaled: its attribute `scaling` is the int 1."""
    attention = DiaSelfAttention(
        DiaDecoderConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32), layer_idx=0
    )
    (finding,) = found_by_table(attention).values()
    assert [path.scale for path in finding.paths] == [1]
