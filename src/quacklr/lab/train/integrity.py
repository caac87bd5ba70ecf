"""Before a run reads tokens: are they those that were prepared?"""

from __future__ import annotations

from quacklr.lab.data import Corpus
from quacklr.lab.data.corpus import CHEAP
from quacklr.lab.data.manifest import Shard
from quacklr.lab.data.tokens import DTYPE
from quacklr.lab.errors import UserError
from quacklr.lab.progress import progress
from quacklr.lab.train.world import World


def verify(corpus: Corpus, world: World, resumed: bool) -> None:
    """Hash what may have changed since it was prepared; the processes of a machine share the files among them.

    UserError in the process that finds a file which is not what was written; the others end without a word.
    """
    mine = corpus.suspects(every=resumed)[world.local_rank :: world.local_size]
    refusal = None
    try:
        _hash(corpus, mine)
    except UserError as error:
        refusal = error
    if world.largest(refusal is not None):
        raise refusal or SystemExit(2)


def _hash(corpus: Corpus, shards: list[Shard]) -> None:
    """With a display where it takes a while."""
    size = sum(shard.tokens for shard in shards) * DTYPE.itemsize
    if size <= CHEAP:
        corpus.verify(lambda _: None, shards)
        return
    with progress("verifying the corpus", size / 1e6, "MB") as show:
        corpus.verify(lambda tokens: show(tokens * DTYPE.itemsize / 1e6), shards)
