"""Build a release and check it as a user will get it: `make release`, or `make release TAG=v0.2.0` before an upload.

    1. documents   CHANGELOG.md and CITATION.cff have the version of src/quacklr/__init__.py
    2. build       an sdist, and a wheel from the sdist, into dist/
    3. twine       the metadata are valid, and PyPI can render the page
    4. contents    each file is allowed by tools/release_contents.toml and tracked by git
    5. page        every link and image of README is absolute, and its target exists
    6. install     the wheel and torch in an empty venv: README's first example prints what README says,
                   `quacklr --version` is fast, and a command whose extra is missing says so in one sentence

The first problem ends it with exit code 1. With a tag, the tag must be the version, the entries of the changelog must
have moved from [Unreleased] to the version, and nothing may be uncommitted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

from pypi_readme import problems
from release_contents import allowed, differences, files_of, tracked

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
STARTS, SECONDS = 10, 0.3
"""`quacklr --version` is started so often; the fastest start must take less than so many seconds."""

NO_NUMPY = "ignore:Failed to initialize NumPy"
"""A warning of torch, when it is imported without numpy."""


def main() -> int:
    """Run all steps."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tag", default="", help="the tag of the release, such as v0.2.0")
    tag = options.parse_args().tag
    version = version_of_source()
    check_documents(version)
    if tag:
        check_tag(tag, version)
    wheel, sdist = build()
    call(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    lists, known = allowed(), tracked()
    for kind, archive in (("wheel", wheel), ("sdist", sdist)):
        stop_at(differences(files_of(archive), lists[kind], lists["suffixes"], known))
        report(f"{archive.name}: {len(files_of(archive))} files, all allowed")
    stop_at(problems(description(wheel), version))
    report("every link and image of the page on PyPI is absolute, and those into the repository exist")
    with tempfile.TemporaryDirectory() as folder:
        check_installed(wheel, Path(folder))
    for archive in (wheel, sdist):
        print(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.stat().st_size:>9,}  {archive.name}")
    print(
        f"quacklr {version} can be uploaded" if tag else "all checks passed; before an upload: make release TAG=vX.Y.Z"
    )
    return 0


def version_of_source() -> str:
    """The version, which is only in src/quacklr/__init__.py."""
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / "src/quacklr/__init__.py").read_text(), re.MULTILINE)
    return found[1] if found else ""


def check_documents(version: str) -> None:
    """CHANGELOG.md and CITATION.cff name the version."""
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        stop_at([f"CHANGELOG.md has no section ## [{version}]: rename [Unreleased], and add the date"])
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        stop_at([f"CITATION.cff does not have version: {version}"])
    report(f"version {version}, in CHANGELOG.md and CITATION.cff too")


def check_tag(tag: str, version: str) -> None:
    """The tag is the version, no entry of the changelog is unreleased, and everything is committed."""
    if tag != f"v{version}":
        stop_at([f"the tag is {tag}, but src/quacklr/__init__.py has {version}: tag v{version}, or change the version"])
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    if unreleased and unreleased[1].strip():
        stop_at([f"CHANGELOG.md has entries under [Unreleased]: move them to [{version}]"])
    if changed := call("git", "status", "--porcelain").strip():
        stop_at([f"not committed: {line}" for line in changed.splitlines()])
    report(f"tag {tag}; no unreleased entries; everything is committed")


def build() -> tuple[Path, Path]:
    """The wheel and the sdist, in an emptied dist/. The wheel is built from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def description(wheel: Path) -> str:
    """The text of the page on PyPI, from the metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name)).get_payload(decode=True).decode()  # type: ignore[union-attr]


def check_installed(wheel: Path, folder: Path) -> None:
    """Install the wheel in an empty venv, and use it there as a first user does."""
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, command = str(scripts / "python"), str(scripts / "quacklr")
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    call(python, "-m", "pip", "check")
    packages = call(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").split()
    report(f"installed in an empty venv: {' '.join(packages)}")

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    printed = call(python, "-W", "error", "-W", NO_NUMPY, "-c", example, cwd=folder)
    if "\n".join(f"    {line}" for line in printed.splitlines()) not in readme:
        stop_at([f"README's first example prints something else than README says:\n{printed}"])
    report("README's first example prints what README says")

    seconds = min(duration(command, "--version") for _ in range(STARTS))
    if seconds >= SECONDS:
        stop_at([f"quacklr --version takes {seconds:.2f} s, not less than {SECONDS} s: see python -X importtime"])
    report(f"quacklr --version takes {seconds:.2f} s (fastest of {STARTS})")
    check_missing_extras(command, folder)


def check_missing_extras(command: str, folder: Path) -> None:
    """Every command whose packages are missing ends with one sentence that says what to install."""
    commands = re.findall(r"^    (\w+) ", call(command, "--help"), re.MULTILINE)
    for name in commands:
        words, environment = [command, name, "llama"], os.environ | {"PYTHONWARNINGS": NO_NUMPY}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 2 or len(done.stderr.splitlines()) != 1 or "pip install" not in done.stderr:
            stop_at([f"quacklr {name} without its extra: exit code {done.returncode}\n{done.stdout}{done.stderr}"])
        print(f"    {done.stderr.strip()}")
    if not commands:
        stop_at(["quacklr --help lists no commands"])
    report(f"{len(commands)} commands say in one sentence which extra is missing")


def duration(*arguments: str) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def call(*arguments: str, cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; its output and exit code 1 if it fails."""
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        stop_at([f"{' '.join(arguments)} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}"])
    return done.stdout


def report(sentence: str) -> None:
    """Print what was checked."""
    print(f"ok  {sentence}", flush=True)


def stop_at(sentences: list[str]) -> None:
    """End with exit code 1 if there is a problem."""
    if sentences:
        raise SystemExit("\n".join(f"not ok  {sentence}" for sentence in sentences))


if __name__ == "__main__":
    sys.exit(main())
