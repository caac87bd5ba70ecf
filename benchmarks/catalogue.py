"""Checks on which models QuacK can be attached, and whether every rate is correct: all types of transformers, tiny.

    make models                                                            all models, in minutes: writes docs/models.md
    PYTHONPATH=tests/kit python benchmarks/catalogue.py --only llama t5    only these: prints their rows of the table

The attention of each model is found by table, and measured with a sample batch. `tests/kit/perturbation.py` then checks
both independently: it changes rows of parameters and compares logits. The exit code is 1 if a rate is wrong, or if
fewer models attach than the goal (95 %).
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD

from layout import layout, query_and_key
from perturbation import judged, rated
from quacklr import QuacK
from quacklr.find.discover import found_by_table, logit_paths
from quacklr.find.finding import NO_SOFTMAX, Finding, differences
from quacklr.find.measure.assemble import measured_paths
from quacklr.util.modules import named_parameters
from tiny_models import CAUSAL, build, sections

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/models.md"
GOAL = 0.95
GAPS = {  # terms that are on no path though they should be, with what the judge says of them
    "funnel": ("q . seg_embed, whose keys are learned, is on no path", r"not the sum|seg_embed"),
    "inkling_text": ("a bias that is r_proj . rel_logits_proj is on no path", r"rel_logits_proj"),
}
ATTACHES, PARTLY, NORMED, NEEDS, NOTHING = (
    *("attaches", "attaches in part", "nothing to control: QK norm", "needs a sample", "no softmax attention"),
)
SAME, FAILED, LEFT_RIGHTLY, RIGHT, WRONG = "the same", "its forward", "rightly", "right", "WRONG"
GAP = "as its paths say, but"
INTRODUCTION = """\
This page lists the models that were tested with QuacK: every type of transformers that has a causal language model, the
main encoders and encoder-decoders, and the attention layers of torch. To see one yourself: `quacklr inspect llama`.

All models are tiny and have random weights. The last three columns:

- *without a sample*: what tables know. `QuacK(model, optimizer)` measures the rest on the first batch.
- *with a sample*: `QuacK(logit_paths(model, batch), optimizer)`, which also measures it on a batch.
- *rows of parameters*: the result of an independent check, `tests/kit/perturbation.py`. It uses neither the tables nor
  the measurement. It changes rows of parameters, compares logits, and computes the rate that each row of each parameter
  must have after all parameters have changed. Modules that do not run on the sample, such as vision towers, are not
  checked in this way: their rates are compared with those of the tables.
"""
TITLES = ("type", "attention", "layout", "heads / keys", "without a sample", "with a sample", "rows of parameters")


class Row(NamedTuple):
    """A line of the page: all that is counted is read off it."""

    type: str
    attention: str
    layout: str
    heads: str
    without: str
    sample: str
    judged: str

    @property
    def with_a_sample(self) -> str:
        """Its outcome with a sample, in full."""
        return self.without if self.sample == SAME else self.sample


def examined(name: str, section: str) -> Row:
    """One model: read, measured, judged."""
    model, sample = build(name, section)
    ruled = found_by_table(model)
    without = _by_rule(ruled.values())
    try:
        seen = measured_paths(model, sample)
    except ValueError as error:
        return _row(name, model, ruled, without, f"{FAILED} fails: {_told(error)}", "-")
    known = {name: finding for name, finding in {**seen, **_known(ruled)}.items() if not finding.unknown}
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    both = _known(ruled).keys() & _known(seen).keys()
    wrong = [differences(ruled[n].paths, seen[n].paths, parameters) for n in both]
    wrong = [f"rule and measurement differ: {difference}" for difference in wrong if difference]
    more = [n for n in {**ruled, **seen} if n not in _known(ruled)]
    with_sample = SAME if not more else _by_rule(known.values())
    if failed := [finding for finding in seen.values() if finding.unknown]:
        with_sample = failed[0].reason
    return _row(name, model, known, without, with_sample, _judged(name, model, sample, known, wrong, without))


def _judged(name: str, model: nn.Module, sample: Any, known: dict[str, Finding], wrong: list[str], without: str) -> str:
    if not known:
        return "-"
    verdict = judged(model, sample, {name: finding.paths for name, finding in known.items()})
    reason, pattern = GAPS.get(name, ("", r"(?!)"))
    if reason and not verdict.problems:
        wrong.append("this is no gap any more; take it out of GAPS")
    wrong += [problem for problem in verdict.problems if not re.search(pattern, problem)]
    right = 0
    if any(finding.paths for finding in known.values()):
        given = (
            model if without.startswith((ATTACHES,)) and not without.startswith(PARTLY) else logit_paths(model, sample)
        )
        with QuacK(given, SGD(model.parameters(), lr=1.0), tau=1.0) as quack:
            right, off = rated(model, quack, verdict)
        wrong += [f"the rate of {row}" for row in off]
    if wrong:
        return f"{len(wrong)} {WRONG}: {wrong[0]}"
    unseen = f", {len(verdict.not_run)} modules not run" if verdict.not_run else ""
    if reason:
        return f"{right} {GAP} {reason}"
    return (f"{right} {RIGHT}" if right else f"left alone {LEFT_RIGHTLY}") + unseen


def _known(findings: dict[str, Finding]) -> dict[str, Finding]:
    return {name: finding for name, finding in findings.items() if not finding.unknown}


def _by_rule(findings: Iterable[Finding]) -> str:
    """One outcome for all attentions of a model."""
    findings = [finding for finding in findings if finding.reason != NO_SOFTMAX]
    unknown, paths = [f for f in findings if f.unknown], [f for f in findings if f.paths]
    if not findings:
        return NOTHING
    if unknown:
        return f"{PARTLY}, {len(unknown)} of {len(findings)} need a sample" if paths else NEEDS
    if not paths:
        return NORMED
    normed = len(findings) - len(paths)
    return ATTACHES + (f"; {normed} of {len(findings)} have QK norm" if normed else "")


def _row(name: str, model: nn.Module, known: dict[str, Finding], without: str, sample: str, said: str) -> Row:
    names = {id(parameter): n.rsplit(".", 2)[-2] for n, parameter in model.named_parameters() if "." in n}
    attending = {n: f for n, f in known.items() if f.reason != NO_SOFTMAX}
    classes = [type(model.get_submodule(n)).__name__ for n in attending]
    words = [layout(f.paths, names) for f in attending.values() if f.paths]
    heads = [f"{f.paths[0].heads} / {query_and_key(f.paths[0])[1].blocks}" for f in attending.values() if f.paths]
    attention, stored, numbers = (", ".join(dict.fromkeys(cell)) or "-" for cell in (classes, words, heads))
    return Row(name, attention, stored, numbers, without, sample, said)


def _told(error: Exception) -> str:
    return re.sub(r".*failed on the sample: \w+: (.*?);? a sample is.*", r"\1", str(error))


def summary(found: dict[str, list[Row]]) -> str:
    """What the lines of the page come to."""
    causal = [row for row in found[CAUSAL] if row.without != NOTHING]
    attach, normed = ([row for row in causal if row.without.startswith(word)] for word in (ATTACHES, NORMED))
    partly = [row for row in attach if row.without.startswith(PARTLY)]
    needs = [row for row in causal if row.without == NEEDS]
    runs = [row for row in causal if not row.sample.startswith(FAILED)]
    attach_measured = [row for row in runs if row.with_a_sample.startswith(ATTACHES)]
    control = [row for row in runs if not row.with_a_sample.startswith(NORMED)]
    everything = [row for rows in found.values() for row in rows]
    rows = [number for row in everything for number in re.findall(rf"^(\d+) {RIGHT}", row.judged)]
    return f"""\
