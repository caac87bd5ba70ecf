"""Logits in chunks, and sums over them, equal those of all logits at once, for all masks, layouts and chunk sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quacklr.attention.accumulator
import quacklr.attention.logits
from quacklr import LogitMonitor
from quacklr.attention.accumulator import StatsAccumulator
from quacklr.attention.logits import head_axes
from quacklr.attention.logits import EagerLogits, Logits, QKLogits

B, H, Q, K = 2, 4, 5, 6  # sequences, heads, queries, keys


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def statistics(logits: list[Tensor], extra: int = 0) -> dict[str, list[float]]:
    """Each head's, of (B, H, I, J) logits now and before, one query at a time; -inf is hidden."""
    logit_BHIJ, before_BHIJ = logits
    found: dict[str, list[float]] = {"max": [], "change": [], "entropy": [], "sink": []}
    for head in range(logit_BHIJ.shape[1]):
        entropy, sink, change, largest = [], [], [], -math.inf
        for b in range(logit_BHIJ.shape[0]):
            keys_IJ = logit_BHIJ[b, head, :, : logit_BHIJ.shape[-1] - extra]
            first = int((keys_IJ > -torch.inf).any(0).int().argmax())
            for i, row_J in enumerate(keys_IJ):
                seen = row_J > -torch.inf
                share = logit_BHIJ[b, head, i].softmax(0)
                if seen.any():
                    largest = max(largest, float(row_J.max()))
                    entropy.append(float(-torch.special.xlogy(share, share).sum()))
                    change += (row_J - before_BHIJ[b, head, i, : len(row_J)])[seen].abs().tolist()
                if seen.sum() > 1:
                    sink.append(float(share[first] + share[len(row_J) :].sum()))
        found["max"].append(largest)
        for name, values in (("change", change), ("entropy", entropy), ("sink", sink)):
            found[name].append(sum(values) / len(values) if values else math.nan)
    return found


def check(logits: Sequence[Logits], expected: dict[str, list[float]]) -> None:
    now, before = logits
    stats = StatsAccumulator(now, StatsAccumulator(before, None).kept_BHIJ)
    change, entropy, sink, compared, seeing, choosing = stats.sums
    measured = {"max": stats.max_BH.amax(0), "change": change / compared, "entropy": entropy / seeing}
    for name, of_heads in (measured | {"sink": sink / choosing}).items():
        wanted = torch.tensor(expected[name])
        assert torch.allclose(of_heads, wanted, rtol=1e-4, atol=1e-5, equal_nan=True), (name, of_heads, wanted)


