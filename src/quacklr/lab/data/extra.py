"""Optional packages (extras such as `quacklr[data]`) and files of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quacklr.lab.errors import UserError


@contextmanager
def requires_extra(purpose: str, name: str = "data") -> Iterator[None]:
    """Raise a missing import of the body as a UserError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{purpose} needs the package {package}: pip install 'quacklr[{name}]'") from error


def fetch(repo: str, name: str, kind: str, way_out: str) -> Path:
    """Path of a file of the hub, from its cache or downloaded; UserError, with `way_out`, if neither works."""
    with requires_extra("the hub"):
        from huggingface_hub import hf_hub_download
    try:
        return Path(hf_hub_download(repo, name, repo_type=kind))
    except Exception as error:  # the errors of the hub have no common base class
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"cannot fetch {name} of {repo} from the hub ({reason}); {way_out}") from error