Of {len(found[CAUSAL])} types with a causal language model, {len(causal)} have softmax attention. Without a sample:

- {len(attach) - len(partly)} attach;
- {len(normed)} have QK norm in every layer, and QuacK does not change them: their logits do not depend on the scale \
of the query and key weights;
- {len(partly)} attach in part, and {len(needs)} not at all: the rest of their attention is measured.

So {percent(len(attach) - len(partly) + len(normed), len(causal))} are known to tables. Of the types without QK norm \
in every layer, {percent(len(attach) - len(partly), len(causal) - len(normed))} attach with all of their attention.

With a sample: {len(runs)} types run on the sample that was made for them. Of these, {len(control)} do not have QK \
norm in every layer, and {len(attach_measured)} of those attach.

{len(everything)} models were built. In {len(rows)} models that attach, all {sum(map(int, rows)):,} rows of parameters \
have the correct rate. {sum(WRONG in row.judged for row in everything)} models have a row with a wrong rate. In \
{sum(GAP in row.judged for row in everything)} more models one term of the logit is on no path, so the rates do not \
take it into account; the table names the term.
"""


def percent(some: int, of: int) -> str:
    return f"{some} of {of} ({100 * some / max(of, 1):.1f} %)"


def page(found: dict[str, list[Row]]) -> str:
    import transformers

    versions = f"torch {torch.__version__} and transformers {transformers.__version__}"
    made = f"Made by `make models` with {versions}."
    tables = [f"## {section}\n\n{table(rows)}" for section, rows in found.items()]
    return "\n".join(["# Models that QuacK can be attached to\n", INTRODUCTION, made + "\n", summary(found), *tables])


def table(rows: Iterable[Row]) -> str:
    cells = [TITLES, ["---"] * len(TITLES), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells)


def read_page(text: str) -> dict[str, list[Row]]:
    """The lines of a page, by section."""
    found: dict[str, list[Row]] = {}
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        cells = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines if line.startswith("| ")][2:]
        found[title] = [Row(*(cell.replace("\\|", "|") for cell in line)) for line in cells]
    return found


def below_the_goal(found: dict[str, list[Row]], goal: float = GOAL) -> list[str]:
    """What is not as it should be; so many must attach, or rightly be left alone, without a sample."""
    every = [row for rows in found.values() for row in rows]
    wrong = [f"{row.type}: {row.judged}" for row in every if WRONG in row.judged]
    wrong += [f"{row.type}: {row.sample}" for row in every if row.sample.startswith((NEEDS, PARTLY, "not recognised"))]
    causal = [row for row in found.get(CAUSAL, []) if row.without != NOTHING]
    attach = [
        row for row in causal if row.without.startswith((ATTACHES, NORMED)) and not row.without.startswith(PARTLY)
    ]
    if len(attach) < goal * len(causal):
        wrong.append(f"only {percent(len(attach), len(causal))} attach without a sample")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="check only these types, and write no file")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = [(section, name) for section, names in sections().items() for name in names if not only or name in only]
    found: dict[str, list[Row]] = {}
    for i, (section, name) in enumerate(chosen):
        print(f"\r{i + 1} of {len(chosen)} {name:<60.60}", end="", file=sys.stderr, flush=True)
        found.setdefault(section, []).append(examined(name, section))
    print(file=sys.stderr)
    if only:
        print(*(table(rows) for rows in found.values()), sep="\n")
    else:
        PAGE.write_text(page(found))
    wrong = below_the_goal(found, 0 if only else GOAL)
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
