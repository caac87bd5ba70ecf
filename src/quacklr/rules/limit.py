"""A limit for the change of logits in one step: what `clip_grad_norm_` is to gradients."""

from __future__ import annotations

from quacklr.rules.budget import Budget


class Limit(Budget):
    """The step of a head is scaled down if it would change the head's logits by more than `nats`; otherwise not at all.

        rate = min(1, nats * (lr now / initial lr) / asked(h))

    Where nothing is limited, the step is bitwise the optimizer's own. `Limit(inf)` limits nothing: it only measures,
    for `quack.changes()`. The number is that of `Budget`, and follows the schedule of lr in the same way.
    """

    largest_rate = 1.0
