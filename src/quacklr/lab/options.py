"""How the lab's commands turn a dataclass into options: one a field, without prefixes, and a flag only to be set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from quacklr.lab.errors import UserError
from quacklr.util.arguments import unusable_argument

T = TypeVar("T")
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def read(kind: type[T], command: str, argv: Sequence[str], description: str | None = None, *config: Any) -> T:
    """The options of a command as an instance of a dataclass; UserError or SystemExit(2) for what is wrong with them.

    An empty value is refused here: `--out ''` would be the current folder.
    """
    refuse_unusable(argv)
    return tyro.cli(kind, prog=command, args=list(argv), description=description, config=(*OPTIONS, *config))


def refuse_unusable(argv: Sequence[str]) -> None:
    """UserError for an argument that no option accepts."""
    if unusable := unusable_argument(argv):
        raise UserError(unusable)
