"""QuacK in one file, to copy into a project that cannot add a dependency. It needs torch only.

You say which rows of which parameter are the query and the key of each head. `logits` has an entry for each attention:
the paths whose sum is the logit. A path is the weights of the query in order, and the weights of the key in order.

    q = Rows(qkv.weight, torch.arange(dim).view(heads, -1), qkv.bias)          # fused: [q | k | v]
    k = Rows(qkv.weight, dim + torch.arange(dim).view(heads, -1), qkv.bias)    # GQA: .view(kv_heads, -1)
    quack = Quack(optimizer, logits=[[([q], [k])]])                            # tau=1.0 for the paper's rule
    [([dq, uq], [dkv, uk]), ([dq, qr], [kr])]                                  # MLA: two paths

`pip install quacklr` finds the rows and verifies them on the first batch. It supports sharded weights, several
optimizers, 16-bit weights and LoRA too. tests/test_one_file.py: both take the same steps, bitwise.
"""

import math
from functools import partial, reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

Numbers = dict["Rows", Tensor]  # (blocks,) by weight
norm = partial(torch.linalg.vector_norm, dim=(1, 2))  # (blocks,)


class Rows:
    """The rows of a parameter that belong to each block (head), and those of its bias. `index` is (blocks, rows)."""

    def __init__(self, weight: Tensor, index: Tensor, bias: Tensor | None = None) -> None:
        self.parts = [weight] if bias is None else [weight, bias]
        self.index, (self.blocks, self.rows) = index.to(weight.device), index.shape

    def read(self) -> Tensor:
        """(blocks, rows, columns): a copy. The bias is the last column."""
        return torch.cat([part.detach()[self.index].view(*self.index.shape, -1) for part in self.parts], 2)

    def write(self, rows_BRC: Tensor) -> None:
        for part, part_BRC in zip(self.parts, rows_BRC.split([part[0].numel() for part in self.parts], 2), strict=True):
            part.detach()[self.index] = part_BRC.reshape(*self.index.shape, *part.shape[1:])


def largest_singular_value(rows_BRC: Tensor) -> Tensor:
    """(blocks,): from above, by the Schatten norm of order 32. At most 16 % too large for heads of 128 rows."""
    short = rows_BRC if rows_BRC.shape[1] <= rows_BRC.shape[2] else rows_BRC.mT
    power, tiny = torch.bmm(short, short.mT), torch.finfo(rows_BRC.dtype).tiny
    bound = power.amax((1, 2)).clamp(min=tiny)
    power = power / bound[:, None, None]
    size = norm(power)
    power = power / size.clamp(min=tiny)[:, None, None]
    for _ in range(3):
        power = torch.bmm(power, power)
    return (bound * size * norm(power).pow(1 / 8)).sqrt()


class Quack:
    """A step that changes the logits of a head by more than `nats` is scaled down; with `tau`, the paper's rule."""

    def __init__(self, optimizer: torch.optim.Optimizer, logits: Any, tau: float | None = None, nats: float = 0.02):
        self.groups, self.tau, self.nats, self.terms = optimizer.param_groups, tau, nats, list[Any]()
        for logit, paths in enumerate(logits):
            for queries, keys in paths:
                path, q = [*queries, *reversed(keys)], queries[-1]
                sizes = [sum(each[-1].rows for each, _ in paths), math.prod(w.rows for w in path) // q.rows]
                scale = torch.tensor(sizes).rsqrt().prod().item()
                reads = [(w, torch.arange(q.blocks, device=w.index.device) // (q.blocks // w.blocks)) for w in path]
                self.terms += [(logit, *read, [*reads[:i], *reads[i + 1 :]], scale) for i, read in enumerate(reads)]
        self.weights: list[Rows] = list(dict.fromkeys(weight for _, weight, *_ in self.terms))
        self.start = self.sensitivities({weight: norm(weight.read()) for weight in self.weights})
        self.allowed()
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def sensitivities(self, norms: Numbers) -> Numbers:
        """The largest product of the norms of a block's partners."""
        found = {weight: torch.zeros_like(norms[weight]) for weight in self.weights}
        for _, weight, blocks, partners, _ in self.terms:
            found[weight].scatter_reduce_(0, blocks, reduce(mul, [norms[w][read] for w, read in partners]), "amax")
        return found

    def limited(self, norms: Numbers, steps: Numbers, allowed: dict[Tensor, float], largest: Any) -> Numbers:
        """The rates with which no head's logits change by more than is allowed."""
        changes, rates = dict[int, Any](), {w: torch.full_like(norms[w], torch.inf) for w in self.weights}
        for logit, weight, blocks, partners, scale in self.terms:
            step = scale * torch.tensor(weight.rows).sqrt().item() * steps[weight][blocks]
            changes[logit] = changes.get(logit, 0) + reduce(mul, [norms[w][read] for w, read in partners], step)
        for logit, weight, blocks, *_ in self.terms:
            rates[weight].scatter_reduce_(0, blocks, 1 / changes[logit].nan_to_num(posinf=0.0), "amin")
        rates = {weight: allowed.get(weight.parts[0], 0) * rate for weight, rate in rates.items()}
        return {w: rate.nan_to_num(1.0, 1.0).clamp(max=largest[w]) for w, rate in rates.items()}

    def allowed(self) -> dict[Tensor, float]:
        """By parameter: nats * lr / the largest lr that a scheduler has announced, or that was seen."""
        for group in self.groups:
            lrs = [group[key] for key in ("initial_lr", "max_lr", "quack_initial_lr", "lr") if key in group]
            group["quack_initial_lr"] = max(lrs)
        return {p: self.nats * (g["lr"] / (g["quack_initial_lr"] or 1)) for g in self.groups for p in g["params"]}

    def before(self, *_: Any) -> None:
        self.old = {weight: weight.read() for weight in self.weights}

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        new, norms = {w: w.read() for w in self.weights}, {w: norm(old) for w, old in self.old.items()}
        if self.tau is not None:
            now, tau = self.sensitivities(norms), self.tau
            rates = {w: (tau * start / now[w]).nan_to_num(tau, tau) for w, start in self.start.items()}
        else:
            steps, allowed = {w: largest_singular_value(new[w] - self.old[w]) for w in self.weights}, self.allowed()
            first = self.limited(norms, steps, allowed, dict.fromkeys(self.weights, 1))
            larger = {w: torch.addcmul(norms[w], first[w], steps[w] * w.rows**0.5) for w in self.weights}
            rates = self.limited(larger, steps, allowed, first)
        for weight, rate in rates.items():
            weight.write(torch.lerp(self.old[weight], new[weight], rate[:, None, None]))

    def state_dict(self) -> dict[str, Any]:
        return {"start": list(self.start.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = dict(zip(self.weights, state["start"], strict=True))
