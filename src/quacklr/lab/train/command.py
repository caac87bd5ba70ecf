"""`quacklr train`: options to a configuration, a run, and a sentence about how it ended.

Options are read twice. First those that choose kinds (--preset, --method, --attention, ...), because they decide which
others there are; then all of them, so that --help shows just those that mean something, with their true defaults.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from quacklr.lab.config import KINDS, Config, fingerprint, kind_of, values_of
from quacklr.lab.errors import UserError, exit_code
from quacklr.lab.options import read, refuse_unusable
from quacklr.lab.presets import ATTENTIONS, PRESETS, with_kinds
from quacklr.lab.train.checkpoint import checkpoints
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.picture import draw_logits
from quacklr.lab.train.runner import Stopped, run
from quacklr.lab.train.session import Row
from quacklr.lab.train.world import is_loss_of_a_process, leads
from quacklr.util import terminal

ABOUT = """\
Train one model and write everything about it to a folder.

The default is a model of a million parameters on the source of Python's standard library:
about a minute on two cores, and nothing to download.
"""


CHOICES = {  # what --help says of the options that choose kinds
    "preset": "Where all other defaults come from; the paper's need a GPU.",
    "attention": "Multi-head attention, or multi-head latent attention.",
    "method": "What is done about attention logits; default is nothing.",
    "optimizer": "Muon for matrices and AdamW for the rest, or AdamW for all.",
    "schedule": "The learning rate after its warmup.",
}


@dataclass(frozen=True)
class RunLocation:
    """Where the run goes."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Its folder; runs/<a name made from the options> unless given."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Go on with the run in this folder, with its options."""
    wandb: Annotated[str | None, tyro.conf.arg(metavar="PROJECT")] = None
    """Log to this project of Weights & Biases too."""


def parse(argv: Sequence[str]) -> tuple[Config, RunLocation]:
    """The run that the options mean."""
    refuse_unusable(argv)
    base, chosen = first_reading(argv)
    parts = values_of(base)
    titles = {name: chosen.get(name, name).replace("-", "_") for name in parts}  # a part is titled by its kind
    choices = choices_type()
    shown = make_dataclass(
        "Train",
        [
            ("main", choices, field(default=choices(**chosen))),
            ("folder", RunLocation, field(default=RunLocation())),
            *((titles[name], type(part), field(default=part)) for name, part in parts.items()),
        ],
        frozen=True,
    )
    refuse_strangers(argv, base)
    given: Any = read(shown, "quacklr train", argv, ABOUT)
    return Config(**{name: getattr(given, titles[name]) for name in parts}), given.folder


def choices_type() -> Any:
    """The options that choose kinds, one for each name that presets and KINDS know."""
    names = {"preset": PRESETS.keys()} | {name: kinds.keys() for name, kinds in KINDS.items()}
    options: list[Any] = [
        (name, Annotated[Literal.__getitem__(tuple(known)), tyro.conf.arg(help=CHOICES[name])])
        for name, known in names.items()
    ]
    about = "Other kinds have other options: `quacklr train --method quack --attention mla --help` shows theirs."
    return make_dataclass("Choices", options, frozen=True, namespace={"__doc__": about})


def first_reading(argv: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """The configuration that all defaults come from, and the kinds that are chosen. Mistakes are left to tyro."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("preset", "resume", *KINDS):
        first.add_argument(f"--{name}", nargs="?")
    given, _ = first.parse_known_args([option for option in argv if option not in ("-h", "--help")])
    preset = given.preset if given.preset in PRESETS else "cpu"
    kinds = {name: value if (value := getattr(given, name)) in KINDS[name] else None for name in KINDS}
    saved = PRESETS[preset] if given.resume is None else Folder(Path(given.resume)).config()
    base = with_kinds(saved, ATTENTIONS[preset], **kinds)
    return base, {"preset": preset} | {name: kind_of(name, getattr(base, name)) for name in KINDS}


