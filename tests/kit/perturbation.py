"""The judge of which rows make which head's logits: change rows, look at logits. Knows nothing of `quacklr.find`.

An attention is called alone, with what it was given in a real forward, so that only its own weights can matter. Of the
paths that are claimed for it, these must hold:

    a row of a block, changed       moves the logits of the heads that read the block, and of no other head
    blocks, each scaled its own way multiply the terms of a head's logit as its paths say, to rounding
    all that is on no path, tripled changes no logit; a norm's gain and what is only added to logits are exempt

From what moved what, and from norms taken by hand, comes the rate of every row of every parameter.

Shapes: H heads, N whatever else logits have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from called_alone import MASKED, Attention, calls
from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.quack import QuacK

Part = tuple[Tensor, Tensor]  # a parameter, and which of its entries
Block = tuple[Part, ...]  # of a weight, and of its bias
Chain = tuple[Block, ...]  # what is multiplied to make one term of a head's logit

NOT_TAKEN_APART = {"AXK2Attention"}  # a latent of zeros, as for one term alone, would be zero after its norm too
EXEMPT = re.compile(  # Class.parameter: gains of norms; what is only added to logits; what mixes keys before a norm
    r"\w+\.(\S*norm|\S*sink|relative|rel_pos|rel_attn|gru_rel_pos|logit_scale|\S*position_bias)"
    r"|DogeAttention\.(A|dt_proj|v_proj)|DeepseekV4Attention\.compressor\S*gate_proj"
    r"|ZayaAttention\.qkv_proj\.conv_qk\w+\.weight",
    re.IGNORECASE,
)
STILL, EXACT, FREE = 1e-5, 1e-4, 1e-3  # of the largest logit: not moved; the same; the same but for an epsilon


@dataclass
class Verdict:
    """What is wrong with the paths that were claimed; the terms of every head's logit; modules that did not run."""

    problems: list[str] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


def judged(model: nn.Module, sample: Any, claims: Mapping[str, Sequence[LogitPath]]) -> Verdict:
    """All attentions of a model in eval mode against the paths claimed for each, by module name.

    Their weights are changed first, so that nothing starts at zero.
    """
    randomise(model, claims)
    verdict = Verdict()
    attentions, elsewhere = calls(model, sample, claims)
    verdict.problems += [f"{name}: an attention that nothing is said of" for name in elsewhere]
    for name, paths in claims.items():
        if name not in attentions:
            verdict.not_run.append(name)
            verdict.chains += [chain for path in paths for chain in claimed(path)]
            continue
        hearing = Hearing(attentions[name], paths)
        verdict.problems += [f"{name}: {problem}" for problem in hearing.problems()]
        verdict.chains += [chain for chains in hearing.chains.values() for chain in chains]
    return verdict


def randomise(model: nn.Module, names: Iterable[str]) -> None:
    """Embeddings as large as they are after a norm, so that a norm's epsilon does not matter; no zeros in attention."""
    embeddings = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    with torch.no_grad():
        for parameter in embeddings:
            parameter.add_(torch.randn(parameter.shape))
        for parameter in dict.fromkeys(p for name in names for p in model.get_submodule(name).parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape))


def blocks(weight: Weight) -> list[Block]:
    """The entries of each block of a weight, and of its bias."""
    return [
        tuple((part.param, entries(part, part.block_of_row == b)) for part in weight.parts)
        for b in range(weight.blocks)
    ]


def entries(weight: Weight, rows: Tensor) -> Tensor:
    """Some rows of a weight as a mask of its parameter."""
    if isinstance(weight.dim, tuple):
        lead = weight.param.shape[: len(weight.dim)]
        return rows.view(*lead, *[1] * (weight.param.ndim - len(lead))).expand(weight.param.shape)
    return rows.view([-1 if d == weight.dim else 1 for d in range(weight.param.ndim)]).expand(weight.param.shape)


def claimed(path: LogitPath) -> list[Chain]:
    of_weight = [blocks(weight) for weight in path.weights]
    return [tuple(of[b] for of, b in zip(of_weight, read, strict=True)) for read in path.reads.T.tolist()]


