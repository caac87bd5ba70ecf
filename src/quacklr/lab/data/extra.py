"""What only some need: packages of an extra such as `quacklr[data]`, and files of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quacklr.lab.errors import UserError


@contextmanager
def extra(purpose: str, name: str = "data") -> Iterator[None]:
    """Import in here what an extra brings; UserError that names it when it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{purpose} needs the package {package}: pip install 'quacklr[{name}]'") from error


def fetch(repo: str, name: str, kind: str, way_out: str) -> Path:
    """A file of the hub, from its cache or the network; UserError with the way out when neither has it."""
    with extra("the hub"):
        from huggingface_hub import hf_hub_download
    try:
        return Path(hf_hub_download(repo, name, repo_type=kind))
    except Exception as error:  # the hub's errors share no base: some are OSErrors, some ValueErrors, some neither
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"cannot fetch {name} of {repo} from the hub ({reason}); {way_out}") from error
