"""Text from tokens as they come: a character may take several tokens, and how one reads depends on the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quacklr.lab.data import Tokenizer

UNREADABLE = "\ufffd"  # what a tokenizer makes of a part of a character
LONGEST = 4  # bytes of a character in UTF-8, so that after as many tokens more of them will not help


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of the tokens, piece by piece, each as soon as it is whole; together they are the text of them all."""
    told: list[int] = []  # the tokens of the piece before: what comes next is decoded after them
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        piece = _after(tokenizer, told, waiting)
        if not piece.endswith(UNREADABLE) or len(waiting) >= LONGEST:
            yield piece
            told, waiting = waiting, []
    if waiting:
        yield _after(tokenizer, told, waiting)


def _after(tokenizer: Tokenizer, told: list[int], waiting: list[int]) -> str:
    return tokenizer.decode(told + waiting)[len(tokenizer.decode(told)) :]
