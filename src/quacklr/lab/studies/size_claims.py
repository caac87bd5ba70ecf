"""Claims about the size of the model: 0.3M, 1M and 4M parameters."""

from __future__ import annotations

from statistics import mean

from quacklr.lab.methods import Default, Quack
from quacklr.lab.studies.comparison import compare, difference, less, more
from quacklr.lab.studies.results import MethodRuns, Results
from quacklr.lab.studies.sizes import JUDGED, bracket, critical_rate, runs_above
from quacklr.lab.studies.verdicts import Answer, Claim, answer, mean_and_sd


def methods_above(results: Results, size: str) -> tuple[MethodRuns, MethodRuns]:
    """QuacK and the default at ten times the critical learning rate."""
    return runs_above(results, Quack, size), runs_above(results, Default, size)


def larger_is_critical_earlier(results: Results) -> Answer:
    """The larger the model, the lower the learning rate at which the largest logit of the default is 100."""
    found = {size: critical_rate(results, size) for size in JUDGED}
    (small, first), *_, (large, last) = found.items()
    label = f"MHA, Muon: {large} - {small}, log10 of the critical learning rate"
    runs = (last.low, last.high, first.low, first.high)
    rates = {size: each.by_seed().values() for size, each in found.items()}
    text = ", ".join(f"{10 ** mean(each):.2g} at {size} (n {len(each)})" for size, each in rates.items() if each)
    return answer(
        f"critical learning rate, mean over the seeds: {text}",
        (less, compare(label, last.by_seed(), first.by_seed(), *runs)),
    )


def better_at_every_size(results: Results) -> Answer:
    """At ten times the critical learning rate, QuacK beats the default at 0.3M, 1M and 4M parameters."""
    pairs = [methods_above(results, size) for size in JUDGED]
    texts = [f"{quack.cell}: {quack} {mean_and_sd(quack)}, default {mean_and_sd(other)}" for quack, other in pairs]
    return answer("; ".join(texts), *((less, difference(*pair)) for pair in pairs))


def gains_more_with_size(results: Results) -> Answer:
    """The larger the model, the more QuacK gains over the default at ten times the critical learning rate."""
    pairs = {size: methods_above(results, size) for size in JUDGED}
    gains = {size: gain(*pair) for size, pair in pairs.items()}
    (small, of_small), *_, (large, of_large) = gains.items()
    lrs = {size: quack.cell.lr for size, (quack, _) in pairs.items()}
    label = f"MHA, Muon: gain at {large} and lr {lrs[large]:g} - gain at {small} and lr {lrs[small]:g}, validation loss"
    compared = compare(label, of_large, of_small, *pairs[large], *pairs[small])
    times = {size: lr / 10 ** bracket(results, size).critical for size, lr in lrs.items()}
    texts = [
        f"{mean(each.values()):.3f} at {size} and lr {lrs[size]:g}, {times[size]:.1f} times the critical one"
        for size, each in gains.items()
    ]
    return answer(f"loss of the default - loss of QuacK: {'; '.join(texts)}", (more, compared))


def gain(quack: MethodRuns, default: MethodRuns) -> dict[int, float]:
    """How far the loss of QuacK is below that of the default, by seed."""
    losses, others = quack.by_seed(), default.by_seed()
    return {seed: others[seed] - losses[seed] for seed in losses.keys() & others.keys()}


SIZE_CLAIMS: dict[str, Claim] = {
    "size and critical rate": larger_is_critical_earlier,
    "every size": better_at_every_size,
    "size and gain": gains_more_with_size,
}
