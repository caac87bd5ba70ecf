"""Text as tokens on disk: made by `quacklr prepare`, opened here, read as batches that depend on (seed, step) alone."""

from quacklr.lab.data.corpus import Corpus, left_tokenizer, open_corpus
from quacklr.lab.data.manifest import SPLITS, Manifest
from quacklr.lab.data.tokenizer import Tokenizer
from quacklr.lab.data.tokens import Tokens, batch, fixed

__all__ = ["SPLITS", "Corpus", "Manifest", "Tokenizer", "Tokens", "batch", "fixed", "left_tokenizer", "open_corpus"]
