"""Command-line arguments: a parser that reports a mistake in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one sentence, without the usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the options; a mistake ends the process with exit code 2."""
        if empty := empty_argument(args or []):
            self.error(empty)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and the help option, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def empty_argument(argv: Sequence[str]) -> str:
    """A message about the first argument that is empty, as an unset variable of a shell script is; "" if none is."""
    for before, argument in pairwise(["", *argv]):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            named = before if before.startswith("--") and "=" not in before else "an argument"
            return f"{argument.rstrip('=') or named} is empty; give it a value, or leave it out"
    return ""
