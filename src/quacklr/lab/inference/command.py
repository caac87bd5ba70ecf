"""`quacklr generate`: continue a text with the model of a run."""

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
from quacklr.lab.inference.sample import SamplingParams, continuation
from quacklr.lab.inference.stream import decode_stream
from quacklr.lab.options import read
from quacklr.lab.train.trained import Trained, open_run

ABOUT = """\
Continue a text with the model of a finished run, and print the tokens as they are sampled.

The prompt and its continuation are printed to stdout, a summary to stderr. Generation stops at the end of the document,
after --tokens, or when the context is full.

    quacklr generate runs/mine --prompt "import "
    quacklr generate runs/mine --prompt - --temperature 0.7 --top-p 0.9 < prompt.txt
"""


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `quacklr generate`."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """The folder of a run of `quacklr train`."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """The text to continue; - reads it from stdin. (--prompt=-x if it begins with a dash.)"""
    tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Most tokens to generate; until the context is full unless given."""
    sampling: SamplingParams = field(default=SamplingParams())
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Load the checkpoint of this step; the run need not have finished."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        validate_positive(tokens=1 if self.tokens is None else self.tokens)


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, or 2 for an error that the user can correct."""
    return exit_code("quacklr generate", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    options = read(GenerateOptions, "quacklr generate", argv, ABOUT)
    text = prompt_text(options.prompt)
    run = open_run(options.run, options.step, options.device)
    prompt = run.tokenizer.encode(text)
    print_continuation(run, text, prompt, max_new_tokens(run, prompt, options.tokens), options.sampling)
    return 0


def prompt_text(option: str) -> str:
    """The value of --prompt, or stdin for `-`; UserError if it cannot be read, or is empty or not UTF-8."""
    try:
        text = (sys.stdin.buffer.read() if option == "-" else option.encode()).decode()
    except OSError as error:
        raise UserError(f"--prompt - cannot read stdin: {error.strerror or error}") from error
    except UnicodeError as error:
        raise UserError(f"--prompt is not valid UTF-8: {error}") from error
    if not text:
        raise UserError("--prompt is empty; give at least one character to continue")
    return text


def max_new_tokens(run: Trained, prompt: Sequence[int], wanted: int | None) -> int:
    """How many tokens to generate at most; UserError if they do not fit into the context."""
    context = run.config.shape.context
    if not prompt:
        raise UserError("--prompt has no token that this model knows; give another text to continue")
    if len(prompt) >= context:
        raise UserError(
            f"--prompt has {len(prompt):,} tokens, and the context of this model is {context:,}, so there is no room "
            f"for another; leave at least {len(prompt) - context + 1:,} out"
        )
    if wanted is not None and len(prompt) + wanted > context:
        raise UserError(
            f"--tokens {wanted} after a prompt of {len(prompt)} is more than the context of {context}; there is room "
            f"for {context - len(prompt)}"
        )
    return context - len(prompt) if wanted is None else wanted


def print_continuation(run: Trained, text: str, prompt: Sequence[int], count: int, params: SamplingParams) -> None:
    """Print the prompt, its continuation while it is sampled, and a summary."""
    times: list[float] = []

    def timed() -> Iterator[int]:
        for token in continuation(run, prompt, count, params):
            times.append(time.perf_counter())
            yield token

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    print_now(text)
    try:
        for part in decode_stream(run.tokenizer, timed(), prompt):
            print_now(part)
    except KeyboardInterrupt:
        print_now("\n")
        raise
    print_now("\n")
    print(summary(run, len(prompt), times), file=sys.stderr)


def print_now(text: str) -> None:
    """Print and flush; UserError if that fails, except for a closed pipe."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write the text: {error.strerror}") from error


def summary(run: Trained, prompt: int, times: Sequence[float]) -> str:
    """The number of tokens, their rate after the first one, and the size of the caches."""
    tokens = len(times)
    size = sum(cache.bytes_per_position for cache in run.model.caches(positions=1))
    speed = f", {(tokens - 1) / (times[-1] - times[0]):,.0f} a second" if tokens > 1 else ""
    full = "; the context is full" if prompt + tokens == run.config.shape.context else ""
    count = f"{tokens} token{'' if tokens == 1 else 's'}"
    return f"{count} after a prompt of {prompt}{speed}; {size:,.0f} bytes of cache a token{full}"
