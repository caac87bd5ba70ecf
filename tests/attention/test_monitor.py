"""What the monitor promises of a measurement, whatever the attention: changes, probes, errors, and no trace of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models import assert_equal
from quacklr import LogitMonitor, LogitPath, QKClip, check, mha, packed
from quacklr.lab.model import MHA, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.3)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
NAME = "blocks.1.attention"


def probe() -> Tensor:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_probe_is_what_the_model_takes(form: str) -> None:
    model = build(SHAPE, GQA, seed=0)
    given = {"tokens_BT": probe()} if form == "dict" else (probe(), probe())
    one, other = LogitMonitor(model, given).measure(), LogitMonitor(model, probe()).measure()
    assert_equal(one[NAME].max, other[NAME].max)


@pytest.mark.parametrize("probe", [None, "tokens", torch.utils.data.DataLoader([1])], ids=["None", "str", "DataLoader"])  # type: ignore[arg-type]
def test_what_is_no_batch_is_refused(probe: object) -> None:
    with pytest.raises(ValueError, match="a probe is a batch that the model is called with"):
        LogitMonitor(nn.Linear(2, 2), probe)


class Recurrent(nn.Module):
    """Linear attention: a product of queries and keys, and no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.in_mix, self.out_mix = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = self.in_mix(x_BTD).relu().chunk(2, -1)
        return self.out_mix(q @ (k.mT @ x_BTD))

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.in_mix, ("q", 4, 4), ("k", 4, 4)))


def test_a_model_without_softmax_attention_is_told_that_it_may_have_none() -> None:
    model, x = Recurrent(), torch.randn(2, 7, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = "If (the model has no softmax attention|it has none) .*Mamba, RWKV"
    with pytest.raises(ValueError, match=f"no attention was seen in a forward of Recurrent: .*{told}"):
        LogitMonitor(model, x).measure()
    with pytest.raises(ValueError, match=told):
        check(model, optimizer, x)
    QKClip(model, optimizer)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=f"QK clip saw no attention logits in training mode before this .*{told}"):
        optimizer.step()
