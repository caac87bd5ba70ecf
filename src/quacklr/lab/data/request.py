"""A request to `quacklr prepare`: equal descriptions give equal shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quacklr.lab.data import vocabularies
from quacklr.lab.data.sources import Fractions, TextSource
from quacklr.lab.errors import MAX_INT, UserError, validate_at_most

SHARD_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """A source, a tokenizer, and the fractions of documents that are `held_out` for val and probe."""

    source: TextSource
    held_out: Fractions
    tokenizer: str = "bytes"
    end_token: str | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        val, probe = self.held_out["val"], self.held_out["probe"]
        if not (min(val, probe) > 0 and val + probe < 1):
            raise UserError(f"--val {val} and --probe {probe} are shares: each above 0, and together below 1")
        if self.shard_tokens < 1:
            raise UserError(f"--shard-tokens must be at least 1, not {self.shard_tokens}")
        validate_at_most(MAX_INT, shard_tokens=self.shard_tokens)
        if self.tokenizer == "bytes" and self.end_token is not None:
            raise UserError("--end-token contradicts --tokenizer bytes, where byte 0 ends a document")

    def describe(self) -> dict[str, Any]:
        """The request as JSON, without absolute paths and dates."""
        return {
            "source": self.source.describe(),
            "held_out": dict(self.held_out),
            "tokenizer": vocabularies.describe(self.tokenizer),
            "end_token": self.end_token,
            "shard_tokens": self.shard_tokens,
        }
