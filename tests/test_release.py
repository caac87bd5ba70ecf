"""The parts of `make release` that take no minutes: metadata, the page on PyPI, the list of files, the version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import hatchling.build
import pytest
import yaml
from trove_classifiers import classifiers

import quacklr
from pypi_readme import path_of, problems, repository, targets
from release import check_tag, version_of_source
from release_contents import allowed, differences, files_of, tracked

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The metadata of a wheel, which the build backend writes without building one."""
    folder = tmp_path_factory.mktemp("metadata")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.build.prepare_metadata_for_build_wheel(str(folder))
    return BytesParser().parsebytes((folder / name / "METADATA").read_bytes())


def page(metadata: Message) -> str:
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    return text.decode()


def test_the_page_on_pypi_is_readme_with_absolute_links_whose_targets_exist(metadata: Message) -> None:
    shown, version = page(metadata), metadata["Version"]
    assert problems(shown, version) == []
    names = {path_of(target, version) for target in targets(shown)} - {""}
    assert {"docs/attach.md", "results/figures/figure-2-interventions.png"} <= names
    readme = [target for target in targets((ROOT / "README.md").read_text()) if not target.startswith("https://")]
    assert len(readme) <= len([target for target in targets(shown) if path_of(target, version)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](docs/attach.md)", "docs/attach.md is a relative link"),
        ("[a](#limits)", "#limits is a relative link"),
        ("![a](figure.png)", "figure.png is a relative link"),
        ('<img src="figure.png">', "figure.png is a relative link"),
        ("[a][b]\n\n[b]: docs/attach.md", "docs/attach.md is a relative link"),
        ("| a |\n|---|\n| [a](b.md) |", "b.md is a relative link"),
        ("[a]({0}/blob/v1.0/docs/nowhere.md#b)", "the repository has no docs/nowhere.md"),
        ("![a]({0}/actions/workflows/nothing.yml/badge.svg)", "the repository has no .github/workflows/nothing.yml"),
    ],
)
def test_a_link_that_does_not_work_on_pypi_is_named(text: str, problem: str) -> None:
    (found,) = problems(text.replace("{0}", repository()), "1.0")
    assert problem in found


def test_links_in_code_are_text() -> None:
    assert problems("`[a](b.md)` and https://pytorch.org\n\n    [a](b.md)\n", "1.0") == []


def test_metadata_have_what_pypi_shows(metadata: Message) -> None:
    assert metadata["Name"] == "quacklr"
    assert [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need] == ["torch>=2.9"]
    given = metadata.get_all("Classifier", [])
    assert set(given) <= classifiers
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)} <= set(given)
    assert len(metadata["Keywords"].split(",")) > 5
    assert {url.partition(", ")[0] for url in metadata.get_all("Project-URL", [])} >= {"Repository", "Issues"}


def test_the_address_of_the_repository_is_one_in_pyproject_and_readme() -> None:
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "README.md")]
    addresses = re.findall(r"https://github\.com/[\w-]+/[\w-]+", "".join(texts))
    assert len(addresses) > 5
    assert set(addresses) == {repository()}
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert all(repository() in each["replacement"] for each in hook["substitutions"])


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert version_of_source() == quacklr.__version__
    holders = [file for file in (ROOT / "src").rglob("*.py") if re.search(r"^__version__ =", file.read_text(), re.M)]
    assert holders == [ROOT / "src/quacklr/__init__.py"]
    assert f"\nversion: {quacklr.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{quacklr.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_badges_of_readme_say_what_the_metadata_say(metadata: Message) -> None:
    readme = (ROOT / "README.md").read_text()
    versions = re.findall(r":: Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.MULTILINE)
    assert f"[![Python {versions[0]} to {versions[-1]}](https://img.shields.io/badge/python-{versions[0]}_to_" in readme
    assert f"_to_{versions[-1]}-blue)](pyproject.toml)" in readme
    assert f"badge/licence-{metadata['License-Expression'].replace('-', '--')}-blue)](LICENSE)" in readme


def test_a_tag_of_another_version_stops_the_release() -> None:
    with pytest.raises(SystemExit, match="the tag is v9.9.9, but .* tag v0.2.0, or change the version"):
        check_tag("v9.9.9", "0.2.0")


def test_the_version_is_printed_without_torch() -> None:
    script = (
        "import sys, quacklr.cli; quacklr.cli.main(['--version']); print({'torch', 'numpy', 'tyro'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == f"quacklr {quacklr.__version__}\nset()\n"


def released() -> dict[str, str]:
    """The files of an sdist of all tracked files."""
    excluded = tuple(f"{name}/" for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"])
    return {name: name for name in sorted(tracked()) if not name.startswith(excluded)} | {"PKG-INFO": "PKG-INFO"}


def test_every_tracked_file_may_be_in_a_release() -> None:
    """If this fails for a new file: exclude it from the sdist in pyproject.toml, or add it to the list."""
    lists = allowed()
    assert differences(released(), lists["sdist"], lists["suffixes"], tracked()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt matches no pattern of tools/release_contents.toml"),
        ("docs/draft.md", "docs/draft.md is not tracked by git"),
        ("tests/weights.pt", "tests/weights.pt has a suffix that tools/release_contents.toml does not list"),
    ],
)
def test_a_file_that_should_not_be_in_a_release_is_named(name: str, message: str) -> None:
    lists, known = allowed(), tracked() | ({name} - {"docs/draft.md"})
    (found,) = differences(released() | {name: name}, lists["sdist"], lists["suffixes"], known)
    assert found.startswith(message)


def test_a_file_that_is_missing_in_a_release_is_named() -> None:
    lists, files = allowed(), released()
    del files["src/quacklr/py.typed"], files["LICENSE"]
    assert differences(files, lists["sdist"], lists["suffixes"], tracked()) == [
        "LICENSE of tools/release_contents.toml matches no file: find out why it is missing, or delete the line",
        "src/quacklr/py.typed is missing, though git tracks it",
    ]


def test_the_files_of_both_archives_have_their_paths_in_the_repository(tmp_path: Path) -> None:
    file = tmp_path / "quack.py"
    file.touch()
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.write(file, "quacklr/quack.py")
    with tarfile.open(tmp_path / "a.tar.gz", "w") as sdist:
        sdist.add(file, "quacklr-1.0/src/quacklr/quack.py")
    assert files_of(tmp_path / "a.whl") == {"quacklr/quack.py": "src/quacklr/quack.py"}
    assert files_of(tmp_path / "a.tar.gz") == {"src/quacklr/quack.py": "src/quacklr/quack.py"}


def test_workflows_call_make_targets_that_exist() -> None:
    targets_of_make = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            for step in job.get("steps", []):
                called |= set(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert {"test", "docs", "release", "oldest"} <= called
    assert called <= targets_of_make


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not on the PATH; make workflows installs it")
def test_actionlint_accepts_the_workflows() -> None:
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
