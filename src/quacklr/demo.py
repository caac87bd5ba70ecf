"""`quacklr demo`: what QuacK is for, seen in a minute or two on a CPU.

A small byte-level transformer learns the source of Python's standard library twice, from the same weights and with the
same batches, at a learning rate that is too high for it: once plain, once with QuacK. The two take their steps in turn,
so that one table grows with both. All numbers come from text that is not trained on.

Shapes: B sequences, T positions, D width, H heads, K width of a head, L layers, P causal pairs (i >= j) of positions.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path as File

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from quacklr.path import Path, mha
from quacklr.quack import QuacK
from quacklr.weight import packed

WIDTH, LAYERS, HEADS, CONTEXT = 96, 3, 4, 128
D_HEAD = WIDTH // HEADS
BATCH, HELD_OUT, PROBE = 8, 64, 2  # sequences of a training step, for the validation loss, and for the logits
WARMUP, ROWS = 20, 20
SKIPPED = {"test", "tests", "site-packages", "dist-packages"}
SAME_LOSS, SAME_LOGIT = 1.02, 1.5  # ratios within which two runs are called the same

HEADER = """\
The same small transformer learns the source of Python's standard library twice, from the same weights and batches:
plain AdamW, and AdamW with QuacK (tau {tau:g}). lr {lr:g}, {steps} steps, seed {seed}.

           validation loss          max |logit|
  step       plain     QuacK       plain     QuacK"""

NEXT = """\
In your own script, once the weights are initialised or loaded, add two lines; the training loop stays as it is:

    from quacklr import QuacK
    quack = QuacK(model, optimizer)