def refuse_strangers(argv: Sequence[str], config: Config) -> None:
    """UserError for an option of another kind than the chosen one: it would do nothing."""
    known = {name for part in values_of(config).values() for name in values_of(part)}
    for name, kinds in KINDS.items():
        owners: dict[str, list[str]] = {}
        for kind, type_ in kinds.items():
            for each in fields(type_):
                owners.setdefault(each.name, []).append(kind)
        for option in argv:
            wanted = option.partition("=")[0].removeprefix("--").replace("-", "_")
            if option.startswith("--") and wanted in owners and wanted not in known:
                chosen = kind_of(name, getattr(config, name))
                right = " or ".join(f"--{name} {kind}" for kind in owners[wanted])
                raise UserError(
                    f"{option.partition('=')[0]} means nothing with --{name} {chosen}; it goes with {right}"
                )


def name_of(config: Config) -> str:
    """A folder's name that people can read, and that no other configuration has."""
    kinds = f"{kind_of('attention', config.attention)}-{kind_of('method', config.method)}"
    return f"{kinds}-lr{config.optimizer.lr:g}-seed{config.training.seed}-{fingerprint(config)}"


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, 1 if another process is lost, 2 for what a user can mend, 130 or 143 when stopped."""
    if leads():
        return exit_code("quacklr train", lambda: _train(*asked(argv), "quacklr train"))
    who = f"quacklr train (rank {os.environ['RANK']})"
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return exit_code(who, lambda: _train(*asked(argv), who))


@terminal.tolerant()
def _train(config: Config, path: Path, place: RunLocation, who: str) -> int:
    try:
        result = run(config, path, resume=place.resume is not None, wandb=place.wandb)
        picture = draw_logits(path) if leads() else None
    except Stopped as stopped:
        if leads():
            print(f"Stopped at step {stopped.step}; go on with: {again(path)}", file=sys.stderr)
        return 128 + stopped.signum
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(out_of_memory(error, path)) from error
        if not is_loss_of_a_process(error):
            raise
        print(f"{who}: {loss_of_a_process(error, path)}", file=sys.stderr)
        return 1
    tell_end(result, path, picture)
    return 0


def asked(argv: Sequence[str]) -> tuple[Config, Path, RunLocation]:
    """The run that the options mean, and its folder. What is wrong with them is said by one process."""
    try:
        with nullcontext() if leads() else redirect_stderr(None):
            config, place = parse(argv)
        if place.resume and place.out:
            raise UserError("--resume says the folder of the run, so leave --out away")
    except UserError:
        if leads():
            raise
        raise SystemExit(2) from None
    return config, place.resume or place.out or Path("runs") / name_of(config), place


def again(path: Path) -> str:
    """The command that goes on with a run, in as many processes as before."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    start = "quacklr train" if size == 1 else f"torchrun --nproc-per-node {size} -m quacklr train"
    return f"{start} --resume {shlex.quote(str(path))}"


def loss_of_a_process(error: BaseException, path: Path) -> str:
    """What has happened, and the way on."""
    reason = re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0]).partition(". ")[0]
    return f"another process of this run has died or does not answer ({reason}), so the run ends; {way_on(path)}"


def way_on(path: Path) -> str:
    """How to go on with a run that has ended early."""
    found = checkpoints(path / "checkpoints")
    return (
        f"its last checkpoint is {found[-1].name}; go on with: {again(path)}" if found else "it has no checkpoint yet"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory cannot be allocated: numpy's, torch's of a GPU, torch's of the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(error: BaseException, path: Path) -> str:
    """What was too large, and the way on."""
    reason = " ".join(str(error).split()).partition(". ")[0]
    return f"out of memory ({reason}): a smaller model, --micro-batch or --context needs less; {way_on(path)}"


def tell_end(result: Row, path: Path, picture: Path | None) -> None:
    """How it ended, and where to look."""
    if result["status"] == "diverged":
        print(f"The run diverged: {result['reason']}. It is recorded in {path}.")
    else:
        print(f"Done: validation loss {result['val_loss']:.4f}, {result['val_bpb']:.4f} bits a byte. {path}")
    if picture:
        print(f"The logits of every head, step by step: {picture}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
