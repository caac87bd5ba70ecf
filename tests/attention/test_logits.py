"""Logits in chunks, and sums over them, equal those of all logits at once, for all masks, layouts and chunk sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import by_hand
import quacklr.attention.logits
import quacklr.attention.monitor
from quacklr.attention.logits import EagerLogits, Logits, QKLogits, head_axes
from quacklr.attention.monitor import LogitStats, StatsAccumulator

B, H, Q, K = 2, 4, 5, 6  # sequences, heads, queries, keys


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(
    logits: Sequence[Logits], expected: Sequence[Tensor], seen: Tensor, sink_H: Tensor | None, chunk: int
) -> None:
    """Judge: by_hand.statistics, one query at a time, of logits now and before."""
    now, before = (by_hand.Written(each, torch.empty(0), torch.empty(0), extra_H=sink_H) for each in expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quacklr.attention.logits, "CHUNK", chunk)
        stats = StatsAccumulator(logits[0], StatsAccumulator(logits[1], None).kept_BHIJ)
    totals, counts = stats.sums.chunk(2)
    by_hand.assert_measured(
        LogitStats(stats.max_BH.amax(0), *(totals / counts)),
        by_hand.statistics(now, seen, before),
        f"chunks of {chunk}",
    )


MASKS = st.fixed_dictionaries(
    {
        "by_head": st.booleans(),  # one mask for each head, or one for all
        "known": st.sampled_from(["all", "some", "none"]),  # how much of the mask the provenance tracker found
        "value": st.sampled_from(["-inf", "least", "-1e4"]),  # what stands there
        "density": st.sampled_from([0.0, 0.3, 0.9]),
        "seed": st.integers(0, 1000),
        "chunk": st.sampled_from([1, 40, 2**20]),
        "sink": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


@settings(max_examples=80, deadline=None)
@given(MASKS)
def test_what_a_model_wrote_is_counted_where_its_queries_may_look(case: dict[str, Any]) -> None:
    known = "all" if case["value"] == "-1e4" else case["known"]  # only the least numbers show by themselves
    value = {"-inf": -torch.inf, "least": torch.finfo(case["dtype"]).min, "-1e4": -1e4}[case["value"]]
    generator = torch.Generator().manual_seed(case["seed"])
    hidden = torch.rand(B, H if case["by_head"] else 1, Q, K, generator=generator) < case["density"]
    hidden[..., 2, 3] = False  # a sequence sees something
    some = hidden & (torch.arange(Q) % 2 == 0)[:, None]
    logits = [(3 * random(B, H, Q, K, seed=case["seed"] + n)).to(case["dtype"]) for n in range(2)]
    sink_H = random(H, seed=case["seed"]).to(case["dtype"]) if case["sink"] else None
    written = []
    for each in logits:
        columns, masks = [each.masked_fill(hidden, value)], [hidden, some]
        if sink_H is not None:
            columns.append(sink_H[:, None, None].expand(B, H, Q, 1))
            masks = [torch.nn.functional.pad(mask, (0, 1)) for mask in masks]
        written.append(EagerLogits(torch.cat(columns, -1), K, {"all": masks[0], "some": masks[1]}.get(known)))
    expected = [each.float() for each in logits]
    check(written, expected, ~hidden, None if sink_H is None else sink_H.float(), case["chunk"])


@settings(max_examples=80, deadline=None)
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
    seen, given_mask = torch.ones(B, H, Q, K, dtype=torch.bool), None
    if mask == "bool":
        seen = given_mask = (random(B, 1, Q, K, seed=seed) > 0) | (torch.arange(K) == 0)
    elif mask is not None:
        bias = random(1, H if mask == "bias of heads" else 1, 1, K, seed=seed)
        logits = [each + bias for each in logits]
        seen = seen & (torch.arange(K) < K - 1)
        given_mask = bias.masked_fill(torch.arange(K) == K - 1, -1e9).expand(B, H, Q, K)
    if offset is not None:
        seen = seen & (torch.arange(K) <= torch.arange(Q)[:, None] + offset)
    check([QKLogits(q, K, k, 0.5, offset, given_mask) for q in queries], logits, seen, None, chunk)


def test_a_sample_of_queries_and_keys_is_always_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [random(B, H, Q, K, seed=n) for n in range(2)]
    for kept, queries, keys in ((2 * B * H * K, [1, 4], slice(None)), (B * H * 2, [4], slice(None, None, 3))):
        monkeypatch.setattr(quacklr.attention.monitor, "KEPT", kept)
        first = StatsAccumulator(EagerLogits(logits[0], K), None)
        assert first.kept_BHIJ.numel() <= kept
        second = StatsAccumulator(EagerLogits(logits[1], K), first.kept_BHIJ)
        expected = (logits[1] - logits[0])[:, :, queries][..., keys].abs().mean((0, 2, 3))
        torch.testing.assert_close(second.sums[0] / second.sums[3], expected)


def test_logits_that_are_not_a_number_are_reported_as_such() -> None:
    logits = random(B, H, Q, K)
    logits[0, 1, 0, 0] = torch.nan
    assert StatsAccumulator(EagerLogits(logits, K), None).max_BH.amax(0).isnan().tolist() == [False, True, False, False]


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
