"""One run from beginning to end: rows go to its folder, checkpoints are saved, and a signal to stop loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from quacklr.lab.config import KINDS, Config, Machine, Watch, differences, fingerprint, kind_of, values_of
from quacklr.lab.data import Corpus, open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.files import locked
from quacklr.lab.optim import Constant
from quacklr.lab.progress import Show, progress
from quacklr.lab.signals import signals
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints, ours, refuse_older_format, step_of
from quacklr.lab.train.device import device_of, environment, threads_restored
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.integrity import verify
from quacklr.lab.train.session import Row, Session
from quacklr.lab.train.statistics import largest
from quacklr.lab.train.trackers import Tracker, trackers
from quacklr.lab.train.world import World, is_restarted, job, joined
from quacklr.util import terminal


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the run after a whole step; its checkpoint is saved."""

    def __init__(self, step: int, signum: int) -> None:
        super().__init__(step, signum)
        self.step, self.signum = step, signum


@terminal.tolerant()
def run(config: Config, path: Path, resume: bool = False, wandb: str | None = None) -> Row:
    """Train, and return how it ended: the content of `result.json`.

    With `resume` it goes on from the folder's last checkpoint, or begins if there is none. Raises Stopped when a signal
    (Ctrl-C, SIGTERM) ended it, and UserError for what a user can mend.
    """
    folder = Folder(path)
    resume = resume or (is_restarted() and folder.environment.get("job") == job())
    with threads_restored(), joined() as world:
        return _run(config, folder, resume, wandb, world)


def _run(config: Config, folder: Folder, resume: bool, wandb: str | None, world: World) -> Row:
    """The run, in one of the processes that have found each other; nothing that it made outlives it."""
    world.told(lambda: world.refuse_unless_shared(config.sequences))
    if ended := world.told(lambda: _ending(config, folder, resume)):
        return ended
    device_of(config.machine)  # before the corpus, which may take a while to make
    corpus = open_corpus(config.training.corpus)
    if corpus.fingerprint != world.told(lambda: corpus.fingerprint):
        raise UserError(f"--corpus {config.training.corpus} is other text here than for the leading process")
    verify(corpus, world, resumed=resume and folder.taken)
    session = Session(config, corpus)
    name = name_of_checkpoints(session.config, corpus.fingerprint)
    about = environment(session.device) | {"corpus": corpus.fingerprint, "processes": world.size, "job": job()}
    with ExitStack() as stack:
        found = world.told(lambda: _taken(folder, resume, stack))
        saves = stack.enter_context(Checkpoints(folder.checkpoints, name, config.watch.keep))
        if found:
            _load(session, saves, found)
        writer = _writer(session, corpus, folder, about, wandb) if world.leads else nullcontext(_nowhere)
        with writer as write:
            _train(session, saves, write, folder)
        saves.wait()
        return world.told(lambda: _end(folder))


def _load(session: Session, saves: Checkpoints, path: Path) -> None:
    """Go on from a checkpoint; UserError if it is none of quacklr's, before a row is dropped for it."""
    rest = saves.load(path, session.model, session.optimizers)
    with ours(path):
        session.load_rest(rest)
        if type(session.step) is not int or session.step != step_of(path):
            raise ValueError(f"it says that it is of step {session.step}")
        if not isinstance(session.first_val_loss, float):
            raise ValueError("it does not say the first validation loss")


def _train(session: Session, saves: Checkpoints, write: Callable[[Row], None], folder: Folder) -> None:
    """All rows from where the session stands, each written before the next is begun."""
    steps = session.config.training.steps
    with signals() as stop:
        for row in session.rows():
            write(row)
            signum = int(session.world.largest(stop[0] if stop else 0))  # all processes stop at the same step
            stopping = bool(signum) and session.step < steps and "diverged" not in row
            if stopping or "diverged" in row or is_due(session):
                if session.world.leads:
                    folder.flush()  # a checkpoint without the rows before it could not be resumed
                saves.save(session.step, session.tensors(), session.rest(), session.config.watch.async_save)
            if stopping:
                saves.wait()
                raise Stopped(session.step, signum)


@contextmanager
def _writer(
    session: Session, corpus: Corpus, folder: Folder, about: Row, wandb: str | None
) -> Iterator[Callable[[Row], None]]:
    """What writes a row to the folder, to the trackers and to the terminal, from where the session stands."""
    watchers = trackers(folder.path, session.config, session.step, wandb)  # it may refuse, so it comes first
    corpus.leave_tokenizer(folder.path)
    folder.forget_after(session.step if session.first_val_loss is not None else -1)
    folder.reopen()
    folder.begin(session.config, about)
    try:
        with progress("training", session.config.training.steps, "steps", session.step) as show:
            show.line(heading(session, folder.path))

            def write(row: Row) -> None:
                folder.append(row)
                for watcher in list(watchers):
                    with _dropped_if_it_fails(watcher, watchers):
                        watcher.write(row)
                tell(show, row)

            yield write
    finally:
        for watcher in list(watchers):
            with _dropped_if_it_fails(watcher, watchers):
                watcher.close()


