"""The command `quacklr`: one subcommand a job, each imported only when it is run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from quacklr import __version__
from quacklr.util import terminal
from quacklr.util.arguments import Parser

COMMANDS = {  # the module whose main(argv) it is, and what it does
    "demo": ("quacklr.lab.demo", "see in minutes what QuacK is for: the default breaks, QuacK does not"),
    "inspect": (
        "quacklr.inspect.command",
        "the attention of a model, as quacklr sees it: layout, heads, paths, what is left alone and why",
    ),
    "check": (
        "quacklr.checking.command",
        "is QuacK wired right into a model? Real steps and perturbed rows on a copy; a table, a picture, an exit code",
    ),
    "train": ("quacklr.lab.train.command", "train one model with any of the methods, and write everything to a folder"),
    "sweep": ("quacklr.lab.sweep.command", "run the grids of the studies, several runs at once, resumable"),
    "report": ("quacklr.lab.report.command", "make figures, a table of claims and one page from a sweep's ledger"),
    "generate": ("quacklr.lab.inference.command", "let the model of a run go on with a text"),
    "export": ("quacklr.lab.export.command", "write a run as a transformers checkpoint: Llama, Qwen3 or DeepSeek-V3"),
    "prepare": ("quacklr.lab.data.command", "turn text into shards of tokens to train on"),
}


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
