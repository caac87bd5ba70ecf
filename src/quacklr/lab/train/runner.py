"""Executes one run in its folder: training, rows, trackers, checkpoints, resumption and signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from quacklr.lab.config import KINDS, Config, differences, kind_of, values_of
from quacklr.lab.data import Corpus, open_corpus
from quacklr.lab.errors import UserError, one_line
from quacklr.lab.files import locked
from quacklr.lab.progress import ProgressDisplay, progress
from quacklr.lab.signals import stop_signals
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints, step_of, user_errors_for, validate_format
from quacklr.lab.train.device import device_of, environment, threads_restored
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.identity import resume_key, run_identity
from quacklr.lab.train.integrity import verify_corpus
from quacklr.lab.train.rows import Row
from quacklr.lab.train.session import Session
from quacklr.lab.train.statistics import max_logit
from quacklr.lab.train.trackers import Tracker, trackers
from quacklr.lab.train.world import World, is_restarted, process_group, torchrun_id


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal stopped the run after a step; its checkpoint is saved."""

    def __init__(self, step: int, signum: int) -> None:
        super().__init__(step, signum)
        self.step, self.signum = step, signum


def run(config: Config, path: Path, resume: bool = False, wandb: str | None = None) -> Row:
    """Train a run in a folder and return its result, the content of `result.json`.

    With `resume` it continues from the last checkpoint, or begins if there is none. Raises Stopped after SIGINT or
    SIGTERM, and UserError for mistakes that a user can fix.
    """
    folder = Folder(path)
    resume = resume or (is_restarted() and folder.environment.get("job") == torchrun_id())
    with threads_restored(), process_group() as world:
        return _run(config, folder, resume, wandb, world)


def _run(config: Config, folder: Folder, resume: bool, wandb: str | None, world: World) -> Row:
    """The run in one process of the group. The session must be a local variable: see `process_group`."""
    world.broadcast(lambda: world.validate_divisible(config.sequences))
    if ended := world.broadcast(lambda: _finished_result(config, folder, resume)):
        return ended
    device = device_of(config.machine)  # before the corpus, which may take minutes to prepare
    corpus = open_corpus(config.training.corpus)
    if corpus.fingerprint != world.broadcast(lambda: corpus.fingerprint):
        raise UserError(f"--corpus {config.training.corpus} has other text in this process than in rank 0")
    verify_corpus(corpus, world, resumed=resume and folder.has_run)
    session = Session(config, corpus, device)
    identity = run_identity(session.config, corpus.fingerprint)
    about = environment(device) | {"corpus": corpus.fingerprint, "processes": world.size, "job": torchrun_id()}
    with ExitStack() as stack:
        found = world.broadcast(lambda: _checkpoint_to_resume(folder, resume, stack))
        saves = stack.enter_context(Checkpoints(folder.checkpoints, identity, config.watch.keep))
        if found:
            _load(session, saves, found)
        writer = _writer(session, corpus, folder, about, wandb) if world.is_rank0 else nullcontext(_ignore)
        with writer as write:
            _train(session, saves, write, folder)
        saves.wait()
        return world.broadcast(lambda: _write_result(folder))


def _load(session: Session, saves: Checkpoints, path: Path) -> None:
    """Load a checkpoint into the session; UserError, before any row is removed, if it is not one of quacklr's."""
    state = saves.load(path, session.model, session.optimizers)
    with user_errors_for(path):
        session.load_extra_state(state)
        if type(session.step) is not int or session.step != step_of(path):
            raise ValueError(f"it says that it is of step {session.step}")
        if not isinstance(session.first_val_loss, float):
            raise ValueError("it does not say the first validation loss")


def _train(session: Session, saves: Checkpoints, write: Callable[[Row], None], folder: Folder) -> None:
    """Train to the end or to a signal; write each row before the next step, and save checkpoints when due."""
    steps = session.config.training.steps
    with stop_signals() as caught:
        for row in session.rows():
            write(row)
            signum = int(session.world.all_reduce_max(caught[0] if caught else 0))  # all ranks stop at the same step
            stopping = bool(signum) and session.step < steps and "diverged" not in row
            if stopping or "diverged" in row or is_checkpoint_due(session):
                if session.world.is_rank0:
                    folder.flush()  # a run can only be resumed from a checkpoint if it has all earlier rows
                saves.save(session.step, session.tensors(), session.extra_state(), session.config.watch.async_save)
            if stopping:
                saves.wait()
                raise Stopped(session.step, signum)


@contextmanager
def _writer(
    session: Session, corpus: Corpus, folder: Folder, about: Row, wandb: str | None
) -> Iterator[Callable[[Row], None]]:
    """A function that writes a row to the folder, the trackers and the terminal. First updates the folder's files."""
    active = trackers(folder.path, session.config, session.step, wandb)  # first, because it may raise UserError
    corpus.save_tokenizer(folder.path)
    folder.truncate_after(session.step if session.first_val_loss is not None else -1)
    folder.remove_result()
    folder.write_config(session.config, about)
    try:
        with progress("training", session.config.training.steps, "steps", session.step) as show:
            show.line(describe_run(session, folder.path))

            def write(row: Row) -> None:
                folder.append(row)
                for tracker in list(active):
                    with _dropped_on_error(tracker, active):
                        tracker.write(row)
                show_row(show, row)

            yield write
    finally:
        for tracker in list(active):
            with _dropped_on_error(tracker, active):
                tracker.close()