@contextmanager
def unchanged(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Whatever is done to them meanwhile."""
    saved = [(parameter, parameter.detach().clone()) for parameter in parameters]
    with torch.no_grad():
        yield
        for parameter, was in saved:
            parameter.copy_(was)


class Hearing:
    """One attention, and the paths claimed for it."""

    def __init__(self, attention: Attention, paths: Sequence[LogitPath]) -> None:
        self.attention, self.paths = attention, paths
        self.logits = attention.logits()
        self.weights = {weight: blocks(weight) for path in paths for weight in path.weights}
        self.params: list[Tensor] = list(
            dict.fromkeys([*attention.module.parameters(), *(w.param for w in self.parts())])
        )
        self.moved = {w: [self._moved(block) for block in of] for w, of in self.weights.items()}
        self.chains = {path: self._chains(path) for path in paths}

    def parts(self) -> Iterator[Weight]:
        yield from (part for weight in self.weights for part in weight.parts)

    def problems(self) -> Iterator[str]:
        if not self.logits.numel():
            yield from ["claims paths, but has no softmax"] if self.paths else []
            return
        again = self.attention.logits()
        if not torch.equal(again, self.logits):
            yield "its logits are not the same twice"
        yield from self._rows()
        yield from self._heads()
        yield from self._terms()
        yield from self._rest()

    def _differs(self, logits: Tensor, other: Tensor, bound: float) -> Tensor:
        """(H,): whether any logit is another, by so much of the largest one."""
        seen = (self.logits.abs() < MASKED) & (logits.abs() < MASKED) & (other.abs() < MASKED)
        off = (logits - other).where(seen, 0).abs().amax(1)
        return off > bound * self.logits.where(seen, 0).abs().max()

    def _moved(self, block: Block) -> frozenset[int]:
        """The heads whose logits change with these entries."""
        with unchanged(param for param, _ in block):
            for param, mask in block:
                param[mask] += param.std() * (0.5 + torch.rand(int(mask.sum())))
            moved = self._differs(self.attention.logits(), self.logits, STILL)
        return frozenset(moved.nonzero().flatten().tolist())

    def _rows(self) -> Iterator[str]:
        """Every row of a block moves the same heads as the block does."""
        for weight, moved in self.moved.items():
            for part in weight.parts:
                for row, b in enumerate(part.block_of_row.tolist()):
                    one = entries(part, torch.arange(len(part.block_of_row)) == row)
                    if b >= 0 and (heads := self._moved(((part.param, one),))) != moved[b]:
                        yield f"row {row} of {part.name} moves heads {sorted(heads)}, its block {sorted(moved[b])}"

    def _read(self, path: LogitPath, head: int) -> list[int] | None:
        """The block that a head was seen to read of each weight of a path; None if it does not have the path."""
        read = [[b for b, heads in enumerate(self.moved[weight]) if head in heads] for weight in path.weights]
        return [of[0] for of in read] if all(len(of) == 1 for of in read) else None

    def _chains(self, path: LogitPath) -> list[Chain]:
        reads = [self._read(path, head) for head in range(len(self.logits))]
        return [
            tuple(self.weights[weight][b] for weight, b in zip(path.weights, read, strict=True))
            for read in reads
            if read is not None
        ]

    def _heads(self) -> Iterator[str]:
        for path in self.paths:
            seen = {tuple(read) for head in range(len(self.logits)) if (read := self._read(path, head)) is not None}
            said = {tuple(read) for read in path.reads.T.tolist()}
            if seen != said:
                yield f"{path}: heads read blocks {sorted(seen)}, not {sorted(said)}"

    def _scaled(self, scale: Mapping[Weight, Sequence[float]]) -> Tensor:
        """Logits with every block of some weights multiplied by a number."""
        with unchanged(self.params):
            for weight, numbers in scale.items():
                for block, number in zip(self.weights[weight], numbers, strict=True):
                    for param, mask in block:
                        param[mask] *= number
            return self.attention.logits()

    def _terms(self) -> Iterator[str]:
        """A head's logit is a sum over its paths, of terms linear in every block on the path."""
        if not self.paths or type(self.attention.module).__name__ in NOT_TAKEN_APART:
            return
        none = {weight: [0.0] * weight.blocks for weight in self.weights}
        scale = {weight: (0.5 + torch.rand(weight.blocks)).tolist() for weight in self.weights}
        nothing = self._scaled(none)
        expected = nothing.clone()
        for path in self.paths:
            alone = self._scaled({weight: zeros for weight, zeros in none.items() if weight not in path.weights})
            for head in range(len(self.logits)):
                if (read := self._read(path, head)) is not None:
                    by = prod(scale[weight][b] for weight, b in zip(path.weights, read, strict=True))
                    expected[head] += by * (alone[head] - nothing[head])
        if self._differs(self._scaled(scale), expected, EXACT).any():
            yield f"its logits are not the sum of {', '.join(map(str, self.paths))}"

    def _rest(self) -> Iterator[str]:
        """The rest can be tripled."""
        taken = {param: torch.zeros(param.shape, dtype=torch.bool) for param in self.params}
        for part in self.parts():
            taken[part.param] |= entries(part, part.block_of_row >= 0)
        module = self.attention.module
        names = {id(param): f"{type(module).__name__}.{name}" for name, param in module.named_parameters()}
        rest = [p for p in self.params if not EXEMPT.match(names.get(id(p), "")) and not taken[p].all()]
        if self._tripled(rest, taken):
            blamed = ", ".join(names.get(id(p), "another's") for p in rest if self._tripled([p], taken))
            yield f"its logits depend on the scale of what is on no path, such as {blamed}"

    def _tripled(self, params: Sequence[Tensor], taken: Mapping[Tensor, Tensor]) -> bool:
        """Whether logits change if all of these parameters but what is taken is tripled."""
        with unchanged(params):
            for param in params:
                param[~taken[param]] *= 3
            return bool(self._differs(self.attention.logits(), self.logits, FREE).any())


def sensitivities(chains: Sequence[Chain]) -> dict[object, tuple[Block, float]]:
    """Of every block, the largest product of the norms of the others on a chain with it."""
    found: dict[object, tuple[Block, float]] = {}
    for chain in chains:
        norms = [sum(float(p.detach()[mask].double().square().sum()) for p, mask in block) ** 0.5 for block in chain]
        for i, block in enumerate(chain):
            key = tuple((id(param), mask.numpy().tobytes()) for param, mask in block)
            found[key] = block, max(found.get(key, (block, 0.0))[1], prod(norms[:i] + norms[i + 1 :]))
    return found


def rated(model: nn.Module, quack: QuacK, verdict: Verdict) -> tuple[int, list[str]]:
    """How many rows of all parameters have the rate that they must have after every row has changed; and which do not.

    Not counted are modules that did not run: of these the rates are held against what was claimed.
    """
    chains = verdict.chains
    unjudged = {p for name in verdict.not_run for p in model.get_submodule(name).parameters()}
    before = sensitivities(chains)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(torch.exp(torch.randn([*param.shape[:1], *[1] * (param.ndim - 1)])))
            param.mul_(torch.exp(torch.randn(param.shape[-1:])))
    after = sensitivities(chains)
    rates: dict[Tensor, Tensor] = {param: torch.ones(param.shape) for param in model.parameters()}
    for key, (block, start) in before.items():
        for tensor, mask in block:
            rates[tensor][mask] = start / after[key][1]
    right, wrong = 0, []
    for name, param in model.named_parameters():
        said = quack.rate_of(param)
        implied = rates[param] if param.requires_grad else torch.ones(())
        close = torch.isclose(torch.ones(()) if said is None else said, implied, rtol=1e-4)
        of_row = close.expand(param.shape).flatten(1).all(1) if param.ndim > 1 else close.expand(param.shape)
        right += int(of_row.sum()) if param not in unjudged else 0
        wrong += [f"{name}[{row}]" for row in (~of_row).nonzero().flatten().tolist()]
    return right, wrong
