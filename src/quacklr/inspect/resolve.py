"""Finds the model that TARGET on the command line names. The first kind that fits is used:

package.module:factory, file.py:factory     Python; contains a colon
config.json, or a folder with one           transformers
a model type, a hub id in the cache         transformers
a model's name                              timm
"""

from __future__ import annotations

import difflib
from pathlib import Path

from quacklr.inspect import from_factory, from_timm, from_transformers
from quacklr.inspect.target import BadTargetError, Target


def resolve(name: str) -> Target:
    """The model with this name. BadTargetError if there is none, or more than one."""
    if ":" in name:
        return from_factory.target(name)
    is_type, is_folder = name in from_transformers.types(), (Path(name) / "config.json").is_file()
    if is_type and is_folder:
        raise BadTargetError(f"{name} is a type of transformers and a folder here; write ./{name} for the folder")
    if is_folder or Path(name).is_file():
        return from_transformers.from_file(name)
    if is_type:
        return from_transformers.from_type(name)
    if "/" in name:
        return from_transformers.from_cache(name)
    if from_timm.is_model(name):
        return from_timm.target(name)
    raise BadTargetError(_unknown(name))


def _unknown(name: str) -> str:
    types, no_timm = from_transformers.types(), from_timm.unavailable()
    tried = [
        "no file or folder with a config.json",
        "no model type of transformers" if types else "transformers is not installed (pip install transformers)",
        f"timm cannot be imported ({no_timm})" if no_timm else "no model of timm",
    ]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), types, n=3)
    perhaps = f"; did you mean {' or '.join(close)}?" if close else "; a model of yours is package.module:factory"
    return f"{name}: {', '.join(tried)}{perhaps}"
