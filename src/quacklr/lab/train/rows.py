"""Types of the rows that a run writes, one row per step. Reading them needs neither the training loop nor torch."""

from __future__ import annotations

from typing import Any, TypedDict

Row = dict[str, Any]
Table = list[list[float | None]]
"""One number per layer and head: layers x heads."""


class Step(TypedDict):
    """Anything that belongs to an optimizer step."""

    step: int


class MeasuredRow(Step, total=False):
    """The keys of a row that are read from metrics.jsonl or a ledger."""

    loss: float | None
    val_loss: float | None
    val_bpb: float | None
    tokens: int
    tokens_per_second: float | None
    logits: dict[str, Table]
    norm: dict[str, Table]
    rate: dict[str, Table]
    diverged: str
