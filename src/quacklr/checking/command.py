"""`quacklr check TARGET`: is QuacK wired right into a model?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from quacklr.checking.prove import check
from quacklr.checking.report import CheckReport
from quacklr.inspect.command import of_target, quiet, say
from quacklr.inspect.target import BadTargetError, resolve, told
from quacklr.util.arguments import Parser
from quacklr.util.terminal import answer, sentence

LARGEST, MOST = 1e30, 10_000  # of numbers, and of steps
ABOUT = """\
Is QuacK wired right into a model? A copy of it takes a few real steps, and rows
of its weights are nudged: every head must move with its own rows, with no others,
and by no more than the steps of those rows allow.

TARGET is one of
  llama                      a model type of transformers, a small one of the kind
  path/to/config.json        a config of transformers, or a folder with one
  vit_tiny_patch16_224       a model of timm
  package.module:factory     a function of yours that returns (model, batch), where
  path/to/file.py:factory    batch is what it is called with, or (model, optimizer, batch)
"""
EXAMPLES = """\
examples:
  quacklr check deepseek_v3                     seconds: a small model, random weights
  quacklr check train.py:make --out check.png   yours, with a picture of every head
  quacklr check gpt2 --optimizer muon --lr 0.02

exit code: 0 if it is wired right; 1 if it is not, if that cannot be shown, or if QuacK refuses the model; 2 if
there is no such model, or an option is wrong
"""


def main(argv: Sequence[str]) -> int:
    """Check a model and print what was found; the exit code is the verdict."""
    asked = parser().parse_args(argv)
    try:
        with quiet():
            wiring = checked(asked)
        answer(str(wiring))
        if asked.out is not None:
            wiring.save(asked.out)
    except BrokenPipeError:  # somebody reads the first lines only
        return 1
    except ValueError as error:  # QuacK refuses it, or it does not run
        return fail(str(error), 1)
    except OSError as error:
        return fail(sentence(error), 2)
    except (BadTargetError, ModuleNotFoundError) as error:
        return fail(str(error), 2)
    return 0 if wiring.ok else 1


def parser() -> Parser:
    """The options."""
    options = of_target("quacklr check", "[options]", ABOUT, EXAMPLES)
    options.add_argument("--optimizer", choices=MAKERS, default="adamw", help="if the target brings none (adamw)")
    options.add_argument("--lr", type=positive, default=1e-3, metavar="LR", help="its learning rate (1e-3)")
    options.add_argument("--tau", type=positive, default=1.0, metavar="TAU", help="QuacK's (1)")
    options.add_argument("--steps", type=count, default=3, metavar="N", help="real steps to take (3)")
    options.add_argument("--growth", type=positive, default=4.0, metavar="X", help="how far weights grow (4)")
    options.add_argument("--out", type=picture, metavar="FILE", help="also draw every head: check.png, .svg or .pdf")
    return options


def checked(asked: argparse.Namespace) -> CheckReport:
    """The check that was asked for."""
    say(f"building {asked.target} ...")
    target = resolve(asked.target)
    model, batch = target.runnable()
    torch.manual_seed(0)
    optimizers = target.optimizers or MAKERS[asked.optimizer](model, asked.lr)
    say(f"checking {type(model).__name__} on {target.measured_on or 'its batch'} ...")
    try:
        return check(model, optimizers, batch, tau=asked.tau, steps=asked.steps, growth=asked.growth)
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError) as error:
        raise ValueError(f"{asked.target}: the model fails on its batch: {told(error)}") from error


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for matrices, AdamW for embeddings and all else."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(param) for table in tables for param in table.parameters()}
    matrices = [param for param in model.parameters() if param.ndim == 2 and id(param) not in embeddings]
    chosen = {id(param) for param in matrices}
    return [Muon(matrices, lr), AdamW([param for param in model.parameters() if id(param) not in chosen], lr)]


MAKERS: dict[str, Callable[[nn.Module, float], Any]] = {
    "adamw": lambda model, lr: AdamW(model.parameters(), lr),
    "sgd": lambda model, lr: SGD(model.parameters(), lr),
    "muon": muon,
}


def positive(text: str) -> float:
    """A number above 0, within the range of float32."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= LARGEST:
            return value
    raise argparse.ArgumentTypeError(f"must be a positive number, at most {LARGEST:g}, not {text}")


def count(text: str) -> int:
    """A whole number above 0, of steps that somebody waits for."""
    with suppress(ValueError):
        if 0 < (value := int(text)) <= MOST:
            return value
    raise argparse.ArgumentTypeError(f"must be a positive whole number, at most {MOST:,}, not {text}")


def picture(text: str) -> Path:
    """A file to draw into."""
    file = Path(text)
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must be a .png, .svg or .pdf, not {text}")
    try:
        file.exists()
        if not file.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    except OSError as error:
        raise argparse.ArgumentTypeError(sentence(error)) from error
    return file


def fail(sentence: str, code: int) -> int:
    """Say why there is no answer."""
    print(f"quacklr check: {sentence}", file=sys.stderr)
    return code
