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
def test_of_four_million_logits_a_million_are_kept(eager: bool) -> None:
    monitor, before = LogitMonitor(Attention(eager), torch.randn(2, 1024, WIDTH)), alive()
    monitor.measure()
    assert 0 < alive()[1] - before[1] - 2 * 1024 * WIDTH * 4 <= 2**20 * 4


LONG = """
import json, resource, sys
sys.path[:0] = {folders!r}
import torch
import test_monitor_memory as t
from quacklr import LogitMonitor, QKClip

torch.set_num_threads(1)
model = torch.nn.Sequential(t.Attention())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clip = QKClip(model, optimizer, 1e-3)


def peak_after(tokens):
    x = torch.randn(2, tokens, t.WIDTH)
    LogitMonitor(model, x).measure()
    model(x).mean().backward()
    optimizer.step()
    assert bool((clip.max_logits()["0"] > 0).all())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


print(json.dumps([peak_after(64), peak_after({tokens})]))
"""


def test_half_a_gigabyte_of_logits_does_not_take_half_a_gigabyte() -> None:
    """2 sequences, 2 heads, 5800 * 5800 pairs of float32: 512 MB, of which there is never more than a part.

    The monitor and a clip, in a process of their own.
    """
    tokens = 5800
    assert 2 * HEADS * tokens**2 * 4 >= 2**29
    folders = [str(Path(__file__).parent), str(Path(by_hand.__file__).parent)]
    code = LONG.format(folders=folders, tokens=tokens)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert after - before < 250
