"""Text from tokens as they come: a character may take several tokens, and how one reads depends on the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quacklr.lab.data import Tokenizer

UNREADABLE = "\ufffd"  # what a tokenizer makes of a part of a character
LONGEST = 3  # how many there are of these, at most, where the rest of a character may still come


def pieces(tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """The text of tokens that follow others, piece by piece, each as soon as it is whole; together they are all of it.

    What may be the beginning of a character waits for the next token, and is told as it is when there is none.
    """
    window, told = list(before), len(tokenizer.decode(before))
    fresh: list[int] = []
    for token in tokens:
        window.append(token)
        fresh.append(token)
        text = tokenizer.decode(window)
        whole = max(told, len(text) - _unreadable_end(text))
        if whole > told:
            yield text[told:whole]
            told = whole
        if whole == len(text):  # so that the next is decoded after these, and not after all
            window, fresh = fresh, []
            told = len(tokenizer.decode(window))
    yield from filter(None, [tokenizer.decode(window)[told:]])


def _unreadable_end(text: str) -> int:
    """How many characters at the end may be parts of one that is not there yet."""
    return min(LONGEST, len(text) - len(text.rstrip(UNREADABLE)))
