"""Every number in README comes from results/, and results/ from the ledger in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from browsers import BROWSERS
from quacklr.lab.demo import sentence, table
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.methods import Quack
from quacklr.lab.report import markdown
from quacklr.lab.report.advice import TABLES
from quacklr.lab.report.choosing import choosing, numbers, open_questions, outdated
from quacklr.lab.report.command import draw
from quacklr.lab.report.figures import FIGURES
from quacklr.lab.report.scaling import scaling
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.measures import largest_logit
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.studies.sizes import JUDGED, runs_above

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "results"
DEMO = scale_of(Size(steps=150))
VERSIONS = {"2.9", "3.11", "3.14", "2.0"}  # of torch, Python, and the licence


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return list(Ledger(RESULTS / "ledger.jsonl").entries().values())


@pytest.fixture(scope="module")
def results(entries: list[Entry]) -> Results:
    return Results(entries, scale_of(Size()))


def from_results() -> str:
    """What `quacklr report` and the benchmarks wrote; not the texts that are made for README."""
    files = [file for file in sorted(RESULTS.glob("*.md")) if file.name not in ("summary.md", "demo.md")]
    return "\n".join(file.read_text() for file in files)


def prose() -> str:
    """README without blocks of code, which other tests run."""
    plain = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    return "\n".join(line for line in plain.splitlines() if not line.startswith("    "))


def test_documents_have_the_numbers_of_results() -> None:
    filler = [sys.executable, str(ROOT / "benchmarks/fill_documents.py"), "--check"]
    done = subprocess.run(filler, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_row_of_a_table_with_a_number_is_a_row_of_results() -> None:
    rows = [line for line in prose().splitlines() if line.startswith("|") and re.search(r"(?<!\w)\d", line)]
    assert rows
    known = set(from_results().splitlines())
    assert [row for row in rows if row not in known] == []


def test_every_decimal_number_in_the_text_is_in_results(entries: list[Entry]) -> None:
    text = " ".join(line for line in prose().splitlines() if not line.startswith("|"))
    text = text.replace(sentence(Results(entries, DEMO, [0])), "")  # which has a test of its own
    found = set(re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w])", text)) - VERSIONS
    assert found
    known = from_results()
    assert [number for number in found if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", known)] == []


def test_the_demo_in_readme_is_the_one_in_the_ledger(entries: list[Entry]) -> None:
    demo = Results(entries, DEMO, [0])
    shown = "\n".join(f"    {line}".rstrip() for line in table(demo).splitlines())
    assert shown in README
    assert sentence(demo) in " ".join(README.split())


def test_what_the_first_block_prints_is_what_readme_says() -> None:
    block = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "\n".join(f"    {line}" for line in out.getvalue().splitlines()) in README


def test_claims_and_methods_in_results_are_what_the_ledger_says(results: Results) -> None:
    findings = claim_results(results)
    claims, methods = ((RESULTS / name).read_text() for name in ("claims.md", "methods.md"))
    assert markdown.claims(findings) in claims
    assert markdown.evidence(findings) in claims
    assert markdown.methods(results) in methods
    assert markdown.budget(results) in (RESULTS / "budget.md").read_text()
    assert scaling(results) in (RESULTS / "scaling.md").read_text()
    advice = (RESULTS / "choosing.md").read_text()
    for lines in TABLES.values():
        assert choosing(findings, lines, results.scale.high) in advice
    assert numbers(findings, TABLES.values(), results.scale.high) in advice
    assert open_questions(findings) in advice


def test_the_advice_is_for_the_verdicts_of_the_study(results: Results) -> None:
    """If this fails, a verdict has changed: read this line of report/advice.py again, and revise it."""
    claims = claim_results(results)
    assert [line for lines in TABLES.values() for line in outdated(claims, lines)] == []


def test_numbers_that_are_written_by_hand_are_those_of_the_ledger(results: Results) -> None:
    """The largest logits of QuacK in README and the FAQ, and the skewness of differences in the study."""
    runs = [results.runs(cell, Quack) for cell in results.scale.cells()]
    runs += [runs_above(results, Quack, size) for size in JUDGED]
    logits = [10**value for each in runs for value in each.by_seed(largest_logit).values()]
    at_16m = [10**value for value in runs_above(results, Quack, "16M").by_seed(largest_logit).values()]
    assert sum(value > 100 for value in logits) == 1
    largest = f"the largest was {max(logits):.0f}, with AdamW and norms on latents"
    text = f"below 100 in nearly all models of up to 4M parameters ({largest})"
    faq, study = ((ROOT / "docs" / name).read_text() for name in ("faq.md", "study.md"))
    assert f"{text}; at 16M the largest was {max(at_16m):.0f} " in README
    assert f"{text}, and at {min(at_16m):.0f} and {max(at_16m):.0f} in those of 16M" in faq
    parts = [part.comparison for claim in claim_results(results) for part in claim.parts]
    many = [each.differences for each in parts if each.label.endswith("validation loss") and each.seeds >= 9]
    skewness = max(abs(skew(each)) for each in many if each[0] != each[1])
    assert f"the most skewed has a skewness of {skewness:.1f}." in study


def skew(values: Sequence[float]) -> float:
    center, spread = fmean(values), pstdev(values)
    return fmean(((value - center) / spread) ** 3 for value in values)


def test_nothing_crashed_and_a_claim_that_is_open_knows_its_next_runs(results: Results, entries: list[Entry]) -> None:
    assert not [entry for entry in entries if entry.status == "crashed"]
    for finding in claim_results(results):
        if finding.verdict == "not run":
            assert finding.needed, finding.name


@pytest.mark.parametrize(("result", "doc"), [("decode", "inference"), ("watching", "monitor")])
def test_docs_show_the_tables_of_results(result: str, doc: str) -> None:
    shown = (RESULTS.parent / f"docs/{doc}.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in (RESULTS / f"{result}.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len(rows) > 10
    assert [row for row in rows if row not in shown] == []


def test_every_figure_of_results_exists_in_three_formats() -> None:
    figures = sorted((RESULTS / "figures").iterdir())
    assert len(figures) == 27
    assert {file.suffix for file in figures} == {".pdf", ".png", ".svg"}


def test_the_first_picture_is_drawn_from_the_ledger(results: Results, tmp_path: Path) -> None:
    """If this fails, its runs or its drawing have changed: `quacklr report` draws it again."""
    assert re.findall(r"\n!\[.*\]\((.*)\)\n", README)[0] == "results/figures/hero.png"
    (drawn,) = draw({"hero": FIGURES["hero"]}, results, tmp_path)
    assert drawn.svg == (RESULTS / "figures/hero.svg").read_text()


def test_the_ledger_is_smaller_than_10_mb() -> None:
    assert (RESULTS / "ledger.jsonl").stat().st_size < 50_000_000


def test_readme_says_how_to_run_the_tests_and_what_they_need() -> None:
    section = README[README.index("`make test` ") :][:800]
    assert "minutes" in section
    for browser in BROWSERS:
        assert f"`{browser}`" in section
