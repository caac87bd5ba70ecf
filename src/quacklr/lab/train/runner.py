"""One run from beginning to end: rows go to its folder, checkpoints are saved, and a signal to stop loses nothing."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from quacklr.lab.config import KINDS, Config, Machine, Watch, differences, fingerprint, kind_of, values_of
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.files import locked
from quacklr.lab.optim import Constant
from quacklr.lab.progress import Show, progress
from quacklr.lab.train.checkpoint import checkpoints, load, save
from quacklr.lab.train.device import device_of, environment
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.session import Row, Session
from quacklr.lab.train.statistics import largest
from quacklr.lab.train.trackers import Tracker, trackers


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the run after a whole step; its checkpoint is saved."""

    def __init__(self, step: int, signum: int) -> None:
        super().__init__(step, signum)
        self.step, self.signum = step, signum


def run(config: Config, path: Path, resume: bool = False, wandb: str | None = None) -> Row:
    """Train, and return how it ended: the content of `result.json`.

    With `resume` it goes on from the folder's last checkpoint, or begins if there is none. Raises Stopped when a signal
    (Ctrl-C, SIGTERM) ended it, and UserError for what a user can mend.
    """
    folder = Folder(path)
    folder.refuse_unless_new(resume)
    _refuse_another(config, folder)
    ended = folder.result
    if ended and (ended["status"] == "diverged" or ended["step"] >= config.training.steps):
        return ended
    device_of(config.machine)  # before the corpus, which may take a while to make
    corpus = open_corpus(config.training.corpus)
    session = Session(config, corpus)
    name = f"{fingerprint(essence(session.config))}-{corpus.fingerprint}"
    with locked(path):
        folder.refuse_unless_new(resume)
        if folder.taken:
            _continue(session, folder, name)
        watchers = trackers(path, session.config, session.step, wandb)
        folder.begin(session.config, environment(session.device) | {"corpus": corpus.fingerprint})
        _train(session, folder, name, watchers)
        result = conclude(folder.rows())
        folder.end(result)
    return result


def _train(session: Session, folder: Folder, name: str, watchers: Sequence[Tracker]) -> None:
    """All rows from where the session stands, each written before the next is begun."""
    steps = session.config.training.steps
    try:
        with progress("training", steps, "steps", session.step) as show, signals() as stop:
            with suppress(BrokenPipeError):
                show.line(heading(session, folder.path))
            for row in session.rows():
                folder.append(row)
                for watcher in watchers:
                    watcher.write(row)
                with suppress(BrokenPipeError):  # nobody reads any more; the run goes on
                    tell(show, row)
                stopping = bool(stop) and session.step < steps and "diverged" not in row
                _save_if_due(session, folder, name, last=stopping or "diverged" in row)
                if stopping:
                    raise Stopped(session.step, stop[0])
    finally:
        for watcher in watchers:
            watcher.close()


def _refuse_another(config: Config, folder: Folder) -> None:
    """UserError if the folder holds a run that is not this one."""
    if folder.taken:
        saved = folder.config()
        shape = replace(config.shape, vocab=config.shape.vocab or saved.shape.vocab)
        one, other = essence(saved), essence(replace(config, shape=shape))
        if one != other:
            raise UserError(f"{folder.path} holds another run: it differs in {', '.join(differences(one, other))}")


def _continue(session: Session, folder: Folder, name: str) -> None:
    """Load the last checkpoint, if there is one, and forget the rows that came after it."""
    found = checkpoints(folder.checkpoints)
    if found:
        session.load_state_dict(load(found[-1], name))
    elif folder.result:
        raise UserError(f"{folder.path} has no checkpoint left to go on from; train anew in another --out")
    elif folder.rows():
        print(f"{folder.path} has no checkpoint yet, so the run begins again", file=sys.stderr)
    folder.forget_after(session.step if found else -1)
    folder.reopen()


def essence(config: Config) -> Config:
    """What a run cannot change on its way: all but how it is watched, on what machine, and how long it goes on.

    With a schedule that ends, its length is part of it. Where the corpus lies is not: its content is.
    """
    steps = 10**9 if isinstance(config.schedule, Constant) else config.training.steps
    training = replace(config.training, steps=steps, corpus="")
    return replace(config, training=training, watch=Watch(), machine=Machine())


def _save_if_due(session: Session, folder: Folder, name: str, last: bool) -> None:
    watch, steps = session.config.watch, session.config.training.steps
    if last or session.step == steps or (session.step and session.step % watch.checkpoint_every == 0):
        save(folder.checkpoints, session.step, name, session.state_dict(), watch.keep)


@contextmanager
def signals() -> Iterator[list[int]]:
    """A list that a first Ctrl-C or SIGTERM puts its number into; a second one stops at once."""
    caught: list[int] = []

    def handle(signum: int, _: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def heading(session: Session, path: Path) -> str:
    """What is about to be trained, where, and where it goes."""
    config = session.config
    kinds = {field: kind_of(field, getattr(config, field)) for field in KINDS}
    settings = ", ".join(f"{name} {value}" for name, value in values_of(config.method).items())
    tokens = config.training.steps * config.training.batch_tokens
    start = f"from step {session.step} on" if session.step else "from the beginning"
    return (
        f"{session.size:,} parameters, {kinds['attention']}, {kinds['method']}{f' ({settings})' if settings else ''}, "
        f"{kinds['optimizer']} at lr {config.optimizer.lr:g}, on {session.device}\n"
        f"{config.training.steps:,} steps of {config.training.batch_tokens:,} tokens, {tokens:,} in all, {start}; "
        f"everything goes to {path}"
    )


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
