"""Command-line options of the lab from dataclasses: one option per field, without prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from quacklr.lab.errors import UserError
from quacklr.util.arguments import empty_argument

T = TypeVar("T")
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def read(kind: type[T], command: str, argv: Sequence[str], description: str | None = None, *config: Any) -> T:
    """Parse arguments into a dataclass; UserError or SystemExit(2) if they are wrong."""
    validate_arguments(argv)
    return tyro.cli(kind, prog=command, args=list(argv), description=description, config=(*OPTIONS, *config))


def validate_arguments(argv: Sequence[str]) -> None:
    """Raise UserError for an argument that is empty."""
    if empty := empty_argument(argv):
        raise UserError(empty)
