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
        if unusable := unusable_argument(args or []):
            self.error(unusable)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and the help option, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def unusable_argument(argv: Sequence[str]) -> str | None:
    """A message about the first argument that is empty, has a NUL character, or is not UTF-8; None if there is none."""
    for before, argument in pairwise(["", *argv]):
        named = argument if argument.startswith("--") else before if "=" not in before else ""
        option = named.partition("=")[0] if named.startswith("--") else "an argument"
        if not argument or argument == f"{option}=":
            return f"{option} is empty; give it a value, or leave it out"
        if "\0" in argument:
            return f"{option} has a NUL character in it; leave that out"
        try:
            argument.encode()
        except UnicodeEncodeError:
            return f"{option} is not valid UTF-8: {argument!a}"
    return None
