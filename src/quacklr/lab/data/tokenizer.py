"""Text to ids and back: bytes, which need no file, or any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, final

import numpy as np
from numpy.typing import NDArray

from quacklr.lab.data.extra import extra
from quacklr.lab.data.manifest import Vocabulary
from quacklr.lab.data.tokens import DTYPE
from quacklr.lab.errors import UserError

if TYPE_CHECKING:
    import tokenizers

MOST = np.iinfo(DTYPE).max + 1
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


class Tokenizer(Protocol):
    """What a corpus is written and read with."""

    @property
    def vocab(self) -> int:
        """Every id is smaller."""

    @property
    def end(self) -> int:
        """The id that ends a document."""

    @property
    def end_token(self) -> str:
        """How the end of a document decodes."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no whole character becomes U+FFFD."""

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        """The ids of UTF-8 texts, each with its end, as fast as it goes."""


@final
class Bytes:
    """UTF-8, a byte a token; byte 0 ends a document, so that a NUL in a text is dropped."""

    vocab = 256
    end = 0
    end_token = "\0"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no end."""
        return list(text.replace("\0", "").encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no whole character becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        """The ids of UTF-8 texts, each with its end."""
        return [np.frombuffer(document + b"\0", np.uint8).astype(DTYPE) for document in documents]


@final
class FromJson:
    """What a `tokenizer.json` describes. Its special tokens in a text are text: only the end ends a document."""

    def __init__(self, raw: bytes, name: str, end_token: str | None = None) -> None:
        self._tokenizer = _parse(raw, name)
        self.vocab = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab > MOST:
            raise UserError(f"the tokenizer {name} has {self.vocab:,} ids, but a token is 16 bits: {MOST:,} at most")
        self.end_token = end_token or self._usual_end(name)
        end = self._tokenizer.token_to_id(self.end_token)
        if end is None:
            raise UserError(f"the tokenizer {name} has no token {self.end_token}; give another --end-token")
        self.end = end

    def _usual_end(self, name: str) -> str:
        for token in ENDS:
            if self._tokenizer.token_to_id(token) is not None:
                return token
        raise UserError(f"the tokenizer {name} has none of {', '.join(ENDS)}; name its own with --end-token")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no whole character becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        """The ids of UTF-8 texts, each with its end; on all cores."""
        texts = [document.decode() for document in documents]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.end], dtype=DTYPE) for encoding in encoded]


def vocabulary(tokenizer: Tokenizer, name: str, sha256: str | None) -> Vocabulary:
    """What a manifest says of a tokenizer."""
    return Vocabulary(name, tokenizer.vocab, tokenizer.end, tokenizer.end_token, sha256)


def _parse(raw: bytes, name: str) -> tokenizers.Tokenizer:
    with extra(f"the tokenizer {name}"):
        from tokenizers import Tokenizer
    try:
        parsed = Tokenizer.from_buffer(raw)
    except Exception as error:  # the Rust side raises plain Exception
        raise UserError(f"the tokenizer {name} is no tokenizer.json: {error}") from error
    parsed.no_truncation()
    parsed.no_padding()
    parsed.encode_special_tokens = True
    return parsed
