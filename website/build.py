"""Build the site: python -m website.build [FOLDER], which is what `make docs` does. Needs no network.

docs/ is copied to a temporary folder with what its pages include, zensical builds the copy in strict mode (a dead link
or anchor is an error), and the result is moved to FOLDER (default: site).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from website.pages import NOTEBOOK, ROOT, page, repository, titles
from website.study import write_report

SHIM = "https://unpkg.com/iframe-worker/shim"
"""A script that zensical's plugin `offline` loads from another host; website/assets/worker.js does the same."""


def build(out: Path) -> None:
    """Write the site to a folder, which is replaced."""
    with TemporaryDirectory(prefix="quacklr-site-") as folder:
        stage = Path(folder)
        write_sources(stage)
        zensical(stage)
        for file in (stage / "site").rglob("*.html"):
            file.write_text(local_worker(file, stage / "site"), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stage / "site", out)


def write_sources(stage: Path) -> None:
    """Everything that zensical reads: pages, figures, scripts, and its configuration."""
    shutil.copytree(ROOT / "docs", stage / "docs")
    shutil.copytree(ROOT / "website/assets", stage / "docs/assets")
    shutil.copytree(ROOT / "results/figures", stage / "docs/results/figures")
    shutil.copy(ROOT / "results/decode.png", stage / "docs/results")
    write_report(stage / "docs/results/report.html")
    (stage / "src").symlink_to(ROOT / "src")
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    config += f'\n[[project.extra.social]]\nicon = "fontawesome/brands/github"\nlink = "{repository()}"\n'
    if not NOTEBOOK.exists():
        config = re.sub(r".*tutorial\.md.*\n", "", config)
        (stage / "docs/tutorial.md").unlink()
    (stage / "zensical.toml").write_text(config, encoding="utf-8")
    names = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    if names != titles().keys():
        wrong = ", ".join(sorted(names ^ titles().keys()))
        raise SystemExit(f"docs/ and nav of zensical.toml do not have the same pages: {wrong}")
    for file in (stage / "docs").rglob("*.md"):
        file.write_text(page(ROOT / "docs" / file.relative_to(stage / "docs")), encoding="utf-8")


def zensical(stage: Path) -> None:
    """Run zensical; its messages end the process if there are any."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=stage, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)  # without colours
        found = re.search(r".*\d issues? found", text, re.DOTALL)  # then only a traceback of zensical follows
        raise SystemExit(f"zensical cannot build docs/ with zensical.toml:\n{found[0] if found else text}")


def local_worker(file: Path, site: Path) -> str:
    """A page whose search needs no other host."""
    return file.read_text(encoding="utf-8").replace(SHIM, os.path.relpath(site / "assets/worker.js", file.parent))


def main() -> None:
    """Build, and say where the result is."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    build(out)
    print(f"The site is in {out}; open {out / 'index.html'}")


if __name__ == "__main__":
    main()