@contextmanager
def _dropped_if_it_fails(watcher: Tracker, watchers: list[Tracker]) -> Iterator[None]:
    """A tracker shows what metrics.jsonl has: a run goes on without one that fails."""
    try:
        yield
    except Exception as error:  # whatever a package and its network raise
        watchers.remove(watcher)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{type(watcher).__name__} fails ({reason}), so the run goes on without it", file=sys.stderr)


def _nowhere(_: Any) -> None:
    """For what is not to be shown or written."""


def _ending(config: Config, folder: Folder, resume: bool) -> Row | None:
    """How the run in the folder has ended, if it has; UserError if it is another one, or not to be resumed."""
    folder.refuse_unless_new(resume)
    _refuse_another(config, folder)
    ended = folder.result
    if not ended or (ended["status"] != "diverged" and ended["step"] < config.training.steps):
        return None
    folder.refuse_gaps(ended["step"], ended=True)
    return ended


def _taken(folder: Folder, resume: bool, stack: ExitStack) -> Path | None:
    """Keep others out of the folder from now on; the checkpoint to go on from, None if the run begins here."""
    stack.enter_context(locked(folder.path))
    folder.refuse_unless_new(resume)
    found = checkpoints(folder.checkpoints) if folder.taken else []
    if found:
        folder.refuse_gaps(step_of(found[-1]) or 0)
        return found[-1]
    refuse_older_format(folder.checkpoints)
    reached = folder.rows()[-1]["step"] if folder.taken and folder.rows() else None
    # with --async-save one may be under way when the next is due
    if folder.result or (reached is not None and reached > 2 * folder.config().watch.checkpoint_every):
        raise UserError(f"{folder.path} has no checkpoint left to go on from; train anew in another --out")
    if reached is not None:
        print(f"{folder.path} has no checkpoint yet, so the run begins again", file=sys.stderr)
    return None


def _end(folder: Folder) -> Row:
    """Write down how the run ended."""
    result = conclude(folder.rows())
    folder.end(result)
    return result


def _refuse_another(config: Config, folder: Folder) -> None:
    """UserError if the folder holds a run that is not this one."""
    if folder.taken:
        saved = folder.config()
        shape = replace(config.shape, vocab=config.shape.vocab or saved.shape.vocab)
        one, other = resume_key(saved), resume_key(replace(config, shape=shape))
        if one != other:
            raise UserError(f"{folder.path} holds another run: it differs in {', '.join(differences(one, other))}")


def resume_key(config: Config) -> Config:
    """What a run cannot change on its way: all but how it is watched, on what machine, and how long it goes on.

    With a schedule that ends, its length is part of it. Where the corpus lies is not: its content is.
    """
    steps = 10**9 if isinstance(config.schedule, Constant) else config.training.steps
    training = replace(config.training, steps=steps, corpus="")
    return replace(config, training=training, watch=Watch(), machine=Machine())


def name_of_checkpoints(config: Config, corpus: str) -> str:
    """What the checkpoints of a run say of themselves, so that none is taken for another's."""
    return f"{fingerprint(resume_key(config))}-{corpus}"


def is_due(session: Session) -> bool:
    """Whether a checkpoint is saved after this step."""
    watch, steps = session.config.watch, session.config.training.steps
    return session.step == steps or (session.step > 0 and session.step % watch.checkpoint_every == 0)


def heading(session: Session, path: Path) -> str:
    """What is about to be trained, where, and where it goes."""
    config = session.config
    kinds = {field: kind_of(field, getattr(config, field)) for field in KINDS}
    settings = ", ".join(f"{name} {value}" for name, value in values_of(config.method).items())
    tokens = config.training.steps * config.training.batch_tokens
    start = f"from step {session.step} on" if session.step else "from the beginning"
    return (
        f"{session.size:,} parameters, {kinds['attention']}, {kinds['method']}{f' ({settings})' if settings else ''}, "
        f"{kinds['optimizer']} at lr {config.optimizer.lr:g}, on {where(session)}\n"
        f"{config.training.steps:,} steps of {config.training.batch_tokens:,} tokens, {tokens:,} in all, {start}; "
        f"everything goes to {path}"
    )


def where(session: Session) -> str:
    """The device, and how many processes share the model in which way."""
    size, shared = session.world.size, {"ddp": "each with the whole model", "fsdp": "each with a shard of the model"}
    several = f" in {size} processes, {shared[session.config.machine.parallel]}" if size > 1 else ""
    return f"{session.device}{several}"


def tell(show: Show, row: Row) -> None:
    """The row on the display: a line that stays when something was measured, otherwise a few words."""
    loss = f"loss {row['loss']:.3f}" if "loss" in row else ""
    if "val_loss" in row:
        parts = [
            f"step {row['step']:>6}",
            f"validation loss {row['val_loss']:.3f}",
            f"{row['val_bpb']:.3f} bits a byte",
        ]
        top = largest(row["logits"]) if "logits" in row else None
        parts += [f"largest logit {top:.4g}"] if top is not None else []
        show.line("  ".join([*parts, *([loss] if loss else [])]))
    speed = f", {row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else ""
    show(row["step"], f"{loss}{speed}")


def conclude(rows: list[Row]) -> dict[str, Any]:
    """How a run ended, from its rows."""
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
        "max_logit": largest(probed[-1]["logits"]) if probed else None,
    }
