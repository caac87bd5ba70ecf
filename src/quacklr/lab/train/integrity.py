"""Verification of a corpus before a run reads its tokens."""

from __future__ import annotations

from quacklr.lab.data import Corpus
from quacklr.lab.data.corpus import ALWAYS_HASHED_BYTES
from quacklr.lab.data.manifest import Shard
from quacklr.lab.data.tokens import DTYPE
from quacklr.lab.errors import UserError
from quacklr.lab.progress import progress
from quacklr.lab.train.world import World


def verify_corpus(corpus: Corpus, world: World, resumed: bool) -> None:
    """Hash the shards that may have changed; the processes of a machine divide the files among them.

    UserError in a process that finds a wrong hash; the other processes exit silently.
    """
    shards = corpus.shards_to_verify(every=resumed)[world.local_rank :: world.local_size]
    failure = None
    try:
        _hash(corpus, shards)
    except UserError as error:
        failure = error
    if world.all_reduce_max(failure is not None):
        raise failure or SystemExit(2)


def _hash(corpus: Corpus, shards: list[Shard]) -> None:
    """Hash shards, with a progress display if they are large."""
    size = sum(shard.tokens for shard in shards) * DTYPE.itemsize
    if size <= ALWAYS_HASHED_BYTES:
        corpus.verify(lambda _: None, shards)
        return
    with progress("verifying the corpus", size / 1e6, "MB") as show:
        corpus.verify(lambda tokens: show(tokens * DTYPE.itemsize / 1e6), shards)
