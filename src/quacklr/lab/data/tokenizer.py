"""Tokenizers: bytes, which need no file, or any `tokenizer.json`. The id `end` ends a document; `vocab` counts ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from quacklr.lab.data.extra import requires_extra
from quacklr.lab.data.manifest import Vocabulary
from quacklr.lab.data.tokens import DTYPE
from quacklr.lab.errors import UserError

if TYPE_CHECKING:
    import tokenizers

MAX_VOCAB = np.iinfo(DTYPE).max + 1
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


@final
class ByteTokenizer:
    """One token per UTF-8 byte. Byte 0 ends a document, so NUL characters of a text are removed."""

    vocab = 256
    end = 0
    end_token = "\0"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end."""
        return list(text.replace("\0", "").encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an incomplete character becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        """The ids of many UTF-8 texts, each with an end."""
        return [np.frombuffer(document + b"\0", np.uint8).astype(DTYPE) for document in documents]


@final
class JsonTokenizer:
    """The tokenizer of a `tokenizer.json`. Special tokens that occur in a text are encoded as text."""

    def __init__(self, raw: bytes, name: str, end_token: str | None = None) -> None:
        self._tokenizer = _parse(raw, name)
        self.vocab = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab > MAX_VOCAB:
            raise UserError(
                f"the tokenizer {name} has {self.vocab:,} ids, but a token is 16 bits: {MAX_VOCAB:,} at most"
            )
        self.end_token = end_token or self._default_end(name)
        end = self._tokenizer.token_to_id(self.end_token)
        if end is None:
            raise UserError(f"the tokenizer {name} has no token {self.end_token}; give another --end-token")
        self.end = end

    def _default_end(self, name: str) -> str:
        for token in END_TOKENS:
            if self._tokenizer.token_to_id(token) is not None:
                return token
        raise UserError(f"the tokenizer {name} has none of {', '.join(END_TOKENS)}; name its own with --end-token")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an incomplete character becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        """The ids of many UTF-8 texts, each with an end; uses all cores."""
        texts = [document.decode() for document in documents]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.end], dtype=DTYPE) for encoding in encoded]


Tokenizer = ByteTokenizer | JsonTokenizer


def vocabulary(tokenizer: Tokenizer, name: str, sha256: str | None) -> Vocabulary:
    """The entry of a tokenizer in a manifest."""
    return Vocabulary(name, tokenizer.vocab, tokenizer.end, tokenizer.end_token, sha256)


def _parse(raw: bytes, name: str) -> tokenizers.Tokenizer:
    with requires_extra(f"the tokenizer {name}"):
        from tokenizers import Tokenizer
    try:
        parsed = Tokenizer.from_buffer(raw)
    except Exception as error:  # the Rust library raises plain Exception
        raise UserError(f"the tokenizer {name} is no tokenizer.json: {error}") from error
    parsed.no_truncation()
    parsed.no_padding()
    parsed.encode_special_tokens = True
    return parsed