An attention that quacklr does not know declares its logit in one method, as Attention does in quacklr/demo.py.
To see a learning rate at which the plain run is fine as well: quacklr demo --lr 0.003"""


def rotate(x_BHTK: Tensor) -> Tensor:
    """Turn each query or key by its position (rotary embeddings), so that logits depend on distances."""
    angle_TK = torch.outer(torch.arange(x_BHTK.shape[2]), 10000.0 ** (-torch.arange(0, D_HEAD, 2) / D_HEAD))
    cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
    a_BHTK, b_BHTK = x_BHTK.chunk(2, dim=-1)
    return torch.cat([a_BHTK * cos_TK - b_BHTK * sin_TK, b_BHTK * cos_TK + a_BHTK * sin_TK], dim=-1)


def heads(x_BTD: Tensor) -> Tensor:
    """(B, T, D) to (B, H, T, K)."""
    return x_BTD.view(*x_BTD.shape[:2], HEADS, D_HEAD).transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def qk(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, (B, H, T, K) each; a logit is their product over sqrt(K)."""
        return rotate(heads(self.q(x_BTD))), rotate(heads(self.k(x_BTD)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix values by the softmax of the logits."""
        mixed_BHTK = scaled_dot_product_attention(*self.qk(x_BTD), heads(self.v(x_BTD)), is_causal=True)
        return self.o(mixed_BHTK.transpose(1, 2).flatten(2))

    def logit_paths(self) -> list[Path]:
        """What QuacK needs to know: the logit of head h is q[h] . k[h]."""
        return mha(*packed(self.q, ("q", HEADS, D_HEAD)), *packed(self.k, ("k", HEADS, D_HEAD)))


class Block(nn.Module):
    """Attention and an MLP, each on a normed residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add both to the stream."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Decoder(nn.Module):
    """A byte-level language model; every matrix starts as N(0, 0.02)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)
        generator = torch.Generator().manual_seed(seed)
        for matrix in (param for param in self.parameters() if param.ndim == 2):
            nn.init.normal_(matrix, std=0.02, generator=generator)

    def streams(self, bytes_BT: Tensor) -> Iterator[Tensor]:
        """The residual stream before each block, and after the last."""
        x_BTD: Tensor = self.embed(bytes_BT)
        yield x_BTD
        for block in self.blocks:
            x_BTD = block(x_BTD)
            yield x_BTD

    def loss(self, bytes_BT: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte, in nats."""
        *_, x_BTD = self.streams(bytes_BT[:, :-1])
        return cross_entropy(self.unembed(self.norm(x_BTD)).flatten(0, 1), bytes_BT[:, 1:].flatten())

    def attention_logits(self, bytes_BT: Tensor) -> Tensor:
        """(L, B, H, P): q . k / sqrt(K) of every layer and head, for the pairs that a causal softmax sees."""
        i_P, j_P = torch.tril_indices(bytes_BT.shape[1], bytes_BT.shape[1])
        logits = []
        for block, x_BTD in zip(self.blocks, self.streams(bytes_BT), strict=False):
            assert isinstance(block, Block)
            q_BHTK, k_BHTK = block.attention.qk(block.norm1(x_BTD))
            logits.append((q_BHTK @ k_BHTK.mT / math.sqrt(D_HEAD))[..., i_P, j_P])
        return torch.stack(logits)


def corpus() -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes: all but the last 5 % to train on, and the rest."""
    root = File(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not SKIPPED & set(file.relative_to(root).parts))
    text = bytearray().join(file.read_bytes() for file in files if file.is_file())
    if len(text) < 1_000_000:
        sys.exit(f"quacklr demo: {root} has too little source to train on; use a Python that comes with its .py files")
    data = torch.frombuffer(text, dtype=torch.uint8)
    end = len(data) * 95 // 100
    return data[:end], data[end:]


def batches(data: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Random stretches of the text, (size, CONTEXT + 1), without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(data) - CONTEXT, (size, 1), generator=generator)
        yield data[start + torch.arange(CONTEXT + 1)].long()


@dataclass(frozen=True, slots=True)
class Measured:
    """One run at one step: validation loss, largest |logit|, and mean |change in logit per step| since the last row."""

    loss: float
    max_logit: float
    change: float


class Run:
    """A model in training, watched on a batch that it never trains on."""

    def __init__(self, model: Decoder, lr: float, held_out: Tensor) -> None:
        self.model, self.held_out = model, held_out
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / WARMUP, total_iters=WARMUP)
        self.logits, self.changes = self.probe(), list[float]()

    @torch.no_grad()
    def probe(self) -> Tensor:
        """The attention logits of the first held-out sequences."""
        return self.model.attention_logits(self.held_out[:PROBE, :-1])

    def step(self, bytes_BT: Tensor) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        self.model.loss(bytes_BT).backward()
        self.optimizer.step()
        self.schedule.step()
        before, self.logits = self.logits, self.probe()
        self.changes.append((self.logits - before).abs().mean().item())

    @torch.no_grad()
    def measure(self) -> Measured:
        """The row of this step; the next one starts from here."""
        change = sum(self.changes) / max(1, len(self.changes))
        self.changes.clear()
        return Measured(self.model.loss(self.held_out).item(), self.logits.abs().max().item(), change)


def number(value: float) -> str:
    """A logit for a table; one that exploded must not break the columns."""
    return f"{value:.1e}" if value >= 1e6 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class Row:
    """Both runs at one step: a line of the live table."""

    step: int
    plain: Measured
    quack: Measured

    def __str__(self) -> str:
        logits = f"{number(self.plain.max_logit):>12}{number(self.quack.max_logit):>10}"
        return f"{self.step:>6}{self.plain.loss:>12.3f}{self.quack.loss:>10.3f}{logits}"


def train(lr: float, tau: float, steps: int, seed: int) -> Iterator[tuple[int, Row | None]]:
    """Train both runs in turn: how many steps are done, and every so often a row."""
    train_data, other = corpus()
    held_out = next(batches(other, HELD_OUT, seed=0))  # whatever the seed, so that runs can be compared
    model = Decoder(seed)
    plain, quack = Run(deepcopy(model), lr, held_out), Run(model, lr, held_out)
    QuacK(quack.model, quack.optimizer, tau=tau)
    yield 0, Row(0, plain.measure(), quack.measure())
    for step, bytes_BT in zip(range(1, steps + 1), batches(train_data, BATCH, seed), strict=False):
        plain.step(bytes_BT)
        quack.step(bytes_BT)
        due = step % math.ceil(steps / ROWS) == 0 or step == steps
        yield step, Row(step, plain.measure(), quack.measure()) if due else None


class Screen:
    """Lines that stay, and on a terminal below them one that says how far we are."""

    def __init__(self, steps: int) -> None:
        self.steps, self.started, self.status = steps, 0.0, ""

    def line(self, text: str) -> None:
        """Print in place of the status, and of the ^C that a terminal puts after it."""
        print(f"\r{' ' * (len(self.status) + 2)}\r{text}" if self.status else text, flush=True)
        self.status = ""

    def progress(self, step: int) -> None:
        """Say how many steps are done and how long the rest will take, which is known from step 1 on."""
        if step == 0:
            self.started = time.monotonic()
        elif sys.stdout.isatty():
            left = int((time.monotonic() - self.started) * (self.steps / step - 1))
            self.status = f"step {step} of {self.steps}, {left // 60}:{left % 60:02} left; Ctrl-C stops "
            print(f"\r{self.status}", end="", flush=True)


def compare(ours: float, theirs: float, margin: float) -> str:
    """How our number stands to theirs; what is not finite is larger than all that is."""
    ours, theirs = (value if math.isfinite(value) else math.inf for value in (ours, theirs))
    return "lower" if ours * margin < theirs else "higher" if ours > theirs * margin else "about the same"


def verdict(row: Row, lr: float) -> str:
    """One sentence on what was seen, whichever way it went."""
    plain, quack = row.plain, row.quack
    loss = compare(quack.loss, plain.loss, SAME_LOSS)
    logit = compare(quack.max_logit, plain.max_logit, SAME_LOGIT)
    so = {"lower": "QuacK helped", "higher": "QuacK did harm", "about the same": "QuacK did not help the loss"}[loss]
    return (
        f"At lr {lr:g} {so}: with it the validation loss is {loss} ({quack.loss:.2f} against {plain.loss:.2f}) and\n"
        f"the largest attention logit is {logit} ({number(quack.max_logit)} against {number(plain.max_logit)})."
    )


def summary(row: Row, lr: float) -> str:
    """The final table and the verdict."""
    numbers = (
        (f"after {row.step} steps", "plain", "QuacK"),
        ("validation loss", f"{row.plain.loss:.3f}", f"{row.quack.loss:.3f}"),
        ("max |logit|", number(row.plain.max_logit), number(row.quack.max_logit)),
        ("mean |change in logit per step|", number(row.plain.change), number(row.quack.change)),
    )
    lines = [f"{name:<32}{plain:>10}{quack:>10}" for name, plain, quack in numbers]
    return "\n".join(["", *lines, "", verdict(row, lr), ""])


def run(steps: int, lr: float, tau: float, seed: int, threads: int) -> int:
    """Train, show and conclude. Returns the exit code: 0, or 130 when stopped by Ctrl-C."""
    torch.set_num_threads(threads)
    screen, last, code = Screen(steps), None, 0
    screen.line(HEADER.format(steps=steps, lr=lr, tau=tau, seed=seed))
    try:
        for step, row in train(lr, tau, steps, seed):
            if row is not None:
                last = row
                screen.line(str(row))
            screen.progress(step)
    except KeyboardInterrupt:
        screen.line("Stopped; this is what was seen so far.")
        code = 130
    if last is not None:
        screen.line(summary(last, lr))
    if code == 0:
        print(NEXT)
    return code
