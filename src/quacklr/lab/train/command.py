"""The command `quacklr train`.

Options are parsed twice: first those that select kinds (--preset, --method, --attention, ...), because they determine
the other options; then all of them. So --help shows exactly the options that apply, with their defaults.
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
from quacklr.lab.options import read, validate_arguments
from quacklr.lab.presets import ATTENTIONS, PRESETS, with_kinds
from quacklr.lab.train.checkpoint import checkpoints
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.picture import draw_logits
from quacklr.lab.train.rows import Row
from quacklr.lab.train.runner import Stopped, run
from quacklr.lab.train.world import is_lost_rank, is_rank0

ABOUT = """\
Train one model, and write metrics, checkpoints and figures to a folder.

The default is a model of a million parameters on the source of Python's standard library:
about a minute on two cores, and nothing to download.
"""

CHOICES = {  # help of the options that select kinds
    "preset": "The defaults of all other options; the paper's presets need a GPU.",
    "attention": "Multi-head attention, or multi-head latent attention.",
    "method": "The method that controls attention logits; default is none.",
    "optimizer": "Muon for matrices and AdamW for the rest, or AdamW for all.",
    "schedule": "The learning rate schedule after the warmup.",
}


@dataclass(frozen=True)
class RunLocation:
    """Where the run is written."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the run; runs/<a name made from the options> unless given."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Continue the run in this folder, with its options."""
    wandb: Annotated[str | None, tyro.conf.arg(metavar="PROJECT")] = None
    """Also log to this project of Weights & Biases."""


def parse(argv: Sequence[str]) -> tuple[Config, RunLocation]:
    """The configuration and the folders that the options specify."""
    validate_arguments(argv)
    base, chosen = parse_kinds(argv)
    parts = values_of(base)
    titles = {name: chosen.get(name, name).replace("-", "_") for name in parts}  # the title of a part is its kind
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
    validate_options_of_kinds(argv, base)
    given: Any = read(shown, "quacklr train", argv, ABOUT)
    return Config(**{name: getattr(given, titles[name]) for name in parts}), given.folder


def choices_type() -> Any:
    """A dataclass of the options that select kinds: --preset and one for each entry of KINDS."""
    names = {"preset": PRESETS.keys()} | {name: kinds.keys() for name, kinds in KINDS.items()}
    options: list[Any] = [
        (name, Annotated[Literal.__getitem__(tuple(known)), tyro.conf.arg(help=CHOICES[name])])
        for name, known in names.items()
    ]
    about = "Other kinds have other options: `quacklr train --method quack --attention mla --help` shows theirs."
    return make_dataclass("Choices", options, frozen=True, namespace={"__doc__": about})


def parse_kinds(argv: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """Parse the options that select kinds: the configuration of all defaults, and the kinds. tyro reports mistakes."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("preset", "resume", *KINDS):
        first.add_argument(f"--{name}", nargs="?")
    given, _ = first.parse_known_args([option for option in argv if option not in ("-h", "--help")])
    preset = given.preset if given.preset in PRESETS else "cpu"
    kinds = {name: value if (value := getattr(given, name)) in KINDS[name] else None for name in KINDS}
    saved = PRESETS[preset] if given.resume is None else Folder(Path(given.resume)).config()
    base = with_kinds(saved, ATTENTIONS[preset], **kinds)
    return base, {"preset": preset} | {name: kind_of(name, getattr(base, name)) for name in KINDS}


def validate_options_of_kinds(argv: Sequence[str], config: Config) -> None:
    """Raise UserError for an option of a kind that is not selected: it would have no effect."""
    known = {name for part in values_of(config).values() for name in values_of(part)}
    options = [argument.partition("=")[0] for argument in argv if argument.startswith("--")]
    for name, kinds in KINDS.items():
        for option in options:
            wanted = option.removeprefix("--").replace("-", "_")
            owners = [kind for kind, type_ in kinds.items() if wanted in {each.name for each in fields(type_)}]
            if owners and wanted not in known:
                chosen = kind_of(name, getattr(config, name))
                right = " or ".join(f"--{name} {kind}" for kind in owners)
                raise UserError(f"{option} means nothing with --{name} {chosen}; it goes with {right}")


def name_of(config: Config) -> str:
    """A readable folder name, unique for the configuration."""
    kinds = f"{kind_of('attention', config.attention)}-{kind_of('method', config.method)}"
    return f"{kinds}-lr{config.optimizer.lr:g}-seed{config.training.seed}-{fingerprint(config)}"


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 1 if another process died, 2 for a mistake of the user, 130 or 143 by a signal."""
    if is_rank0():
        return exit_code("quacklr train", lambda: _train(*parse_run(argv), "quacklr train"))
    who = f"quacklr train (rank {os.environ['RANK']})"
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return exit_code(who, lambda: _train(*parse_run(argv), who))


def _train(config: Config, path: Path, location: RunLocation, who: str) -> int:
    try:
        result = run(config, path, resume=location.resume is not None, wandb=location.wandb)
        picture = draw_logits(path) if is_rank0() else None
    except Stopped as stopped:
        if is_rank0():
            print(f"Stopped at step {stopped.step}; go on with: {resume_command(path)}", file=sys.stderr)
        return 128 + stopped.signum
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(out_of_memory_message(error, path)) from error
        if not is_lost_rank(error):
            raise
        print(f"{who}: {lost_rank_message(error, path)}", file=sys.stderr)
        return 1
    print_result(result, path, picture)
    return 0


def parse_run(argv: Sequence[str]) -> tuple[Config, Path, RunLocation]:
    """Configuration, folder and locations of the run. Only rank 0 reports mistakes."""
    try:
        with nullcontext() if is_rank0() else redirect_stderr(None):
            config, location = parse(argv)
        if location.resume and location.out:
            raise UserError("--resume already names the folder of the run; do not give --out as well")
    except UserError:
        if is_rank0():
            raise
        raise SystemExit(2) from None
    return config, location.resume or location.out or Path("runs") / name_of(config), location


def resume_command(path: Path) -> str:
    """The command that resumes a run with the same number of processes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    start = "quacklr train" if size == 1 else f"torchrun --nproc-per-node {size} -m quacklr train"
    return f"{start} --resume {shlex.quote(str(path))}"


def lost_rank_message(error: BaseException, path: Path) -> str:
    """The message of an error that means that another process has died."""
    reason = re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0]).partition(". ")[0]
    return f"another process of this run has died or does not answer ({reason}), so the run ends; {resume_hint(path)}"


def resume_hint(path: Path) -> str:
    """How to resume a run that ended early."""
    found = checkpoints(path / "checkpoints")
    if not found:
        return "it has no checkpoint yet"
    return f"its last checkpoint is {found[-1].name}; go on with: {resume_command(path)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of numpy, or of torch on GPU or CPU, means that memory cannot be allocated."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory_message(error: BaseException, path: Path) -> str:
    """The message of an out-of-memory error."""
    reason = " ".join(str(error).split()).partition(". ")[0]
    return f"out of memory ({reason}): a smaller model, --micro-batch or --context needs less; {resume_hint(path)}"


def print_result(result: Row, path: Path, picture: Path | None) -> None:
    """Print how the run ended, its folder and its figure."""
    if result["status"] == "diverged":
        print(f"The run diverged: {result['reason']}. It is recorded in {path}.")
    else:
        print(f"Done: validation loss {result['val_loss']:.4f}, {result['val_bpb']:.4f} bits a byte. {path}")
    if picture:
        print(f"The logits of every head, step by step: {picture}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
