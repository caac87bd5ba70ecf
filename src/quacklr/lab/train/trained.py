"""Opens a finished run for inference: the model of its last checkpoint, and the tokenizer.

run = open_run(Path("runs/mine"))
run.model(tokens_BT)                            # (B, T, V) logits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.nn.utils import parametrize

from quacklr.lab.config import Config, Machine
from quacklr.lab.data import Tokenizer, load_tokenizer
from quacklr.lab.errors import UserError
from quacklr.lab.methods import alter
from quacklr.lab.model import Decoder, build_empty
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints, step_of
from quacklr.lab.train.device import device_of
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.identity import run_identity


@dataclass(frozen=True)
class Trained:
    """The model and the tokenizer of a run. Parametrizations are folded into the weights."""

    config: Config
    step: int
    model: Decoder
    tokenizer: Tokenizer


def open_run(path: Path, step: int | None = None, device: str = "cpu") -> Trained:
    """Open the run in a folder at its last step, or at another step that has a checkpoint.

    UserError if the run has not ended and no step is given, or if its files are damaged.
    """
    folder = Folder(path)
    config = folder.config()
    found = {number: each for each in checkpoints(folder.checkpoints) if (number := step_of(each)) is not None}
    step = _last_step(folder, config, list(found)) if step is None else step
    if step not in found:
        raise UserError(f"{path} has no checkpoint of step {step}{_step_hint(list(found)) or ', nor any other'}")
    tokenizer, vocab = load_tokenizer(path), config.shape.vocab or 0
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer in {path} is of another run: it has {tokenizer.vocab} tokens, the model {vocab}"
        )
    model = build_empty(config.shape, config.attention, device_of(Machine(device=device)))
    alter(config.method, model)
    name = run_identity(config, str(folder.environment.get("corpus")))
    with Checkpoints(folder.checkpoints, name, keep=config.watch.keep) as saves:
        saves.load(found[step], model, optimizers=[])
    model.eval()  # first: in training mode, reading a weight updates the state of Sigma-Reparam
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return Trained(config, step, model.requires_grad_(False), tokenizer)


def _last_step(folder: Folder, config: Config, steps: list[int]) -> int:
    """The last step of a finished run; UserError if it has not ended, or has diverged."""
    result = folder.result
    if result is None:
        rows = folder.rows()
        reached = rows[-1].get("step") if rows else 0
        raise UserError(
            f"the run in {folder.path} has not finished: it is at step {reached} of {config.training.steps}; wait "
            f"for it, or if it has stopped, go on with `quacklr train --resume {folder.path}`{_step_hint(steps)}"
        )
    if result["status"] != "finished":
        raise UserError(f"the run in {folder.path} has diverged: {result.get('reason')}{_step_hint(steps)}")
    return int(result["step"])


def _step_hint(steps: list[int]) -> str:
    """The end of a message: which steps have a checkpoint."""
    return f"; --step {' or '.join(map(str, steps))} loads an existing checkpoint" if steps else ""
