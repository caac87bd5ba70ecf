"""`quacklr export`: write a run as a checkpoint of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from quacklr.lab.data.extra import requires_extra
from quacklr.lab.errors import UserError, exit_code, os_errors
from quacklr.lab.export import model_card, tokenizer, transformers_model
from quacklr.lab.export.check import agreement
from quacklr.lab.files import read_json, write_json
from quacklr.lab.options import read
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.trained import Trained, open_run

ABOUT = """\
Write the model of a finished run as a checkpoint of transformers (safetensors), with its configuration, tokenizer and
model card.

MHA becomes Llama, MHA with QK norm Qwen3, and MLA with latent norms DeepSeek-V3. The export is loaded by
transformers, and its logits are compared with ours.

    quacklr export runs/mine --out exports/mine
"""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `quacklr export`."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """The folder of a run of `quacklr train`."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to write, which must be new or empty."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Load the checkpoint of this step; the run need not have finished."""


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, or 2 for an error that the user can correct."""
    return exit_code("quacklr export", lambda: _export(read(ExportOptions, "quacklr export", argv, ABOUT)))


def _export(options: ExportOptions) -> int:
    transformers_model.architecture(Folder(options.run).config())  # fails before a large checkpoint is loaded
    with write_errors(options.out):
        if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
            raise UserError(f"--out {options.out} exists already; choose a folder that is new or empty")
    with quiet_transformers():
        run = open_run(options.run, options.step)
        with atomic_folder(options.out) as folder:
            with write_errors(options.out):
                write(run, options.run, folder)
            found = agreement(run, folder)
    agreed = f"logits of up to {found.largest:.1f} differ by at most {found.difference:.1g}"
    print(f"{options.run} as {found.name}: {options.out} ({agreed})")
    print(f'import transformers; transformers.pipeline("text-generation", "{options.out}")("The ")')
    return 0


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers; UserError if it is not installed."""
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
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` at the end, and removed on any error or Ctrl-C.

    A killed process leaves `.<name>.exporting`, which the next export of that name removes.
    """
    target = out.resolve()
    part = target.with_name(f".{target.name}.exporting")
    try:
        with write_errors(out):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        yield part
        with write_errors(out):
            part.replace(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write(run: Trained, path: Path, folder: Path) -> None:
    """Write weights, configuration, tokenizer and model card to `folder`; `path` is the run's folder."""
    model: Any = transformers_model.convert(run.model, run.config, run.tokenizer.end)
    model.generation_config.max_length = run.config.shape.context
    unknown = list(range(run.tokenizer.vocab, run.model.embedding.num_embeddings))
    model.generation_config.suppress_tokens = unknown or None  # ids that the tokenizer does not have
    model.save_pretrained(folder)
    tokenizer.convert(run, path).save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # transformers 4 has no class of the name that 5 writes
    write_json(config, read_json(config) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    model_card.write(run, path, folder, type(model).__name__)
    for weights in folder.glob("*.safetensors"):  # safetensors makes them readable by the owner only
        shutil.copymode(folder / "config.json", weights)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise an error of writing to `path` as a UserError: a full disk, a folder without permission."""
    with requires_extra("an export", "hf"):
        from safetensors import SafetensorError
    try:
        with os_errors(f"cannot write {path}"):
            yield
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {error}") from error
