"""The command `quacklr`: one subcommand a job, each imported only when it is run.

Every number is checked here, at the door, so that a mistake costs one sentence and no waiting.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from quacklr import __version__

LAB = {  # by command: the module whose main(argv) it is, and what it does
    "train": ("quacklr.lab.train.command", "train one model with any of the methods, and write everything to a folder"),
    "prepare": ("quacklr.lab.data.command", "turn text into shards of tokens to train on"),
}

DEMO = """\
Train a small byte-level transformer on the source of Python's standard library, twice: plain AdamW, and AdamW with
QuacK. Both start from the same weights and see the same batches. The default learning rate is too high for the plain
run, and the table shows what that does to its attention logits and its loss. Takes a minute or two on a CPU.
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake with one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text}")
        return number

    return read


def positive(text: str) -> float:
    """A positive, finite number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return number


def demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    from quacklr.demo import run

    return run(options.steps, options.lr, options.tau, options.seed, options.threads)


def lab(command: str, argv: Sequence[str]) -> int:
    """Run a command of the lab, which reads its own options; its packages may be missing."""
    try:
        module = importlib.import_module(LAB[command][0])
    except ModuleNotFoundError as missing:
        print(f"quacklr {command} needs {missing.name}: pip install 'quacklr[lab]'", file=sys.stderr)
        return 2
    return int(module.main(argv))


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(prog="quacklr", description="Per-head learning rates that control changes to attention logits.")
    top.add_argument("--version", action="version", version=f"quacklr {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shown = commands.add_parser(
        "demo",
        help="train at a high learning rate with and without QuacK, and see what it is for",
        description=DEMO,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_demo_options(shown)
    shown.set_defaults(command=demo)
    for name, (_, meaning) in LAB.items():
        commands.add_parser(name, help=meaning)
    return top


def add_demo_options(shown: argparse.ArgumentParser) -> None:
    """The options of `quacklr demo`."""
    cores = os.cpu_count() or 1
    for name, kind, default, meaning in (
        ("steps", whole(1, 10**6), 500, "training steps of each run"),
        ("lr", positive, 0.02, "learning rate of both runs"),
        ("tau", positive, 1.0, "QuacK's rate at the start, relative to lr"),
        ("seed", whole(0, 2**63 - 1), 0, "for the initial weights and the batches"),
        ("threads", whole(1, cores), 1, "CPU threads; the model is small, so more help little"),
    ):
        shown.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=meaning)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for bad options, 130 when stopped by Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded; see docs/lab.md
    try:
        if argv and argv[0] in LAB:
            return lab(argv[0], argv[1:])
        options = parser().parse_args(argv)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # argparse exits by itself after --help, --version and mistakes
        return int(stop.code or 0)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
