"""Compare the files of a wheel and of an sdist with tools/release_contents.toml, and with the files that git tracks."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
LIST = "tools/release_contents.toml"
WRITTEN_BY_THE_BUILD = ("quacklr-*.dist-info/*", "PKG-INFO")


def allowed() -> dict[str, list[str]]:
    """The patterns for `wheel` and for `sdist`, and the `suffixes` of files in folders."""
    return tomllib.loads((ROOT / LIST).read_text(encoding="utf-8"))


def tracked() -> set[str]:
    """The files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(names.split("\0")) - {""}


def files_of(archive: Path) -> dict[str, str]:
    """The files of a wheel or an sdist, each with its path in the repository."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: f"src/{name}" for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        names = [member.name.partition("/")[2] for member in sdist if not member.isdir()]
    return {name: name for name in names}


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether one of the patterns matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def differences(
    files: Mapping[str, str], patterns: Collection[str], suffixes: Collection[str], known: Collection[str]
) -> list[str]:
    """One sentence for each file that should not be in the archive, or is missing; `known` are the tracked files."""
    found = []
    for name, source in files.items():
        if not matches(name, patterns):
            found.append(f"{name} matches no pattern of {LIST}: keep it out of the build, or add a pattern")
        elif matches(name, WRITTEN_BY_THE_BUILD):
            continue
        elif source not in known:
            found.append(f"{name} is not tracked by git: delete it, or add it to git")
        elif "/" in name and PurePosixPath(name).suffix not in suffixes:
            found.append(f"{name} has a suffix that {LIST} does not list: keep it out of the build, or add its suffix")
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in files)]
    found += [f"{each} of {LIST} matches no file: find out why it is missing, or delete the line" for each in unused]
    package = {name for name in known if name.startswith("src/quacklr/")}
    found += [f"{name} is missing, though git tracks it" for name in sorted(package - set(files.values()))]
    return found
