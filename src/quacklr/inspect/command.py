"""`quacklr inspect TARGET`: the attention layers of a model as quacklr finds them."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from quacklr.inspect.as_json import as_json
from quacklr.inspect.report import report
from quacklr.inspect.resolve import resolve
from quacklr.inspect.show import show
from quacklr.inspect.target import BadTargetError
from quacklr.util.arguments import Parser
from quacklr.util.terminal import os_error_message, print_result

ABOUT = """\
The attention of a model: how queries and keys are stored, what their learning
rates depend on, what QuacK leaves alone and why. Nothing is downloaded.

TARGET is one of
  llama                      a model type of transformers: its default config
  path/to/config.json        a config of transformers, or a folder with one
  org/name                   a model of the hub whose config is in the local cache
  vit_tiny_patch16_224       a model of timm
  package.module:factory     a function of yours that returns a model, or
  path/to/file.py:factory    (model, batch), where batch is the model's input
"""
EXAMPLES = """\
examples:
  quacklr inspect deepseek_v3             takes seconds: only shapes, no weights
  quacklr inspect llama --measure         run a small llama, and compare it with the rules
  quacklr inspect train.py:make_model     your own model
  quacklr inspect gpt2 --json | jq '.layers[0].paths'

exit code: 0 if QuacK attaches to all layers, or has a reason to leave the others alone (QK norm); 1 if a layer
is not recognised or cannot be measured, if rule and measurement differ, or if QuacK would raise another error;
2 if there is no such model
"""


def main(argv: Sequence[str]) -> int:
    """Inspect a model and print the report; the exit code is that of the report."""
    options = parser().parse_args(argv)
    try:
        with quiet():
            progress(f"building {options.target} ...")
            found = report(resolve(options.target), options.measure)
            text = json.dumps(as_json(found, options.target)) if options.json else show(found, options.target)
        print_result(text)
    except BrokenPipeError:  # the reader of the pipe has closed it, as `head` does
        return 1
    except (BadTargetError, OSError) as error:
        print(f"quacklr inspect: {os_error_message(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2
    return found.exit_code


def parser() -> Parser:
    """The options."""
    options = target_parser("quacklr inspect", "[--measure] [--json]", ABOUT, EXAMPLES)
    options.add_argument(
        "--measure",
        action="store_true",
        help="also run a batch and compare the measured paths; for transformers, on a small model of the same kind",
    )
    options.add_argument("--json", action="store_true", help="one JSON object with every row of every layer")
    return options


def target_parser(command: str, options: str, about: str, examples: str) -> Parser:
    """The parser of a command whose argument is one model."""
    found = Parser(
        prog=command,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{command} TARGET {options}",
    )
    found.add_argument("target", metavar="TARGET", help="the model, see above")
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, suppress warnings and logs, and print to stderr, so that stdout has the result only."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def progress(line: str) -> None:
    """Print to stderr if it is a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
