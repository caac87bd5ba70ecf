"""`quacklr inspect TARGET`: the attention layers of a model as quacklr finds them."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.describe import attention_rows, without_rate
from quacklr.find.discover import LogitPaths, by_origin, found_by_table, logit_paths, validate_controls
from quacklr.inspect.resolve import BadTargetError, resolve
from quacklr.quack import QuacK
from quacklr.util.arguments import Parser
from quacklr.util.text_table import columns, grouped, merged

ABOUT = """\
The attention of a model: its heads, its weights, what QuacK leaves alone and why.
Nothing is downloaded.

TARGET is one of
  llama                      a model type of transformers: its default config
  path/to/config.json        a config of transformers; also ./folder, or org/name
                             if that is in the local cache of the hub
  vit_tiny_patch16_224       a model of timm
  package.module:factory     a function of yours that returns a model, or (model,
  path/to/file.py:factory    batch): the model is then measured on the batch
"""
EXAMPLES = """\
examples:
  quacklr inspect deepseek_v3             takes seconds: only shapes, no weights
  quacklr inspect train.py:make_model     your own model
  quacklr inspect gpt2 --json | jq '.layers'

exit code: 0 if QuacK attaches to the model; 1 if it raises an error, or if an attention layer is not recognised
without a batch, or on it; 2 if there is no such model
"""


def main(argv: Sequence[str]) -> int:
    """Inspect a model and print the report; the exit code is 0 if QuacK attaches and every layer is recognised."""
    parser = target_parser("quacklr inspect", "[--json]", ABOUT, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="one JSON object with every layer")
    options = parser.parse_args(argv)
    try:
        with quiet():
            model, batch, _ = resolve(options.target)
            found = report(options.target, model, batch)
    except BadTargetError as error:
        parser.error(str(error))
    print(json.dumps(found.as_json(), indent=2) if options.json else found)
    return int(not found.attaches or any(finding.unknown for finding in found.paths.found.values()))


def target_parser(command: str, options: str, about: str, examples: str) -> Parser:
    """The parser of a command whose argument is one model."""
    raw, usage = argparse.RawDescriptionHelpFormatter, f"{command} TARGET {options}"
    found = Parser(prog=command, usage=usage, description=about, epilog=examples, formatter_class=raw)
    found.add_argument("target", metavar="TARGET", help="the model, see above")
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, suppress warnings and logs, and print to stderr, so that stdout has the result only."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True, slots=True)
class Report:
    """The paths of a model, whether QuacK attaches to it, and a sentence about it."""

    name: str
    model: nn.Module
    paths: LogitPaths
    attaches: bool
    summary: str

    @property
    def left_alone(self) -> dict[str, str]:
        """Why attention layers, or weights of them, get no rate."""
        return {**self.paths.left_alone, **without_rate(weight for path in self.paths for weight in path.weights)}

    def __str__(self) -> str:
        def stored(module: str, paths: Sequence[LogitPath]) -> str:
            names = dict.fromkeys(self._parameter(weight) for path in paths for weight in path.weights)
            return ", ".join(name.removeprefix(f"{module}.").removesuffix(".weight") for name in names)

        made = "shapes only" if _on_meta(self.model) else "with its weights"
        rows = merged(attention_rows(by_origin(self.paths).values(), self.paths.found, "weights", stored))
        title, table = [f"{self.name}: {type(self.model).__name__}, {made}"], columns(rows) if self.paths else []
        sections = title, table, grouped("left alone:", self.left_alone), [self.summary]
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs, with every layer."""
        layers: dict[str, Any] = {}
        for module, paths in by_origin(self.paths).items():
            layers[module] = {"found": self.paths.found[module].origin, "paths": []}
            for path in paths:
                weights = {w.name: {"parameter": self._parameter(w), "blocks": w.blocks} for w in path.weights}
                layers[module]["paths"].append({"heads": path.heads, "scale": path.scale, "weights": weights})
        about = {"target": self.name, "model": type(self.model).__name__, "attaches": self.attaches}
        return {**about, "summary": self.summary, "layers": layers, "left_alone": self.left_alone}

    def _parameter(self, weight: Weight) -> str:
        return self.paths.parameters.get(id(weight.param), ("?", None))[0]


def report(name: str, model: nn.Module, batch: Any) -> Report:
    """Find the attention of a model, with the batch if there is one, and try to attach QuacK."""
    call = f"QuacK({'model' if batch is None else 'logit_paths(model, batch)'}, optimizer)"
    paths = LogitPaths({}, model)
    try:
        paths = LogitPaths(found_by_table(model), model) if batch is None else logit_paths(model, batch)
        if not any(finding.pending for finding in paths.found.values()):
            validate_controls(paths.found, model)
        if not _on_meta(model):
            QuacK(model if batch is None else paths, SGD(model.parameters(), lr=1.0)).remove()
    except (ValueError, RuntimeError) as refused:
        return Report(name, model, paths, False, f"{call} raises: {refused}")
    summary = f"{call} attaches to {len(by_origin(paths))} of {len(paths.found)} attention layers"
    return Report(name, model, paths, True, summary)


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
