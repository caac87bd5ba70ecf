"""`quacklr check TARGET`: test on a copy of a model that QuacK scales the right rows of every head."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch.optim import AdamW

from quacklr.checking.check import check
from quacklr.inspect.command import quiet, target_parser
from quacklr.inspect.resolve import BadTargetError, resolve

ABOUT = """\
Does QuacK scale the right rows of a model? The rows are compared with those that are
measured on a batch. Then a copy of the model takes a few real steps, and the change of
every head's logits is compared with its bound.

TARGET is one of
  package.module:factory     a function of yours that returns (model, batch), where
  path/to/file.py:factory    batch is the model's input, or (model, optimizer, batch);
                             without an optimizer it is AdamW with its own lr, 0.001
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
    parser = target_parser("quacklr check", "[options]", ABOUT, EXAMPLES)
    parser.add_argument("--tau", type=float, help="the rule Paper(tau); without it, the default rule")
    parser.add_argument("--steps", type=int, default=3, help="real steps to take (3)")
    parser.add_argument("--growth", type=float, default=4.0, help="factor of the grown weights (4)")
    options = parser.parse_args(argv)
    for name in ("tau", "steps", "growth"):
        if not 0 < (getattr(options, name) or 1) < math.inf:
            parser.error(f"--{name} must be a positive number, not {getattr(options, name)}")
    try:
        with quiet():
            model, batch, optimizer = resolve(options.target)
            if batch is None:
                parser.error(f"{options.target}: to run it, name a function that returns a batch too: model, batch")
            torch.manual_seed(0)
            optimizer = optimizer or AdamW(model.parameters())
            report = check(model, optimizer, batch, tau=options.tau, steps=options.steps, growth=options.growth)
    except BadTargetError as error:
        parser.error(str(error))
    except ValueError as error:
        print(f"quacklr check: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.ok else 1
