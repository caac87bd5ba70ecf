"""The configuration of a run: frozen dataclasses, and a union of dataclasses where there are several kinds.

The same types define the command line (one option per field), `config.json` of a run, and the key of a ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from quacklr.lab import methods
from quacklr.lab.errors import UserError, validate, validate_at_most, validate_non_negative, validate_positive
from quacklr.lab.methods import Method
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import WSD, AdamWRecipe, Constant, Cosine, MuonRecipe, Recipe, Schedule, validate_schedule
from quacklr.lab.typed import mismatched_keys

KINDS: dict[str, dict[str, type]] = {
    "attention": {"mha": MHA, "mla": MLA},
    "method": {
        "default": methods.Default,
        "quack": methods.Quack,
        "constant-tau": methods.ConstantTau,
        "budget": methods.Budget,
        "limit": methods.Limit,
        "qk-norm": methods.QKNorm,
        "absorbed-qk-norm": methods.AbsorbedQKNorm,
        "qk-clip": methods.QKClipping,
        "soft-cap": methods.SoftCap,
        "sigma-reparam": methods.SigmaReparametrised,
        "muon-split": methods.MuonSplit,
        "compositional-muon": methods.CompositionalMuon,
        "bounded-step": methods.BoundedStep,
    },
    "optimizer": {"muon": MuonRecipe, "adamw": AdamWRecipe},
    "schedule": {"constant": Constant, "cosine": Cosine, "wsd": WSD},
}

NEWER_OPTIONS = {"products": "logits", "together": "nothing", "threshold": 0.0}
"""Options of methods that configurations of older versions do not have, with the values that change nothing."""

MAX_THREADS = 1024
"""Upper limit of thread counts. A process cannot start a hundred times as many threads."""


@dataclass(frozen=True)
class Training:
    """Data, length and seed of the training."""

    corpus: str = "stdlib"
    """A folder made by `quacklr prepare`, or `stdlib`: the source of Python's standard library, one token per byte."""
    steps: int = 300
    """Optimizer steps."""
    batch_tokens: int = 1024
    """Tokens per optimizer step, over all micro-batches and processes."""
    micro_batch: int = 8
    """Sequences per forward pass of a process; gradients are accumulated over the micro-batches of a step."""
    grad_clip: float = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""

    def __post_init__(self) -> None:
        validate_positive(steps=self.steps, batch_tokens=self.batch_tokens, micro_batch=self.micro_batch)
        validate_at_most(2**28, batch_tokens=self.batch_tokens)
        validate_non_negative(grad_clip=self.grad_clip)
        validate(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": self.seed})
        if "\0" in self.corpus:
            raise UserError(f"--corpus {self.corpus!a} is not the name of a folder")


@dataclass(frozen=True)
class Machine:
    """Device, precision and parallelism."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward pass under autocast, or FSDP2's mixed precision; weights and optimizer are fp32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: each process has the whole model (ddp), or a shard of it (fsdp)."""
    recompute: bool = False
    """Activation checkpointing: the backward pass recomputes the activations of each block, which saves memory."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads; torch's default unless given."""

    def __post_init__(self) -> None:
        validate_positive(threads=1 if self.threads is None else self.threads)
        validate_at_most(MAX_THREADS, threads=self.threads)


@dataclass(frozen=True)
class Watch:
    """What is measured and saved, and how often."""

    eval_every: int = 50
    """Steps between validations."""
    eval_sequences: int = 64
    """Sequences of the validation set."""
    probe_every: int = 50
    """Steps between measurements of the attention logits."""
    probe_sequences: int = 4
    """Sequences of the logit probe."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Number of most recent checkpoints to keep."""
    async_save: bool = False
    """Write checkpoints in a background thread: training waits only while the state is copied."""

    def __post_init__(self) -> None:
        validate_positive(**{name: value for name, value in vars(self).items() if name != "async_save"})


@dataclass(frozen=True)
class Config:
    """The configuration of one run."""

    shape: Shape
    attention: MHA | MLA
    method: Method
    optimizer: Recipe
    schedule: Schedule
    training: Training
    machine: Machine
    watch: Watch

    def __post_init__(self) -> None:
        validate_config(self)

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.training.batch_tokens // self.shape.context


def validate_config(config: Config) -> None:
    """Raise UserError, with the names of the options, for options that contradict each other."""
    micro = config.shape.context * config.training.micro_batch
    if config.training.batch_tokens % micro:
        raise UserError(
            f"--batch-tokens {config.training.batch_tokens} is not a multiple of the {micro} tokens of a micro-batch "
            f"(--micro-batch {config.training.micro_batch} x --context {config.shape.context})"
        )
    validate_schedule(config.schedule, config.training.steps)
    of_muon = isinstance(config.method, methods.MuonSplit | methods.CompositionalMuon)
    if of_muon and not isinstance(config.optimizer, MuonRecipe):
        kind = kind_of("method", config.method)
        raise UserError(f"--method {kind} is a way to use Muon, so it needs --optimizer muon")
    whole_matrices = isinstance(config.method, methods.CompositionalMuon | methods.BoundedStep)
    if whole_matrices and config.machine.parallel == "fsdp":
        kind = kind_of("method", config.method)
        raise UserError(f"--method {kind} needs whole matrices, so it needs --parallel ddp")
    if isinstance(config.method, methods.AbsorbedQKNorm) and not isinstance(config.attention, MLA):
        raise UserError("--method absorbed-qk-norm is about latents, so it needs --attention mla")
    if getattr(config.method, "literal", False) and not getattr(config.attention, "latent_norm", False):
        raise UserError("--literal is about norms on latents, so it needs --attention mla --latent-norm")


def kind_of(field: str, value: object) -> str:
    """The command-line name of a value's type, such as `mla` for an MLA."""
    return next(name for name, kind in KINDS[field].items() if type(value) is kind)


def values_of(part: Any) -> dict[str, Any]:
    """Field names and values of a dataclass, not recursive."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def to_json(config: Config) -> dict[str, Any]:
    """Nested dictionaries of plain values; a part that has several kinds has the key `kind`."""
    return {
        name: ({"kind": kind_of(name, part)} if name in KINDS else {}) | values_of(part)
        for name, part in values_of(config).items()
    }


def from_json(saved: Mapping[str, Any]) -> Config:
    """Inverse of `to_json`; UserError if the configuration does not fit this version."""
    hints = get_type_hints(Config)
    try:
        kinds = {name: KINDS[name][part["kind"]] if name in KINDS else hints[name] for name, part in saved.items()}
        return Config(**{name: _part_from_json(kinds[name], part) for name, part in saved.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the saved configuration does not fit this version of quacklr: {error}") from error


def _part_from_json(kind: Any, part: dict[str, Any]) -> Any:
    """One part of a configuration; TypeError if a value has the wrong type. Lists become tuples."""
    if wrong := mismatched_keys(part, kind):
        raise TypeError(f"{', '.join(wrong)} of {kind.__name__} is of another type")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in part.items()}
    return kind(**{name: value for name, value in values.items() if name != "kind"})


def fingerprint(config: Config) -> str:
    """Hash of the options that determine the rows of a run, as eight hexadecimal digits.

    Options of checkpoints, threads and parallelism are not included. The corpus is included by name, not by content.
    """
    watch = replace(config.watch, checkpoint_every=1, keep=1)
    plain = to_json(replace(config, watch=watch, machine=replace(config.machine, threads=None)))
    for part, name in (("watch", "async_save"), ("machine", "parallel"), ("machine", "recompute")):
        del plain[part][name]  # configurations of older versions do not have it
    for name, default in NEWER_OPTIONS.items():
        if plain["method"].get(name) == default:
            del plain["method"][name]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def differences(one: Config, other: Config) -> list[str]:
    """Options in which two configurations differ, as command-line names with both values."""
    found = []
    for field, part in to_json(one).items():
        other_part = to_json(other)[field]
        for name in part.keys() | other_part.keys():
            if part.get(name) != other_part.get(name):
                option = field if name == "kind" else name.replace("_", "-")
                found.append(f"--{option} ({part.get(name)} there, {other_part.get(name)} here)")
    return sorted(found)
