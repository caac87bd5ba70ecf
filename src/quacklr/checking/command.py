"""`quacklr check TARGET`: test on a copy of a model that QuacK scales the right rows of every head."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch.optim import AdamW

from quacklr.checking.check import check
from quacklr.checking.report import CheckReport
from quacklr.inspect.command import progress, quiet, target_parser
from quacklr.inspect.resolve import resolve
from quacklr.inspect.target import BadTargetError, one_line
from quacklr.util.arguments import Parser

ABOUT = """\
Does QuacK scale the right rows of a model? The rows are compared with those that are
measured on a batch. Then a copy of the model takes a few real steps, and the change of
every head's logits is compared with its bound.

TARGET is one of
  package.module:factory     a function of yours that returns (model, batch), where
  path/to/file.py:factory    batch is the model's input, or (model, optimizer, batch)
  vit_tiny_patch16_224       a model of timm
"""
EXAMPLES = """\
examples:
  quacklr check train.py:make                   make() returns a small model and a batch
  quacklr check train.py:make --growth 8        from rows that are eight times as large

exit code: 0 if QuacK scales the right rows; 1 if it does not, if that cannot be shown, or if QuacK cannot be
attached; 2 if there is no such model, or no such option
"""


def main(argv: Sequence[str]) -> int:
    """Check a model and print the report; the exit code is the verdict."""
    options = parser().parse_args(argv)
    try:
        with quiet():
            report = checked(options)
        print(report)
    except (ValueError, OSError, BadTargetError) as error:
        print(f"quacklr check: {error}", file=sys.stderr)
        return 1 if isinstance(error, ValueError) else 2
    return 0 if report.ok else 1


def parser() -> Parser:
    """The options."""
    options = target_parser("quacklr check", "[options]", ABOUT, EXAMPLES)
    options.add_argument("--lr", type=positive, default=1e-3, help="lr of AdamW, if the target has no optimizer (1e-3)")
    options.add_argument("--tau", type=positive, default=1.0, help="tau of QuacK (1)")
    options.add_argument("--steps", type=count, default=3, help="real steps to take (3)")
    options.add_argument("--growth", type=positive, default=4.0, help="factor of the grown weights (4)")
    return options


def checked(options: argparse.Namespace) -> CheckReport:
    """Build the target and check it. ValueError if the model cannot be run or QuacK cannot be attached."""
    progress(f"building {options.target} ...")
    target = resolve(options.target)
    model, batch = target.runnable()
    torch.manual_seed(0)
    optimizers = target.optimizers or AdamW(model.parameters(), options.lr)
    progress(f"checking {type(model).__name__} on its batch ...")
    try:
        return check(model, optimizers, batch, tau=options.tau, steps=options.steps, growth=options.growth)
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError) as error:
        raise ValueError(f"{options.target}: the model fails on its batch: {one_line(error)}") from error


def positive(text: str) -> float:
    """A positive number."""
    if not 0 < (value := float(text)) < 1e30:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def count(text: str) -> int:
    """A positive whole number."""
    if not 0 < (value := int(text)) <= 10_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10,000, not {text}")
    return value
