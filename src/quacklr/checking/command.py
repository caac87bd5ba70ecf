"""`quacklr check TARGET`: test on a copy of a model that QuacK scales the right rows of every head."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from quacklr.checking.prove import check
from quacklr.checking.report import CheckReport
from quacklr.inspect.command import progress, quiet, target_parser
from quacklr.inspect.resolve import resolve
from quacklr.inspect.target import BadTargetError, one_line
from quacklr.util.arguments import Parser

ABOUT = """\
Does QuacK scale the right rows of a model? The rows are compared with those that are
measured on a batch. Then copies of the model take a few real steps, and the change of
every head's logits is compared with its bound.

TARGET is one of
  package.module:factory     a function of yours that returns (model, batch), where
  path/to/file.py:factory    batch is the model's input, or (model, optimizer, batch)
  vit_tiny_patch16_224       a model of timm
"""
EXAMPLES = """\
examples:
  quacklr check train.py:make                   make() returns a small model and a batch
  quacklr check train.py:make --optimizer muon --lr 0.02

exit code: 0 if QuacK scales the right rows; 1 if it does not, if that cannot be shown, or if QuacK cannot be
attached; 2 if there is no such model, or an option is wrong
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
    positive, count = _number(float, 1e30, "positive number"), _number(int, 10_000, "positive whole number")
    options.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="the optimizer, if the target has none (adamw)"
    )
    options.add_argument("--lr", type=positive, default=1e-3, metavar="LR", help="its learning rate (1e-3)")
    options.add_argument("--tau", type=positive, default=1.0, metavar="TAU", help="tau of QuacK (1)")
    options.add_argument("--steps", type=count, default=3, metavar="N", help="real steps to take (3)")
    options.add_argument("--growth", type=positive, default=4.0, metavar="X", help="factor of the grown weights (4)")
    return options


def checked(options: argparse.Namespace) -> CheckReport:
    """Build the target and check it. ValueError if the model cannot be run or QuacK cannot be attached."""
    progress(f"building {options.target} ...")
    target = resolve(options.target)
    model, batch = target.runnable()
    torch.manual_seed(0)
    optimizers = target.optimizers or OPTIMIZERS[options.optimizer](model, options.lr)
    progress(f"checking {type(model).__name__} on its batch ...")
    try:
        return check(model, optimizers, batch, tau=options.tau, steps=options.steps, growth=options.growth)
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError) as error:
        raise ValueError(f"{options.target}: the model fails on its batch: {one_line(error)}") from error


def _muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for matrices, AdamW for embeddings and all other parameters."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(param) for table in tables for param in table.parameters()}
    matrices = {id(p): p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings}
    return [Muon(matrices.values(), lr), AdamW([p for p in model.parameters() if id(p) not in matrices], lr)]


OPTIMIZERS: dict[str, Callable[[nn.Module, float], Any]] = {
    "adamw": lambda model, lr: AdamW(model.parameters(), lr),
    "sgd": lambda model, lr: SGD(model.parameters(), lr),
    "muon": _muon,
}


def _number(kind: Callable[[str], float], largest: float, name: str) -> Callable[[str], float]:
    """A parser of numbers above 0 and up to a largest one."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := kind(text)) <= largest:
                return value
        limit = f"{largest:,}" if kind is int else f"{largest:g}"
        raise argparse.ArgumentTypeError(f"must be a {name}, at most {limit}, not {text}")

    return parse
