"""Everything that decides a run, as frozen dataclasses; where there is a choice of kinds, a union of them.

The same types are the command line (one option a field), the `config.json` of a run, and the key of a study's ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from quacklr.lab import methods
from quacklr.lab.errors import UserError, refuse_above, refuse_negative, refuse_unless, refuse_unless_positive
from quacklr.lab.methods import Method
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import WSD, AdamWRecipe, Constant, Cosine, MuonRecipe, Recipe, Schedule, validate_schedule
from quacklr.lab.typed import misfits

KINDS: dict[str, dict[str, type]] = {
    "attention": {"mha": MHA, "mla": MLA},
    "method": {
        "default": methods.Default,
        "quack": methods.Quack,
        "constant-tau": methods.ConstantTau,
        "qk-norm": methods.QKNorm,
        "absorbed-qk-norm": methods.AbsorbedQKNorm,
        "qk-clip": methods.QKClipping,
        "soft-cap": methods.SoftCap,
        "sigma-reparam": methods.SigmaReparametrised,
        "muon-split": methods.MuonSplit,
    },
    "optimizer": {"muon": MuonRecipe, "adamw": AdamWRecipe},
    "schedule": {"constant": Constant, "cosine": Cosine, "wsd": WSD},
}


MOST_THREADS = 1024
"""More than any machine makes use of; a hundred times as many cannot be started."""


@dataclass(frozen=True)
class Training:
    """What is trained on, and for how long."""

    corpus: str = "stdlib"
    """A folder made by `quacklr prepare`, or `stdlib`: the running Python's standard library, byte by byte."""
    steps: int = 300
    """Optimizer steps."""
    batch_tokens: int = 1024
    """Tokens of a step, over all micro-batches."""
    micro_batch: int = 8
    """Sequences of one forward of a process; a step takes as many forwards as its tokens need."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    seed: int = 0
    """For the initial weights and the order of the data."""

    def __post_init__(self) -> None:
        refuse_unless_positive(steps=self.steps, batch_tokens=self.batch_tokens, micro_batch=self.micro_batch)
        refuse_above(2**28, batch_tokens=self.batch_tokens)
        refuse_negative(grad_clip=self.grad_clip)
        refuse_unless(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": self.seed})
        if "\0" in self.corpus:
            raise UserError(f"--corpus {self.corpus!a} is no name of a folder")


@dataclass(frozen=True)
class Machine:
    """Where it runs, and in which precision."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward under autocast, or with FSDP2 in bf16; weights and optimizer stay in fp32."""
    compile: bool = False
    """Run the model through torch.compile."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """When torchrun starts several processes: each has the whole model, or (fsdp) each has a shard of it."""
    recompute: bool = False
    """Activation checkpointing: a backward makes the inside of each block again, which takes time and saves memory."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads; torch's own choice unless given."""

    def __post_init__(self) -> None:
        refuse_unless_positive(threads=1 if self.threads is None else self.threads)
        refuse_above(MOST_THREADS, threads=self.threads)


@dataclass(frozen=True)
class Watch:
    """What is measured, and how often."""

    eval_every: int = 50
    """Steps between validations."""
    eval_sequences: int = 64
    """Sequences of the validation set."""
    probe_every: int = 50
    """Steps between measurements of the attention logits."""
    probe_sequences: int = 4
    """Sequences of the logit probe."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is always one at the end."""
    keep: int = 2
    """How many of the last checkpoints are kept."""
    async_save: bool = False
    """Write checkpoints in the background: a save stops the training only while the state is copied."""

    def __post_init__(self) -> None:
        refuse_unless_positive(**{name: value for name, value in vars(self).items() if name != "async_save"})


@dataclass(frozen=True)
class Config:
    """One run."""

    shape: Shape
    attention: MHA | MLA
    method: Method
    optimizer: Recipe
    schedule: Schedule
    training: Training
    machine: Machine
    watch: Watch

    def __post_init__(self) -> None:
        refuse_contradictions(self)

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.training.batch_tokens // self.shape.context


def refuse_contradictions(config: Config) -> None:
    """What no run could do, in one sentence that names the options."""
    micro = config.shape.context * config.training.micro_batch
    if config.training.batch_tokens % micro:
        raise UserError(
            f"--batch-tokens {config.training.batch_tokens} is not a multiple of the {micro} tokens of a micro-batch "
            f"(--micro-batch {config.training.micro_batch} x --context {config.shape.context})"
        )
    validate_schedule(config.schedule, config.training.steps)
    if isinstance(config.method, methods.MuonSplit) and not isinstance(config.optimizer, MuonRecipe):
        raise UserError("--method muon-split is a way to use Muon, so it needs --optimizer muon")
    if isinstance(config.method, methods.AbsorbedQKNorm) and not isinstance(config.attention, MLA):
        raise UserError("--method absorbed-qk-norm is about latents, so it needs --attention mla")
    if getattr(config.method, "literal", False) and not getattr(config.attention, "latent_norm", False):
        raise UserError("--literal is about norms on latents, so it needs --attention mla --latent-norm")


def kind_of(field: str, value: object) -> str:
    """The name that the command line has for this value's type."""
    return next(name for name, kind in KINDS[field].items() if type(value) is kind)


def values_of(part: Any) -> dict[str, Any]:
    """The fields of one part of a configuration."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def to_json(config: Config) -> dict[str, Any]:
    """Nested dictionaries of plain values; a choice says its kind."""
    return {
        field.name: ({"kind": kind_of(field.name, value)} if field.name in KINDS else {}) | values_of(value)
        for field in fields(config)
        for value in [getattr(config, field.name)]
    }


def from_json(saved: Mapping[str, Any]) -> Config:
    """The Config that `to_json` wrote; UserError if some other version of this program wrote it."""
    hints = get_type_hints(Config)
    try:
        parts = {
            name: _read(KINDS[name][part["kind"]] if name in KINDS else hints[name], part)
            for name, part in saved.items()
        }
        return Config(**parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the saved configuration does not fit this version of quacklr: {error}") from error


def _read(kind: Any, part: dict[str, Any]) -> Any:
    """One part; TypeError if a value is of another type. JSON has lists where we have tuples."""
    if wrong := misfits(part, kind):
        raise TypeError(f"{', '.join(wrong)} of {kind.__name__} is of another type")
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in part.items() if name != "kind"
    }
    return kind(**values)


def fingerprint(config: Config) -> str:
    """Eight hexadecimal digits: a hash of the options that decide what is in a run's rows.

    How often and in which way to save, how many threads, how processes share the work: none is part of it. A corpus is
    in it by its name, not by its content.
    """
    watch = replace(config.watch, checkpoint_every=1, keep=1)
    plain = to_json(replace(config, watch=watch, machine=replace(config.machine, threads=None)))
    for part, name in (("watch", "async_save"), ("machine", "parallel"), ("machine", "recompute")):
        del plain[part][name]  # which older configurations do not have
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def differences(one: Config, other: Config) -> list[str]:
    """Every option in which two configurations differ, as a reader of the command line knows it."""
    found = []
    for field, part in to_json(one).items():
        there = to_json(other)[field]
        for name in part.keys() | there.keys():
            if part.get(name) != there.get(name):
                option = field if name == "kind" else name.replace("_", "-")
                found.append(f"--{option} ({part.get(name)} there, {there.get(name)} here)")
    return sorted(found)
