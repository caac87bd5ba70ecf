"""Writes tables and sentences of results/ and docstrings of src/ into README.md and docs/, between markers.

    python benchmarks/fill_documents.py            # rewrites what has changed
    python benchmarks/fill_documents.py --check    # changes nothing; exit code 1 if something is out of date

A marker names a file of results/ and one of its headings:

    <!-- results/methods.md: MLA, validation loss -->
    ...                                             the text below that heading is written here
    <!-- end -->

Without a heading the text below the file's title is written. A marker `<!-- modules src/quacklr/core -->` is filled
with the first line of the docstring of every module of that package. results/demo.md and results/summary.md are made
from the ledger first; `quacklr report` and the benchmarks make the others.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from quacklr.lab.demo import ROWS, sentence, table
from quacklr.lab.ledger import Ledger
from quacklr.lab.report.summary import summary
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of

ROOT = Path(__file__).parent.parent
MODULES = re.compile(r"(<!-- modules ([\w./-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- (results/[\w./-]+\.md)(?:: ([^\n]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def made() -> dict[Path, str]:
    """The texts that are made here: what `quacklr demo` printed, and the study in short."""
    entries = list(Ledger(ROOT / "results/ledger.jsonl").entries().values())
    demo, study = Results(entries, scale_of(Size(steps=150)), [0]), Results(entries, scale_of(Size()))
    shown = "\n".join(f"    {line}".rstrip() for line in table(demo).splitlines())
    return {
        ROOT / "results/demo.md": f"# What `quacklr demo` prints\n\n{shown}\n\n{ROWS}\n\n{sentence(demo)}\n",
        ROOT / "results/summary.md": f"# The study in short\n\n{summary(study, claim_results(study))}",
    }


def section(text: str, heading: str | None) -> str:
    """The text below a heading, up to the next heading of its level or above; without one, below the title."""
    level, title = ("#+", re.escape(heading)) if heading else ("#", "[^\n]*")
    found = re.search(rf"^({level}) {title}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"there is no heading {heading!r}")
    return found[2].strip("\n")


def modules(package: Path) -> str:
    """A table of the modules of a package, and of the folders in it, with the first line of each docstring."""
    rows = ["| module | what it is |", "|---|---|"]
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.name != "__init__.py" and (package.name != "quacklr" or path.parent == package):
            rows.append(f"| `{name}` | {docstring.splitlines()[0]} |")
    return "\n".join(rows)


def filled(document: str, texts: dict[Path, str]) -> str:
    """The document with the text of results/ between its markers."""

    def fill(block: re.Match[str]) -> str:
        source = ROOT / block[2]
        text = texts[source] if source in texts else source.read_text()
        return f"{block[1]}\n{section(text, block[3])}\n{block[4]}"

    document = BLOCK.sub(fill, document)
    return MODULES.sub(lambda block: f"{block[1]}\n{modules(ROOT / block[2])}\n{block[3]}", document)


def main() -> int:
    """Fill all documents, or check that they are filled."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something is out of date")
    check = options.parse_args().check
    texts = made()
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts |= {path: filled(path.read_text(), texts) for path in documents}
    stale = []
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(text)
    for name in stale:
        print(f"{name} {'is out of date' if check else 'was written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
