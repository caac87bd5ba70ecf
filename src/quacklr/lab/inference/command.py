"""`quacklr generate`: a run goes on with a text."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from quacklr.lab.errors import UserError, exit_code, validate_positive
from quacklr.lab.inference.sample import SamplingParams, written
from quacklr.lab.inference.stream import pieces
from quacklr.lab.options import read
from quacklr.lab.train.trained import Trained, open_run

ABOUT = """\
Let the model of a finished run go on with a text, token after token, as they come.

The prompt and what follows it are printed to stdout, how it went to stderr. It ends with the document, after --tokens,
or when the context is full.

    quacklr generate runs/mine --prompt "import "
    quacklr generate runs/mine --prompt - --temperature 0.7 --top-p 0.9 < prompt.txt
"""


@dataclass(frozen=True)
class Generate:
    """What goes on with what."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """The folder of a run of `quacklr train`."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """What to go on with; - reads it from stdin. (--prompt=-x if it begins with a dash.)"""
    tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens to add, if the document does not end before; as many as the context has room for unless given."""
    sampling: SamplingParams = field(default=SamplingParams())
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Take the checkpoint of this step, also of a run that has not finished."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        validate_positive(tokens=1 if self.tokens is None else self.tokens)


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, or 2 for what a user can mend."""
    return exit_code("quacklr generate", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    given = read(Generate, "quacklr generate", argv, ABOUT)
    text = readable(standard_input() if given.prompt == "-" else given.prompt.encode())
    if not text:
        raise UserError("--prompt is empty; give at least a character to go on with")
    run = open_run(given.run, given.step, given.device)
    prompt = run.tokenizer.encode(text)
    most = room(run, prompt, given.tokens)
    tell(run, text, prompt, most, given.sampling)
    return 0


def standard_input() -> bytes:
    """All of stdin; UserError if it cannot be read."""
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UserError(f"--prompt - cannot read stdin: {error.strerror or error}") from error


def readable(content: bytes) -> str:
    """UTF-8 as text; UserError if it is something else."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt is no text in UTF-8: {error}") from error


def room(run: Trained, prompt: Sequence[int], wanted: int | None) -> int:
    """How many tokens may follow a prompt; UserError if there is no room for them."""
    context = run.config.shape.context
    if not prompt:
        raise UserError("--prompt has no token in it that this model knows; give another text to go on with")
    if len(prompt) >= context:
        raise UserError(
            f"--prompt has {len(prompt):,} tokens, and the context of this model is {context:,}, so there is no room "
            f"to go on; leave at least {len(prompt) - context + 1:,} out"
        )
    if wanted is not None and len(prompt) + wanted > context:
        raise UserError(
            f"--tokens {wanted} after a prompt of {len(prompt)} is more than the context of {context}; there is room "
            f"for {context - len(prompt)}"
        )
    return context - len(prompt) if wanted is None else wanted


def tell(run: Trained, text: str, prompt: Sequence[int], most: int, choice: SamplingParams) -> None:
    """Print the prompt, and what comes after it while it comes; then how it went."""
    times: list[float] = []

    def timed() -> Iterator[int]:
        for token in written(run, prompt, most, choice):
            times.append(time.perf_counter())
            yield token

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal cannot show a character
    say(text)
    try:
        for piece in pieces(run.tokenizer, timed(), prompt):
            say(piece)
    except KeyboardInterrupt:
        say("\n")
        raise
    say("\n")
    print(summary(run, len(prompt), times), file=sys.stderr)


def say(text: str) -> None:
    """Print it now; UserError if it cannot be written, but for a reader who has read enough."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write the text: {error.strerror}") from error


def summary(run: Trained, prompt: int, times: Sequence[float]) -> str:
    """How many tokens it was, how fast they came after the first, and what the caches take."""
    tokens = len(times)
    caches = run.model.caches(positions=1)
    size = sum(cache.bytes_per_position for cache in caches)
    speed = f", {(tokens - 1) / (times[-1] - times[0]):,.0f} a second" if tokens > 1 else ""
    full = "; the context is full" if prompt + tokens == run.config.shape.context else ""
    count = f"{tokens} token{'' if tokens == 1 else 's'}"
    return f"{count} after a prompt of {prompt}{speed}; {size:,.0f} bytes of cache a token{full}"
