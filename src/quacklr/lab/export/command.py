"""`quacklr export`: a run as a checkpoint of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from quacklr.lab.data.extra import requires_extra
from quacklr.lab.errors import UserError, exit_code
from quacklr.lab.export import tokenizer, twins
from quacklr.lab.export.check import agreement
from quacklr.lab.files import read_json, write_json
from quacklr.lab.options import read
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.trained import Trained, open_run
from quacklr.util import terminal

ABOUT = """\
Write the model of a finished run as a checkpoint of transformers (safetensors), with its configuration and tokenizer.

MHA becomes Llama, MHA with QK norm Qwen3, and MLA with latent norms DeepSeek-V3. What was written is read again by
transformers, and its logits are compared with ours.

    quacklr export runs/mine --out exports/mine
"""


@dataclass(frozen=True)
class Export:
    """What goes where."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """The folder of a run of `quacklr train`."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to write, which must be new or empty."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Take the checkpoint of this step, also of a run that has not finished."""


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, or 2 for what a user can mend."""
    return exit_code("quacklr export", lambda: _export(read(Export, "quacklr export", argv, ABOUT)))


@terminal.tolerant()
def _export(given: Export) -> int:
    twins.twin_of(Folder(given.run).config())  # before a large checkpoint is read for nothing
    with told(given.out):
        if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
            raise UserError(f"--out {given.out} is there already; choose a folder that is new or empty")
    with quiet_transformers():
        run = open_run(given.run, given.step)
        with appearing(given.out) as folder:
            with told(given.out):
                write(run, given.run, folder)
            found = agreement(run, folder)
    agreed = f"logits of up to {found.largest:.1f} differ by at most {found.difference:.1g}"
    print(f"{given.run} as {found.name}: {given.out} ({agreed})")
    print(f'import transformers; transformers.pipeline("text-generation", "{given.out}")("The ")')
    return 0


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings in here; UserError if the package is not there."""
    with requires_extra("an export", "hf"):
        from transformers.utils import logging as of_transformers
    logging: Any = of_transformers  # half of it has no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder that takes its name when all is done; on any error, and after Ctrl-C, it is removed.

    A process killed in between leaves `.<name>.exporting`, which the next export of that name removes.
    """
    place = out.resolve()
    part = place.with_name(f".{place.name}.exporting")
    try:
        with told(out):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        yield part
        with told(out):
            part.replace(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write(run: Trained, path: Path, folder: Path) -> None:
    """Weights, configuration and tokenizer; `path` is the run's folder."""
    twin: Any = twins.made(run.model, run.config, run.tokenizer.end)
    twin.generation_config.max_length = run.config.shape.context
    strangers = list(range(run.tokenizer.vocab, run.model.embedding.num_embeddings))
    twin.generation_config.suppress_tokens = strangers or None  # ids that the tokenizer does not have
    twin.save_pretrained(folder)
    tokenizer.made(run, path).save_pretrained(folder)
    known = folder / "tokenizer_config.json"  # transformers 5 has another name for the class, which 4 does not know
    write_json(known, read_json(known) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    for weights in folder.glob("*.safetensors"):  # which only their owner could read, unlike the rest
        shutil.copymode(folder / "config.json", weights)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """UserError for what the system says about a full disk or a forbidden directory."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except SafetensorError as error:  # what the system says, in its words
        raise UserError(f"cannot write {path}: {error}") from error
