"""`quacklr inspect TARGET`: the attention layers of a model as quacklr finds them."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from quacklr.inspect.report import report
from quacklr.inspect.resolve import BadTargetError, resolve
from quacklr.util.arguments import Parser

ABOUT = """\
The attention of a model: its heads, its weights, what QuacK leaves alone and why.
Nothing is downloaded.

TARGET is one of
  llama                      a model type of transformers: its default config
  path/to/config.json        a config of transformers; also ./folder, or org/name
                             if that is in the local cache of the hub
  vit_tiny_patch16_224       a model of timm
  package.module:factory     a function of yours that returns a model, or (model,
  path/to/file.py:factory    batch): the model is then measured on the batch
"""
EXAMPLES = """\
examples:
  quacklr inspect deepseek_v3             takes seconds: only shapes, no weights
  quacklr inspect train.py:make_model     your own model
  quacklr inspect gpt2 --json | jq '.layers'

exit code: 0 if QuacK attaches to the model; 1 if it raises an error, or if an attention layer is not recognised
without a batch, or on it; 2 if there is no such model
"""


def main(argv: Sequence[str]) -> int:
    """Inspect a model and print the report; the exit code is that of the report."""
    options = parser().parse_args(argv)
    try:
        with quiet():
            found = report(options.target, resolve(options.target))
    except BadTargetError as error:
        print(f"quacklr inspect: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_json(), indent=2) if options.json else found)
    return found.exit_code


def parser() -> Parser:
    """The options."""
    options = target_parser("quacklr inspect", "[--json]", ABOUT, EXAMPLES)
    options.add_argument("--json", action="store_true", help="one JSON object with every layer")
    return options


def target_parser(command: str, options: str, about: str, examples: str) -> Parser:
    """The parser of a command whose argument is one model."""
    raw, usage = argparse.RawDescriptionHelpFormatter, f"{command} TARGET {options}"
    found = Parser(prog=command, usage=usage, description=about, epilog=examples, formatter_class=raw)
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
