"""Monitoring and clipping keep no tensors of the forward alive, and need little memory at long context."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import by_hand
from quacklr import LogitMonitor, LogitPath, QKClip, mha, packed

WIDTH, HEADS = 16, 2
KEPT = 2**20 * 4  # bytes an attention may keep


class Attention(nn.Module):
    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.eager = eager

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (by_hand.heads(each(x_BTD), HEADS) for each in (self.q, self.k, self.v))
        if self.eager:
            future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            out = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(future, -torch.inf).softmax(-1) @ v
        else:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    def logit_paths(self) -> list[LogitPath]:
        q, k = (packed(each, (name, HEADS, WIDTH // HEADS))[0] for each, name in ((self.q, "q"), (self.k, "k")))
        return mha(q, k)


@pytest.fixture(autouse=True)
def young() -> Iterator[None]:
    """What was there before the test is not looked through by the collector, which makes it quick, nor counted."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive() -> tuple[int, int]:
    """Tensors that Python can see, and the bytes of their storages, each counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())


MODELS: dict[str, Callable[[], Any]] = {
    "sdpa": lambda: nn.Sequential(Attention(), Attention()),
    "eager": lambda: nn.Sequential(Attention(True), Attention(True)),
    "torch's own": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_measuring_many_times_keeps_no_more_than_measuring_twice(name: str) -> None:
    model, probe = MODELS[name](), torch.randn(2, 64, WIDTH)
    with torch.no_grad():
        model(probe)
    before, monitor, counts = alive(), LogitMonitor(model, probe), []
    assert before[0] > 0
    for i in range(8):
        monitor.measure(keep=i % 3 != 1)
        counts.append(alive())
    assert len(set(counts[2:])) == 1, counts
    known = weakref.ref(model)
    del monitor
    assert alive() == before
    del model, probe
    gc.collect()
    assert known() is None


def step(model: Any, optimizer: torch.optim.Optimizer, probe: Tensor) -> None:
    model(probe).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_clipping_many_steps_keeps_no_graph_alive(name: str) -> None:
    model, probe = MODELS[name](), torch.randn(2, 64, WIDTH)
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=1e-3), []
    step(model, optimizer, probe)
    before = alive()
    watcher = QKClip(model, optimizer, 1e-3)
    for _ in range(6):
        step(model, optimizer, probe)
        counts.append(alive())
    assert len(set(counts[2:])) == 1, counts
    assert counts[-1][1] - before[1] < 2**14  # some maxima, and which row is whose
    watcher.remove()
    del watcher
    assert alive() == before
    known = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
def test_of_many_logits_a_few_are_kept(eager: bool) -> None:
    """Of 2 * 2 * 1024 * 1024 logits, a million floats; the mean change is then that of a sample."""
    torch.manual_seed(0)
    model, x = Attention(eager), torch.randn(2, 1024, WIDTH)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    pairs, monitor = torch.ones(1024, 1024).tril().bool(), LogitMonitor(model, x)
    before = alive()
    monitor.measure()
    assert alive()[1] - before[1] <= KEPT + 2**16
    with torch.no_grad():
        old = logits(model, x)
        model.q.weight.add_(0.1 * torch.randn_like(model.q.weight))
        new = logits(model, x)
        once, second = alive(), monitor.measure()[""]
        assert alive()[1] - once[1] <= 2**12
        torch.testing.assert_close(second.max, new.masked_fill(~pairs, -torch.inf).amax((0, 2, 3)), rtol=1e-4, atol=0)
        change = (new - old).abs()[:, :, pairs].mean((0, 2))
        torch.testing.assert_close(second.mean_change, change, rtol=0.1, atol=0)


def logits(model: Attention, x: Tensor) -> Tensor:
    q, k = (by_hand.heads(each(x), HEADS) for each in (model.q, model.k))
    return q @ k.mT / (WIDTH // HEADS) ** 0.5


class Pooled(Attention):
    """One query, the last, and all keys."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        pairs = ((self.q, x_BTD[:, -1:]), (self.k, x_BTD), (self.v, x_BTD))
        return scaled_dot_product_attention(*(by_hand.heads(each(x), HEADS) for each, x in pairs))


def test_of_a_query_with_more_than_a_million_logits_a_million_are_kept_at_most() -> None:
    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(1, 600_000, WIDTH)
    monitor, before = LogitMonitor(model, x), alive()
    monitor.measure()
    assert alive()[1] - before[1] <= KEPT + 2**12
    assert monitor.measure()[""].mean_change.tolist() == [0.0] * HEADS


LONG = """
import json, resource, sys
sys.path[:0] = {folders!r}
import torch
import test_monitor_memory as t
from quacklr import LogitMonitor, QKClip

torch.set_num_threads(1)
what, tokens = {what!r}, {tokens}
model = torch.nn.Sequential(t.Attention())


def work(tokens):
    x = torch.randn(2, tokens, t.WIDTH)
    if what == "monitor":
        LogitMonitor(model, x).measure()
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clip = QKClip(model, optimizer, 1e-3)
        model(x).mean().backward()
        optimizer.step()
        assert bool((clip.max_logits()["0"] > 0).all())


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


work(64)
before = peak()
work(tokens)
print(json.dumps(peak() - before))
"""


@pytest.mark.parametrize("what", ["monitor", "clip"])
def test_half_a_gigabyte_of_logits_does_not_take_half_a_gigabyte(what: str) -> None:
    """2 sequences, 2 heads, 5800 * 5800 pairs of float32: 512 MB, of which there is never more than a part.

    Measured is the rise of a process's peak memory with a forward of this many tokens, after one of 64.
    """
    assert 2 * HEADS * 5800**2 * 4 >= 2**29
    folders = [str(Path(__file__).parent), str(Path(by_hand.__file__).parent)]
    code = LONG.format(folders=folders, what=what, tokens=5800)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(json.loads(done.stdout)) < 250
