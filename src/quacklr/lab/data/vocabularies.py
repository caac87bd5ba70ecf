"""The `tokenizer.json` of a corpus: from the hub, from a file, or trained on the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from quacklr.lab.data.extra import fetch, requires_extra
from quacklr.lab.data.tokenizer import END_TOKENS, MAX_VOCAB
from quacklr.lab.errors import UserError

HUB = {"gpt2": "openai-community/gpt2", "cosmo2": "HuggingFaceTB/cosmo2-tokenizer"}
TRAIN = "train:"


def describe(name: str) -> str:
    """The identity of a tokenizer in a request; that of a file includes its hash."""
    if name == "bytes" or name in HUB:
        return name
    if name.startswith(TRAIN):
        return f"{TRAIN}{_size(name)}"
    return f"{Path(name).name} {hashlib.sha256(_file(name)).hexdigest()}"


def tokenizer_json(name: str, texts: Callable[[], Iterator[str]]) -> bytes:
    """The content of `tokenizer.json` for a name; `train:SIZE` is trained on `texts()`."""
    if name in HUB:
        return fetch(HUB[name], "tokenizer.json", "model", "give a local one: --tokenizer PATH").read_bytes()
    return _trained(_size(name), texts()) if name.startswith(TRAIN) else _file(name)


def _file(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        kinds = f"bytes, {', '.join(HUB)}, train:SIZE or a tokenizer.json"
        raise UserError(f"cannot read the tokenizer {name} ({error.strerror or error}); use {kinds}") from error


def _size(name: str) -> int:
    size = name.removeprefix(TRAIN)
    least = 256 + 1  # all bytes and the end
    if not size.isdecimal() or len(size) > len(str(MAX_VOCAB)) or not least <= int(size) <= MAX_VOCAB:
        raise UserError(f"--tokenizer {name}: SIZE must be a whole number from {least} to {MAX_VOCAB:,}")
    return int(size)


def _trained(size: int, texts: Iterator[str]) -> bytes:
    """Train byte-level BPE, which can encode every text. It has fewer than `size` ids if no pairs are left to merge."""
    with requires_extra("training a tokenizer"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_TOKENS[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()
