"""The command `quacklr`: one subcommand a job, each imported only when it is run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from quacklr import __version__, terminal

COMMANDS = {  # the module whose main(argv) it is, and what it does
    "demo": ("quacklr.lab.demo", "see in minutes what QuacK is for: the default breaks, QuacK does not"),
    "inspect": (
        "quacklr.inspect.command",
        "the attention of a model, as quacklr sees it: layout, heads, paths, what is left alone and why",
    ),
    "check": (
        "quacklr.wiring.command",
        "is QuacK wired right into a model? Real steps and nudges on a copy; a table, a picture, an exit code",
    ),
    "train": ("quacklr.lab.train.command", "train one model with any of the methods, and write everything to a folder"),
    "sweep": ("quacklr.lab.sweep.command", "run the grids of the studies, several runs at once, resumable"),
    "report": ("quacklr.lab.report.command", "make figures, a table of claims and one page from a sweep's ledger"),
    "generate": ("quacklr.lab.inference.command", "let the model of a run go on with a text"),
    "export": ("quacklr.lab.export.command", "write a run as a transformers checkpoint: Llama, Qwen3 or DeepSeek-V3"),
    "prepare": ("quacklr.lab.data.command", "turn text into shards of tokens to train on"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake with one sentence instead of the whole usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options; a mistake ends the process with exit code 2."""
        if unusable := unusable_argument(args or []):
            self.error(unusable)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def unusable_argument(argv: Sequence[str]) -> str | None:
    """What is wrong with the first argument that is empty, has a NUL, or is not UTF-8; no option accepts such."""
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
            return f"{option} is no text in UTF-8: {argument!a}"
    return None


def parser() -> Parser:
    """The commands; each reads its own options."""
    top = Parser(prog="quacklr", description="Per-head learning rates that control changes to attention logits.")
    top.add_argument("--version", action="version", version=f"quacklr {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning)
    return top


def run(command: str, argv: Sequence[str]) -> int:
    """Run a command; its packages may be missing."""
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as missing:
        package = "'quacklr[lab]'" if COMMANDS[command][0].startswith("quacklr.lab.") else missing.name
        print(f"quacklr {command} needs {missing.name}: pip install {package}", file=sys.stderr)
        return 2
    return int(module.main(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for bad options, 130 when stopped by Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded; see docs/lab.md
    terminal.open_missing()
    with terminal.tolerant("stderr"):
        code = _main(argv)
    terminal.discard_unwritten()
    return code


def _main(argv: Sequence[str]) -> int:
    try:
        if argv and argv[0] in COMMANDS:
            return run(argv[0], argv[1:])
        parser().parse_args(argv)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # argparse exits by itself after --help, --version and mistakes
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