@contextmanager
def _dropped_on_error(tracker: Tracker, active: list[Tracker]) -> Iterator[None]:
    """Drop a tracker that fails, with a message: the run continues, and metrics.jsonl has all rows."""
    try:
        yield
    except Exception as error:  # any error of a package or its network
        active.remove(tracker)
        print(f"{type(tracker).__name__} fails ({one_line(error)}), so the run goes on without it", file=sys.stderr)


def _ignore(_: Any) -> None:
    """Write nothing, on ranks other than 0."""


def _finished_result(config: Config, folder: Folder, resume: bool) -> Row | None:
    """The result in the folder if the run has ended; UserError if it holds another run, or one not to be resumed."""
    folder.validate_new(resume)
    _validate_same_run(config, folder)
    ended = folder.result
    if not ended or (ended["status"] != "diverged" and ended["step"] < config.training.steps):
        return None
    folder.validate_rows(ended["step"], ended=True)
    return ended


def _checkpoint_to_resume(folder: Folder, resume: bool, stack: ExitStack) -> Path | None:
    """Lock the folder for the rest of the run, and return the checkpoint to resume from, or None to begin."""
    stack.enter_context(locked(folder.path))
    folder.validate_new(resume)
    found = checkpoints(folder.checkpoints) if folder.has_run else []
    if found:
        folder.validate_rows(step_of(found[-1]) or 0)
        return found[-1]
    validate_format(folder.checkpoints)
    reached = folder.rows()[-1]["step"] if folder.has_run and folder.rows() else None
    # twice: with --async-save, one checkpoint may still be in progress when the next is due
    if folder.result or (reached is not None and reached > 2 * folder.config().watch.checkpoint_every):
        raise UserError(f"{folder.path} has no checkpoint left to go on from; train anew in another --out")
    if reached is not None:
        print(f"{folder.path} has no checkpoint yet, so the run begins again", file=sys.stderr)
    return None


def _write_result(folder: Folder) -> Row:
    result = result_of(folder.rows())
    folder.write_result(result)
    return result


def _validate_same_run(config: Config, folder: Folder) -> None:
    """Raise UserError if the folder holds another run."""
    if folder.has_run:
        saved = folder.config()
        shape = replace(config.shape, vocab=config.shape.vocab or saved.shape.vocab)
        one, other = resume_key(saved), resume_key(replace(config, shape=shape))
        if one != other:
            raise UserError(f"{folder.path} holds another run: it differs in {', '.join(differences(one, other))}")


def is_checkpoint_due(session: Session) -> bool:
    """Whether a checkpoint is saved after the current step."""
    watch, steps = session.config.watch, session.config.training.steps
    return session.step == steps or (session.step > 0 and session.step % watch.checkpoint_every == 0)


def describe_run(session: Session, path: Path) -> str:
    """Two lines for the terminal: model, method, optimizer, device, length and folder of a run."""
    config, size = session.config, session.world.size
    kinds = {field: kind_of(field, getattr(config, field)) for field in KINDS}
    settings = ", ".join(f"{name} {value}" for name, value in values_of(config.method).items())
    shared = "each with the whole model" if config.machine.parallel == "ddp" else "each with a shard of the model"
    processes = f" in {size} processes, {shared}" if size > 1 else ""
    tokens = config.training.steps * config.training.batch_tokens
    start = f"from step {session.step} on" if session.step else "from the beginning"
    return (
        f"{session.size:,} parameters, {kinds['attention']}, {kinds['method']}{f' ({settings})' if settings else ''}, "
        f"{kinds['optimizer']} at lr {config.optimizer.lr:g}, on {session.device}{processes}\n"
        f"{config.training.steps:,} steps of {config.training.batch_tokens:,} tokens, {tokens:,} in all, {start}; "
        f"everything goes to {path}"
    )


def show_row(show: ProgressDisplay, row: Row) -> None:
    """Show a row on the terminal: a permanent line after a validation, and the status of the progress bar."""
    loss = f"loss {row['loss']:.3f}" if "loss" in row else ""
    if "val_loss" in row:
        parts = [
            f"step {row['step']:>6}",
            f"validation loss {row['val_loss']:.3f}",
            f"{row['val_bpb']:.3f} bits a byte",
        ]
        top = max_logit(row["logits"]) if "logits" in row else None
        parts += [f"largest logit {top:.4g}"] if top is not None else []
        show.line("  ".join([*parts, *([loss] if loss else [])]))
    speed = f", {row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else ""
    show(row["step"], f"{loss}{speed}")


def result_of(rows: list[Row]) -> dict[str, Any]:
    """The content of `result.json`, from all rows of a run that has ended."""
    if not rows:
        raise UserError("metrics.jsonl has no rows, so nothing can be said about the run; train anew in another --out")
    last = rows[-1]
    validated = [row for row in rows if "val_loss" in row]
    probed = [row for row in rows if "logits" in row]
    return {
        "status": "diverged" if "diverged" in last else "finished",
        "reason": last.get("diverged"),
        "step": last["step"],
        "tokens": last.get("tokens", 0),
        "val_loss": validated[-1]["val_loss"] if validated else None,
        "val_bpb": validated[-1]["val_bpb"] if validated else None,
        "best_val_loss": min((row["val_loss"] for row in validated if row["val_loss"] is not None), default=None),
        "max_logit": max_logit(probed[-1]["logits"]) if probed else None,
    }
