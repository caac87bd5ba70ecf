"""Incremental decoding of tokens to text. A character can take several tokens, and tokens depend on their context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quacklr.lab.data import Tokenizer

REPLACEMENT = "\ufffd"  # the decoded text of an incomplete character
MAX_INCOMPLETE = 3  # most replacement characters at the end that can come from one incomplete character


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens that follow a prompt, each part as soon as its characters are complete.

    An incomplete character waits for the next token; at the end it is yielded as replacement characters.
    """
    window, done = list(prompt), len(tokenizer.decode(prompt))  # tokens to decode, and characters yielded before
    new: list[int] = []
    for token in tokens:
        window.append(token)
        new.append(token)
        text = tokenizer.decode(window)
        complete = max(done, len(text) - _incomplete_length(text))
        if complete > done:
            yield text[done:complete]
            done = complete
        if complete == len(text):  # drop older tokens, so that the window stays short
            window, new = new, []
            done = len(tokenizer.decode(window))
    yield from filter(None, [tokenizer.decode(window)[done:]])


def _incomplete_length(text: str) -> int:
    """The number of characters at the end that can belong to an incomplete character."""
    return min(MAX_INCOMPLETE, len(text) - len(text.rstrip(REPLACEMENT)))
