"""Corpora: text as token ids on disk, written by `quacklr prepare`; batches are a pure function of (seed, step)."""

from quacklr.lab.data.corpus import Corpus, load_tokenizer, open_corpus
from quacklr.lab.data.manifest import SPLITS
from quacklr.lab.data.tokenizer import Tokenizer
from quacklr.lab.data.tokens import Tokens, batch, evaluation_batch

__all__ = ["SPLITS", "Corpus", "Tokenizer", "Tokens", "batch", "evaluation_batch", "load_tokenizer", "open_corpus"]