MASKS = st.fixed_dictionaries(
    {
        "by_head": st.booleans(),  # one mask for each head, or one for all
        "known": st.sampled_from(["all", "some", "none"]),  # how much of the mask the provenance tracker found
        "value": st.sampled_from(["-inf", "least", "-1e4"]),  # what stands there
        "density": st.sampled_from([0.0, 0.3, 0.9]),
        "seed": st.integers(0, 1000),
        "chunk": st.sampled_from([1, 40, 2**20]),
        "extra": st.sampled_from([0, 1]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


@settings(max_examples=150, deadline=None)
@given(MASKS)
def test_what_a_model_wrote_is_counted_where_its_queries_may_look(case: dict[str, Any]) -> None:
    known = "all" if case["value"] == "-1e4" else case["known"]  # only the least numbers show by themselves
    value = {"-inf": -torch.inf, "least": torch.finfo(case["dtype"]).min, "-1e4": -1e4}[case["value"]]
    keys = K - case["extra"]
    generator = torch.Generator().manual_seed(case["seed"])
    hidden = torch.rand(B, H if case["by_head"] else 1, Q, K, generator=generator) < case["density"]
    hidden[..., keys:] = False
    known_mask = {"all": hidden, "some": hidden & (torch.arange(Q) % 2 == 0)[:, None], "none": None}[known]
    logits = [(3 * random(B, H, Q, K, seed=case["seed"] + n)).to(case["dtype"]) for n in range(2)]
    expected = statistics([each.float().masked_fill(hidden, -torch.inf) for each in logits], case["extra"])
    written = [EagerLogits(each.masked_fill(hidden, value), keys, known_mask) for each in logits]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quacklr.attention.logits, "CHUNK", case["chunk"])
        check(written, expected)


@settings(max_examples=100, deadline=None)
@given(
    offset=st.sampled_from([None, 0, 1, -2]),
    mask=st.sampled_from([None, "bool", "bias", "bias of heads"]),
    groups=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([1, 50, 2**20]),
    seed=st.integers(0, 1000),
)
def test_what_a_kernel_made_is_made_again(
    offset: int | None, mask: str | None, groups: int, chunk: int, seed: int
) -> None:
    k = random(B, groups, K, 3, seed=seed)
    queries = [random(B, H, Q, 3, seed=seed + n) for n in (1, 2)]
    logits = [0.5 * q @ k.repeat_interleave(H // groups, 1).mT for q in queries]
    given_mask: Tensor | None = None
    if mask == "bool":
        given_mask = random(B, 1, Q, K, seed=seed) > 0
        logits = [each.masked_fill(~given_mask, -torch.inf) for each in logits]
    elif mask is not None:
        given_mask = random(1, H if mask == "bias of heads" else 1, 1, K, seed=seed)
        logits = [each + given_mask for each in logits]
        given_mask[..., -1] = -1e9
        for each in logits:
            each[..., -1] = -torch.inf
        given_mask = given_mask.expand(B, H, Q, K)
    if offset is not None:
        ahead = torch.arange(K) > torch.arange(Q)[:, None] + offset
        logits = [each.masked_fill(ahead, -torch.inf) for each in logits]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quacklr.attention.logits, "CHUNK", chunk)
        made = [QKLogits(q, K, k, 0.5, offset, given_mask) for q in queries]
        check(made, statistics(logits))


def test_a_sample_of_queries_and_keys_is_always_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [random(B, H, Q, K, seed=n) for n in range(2)]
    for kept, queries, keys in ((2 * B * H * K, [1, 4], slice(None)), (B * H * 2, [4], slice(None, None, 3))):
        monkeypatch.setattr(quacklr.attention.accumulator, "KEPT", kept)
        first = StatsAccumulator(EagerLogits(logits[0], K), None)
        assert first.kept_BHIJ.numel() <= kept
        second = StatsAccumulator(EagerLogits(logits[1], K), first.kept_BHIJ)
        expected = (logits[1] - logits[0])[:, :, queries][..., keys].abs().mean((0, 2, 3))
        torch.testing.assert_close(second.sums[0] / second.sums[3], expected)


AXES = [  # leading axes, heads, one sequence: the axes that are the heads; None if the shape does not show it
    ((2, 4), 4, False, (1,)),
    ((4, 2), 4, False, None),  # (H, B), or (B * G, R)
    ((4, 4), 4, False, None),
    ((2, 2), 4, False, None),  # (G, R), or (B, H) and another number of heads
    ((3, 2, 2), 4, False, (1, 2)),  # (B, G, R)
    ((2, 4, 3), 4, False, None),  # (B, H) and chunks, or (G, B, R)
    ((8,), 8, False, (0,)),
    ((8,), 1, False, ()),
    ((8,), 4, False, None),  # (B * H) or (H * B)
    ((2, 4), None, False, None),
    ((1, 2, 4, 1), None, True, None),
    ((1, 4, 3), 4, True, (1,)),
    ((4, 1, 4), 4, True, None),
    ((2, 1, 2), 4, True, (0, 2)),
    ((8,), 4, True, None),  # with windows
    ((1, 4), None, True, (1,)),
    ((4,), 3, True, (0,)),  # of another attention than the one with 3 heads
]


@pytest.mark.parametrize(("lead", "heads", "one_sequence", "axes"), AXES)
def test_which_axes_are_the_heads_is_known_only_where_the_shape_shows_it(
    lead: tuple[int, ...], heads: int | None, one_sequence: bool, axes: tuple[int, ...] | None
) -> None:
    found = head_axes(lead, heads, one_sequence)
    assert (found.axes if found.known else None) == axes
    entries = torch.arange(math.prod(lead)).view(*lead, 1, 1)
    assert found.arrange(entries, entries.shape).flatten().sort().values.tolist() == list(range(math.prod(lead)))


def test_axes_are_moved_to_sequences_and_heads() -> None:
    axes = head_axes((1, 4, 3), 4, one_sequence=True)
    found = axes.arrange(torch.arange(12).view(4, 3, 1, 1), (1, 4, 3, 1, 1))
    assert found[..., 0, 0].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_logits_that_are_not_a_number_are_reported_as_such() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    x = random(1, 2, 5, 3)
    x[0, 1, 0, 0] = torch.nan
    stats = LogitMonitor(Broken(), x).measure()[""]
    assert stats.max.isnan().tolist() == [False, True]
