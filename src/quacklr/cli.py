"""The command `quacklr`. Each subcommand is imported only when it is run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from quacklr import __version__
from quacklr.util.arguments import Parser

COMMANDS = {  # name: (module with a main(argv), help text)
    "demo": ("quacklr.lab.demo", "train small models with and without QuacK at a high learning rate, and compare them"),
    "inspect": ("quacklr.inspect.command", "show the attention of a model: heads, paths, what is left alone and why"),
    "check": ("quacklr.checking.command", "check on a copy of a model that QuacK scales the right rows, in real steps"),
    "train": ("quacklr.lab.train.command", "train one model with any of the methods, and write everything to a folder"),
    "sweep": ("quacklr.lab.sweep.command", "run the grids of the studies, several runs at once, resumable"),
    "report": ("quacklr.lab.report.command", "make figures, a table of claims and one page from a sweep's ledger"),
    "generate": ("quacklr.lab.inference.command", "generate text with the model of a run"),
    "export": ("quacklr.lab.export.command", "write a run as a transformers checkpoint: Llama, Qwen3 or DeepSeek-V3"),
    "prepare": ("quacklr.lab.data.command", "tokenize text into shards for training"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for bad options, 130 when stopped by Ctrl-C."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is imported; see docs/lab.md
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it, as `head` does; Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def run(argv: Sequence[str]) -> int:
    """Run a command, which parses its own options. argparse exits by itself after --help, --version and mistakes."""
    try:
        if argv and argv[0] in COMMANDS:
            return int(_imported(argv[0]).main(argv[1:]))
        top = Parser(prog="quacklr", description="Per-head learning rates that control changes to attention logits.")
        top.add_argument("--version", action="version", version=f"quacklr {__version__}")
        commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for name, (_, meaning) in COMMANDS.items():
            commands.add_parser(name, help=meaning)
        top.parse_args(argv)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _imported(command: str) -> Any:
    """The module of a command. SystemExit(2) if a package is missing, or if the lab cannot run on this system."""
    try:
        return importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as missing:
        package = "'quacklr[lab]'" if ".lab." in COMMANDS[command][0] else missing.name
        needs = "Linux or macOS" if missing.name == "fcntl" else f"{missing.name}: pip install {package}"
        print(f"quacklr {command} needs {needs}", file=sys.stderr)
        raise SystemExit(2) from missing
